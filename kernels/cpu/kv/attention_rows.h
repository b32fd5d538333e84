// SPDX-License-Identifier: Apache-2.0
// The queries of one task, rows of one KV head, and the tokens that they see.
//
//   query t of Q is position i = total - Q + t and reads
//     codes    j < near(i), but not the sinks        near = clamp(min(i - window + 1, total - fresh))
//     floats   the sinks below near(i), and near(i) <= j
//     of those: j <= i without a mask, else the tokens that the mask admits
#pragma once
#include "softmax.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kRows = 16;  // of a task: they share every decoded code


struct Row {
  float* query;   // [padded dim], 0 after dim
  float* floats;  // [padded value dim] sum of p v over float tokens
  float* lanes;   // [value dim][kFloats] sum of p v over coded tokens, rotated, in units of the levels
  Running run;
  float factor, constant;  // logit of a coded token = factor * scale * dot + constant
  int32_t bias;            // start of the integer sums
  int64_t near, end;       // positions: codes [0, near), floats [near, end), both cut at `end`
  int64_t mask;            // index of its first element
};

struct Sight {
  int64_t total, coded;  // positions; those that have codes
};

inline Sight sight_of(const hf_vq_attention_step& step) {
  const int64_t total = step.tail_start + step.tail_k.tokens;
  return {total, smaller(step.k.count, total)};
}

// Position bounds of query t.
inline void look(const hf_vq_attention_step& step, int64_t t, Row& row) {
  const Sight sight = sight_of(step);
  const int64_t i = sight.total - step.queries + t;
  const int64_t near = larger(step.tail_start, smaller(i - step.window + 1, sight.total - step.fresh));
  row.near = larger(smaller(near, sight.coded), 0);
  row.end = step.mask == nullptr ? larger(i + 1, 0) : sight.total;
}

// Softcap and mask of logits s [n] of the positions first.. ; those outside [low, high) become -infinity.
inline void finish_logits(const hf_vq_attention_step& step, const Row& row, int64_t first, int low, int high, int n,
                          float* s) {
  if (step.softcap != 0.0f)
    for (int i = 0; i < n; i += kFloats)
      store(s + i, tanh_of(load(s + i) / splat(step.softcap)) * splat(step.softcap));
  if (step.mask != nullptr && low < high) {
    const int64_t at = row.mask + first + low;
    if (step.mask_dtype == HF_VQ_BOOL) {
      const uint8_t* sees = static_cast<const uint8_t*>(step.mask) + at;
      for (int i = 0; i < high - low; ++i) s[low + i] = sees[i] != 0 ? s[low + i] : -kInfinity;
    } else {
      float extra[kBlock];
      read_floats(step.mask, step.mask_dtype, at, high - low, extra);
      for (int i = 0; i < high - low; ++i) s[low + i] += extra[i];
    }
  }
  for (int i = 0; i < low; ++i) s[i] = -kInfinity;
  for (int i = high; i < n; ++i) s[i] = -kInfinity;
}

inline void scale_floats(float* x, int n, float factor) {
  for (int i = 0; i < n; i += kFloats) store(x + i, load(x + i) * splat(factor));
}

// soften(), and the sums of the row with it.
inline bool soften(Row& row, int value_dim, float* s, int n) {
  float grown;
  if (!soften(row.run, s, n, grown)) return false;
  if (grown != 1.0f) {
    scale_floats(row.floats, padded(value_dim), grown);
    scale_floats(row.lanes, value_dim * kFloats, grown);
  }
  return true;
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
