// SPDX-License-Identifier: Apache-2.0
// Instructions that look at whole rows k = 0 .. n - 1 of [i, j, k].
//
//   mean         y[i, j] = sum_k a / n
//   RMSNorm      y = a / sqrt(mean a^2 + epsilon) * b
//   LayerNorm    y = (a - mean a) / sqrt(mean (a - mean a)^2 + epsilon) * b + c
#pragma once
#include "elementwise.h"

namespace hf_vq {
namespace {
namespace step {

// sum of (a - middle)^Power over a row
template <int Power> inline float sum_row(const hf_vq_operand& x, int64_t i, int64_t j, int64_t n, float middle) {
  alignas(64) float chunk[kChunk];
  Floats sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  const Floats off = splat(middle);
  float rest = 0.0f;
  for (int64_t k = 0; k < n; k += kChunk) {
    const int64_t m = n - k < kChunk ? n - k : kChunk;
    const Source a = read(x, i, j, k, m, chunk);
    int64_t r = 0;
    for (int lane = 0; r + kFloats <= m; r += kFloats, lane = (lane + 1) % 4) {
      const Floats d = a.at(r) - off;
      sums[lane] = Power == 1 ? sums[lane] + d : fma(d, d, sums[lane]);
    }
    for (; r < m; ++r) {
      const float d = a.from[a.same ? 0 : r] - middle;
      rest += Power == 1 ? d : d * d;
    }
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
}

inline void run_norm(const hf_vq_instruction& p) {
  const int64_t n = p.size[2];
  alignas(64) float a_chunk[kChunk], b_chunk[kChunk], c_chunk[kChunk], y_chunk[kChunk];
  for (int64_t i = 0; i < p.size[0]; ++i)
    for (int64_t j = 0; j < p.size[1]; ++j) {
      float* to = static_cast<float*>(p.y.data) + offset(p.y, i, j, 0);
      const bool centred = p.op != HF_VQ_RMS_NORM;
      const float middle = centred ? sum_row<1>(p.a, i, j, n, 0.0f) / float(n) : 0.0f;
      if (p.op == HF_VQ_MEAN) {
        *to = middle;
        round_row(to, 1, p.rounded);
        continue;
      }
      const float energy = sum_row<2>(p.a, i, j, n, middle) / float(n);
      float factor[kFloats];
      store(factor, splat(1.0f) / sqrt(splat(energy + p.number)));
      for (int64_t k = 0; k < n; k += kChunk) {
        const int64_t m = n - k < kChunk ? n - k : kChunk;
        map_row<HF_VQ_SUBTRACT>(read(p.a, i, j, k, m, a_chunk), {&middle, true}, m, y_chunk, HF_VQ_FLOAT32);
        map_row<HF_VQ_MULTIPLY>({y_chunk, false}, {factor, true}, m, y_chunk, HF_VQ_FLOAT32);
        if (p.b.data != nullptr)
          map_row<HF_VQ_MULTIPLY>({y_chunk, false}, read(p.b, i, j, k, m, b_chunk), m, y_chunk, HF_VQ_FLOAT32);
        if (p.c.data != nullptr)
          map_row<HF_VQ_ADD>({y_chunk, false}, read(p.c, i, j, k, m, c_chunk), m, y_chunk, HF_VQ_FLOAT32);
        round_row(y_chunk, m, p.rounded);
        memcpy(to + k, y_chunk, size_t(m) * sizeof(float));
      }
    }
}

}  // namespace step
}  // namespace
}  // namespace hf_vq
