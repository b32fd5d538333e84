// SPDX-License-Identifier: Apache-2.0
#include "../simd/scalar.h"

#include "kernels_of.h"

namespace hf_vq {
const Kernels scalar_kernels = HF_VQ_KERNELS("scalar");
}
