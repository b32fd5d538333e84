// SPDX-License-Identifier: Apache-2.0
#include "../simd/neon.h"

#include "kernels_of.h"

namespace hf_vq {
const Kernels neon_kernels = HF_VQ_KERNELS("neon");
}
