// SPDX-License-Identifier: Apache-2.0
// Hadamard blocks of 128 numbers in registers: y = (x * d) H_128 / sqrt(128), d signs or fp16.
//
// Four lanes own a block: lane 4 g + t has numbers 32 t .. of block g. H_128 is a product of one 2 x 2 matrix per bit of
// the position of a number:
//
//     bit     6 5     4 . . . 0             bits 0, 4, 5 and 6 are H_16: a product on tensor cores,
//            lane t   place in the lane     whose sums are in the lanes of its input;
//                                           bits 1, 2 and 3 are sums and differences of a lane's registers
//
// All sums are float32.
#pragma once
#include "primitives/mma.cuh"

// Entries (k, column) and (k + 1, column) of a Hadamard matrix of +-1, k even.
template <Dtype D> __device__ inline uint32_t hadamard_pair(int k, int column) {
  constexpr uint32_t one = D == Dtype::FLOAT16 ? 0x3c00 : 0x3f80;
  const uint32_t first = __popc(column & k) & 1, second = __popc(column & (k + 1)) & 1;
  return one ^ first << 15 | (one ^ second << 15) << 16;
}

// Negate number i of a lane's 32, two in each of 16 words, where bit i of `negative` is 1.
__device__ inline void flip_signs(uint32_t* word, uint32_t negative) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = negative >> 2 * i;
    word[i] ^= (bits & 1) << 15 | (bits & 2) << 30;
  }
}

// Two numbers times two of fp16, rounded once.
template <Dtype D> __device__ inline uint32_t times_halves(uint32_t word, uint32_t halves) {
  if constexpr (D == Dtype::FLOAT16) return multiply_pair<D>(word, halves);
  float first, second, a, b;
  unpack_pair<D>(word, first, second);
  unpack_pair<Dtype::FLOAT16>(halves, a, b);
  return pack_pair<D>(first * a, second * b);
}

// A lane's 32 numbers, two in each of 16 words.
template <Dtype D>
__device__ inline void rotate_blocks(const uint32_t* word, uint32_t* rotated, int lane) {
  const int g = lane / 4, t = lane % 4;
  constexpr float norm = 0.08838834764831845f;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {  // bit 4
    const uint32_t low = hadamard_pair<D>(2 * t, 8 * upper + g), high = hadamard_pair<D>(2 * t + 8, 8 * upper + g);
    float sum[8][2];  // by bits 1 to 3 and by bit 0
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float d[4] = {};
      mma<D>(d, word[i], word[i + 4], word[i + 8], word[i + 12], low, high);
      sum[i][0] = d[0], sum[i][1] = d[1], sum[i + 4][0] = d[2], sum[i + 4][1] = d[3];
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (!(i & bit))
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float first = sum[i][c], second = sum[i | bit][c];
            sum[i][c] = first + second, sum[i | bit][c] = first - second;
          }
#pragma unroll
    for (int i = 0; i < 8; ++i) rotated[8 * upper + i] = pack_pair<D>(sum[i][0] * norm, sum[i][1] * norm);
  }
}
