// SPDX-License-Identifier: Apache-2.0
// y[i, j] = sum_k a / n, with the bits of PyTorch's sum of rows that follow each other (ATen, SumKernel.cpp).
//
//   a row      kWays * kLane columns; column c sums k = c, c + kWays * kLane, ...
//   a column   in blocks of 2^p numbers, p = max(4, log2(rows) / 4): level 0 sums a block, level 1 those of 2^p blocks, ..
//   at last    level 0 + 1 + 2 + 3 of each column, then the ways, then the lanes behind what is left over
//
// PyTorch's vectors are AVX2's in this sum, also where it has AVX-512; elsewhere `verify` finds that the bits differ.
#pragma once
#include "../primitives/scratch.h"
#include "elementwise.h"

namespace hf_vq {
namespace {
namespace step {

constexpr int kLane = 8, kWays = 4, kLevels = 4, kColumns = kWays * kLane;

// sum += a, column by column
inline void add_columns(float* sum, const float* a) {
  for (int c = 0; c < kColumns; c += kFloats) store(sum + c, load(sum + c) + load(a + c));
}

// The sum of n numbers.
inline float sum_as_torch(const float* x, int64_t n) {
  alignas(64) float sums[kLevels][kColumns] = {};
  const int64_t vectors = n / kLane, rows = vectors / kWays;
  int log2_rows = 0;
  while ((int64_t(1) << log2_rows) < rows) ++log2_rows;
  const int power = log2_rows / kLevels > 4 ? log2_rows / kLevels : 4;
  const int64_t block = int64_t(1) << power;
  int64_t row = 0;
  while (row + block <= rows) {
    for (const int64_t end = row + block; row < end; ++row) add_columns(sums[0], x + row * kColumns);
    for (int level = 1; level < kLevels; ++level) {
      add_columns(sums[level], sums[level - 1]);
      memset(sums[level - 1], 0, sizeof sums[0]);
      if ((row & ((block - 1) << (level * power))) != 0) break;
    }
  }
  for (; row < rows; ++row) add_columns(sums[0], x + row * kColumns);
  for (int level = 1; level < kLevels; ++level) add_columns(sums[0], sums[level]);
  float* lane = sums[0];
  for (int64_t k = rows * kColumns; k < vectors * kLane; ++k) lane[k % kLane] += x[k];
  for (int c = kLane; c < kColumns; ++c) lane[c % kLane] += lane[c];
  float total = 0.0f;
  for (int64_t k = vectors * kLane; k < n; ++k) total += x[k];
  for (int c = 0; c < kLane; ++c) total += lane[c];
  return total;
}

inline int run_mean(const hf_vq_instruction& p) {
  const int64_t n = p.size[2];
  const bool in_place = p.a.dtype == HF_VQ_FLOAT32 && p.a.stride[2] == 1;
  const Scratch<float> row{size_t(in_place ? 0 : n)};
  if (!row) return HF_VQ_NO_MEMORY;
  for (int64_t i = 0; i < p.size[0]; ++i)
    for (int64_t j = 0; j < p.size[1]; ++j) {
      const int64_t first = offset(p.a, i, j, 0);
      for (int64_t k = 0; k < n && !in_place; ++k) row[size_t(k)] = read_float(p.a.data, p.a.dtype, first + k * p.a.stride[2]);
      const float* x = in_place ? static_cast<const float*>(p.a.data) + first : row.get();
      float* to = static_cast<float*>(p.y.data) + offset(p.y, i, j, 0);
      *to = sum_as_torch(x, n) / float(n);
      round_row(to, 1, p.rounded);
    }
  return HF_VQ_OK;
}

}  // namespace step
}  // namespace
}  // namespace hf_vq
