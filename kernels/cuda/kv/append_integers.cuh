// SPDX-License-Identifier: Apache-2.0
// Rows to integers with one scale s and one zero z per row, QServe's KV4 (hf_vq/ops/reference/codes.py, `encode_integers`):
//
//     r = (x - mean) H     s = max((max r - min r) / top, max |r| / 1024)     z = -min r / s     code_i = round(r_i / s + z)
//
// s and z are first rounded to fp16, the type in which they are stored. If s overflows fp16, s = 65504 and the integers
// are centred on the middle of the row, at most `top` steps from zero. Every operation is rounded like the
// specification, so the codes are bitwise those of every other backend. NaN propagates to s and z.
#pragma once
#include "kv/append.cuh"

__device__ inline float rounded_to_half(float x) { return half_to_float(pack_pair<Dtype::FLOAT16>(x, 0.0f)); }

// Integer quantizer with the interface of `Search`.
template <typename S> struct IntegerRows {
  static constexpr int split = 1, slots = Row<S>::slots, words = 0;
  static constexpr float top = (1 << S::entry_bits) - 1, largest_zero = 1024.0f;

  __device__ IntegerRows(const uint16_t*, const uint32_t*, float, uint32_t*) {
    static_assert(!S::integers || S::vector_size == 1, "a code is one number");
  }
  __device__ void prepare() const {}

  // Codes, s and z of a row that is loaded. All lanes of a warp.
  __device__ void encode(Row<S>& row, bool exists, uint8_t* codes, uint16_t* numbers) const {
    float low = infinity(), high = -infinity();
    const float unit = row.bring_in_range();
    row.rotate();
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& value = row.value[slot][0];
      if constexpr (S::block > 1) value = __fmul_rn(value, inverse_root(S::block));
      if (row.has(slot / S::width)) low = lesser(low, value), high = greater(high, value);
    }
#pragma unroll
    for (int half = 1; half < S::lanes; half *= 2) {
      low = lesser(low, __shfl_xor_sync(0xffffffffu, low, half));
      high = greater(high, __shfl_xor_sync(0xffffffffu, high, half));
    }
    const float largest = greater(fabsf(low), fabsf(high)), least = __fdiv_rn(largest, largest_zero);
    float step = rounded_to_half(greater(__fdiv_rn(__fsub_rn(high, low), top), least) * unit);
    const bool beyond = step > largest_half && largest < infinity();
    if (beyond) step = largest_half;
    const float held = step * (unit == grow ? shrink : 1.0f);  // a step, in the numbers of the row
    float zero = __fdiv_rn(-low, held);
    if (beyond) {
      const float reach = __fmul_rn(top, held);
      const float middle = __fadd_rn(fminf(fmaxf(low, -reach), reach), fminf(fmaxf(high, -reach), reach));
      zero = __fsub_rn(top / 2, __fdiv_rn(middle, 2 * held));
    }
    zero = step == 0.0f ? 0.0f : rounded_to_half(zero);
    int code[slots];
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const float place = rintf(__fadd_rn(__fdiv_rn(row.value[slot][0], held), zero));  // NaN: 0
      code[slot] = step == 0.0f ? 0 : int(fminf(fmaxf(place, 0.0f), top));
    }
    if (!exists) return;
    row.store(code, codes);
    const uint32_t both = pack_pair<Dtype::FLOAT16>(step, zero);
    if (row.lane == 0) store_words<4>(numbers, &both);
  }
};

// Encoder of rows without learned codebooks.
template <typename S> using Encoder = typename OneOf<S::integers, IntegerRows<S>, Search<S>>::type;
