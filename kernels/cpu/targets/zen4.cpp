// SPDX-License-Identifier: Apache-2.0
#include "../simd/avx512.h"

#include "kernels_of.h"

namespace hf_vq {
const Kernels zen4_kernels = HF_VQ_KERNELS("zen4");
}
