// SPDX-License-Identifier: Apache-2.0
// 8-bit quantization of a token with one scale, by all threads of a block: numbers = round(x * 127 / max |x|). The
// result is bitwise that of ops/w4a8.py, quantize_tokens.
//
// A thread loads pieces of 16 adjacent columns once and keeps them in registers. Columns are put in the numbering of
// w4a8.cuh: of eight the even ones, then the odd ones.
#pragma once
#include "plan.cuh"
#include "primitives/numbers.cuh"
#include "w4a8/w4a8.cuh"

// The nearest integer to x, from -127 to 127, in the low byte: 1.5 * 2^23 leaves no place for a fraction.
__device__ inline uint32_t nearest(float x) { return __float_as_uint(__fadd_rn(x, 12582912.0f)); }

constexpr int chunks = (Plan::columns + chunk - 1) / chunk;

struct Rounding {
  static constexpr int pieces = Plan::columns / 16, padded = chunks * chunk / 16;
  static constexpr int each = (padded + Plan::threads - 1) / Plan::threads;
  static constexpr int warps = Plan::threads / 32, shared_bytes = 2 * 4 * 32;
  uint32_t word[each][8];

  __device__ void load(const uint16_t* x) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int piece = threadIdx.x + i * Plan::threads;
      if (piece < pieces) {
        load_words<32>(x + piece * 16, word[i]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) word[i][j] = 0;
      }
    }
  }

  // Each word by `map(word, word of other)`, where both have the same columns.
  template <class Map> __device__ void combine(const uint16_t* other, Map map) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int piece = threadIdx.x + i * Plan::threads;
      if (piece >= pieces) break;
      uint32_t by[8];
      load_words<32>(other + piece * 16, by);
#pragma unroll
      for (int j = 0; j < 8; ++j) word[i][j] = map(word[i][j], by[j]);
    }
  }

  // The largest bits of |x|: those of NaN and of infinity are larger than those of numbers.
  __device__ uint32_t largest_bits() const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < each; ++i)
#pragma unroll
      for (int j = 0; j < 8; ++j) found = max(found, max(word[i][j] & 0x7fff, word[i][j] >> 16 & 0x7fff));
    return found;
  }

  // `put(piece, words)` gets 16 numbers of each piece, in order, and zeros beyond the last column. `shared`: of
  // `shared_bytes`, which nobody else uses. All threads get the token.
  template <class Put> __device__ Token round(char* shared, Put put) const {
    uint32_t* largest = reinterpret_cast<uint32_t*>(shared);
    int* sums = reinterpret_cast<int*>(largest + 32);
    uint32_t bits = __reduce_max_sync(0xffffffffu, largest_bits());
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < warps; ++w) bits = max(bits, largest[w]);
    const float most = to_float<Plan::dtype>(uint16_t(bits));
    const bool finite = __float_as_uint(most) < 0x7f800000u;
    const float magnitude = finite ? fmaxf(most, 1e-30f) : __uint_as_float(0x7fc00000u);
    const float inverse = __fdiv_rn(127.0f, magnitude);
    const uint32_t kept = finite ? 0xffffffffu : 0u;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int piece = threadIdx.x + i * Plan::threads;
      if (piece >= padded) break;
      uint32_t ordered[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t number[2][4];  // even and odd columns
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float first, second;
          unpack_pair<Plan::dtype>(word[i][4 * half + j], first, second);
          number[0][j] = nearest(__fmul_rn(first, inverse));
          number[1][j] = nearest(__fmul_rn(second, inverse));
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const uint32_t(&n)[4] = number[odd];
          const uint32_t low = __byte_perm(n[0], n[1], 0x0040), high = __byte_perm(n[2], n[3], 0x0040);
          ordered[2 * half + odd] = __byte_perm(low, high, 0x5410) & kept;
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) sum = __dp4a(int(ordered[j]), 0x01010101, sum);
      put(piece, ordered);
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) sum += sums[w];
    return {magnitude * (1.0f / 127.0f), sum};
  }
};
