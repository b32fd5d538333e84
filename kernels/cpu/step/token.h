// SPDX-License-Identifier: Apache-2.0
// One token of one sequence for a layer of a growing cache, as hf_vq/cache/layer.py counts it:
//
//   tails    [begin ..           .. end - window | end .. ]   the token is written at `end`,
//   tapes    [ ..  k_end ]            ^ is encoded, where it left the window of this query
//
// then attention over codes and floats. Nothing counts before `advance`.
#pragma once
#include "../kv/attention.h"
#include "elementwise.h"

namespace hf_vq {
namespace {
namespace step {

// 1 if a token leaves the window.
inline int64_t leaving(const hf_vq_token& t) { return t.length + 1 - t.window - t.coded > 0 ? 1 : 0; }

inline const void* at(const hf_vq_floats& x, int64_t token) {
  return static_cast<const char*>(x.data) + token * x.stride[2] * bytes_of(x.dtype);
}

// Rows [heads, dim] of an operand, as token `token` of the tail.
inline void write_token(const hf_vq_operand& x, int64_t heads, int64_t dim, const hf_vq_floats& tail, int64_t token) {
  alignas(64) float chunk[kChunk];
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t k = 0; k < dim; k += kChunk) {
      const int64_t n = dim - k < kChunk ? dim - k : kChunk;
      const Source row = read(x, 0, h, k, n, chunk);
      write_floats(const_cast<void*>(tail.data), tail.dtype, h * tail.stride[1] + token * tail.stride[2] + k, n, row.from);
    }
}

inline int encode(const hf_vq_token& t, const hf_vq_codes& codes, const hf_vq_floats& tail, int64_t end) {
  hf_vq_floats one = tail;
  one.data = at(tail, t.end - t.window);
  one.tokens = 1;
  return append(&codes, &one, 1, t.heads, end);
}

inline hf_vq_floats seen(const hf_vq_token& t, const hf_vq_floats& tail) {
  hf_vq_floats all = tail;
  all.data = at(tail, t.begin);
  all.tokens = t.end + 1 - t.begin;
  return all;
}

inline int run_attention(const hf_vq_instruction& p) {
  const hf_vq_token& t = *static_cast<const hf_vq_token*>(p.detail);
  const int64_t dim = t.k.dim, value_dim = t.v.dim, gone = leaving(t);
  write_token(p.b, t.heads, dim, t.tail_k, t.end);
  write_token(p.c, t.heads, value_dim, t.tail_v, t.end);
  hf_vq_attention_step ask{};
  ask.k = t.k;
  ask.v = t.v;
  ask.k.first = t.k_end - t.coded;
  ask.v.first = t.v_end - t.coded;
  ask.k.count = ask.v.count = t.coded + gone;
  ask.k.rotary_start = ask.v.rotary_start = -ask.k.first;
  if (gone != 0) {
    int status = encode(t, ask.k, t.tail_k, t.k_end);
    if (status == HF_VQ_OK) status = encode(t, ask.v, t.tail_v, t.v_end);
    if (status != HF_VQ_OK) return status;
  }
  ask.sink_k = t.sink_k;
  ask.sink_v = t.sink_v;
  ask.tail_k = seen(t, t.tail_k);
  ask.tail_v = seen(t, t.tail_v);
  ask.query = {p.a.data, {0, p.a.stride[1], 0}, 1, HF_VQ_FLOAT32};
  ask.out = p.y.data;
  ask.out_stride[1] = p.y.stride[1];
  ask.batch = ask.queries = ask.fresh = 1;
  ask.heads = t.heads;
  ask.group = t.group;
  ask.tail_start = t.length - (t.end - t.begin);
  ask.window = t.window;
  ask.scaling = t.scaling;
  ask.softcap = t.softcap;
  const int status = attention(&ask);
  for (int64_t h = 0; h < t.heads * t.group; ++h)
    round_row(static_cast<float*>(p.y.data) + h * p.y.stride[1], value_dim, p.rounded);
  return status;
}

inline void advance(hf_vq_token& t) {
  const int64_t gone = leaving(t);
  t.coded += gone;
  t.k_end += gone;
  t.v_end += gone;
  ++t.length;
  ++t.end;
  if (t.end - t.begin > t.keep) t.begin = t.end - t.keep;
}

// The tails have room, and hold the window.
inline bool fits(const hf_vq_token& t) {
  const int64_t held = t.end - t.begin;
  return t.begin >= 0 && t.end < t.tail_k.tokens && t.end < t.tail_v.tokens && t.window >= 0 && t.coded >= 0 &&
         t.k_end >= t.coded && t.v_end >= t.coded && held <= t.length && t.coded + held >= t.length &&
         t.length + 1 - t.window - t.coded <= 1 && held >= (t.window < t.length ? t.window : t.length) && t.keep >= t.window;
}

}  // namespace step
}  // namespace
}  // namespace hf_vq
