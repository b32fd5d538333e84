// SPDX-License-Identifier: Apache-2.0
// Warp-level MMA: 16-bit floats with float32 accumulators, and int8 with int32 accumulators.
#pragma once
#include "primitives/numbers.cuh"

// d[16 x 8] += a[16 x 16] b[16 x 8]. Lane 4 g + t holds
//
//     a0, a1 = rows g, g + 8 at k = 2t, 2t + 1       b0 = k = 2t, 2t + 1 of column g
//     a2, a3 = the same at k = 2t + 8, 2t + 9        b1 = k = 2t + 8, 2t + 9
//     d[0], d[1] = row g, columns 2t, 2t + 1         d[2], d[3] = row g + 8
//
// The order of the columns of W along k is free, as long as a and b agree.
template <Dtype D>
__device__ inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                           uint32_t b1) {
#if WITHOUT_PRODUCTS
  d[0] += __uint_as_float(a0 ^ a1 ^ a2 ^ a3 ^ b0 ^ b1);
  return;
#endif
  if constexpr (D == Dtype::FLOAT16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// d[16 x 8] += a[16 x 32] b[32 x 8], of unsigned a and signed b, modulo 2^32. As above, with four bytes in the place of two
// numbers: a0 = row g at k = 4t .. 4t + 3, a2 at k = 4t + 16 .. 4t + 19, and so on.
__device__ inline void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// a * b + c, two at once.
template <Dtype D> __device__ inline uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  if constexpr (D == Dtype::FLOAT16)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// Two sums at once. bfloat16 has no addition before sm_90.
template <Dtype D> __device__ inline uint32_t add_pair(uint32_t a, uint32_t b) {
  uint32_t sum;
  if constexpr (D == Dtype::FLOAT16)
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  else
    sum = multiply_add<D>(a, 0x3f803f80u, b);
  return sum;
}

// Two products at once.
template <Dtype D> __device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  return multiply_add<D>(a, b, 0x80008000u);  // -0, the neutral element of addition, also for zeros
}
