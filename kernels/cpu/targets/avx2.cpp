// SPDX-License-Identifier: Apache-2.0
#include "../simd/avx2.h"

#include "kernels_of.h"

namespace hf_vq {
const Kernels avx2_kernels = HF_VQ_KERNELS("avx2");
}
