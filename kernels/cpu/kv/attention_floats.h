// SPDX-License-Identifier: Apache-2.0
// Attention over unquantized tokens: sinks, the window of each query, and the tokens of the newest update.
#pragma once
#include "attention_rows.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kFloatTokens = 64;  // per iteration

// Token t of a head: floats [n], then zeros up to a multiple of 16.
inline void read_token(const hf_vq_floats& tokens, int64_t batch, int64_t head, int64_t t, int n, float* to) {
  const int64_t first = batch * tokens.stride[0] + head * tokens.stride[1] + t * tokens.stride[2];
  read_floats(tokens.data, tokens.dtype, first, n, to);
  for (int i = n; i < padded(n); ++i) to[i] = 0.0f;
}

// Add tokens begin..begin + n - 1 (n <= kFloatTokens), at positions first.. Row r sees the positions
// from low[r] to below high[r].
inline void add_floats(const hf_vq_attention_step& step, const hf_vq_floats& keys, const hf_vq_floats& values,
                       int64_t batch, int64_t head, int64_t begin, int n, int64_t first, Row* rows, int count,
                       const int64_t* low, const int64_t* high) {
  const int dim = step.k.dim, value_dim = step.v.dim;
  alignas(64) float p[kRows][kFloatTokens], token[4][kDim];
  bool seen[kRows];
  memset(p, 0, sizeof p);
  for (int t = 0; t < n; ++t) {
    read_token(keys, batch, head, begin + t, dim, token[0]);
    for (int r = 0; r < count; ++r)
      if (first + t >= low[r] && first + t < high[r])
        p[r][t] = dot_floats(rows[r].query, token[0], padded(dim)) * step.scaling;
  }
  for (int r = 0; r < count; ++r) {
    const int from = int(smaller(larger(low[r] - first, 0), n)), to = int(larger(smaller(high[r] - first, n), from));
    finish_logits(step, rows[r], first, from, to, kFloatTokens, p[r]);
    seen[r] = from < to && soften(rows[r], value_dim, p[r], kFloatTokens);
  }
  for (int t = 0; t < n; t += 4) {
    for (int k = 0; k < 4; ++k) read_token(values, batch, head, begin + (t + k < n ? t + k : t), value_dim, token[k]);
    for (int r = 0; r < count; ++r) {
      if (!seen[r]) continue;
      const float* weight = p[r] + t;  // 0 for tokens from n on
      float* sum = rows[r].floats;
      if (weight[0] != 0.0f && weight[1] != 0.0f && weight[2] != 0.0f && weight[3] != 0.0f) {
        for (int i = 0; i < padded(value_dim); i += kFloats) {
          Floats all = load(sum + i);
          for (int k = 0; k < 4; ++k) all = fma(splat(weight[k]), load(token[k] + i), all);
          store(sum + i, all);
        }
        continue;
      }
      for (int k = 0; k < 4; ++k) {  // what has no weight may be infinite
        if (weight[k] == 0.0f) continue;
        for (int i = 0; i < padded(value_dim); i += kFloats)
          store(sum + i, fma(splat(weight[k]), load(token[k] + i), load(sum + i)));
      }
    }
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
