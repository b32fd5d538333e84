// SPDX-License-Identifier: Apache-2.0
// Codes and entries of VPTQ (hf_vq/formats/published/vptq.py draws the format): an entry is `v` rows of one column.
//
//     stream of a row of vectors    | main, residual of column 0 | of column 1 | ..        bits = main + residual
//     entry                         book[main] + residual book[residual]                   rounded once to Plan::dtype
//
// A code beyond the codebook is clamped to the last entry: no bits address memory outside of it.
#pragma once
#include "plan.cuh"
#include "primitives/codes.cuh"

constexpr int v = Plan::vector_size, code_bits = Plan::entry_bits + Plan::rest_bits;
constexpr int entry_bytes = v * size_of<Plan::dtype>;
constexpr int piece = entry_bytes % 16 == 0 ? 16 : entry_bytes % 8 == 0 ? 8 : entry_bytes % 4 == 0 ? 4 : 2;

// Code `i` of neighbouring ones, a constant once loops are unrolled.
template <int Count> __device__ inline uint32_t main_code(const Codes<code_bits, Count>& codes, int i) {
  const uint32_t code = codes.template field<Plan::entry_bits, 1>(i * code_bits);
  return min(code, uint32_t(Plan::entries - 1));
}
template <int Count> __device__ inline uint32_t rest_code(const Codes<code_bits, Count>& codes, int i) {
  constexpr int bits = Plan::rest_bits ? Plan::rest_bits : 1;
  const uint32_t code = codes.template field<bits, 1>(i * code_bits + Plan::entry_bits);
  return min(code, uint32_t(Plan::rest_entries ? Plan::rest_entries - 1 : 0));
}

// An entry as floats.
__device__ inline void load_entry(const char* book, uint32_t code, float (&value)[v]) {
  constexpr int each = piece / size_of<Plan::dtype>;
#pragma unroll
  for (int first = 0; first < v; first += each) {
    float part[each];
    load_floats<Plan::dtype>(book + (code * v + first) * size_of<Plan::dtype>, part);
#pragma unroll
    for (int i = 0; i < each; ++i) value[first + i] = part[i];
  }
}

// Number `row` of the matrix in outlier column `column`, whose vectors have another length.
__device__ inline float outlier(const uint16_t* codes, const char* book, int outliers, int row, int column) {
  constexpr int length = Plan::outlier_vector ? Plan::outlier_vector : 1;
  const uint32_t code = min(uint32_t(__ldg(codes + int64_t(row / length) * outliers + column)),
                            uint32_t(Plan::outlier_entries ? Plan::outlier_entries - 1 : 0));
  float value[1];
  load_floats<Plan::dtype>(book + (code * length + row % length) * size_of<Plan::dtype>, value);
  return value[0];
}
