// SPDX-License-Identifier: Apache-2.0
// A decoding step: the instructions of a program in order, in the calling thread. Products of large matrices and
// attention take torch's threads; all else is too short for them. Results have PyTorch's bits, but for products: what
// has another order of sums, or other polynomials, is left to the caller (HF_VQ_CALL).
#pragma once
#include "dense.h"
#include "mean.h"
#include "token.h"

namespace hf_vq {
namespace {
namespace step {

inline bool is_float(int dtype) { return dtype >= HF_VQ_FLOAT32 && dtype <= HF_VQ_BFLOAT16; }

inline bool given(const hf_vq_operand& x) { return x.data != nullptr && is_float(x.dtype); }

inline bool may_be_given(const hf_vq_operand& x) { return x.data == nullptr || is_float(x.dtype); }

inline bool is_row(const hf_vq_operand& x) { return given(x) && x.dtype == HF_VQ_FLOAT32 && x.stride[2] == 1; }

inline bool is_product(const hf_vq_instruction& p, int64_t out) {
  return is_row(p.a) && is_row(p.y) && p.size[0] == 1 && p.size[1] == 1 && p.size[2] == out && may_be_given(p.c);
}

inline int codes_fit(const hf_vq_instruction& p) {
  const hf_vq_matrix& w = *static_cast<const hf_vq_matrix*>(p.detail);
  const bool bias = p.c.data == nullptr || p.c.stride[2] == 1;
  const bool there = w.codes != nullptr && w.codebook != nullptr && (w.second_bits == 0 || w.second != nullptr);
  if (!is_product(p, w.out) || !bias || !there) return HF_VQ_UNSUPPORTED;
  return linear_supports(&w);
}

inline bool dense_fits(const hf_vq_instruction& p, bool rows) {
  const hf_vq_dense& w = *static_cast<const hf_vq_dense*>(p.detail);
  const bool whole_rows = w.in_stride == 1, int8 = w.dtype == HF_VQ_INT8 && whole_rows && w.out_stride >= w.in + 2;
  return (int8 || (is_float(w.dtype) && (whole_rows || (rows && w.out_stride == 1)))) && w.data != nullptr && w.out > 0 && w.in > 0 &&
         is_product(p, rows ? w.in : w.out);
}

inline int attention_fits(const hf_vq_instruction& p) {
  const hf_vq_token& t = *static_cast<const hf_vq_token*>(p.detail);
  if (!is_row(p.y) || !is_row(p.a) || !given(p.b) || !given(p.c) || t.heads < 1 || t.group < 1 || p.size[0] != 1 ||
      p.size[1] != t.heads * t.group || p.size[2] != t.v.dim || p.b.stride[2] != 1 || p.c.stride[2] != 1 || !fits(t) ||
      !is_float(t.tail_k.dtype) || !is_float(t.tail_v.dtype))
    return HF_VQ_UNSUPPORTED;
  const int status = codes_supported(&t.k, 0);
  return status != HF_VQ_OK ? status : codes_supported(&t.v, 1);
}

inline int supports(const hf_vq_instruction& p) {
  if (p.op < 0 || p.op >= HF_VQ_NUM_OPS || !given(p.y) || !given(p.a) || !is_float(p.rounded)) return HF_VQ_UNSUPPORTED;
  for (int64_t size : p.size)
    if (size < 1) return HF_VQ_UNSUPPORTED;
  if (p.op < HF_VQ_MEAN) return may_be_given(p.b) && (p.op == HF_VQ_COPY || p.y.dtype == HF_VQ_FLOAT32) ? HF_VQ_OK : HF_VQ_UNSUPPORTED;
  if (p.op == HF_VQ_MEAN) return p.y.dtype == HF_VQ_FLOAT32 ? HF_VQ_OK : HF_VQ_UNSUPPORTED;
  if (p.detail == nullptr) return HF_VQ_UNSUPPORTED;
  if (p.op == HF_VQ_CALL) return static_cast<hf_vq_call*>(p.detail)->run != nullptr ? HF_VQ_OK : HF_VQ_UNSUPPORTED;
  if (p.op == HF_VQ_CODES) return codes_fit(p);
  if (p.op == HF_VQ_ATTENTION) return attention_fits(p);
  return dense_fits(p, p.op == HF_VQ_LOOK_UP) ? HF_VQ_OK : HF_VQ_UNSUPPORTED;
}

inline int run(const hf_vq_instruction& p) {
  if (p.op < HF_VQ_MEAN) {
    run_elementwise(p);
    return HF_VQ_OK;
  }
  if (p.op == HF_VQ_MEAN) return run_mean(p);
  if (p.op == HF_VQ_CALL) {
    const hf_vq_call& call = *static_cast<hf_vq_call*>(p.detail);
    return call.run(call.number) == HF_VQ_OK ? HF_VQ_OK : HF_VQ_CALL_ENDED;
  }
  if (p.op == HF_VQ_LOOK_UP) return look_up(p);
  if (p.op == HF_VQ_DENSE) return run_dense(p);
  if (p.op == HF_VQ_ATTENTION) return run_attention(p);
  const hf_vq_matrix* w = static_cast<const hf_vq_matrix*>(p.detail);
  const int status = linear(w, p.a.data, HF_VQ_FLOAT32, 1, p.c.data, p.c.dtype, p.y.data);
  round_row(static_cast<float*>(p.y.data), w->out, p.rounded);
  return status;
}

}  // namespace step

int step_supports(const hf_vq_instruction* program, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int status = step::supports(program[i]);
    if (status != HF_VQ_OK) return status;
  }
  return HF_VQ_OK;
}

int run_step(const hf_vq_instruction* program, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (program[i].op == HF_VQ_ATTENTION && step::attention_fits(program[i]) != HF_VQ_OK) return HF_VQ_UNSUPPORTED;
  for (int64_t i = 0; i < count; ++i) {
    const int status = step::run(program[i]);
    if (status != HF_VQ_OK) return status;
  }
  for (int64_t i = 0; i < count; ++i)
    if (program[i].op == HF_VQ_ATTENTION) step::advance(*static_cast<hf_vq_token*>(program[i].detail));
  return HF_VQ_OK;
}

}  // namespace
}  // namespace hf_vq
