// SPDX-License-Identifier: Apache-2.0
// E8P: 65536 entries from 256 patterns, signs and a shift (hf_vq/formats/lattice.py draws the bits of a code).
//
//     entry[c] = (-1)^(sign bit c) pattern[code & 255][c] +- shift
//
// The sign of coordinate 7 makes the sum of the entry even. The parity of the pattern itself is stored in the sign bit
// of its coordinate 7 in shared memory: a code then needs one load of 16 bytes.
#pragma once
#include "primitives/numbers.cuh"

constexpr int kE8PRows = 257;  // 256 patterns and the shift

// Fold the parity of its sum into pattern `row`, fp16 [8].
__device__ inline void fold_parity(uint16_t* pattern, float shift) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < 8; ++c) sum += half_to_float(pattern[c]);
  pattern[7] ^= (__float2int_rn(sum / (4.0f * shift)) & 1) << 15;
}

// value[8] += the entry of `code`, whose low 16 bits count.
__device__ inline void add_e8p(const uint16_t* patterns, uint32_t code, float* value) {
  uint32_t pair[4];
  load_words<16>(patterns + (code & 255) * 8, pair);
  const uint32_t signs = code >> 8 & 127, all = signs | (__popc(signs) & 1) << 7;
  const float size = half_to_float(patterns[256 * 8]), shift = code & 0x8000 ? -size : size;
#pragma unroll
  for (int c = 0; c < 8; c += 2) {
    const uint32_t flips = (all >> c & 1) << 15 | (all >> c & 2) << 30;
    float first, second;
    unpack_pair<Dtype::FLOAT16>(pair[c / 2] ^ flips, first, second);
    value[c] += first + shift, value[c + 1] += second + shift;
  }
}
