// SPDX-License-Identifier: Apache-2.0
// Blocks of 128 numbers rotated on tensor cores on their way to shared memory: y = (x * s) H_128 / sqrt(128).
//
// H_128 = H_8 (x) H_16. A block is a matrix X[8 groups, 16 columns], and Y = H_8 X H_16 is two products of 16 x 16:
//
//     D^T = H_16 / 16 . X^T         X^T is read from memory as it lies: two neighbours are one register
//     Y^T = D^T . H_8               the sums of the first product are the factors of the second, lane by lane
//
// D is float32 and becomes two 16-bit numbers, high + low, in the two halves of k: almost nothing is lost
// between them, and no sum of sixteen overflows.
#pragma once
#include "mma.cuh"
#include "plan.cuh"

// Entries (row, k) and (row, k + 1) of a Hadamard matrix of +-`one`, k even.
__device__ inline uint32_t hadamard_pair(int row, int k, uint32_t one) {
  const uint32_t first = __popc(row & k) & 1, second = __popc(row & (k + 1)) & 1;
  return one ^ first << 15 | (one ^ second << 15) << 16;
}

// A block of which a warp has the numbers: loaded first, so that several can be on their way.
template <Dtype D> struct RotatedBlock {
  uint32_t pair[2];

  __device__ void load(const uint16_t* x, const uint8_t* signs, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pair[half] = __ldg(reinterpret_cast<const uint32_t*>(x + g * 16 + half * 8 + 2 * t));
      if (signs) {
        const uint32_t bits = __ldg(signs + g * 2 + half) >> 2 * t;
        pair[half] ^= (bits & 1) << 15 | (bits & 2) << 30;
      }
    }
  }

  // `store(k, value)` gets number 32 t + 8 k + g, as 16 bits, in lane 4 g + t.
  template <typename Store> __device__ void rotate(int lane, const Store& store) const {
    const int g = lane / 4, t = lane % 4;
    constexpr uint32_t one = D == Dtype::FLOAT16 ? 0x3c00 : 0x3f80, sixteenth = D == Dtype::FLOAT16 ? 0x2c00 : 0x3d80;
    float d[4] = {}, sum[4] = {};
    mma<D>(d, hadamard_pair(g, 2 * t, sixteenth), hadamard_pair(g + 8, 2 * t, sixteenth),
           hadamard_pair(g, 2 * t + 8, sixteenth), hadamard_pair(g + 8, 2 * t + 8, sixteenth), pair[0], pair[1]);
    uint32_t high[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      high[i] = pack_pair<D>(d[2 * i], d[2 * i + 1]);
      float first, second;
      unpack_pair<D>(high[i], first, second);
      low[i] = pack_pair<D>(d[2 * i] - first, d[2 * i + 1] - second);
    }
    const uint32_t h8 = hadamard_pair(g, 2 * t, one);
    mma<D>(sum, high[0], high[1], low[0], low[1], h8, h8);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store(i % 2 * 2 + i / 2, uint16_t(pack_pair<D>(sum[i] * 1.4142135623730951f, 0.0f)));
  }
};
