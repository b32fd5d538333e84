// SPDX-License-Identifier: Apache-2.0
#include "../simd/avx512.h"

#include "kernels_of.h"

namespace hf_vq {
const Kernels avx512_kernels = HF_VQ_KERNELS("avx512");
}
