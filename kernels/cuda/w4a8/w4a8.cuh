// SPDX-License-Identifier: Apache-2.0
// 4-bit weights as int8 operands of tensor cores, and the epilogue (QServe, arXiv 2405.04532, section 5.2;
// formats/qoq.py, ops/w4a8.py).
//
// Columns are numbered so that lanes exchange nothing. A lane has 32 adjacent columns of a row, of 128; eight of them are
// a word of codes and two words of bytes, which are two fragments of a product over 32 columns:
//
//     codes   c7 c6 c5 c4 c3 c2 c1 c0     4 bits each
//     even    c6    c4    c2    c0        k =      4 t ..  4 t + 3 of the product
//     odd     c7    c5    c3    c1        k = 16 + 4 t .. 16 + 4 t + 3
//
// With groups, one 32-bit multiply-add applies the step and the zero of four codes. It adds 128 - zero, so that each byte
// is 128 + q step - zero, from 0 to 255 ("protective range"), and none carries. Tensor cores multiply unsigned by signed
// bytes; the epilogue subtracts 128 times the sum of the token's numbers.
#pragma once
#include "plan.cuh"
#include "primitives/mma.cuh"
#include "primitives/numbers.cuh"

constexpr bool grouped = Plan::group > 0;
constexpr int chunk = 128;  // columns of four lanes

// Step and zero of one group of a row, applied to four codes at once.
struct Grid {
  uint32_t step, offset;

  __device__ void set(uint32_t of_group, uint32_t zero) {
    if constexpr (grouped) step = of_group, offset = (128 - zero) * 0x01010101u;
  }

  __device__ void decode(uint32_t codes, uint32_t& even, uint32_t& odd) const {
    even = codes & 0x0f0f0f0fu, odd = codes >> 4 & 0x0f0f0f0fu;
    if constexpr (grouped) even = even * step + offset, odd = odd * step + offset;
  }
};

// Scale of a token, and the sum of its integers.
struct Token {
  float size;
  int sum;
};

// Scale, bias and zero of a row (zero: without groups only). The zero is `steps` scales if it is a whole number of them,
// which is true for weights that hf_vq quantized.
struct Row {
  float scale, bias, zero;
  int steps;
};

constexpr int not_whole = 1 << 30, most_steps = 127;

// `zero`: of rows, where there are no groups. `bias` may be null.
__device__ inline Row row_of(const uint16_t* scale, const char* zero, const char* bias, int row) {
  Row found = {half_to_float(scale[row]), 0.0f, 0.0f, 128};
  float added[1] = {};
  if (bias) load_floats<Plan::bias>(bias + int64_t(row) * size_of<Plan::bias>, added);
  found.bias = added[0];
  if constexpr (!grouped) {
    found.zero = reinterpret_cast<const float*>(zero)[row];
    const float steps = rintf(__fdiv_rn(found.zero, found.scale));
    const bool whole = fabsf(steps) <= most_steps && __fmul_rn(steps, found.scale) == found.zero;
    found.steps = whole ? int(steps) : not_whole;
  }
  return found;
}

__device__ inline float in_doubles(int sum, float scale, int of_token, float zero) {
  return float(double(sum) * double(scale) - double(of_token) * double(zero));
}
// Rarely needed, and long.
__device__ __noinline__ float called_in_doubles(int sum, float scale, int of_token, float zero) {
  return in_doubles(sum, scale, of_token, zero);
}

// y of a sum, rounded as the reference does: once after the formula of integers, then at each operation. A product with
// a number of 11 bits is exact in two parts. `Whole`: as the row's steps are. `Looped`: code that is there once, where a call
// would save many registers.
template <bool Whole, bool Looped = false> __device__ inline float scaled(int sum, const Row& row, const Token& token) {
  float y;
  if constexpr (Whole) {
    sum -= (grouped ? 128 : row.steps) * token.sum;
    const int low = sum & 4095;
    y = __fmaf_rn(float(sum - low), row.scale, float(low) * row.scale);
  } else if constexpr (Looped) {
    y = in_doubles(sum, row.scale, token.sum, row.zero);
  } else {
    y = called_in_doubles(sum, row.scale, token.sum, row.zero);
  }
  return __fadd_rn(__fmul_rn(y, token.size), row.bias);
}

// y of rows `row` and `row` + 1, of which there are `rows`, from their sums for one token; `y`: of the first.
template <bool Whole>
__device__ inline void store_rows(uint16_t* y, int row, int rows, int first, int second, const Row& of_first,
                                  const Row& of_second, const Token& token) {
  const uint32_t word =
      pack_pair<Plan::dtype>(scaled<Whole>(first, of_first, token), scaled<Whole>(second, of_second, token));
  if (rows % 2 == 0) {
    *reinterpret_cast<uint32_t*>(y) = word;
  } else {
    y[0] = uint16_t(word);
    if (row + 1 < rows) y[1] = uint16_t(word >> 16);
  }
}

// True if the zeros of two rows are whole numbers of scales, or are not used.
__device__ inline bool are_whole(const Row& first, const Row& second) {
  return grouped || (first.steps != not_whole && second.steps != not_whole);
}
