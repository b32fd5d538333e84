// SPDX-License-Identifier: Apache-2.0
// Instructions whose number [i, j, k] depends on number [i, j, k] of each operand alone.
//
//   operands  --read-->  chunks of float32, one for each operand  --op, rounded-->  y
//
// Rows of float32 are read and written in place; what has gaps, or another type, goes through a chunk.
#pragma once
#include <utility>

#include "../api.h"
#include "../kv/softmax.h"
#include "../primitives/floats.h"

namespace hf_vq {
namespace {
namespace step {

constexpr int64_t kChunk = 256;

inline int64_t bytes_of(int dtype) { return dtype == HF_VQ_FLOAT32 ? 4 : 2; }

inline Floats negative(Floats a) { return splat(0.0f) - a; }

// e^x as SLEEF's expf of 1 ulp, which PyTorch calls (Shibata and Petrogalli, arXiv 2001.09258): the same operations in
// the same order. x = n log 2 + r, |r| <= log 2 / 2; 2^n in two factors.
inline Floats exp_of_sleef(Floats x) {
  const Floats known = min(max(x, splat(-105.0f)), splat(105.0f));  // NaN becomes a number
  const Ints whole = to_ints(known * splat(1.4426950408889634f));
  const Floats n = to_floats(whole);
  Floats r = fma(n, splat(-0.693145751953125f), known);
  r = fma(n, splat(-1.428606765330187045e-06f), r);
  Floats p = fma(splat(0.000198527617612853646278381f), r, splat(0.00139304355252534151077271f));
  p = fma(p, r, splat(0.00833336077630519866943359f));
  p = fma(p, r, splat(0.0416664853692054748535156f));
  p = fma(p, r, splat(0.166666671633720397949219f));
  p = fma(p, r, splat(0.5f));
  p = splat(1.0f) + fma(r * r, p, r);
  const Ints half = to_ints(fma(n, splat(0.5f), splat(-0.25f)));  // the floor of n / 2
  p = p * exp2_of(half) * exp2_of(whole - half);
  p = where_less(splat(100.0f), x, splat(kv::kInfinity), p);
  p = where_less(x, splat(-104.0f), splat(0.0f), p);
  return where_less(x, splat(kv::kInfinity), p, x);  // of infinity itself, and of NaN itself
}

// The larger one; NaN if one of them is.
inline Floats max_any(Floats a, Floats b) {
  const Floats half = splat(0.5f), both = a * half + b * half;  // of equal numbers, or NaN
  return where_less(a, b, b, where_less(b, a, a, both));
}

template <int Op> inline Floats compute(Floats a, Floats b) {
  if constexpr (Op == HF_VQ_COPY) return a;
  if constexpr (Op == HF_VQ_NEGATE) return a * splat(-1.0f);
  if constexpr (Op == HF_VQ_ABS) return max(a, negative(a));
  if constexpr (Op == HF_VQ_SQUARE) return a * a;
  if constexpr (Op == HF_VQ_CUBE) return a * a * a;
  if constexpr (Op == HF_VQ_SQRT) return sqrt(a);
  if constexpr (Op == HF_VQ_RSQRT) return splat(1.0f) / sqrt(a);
  if constexpr (Op == HF_VQ_RECIPROCAL) return splat(1.0f) / a;
  if constexpr (Op == HF_VQ_SILU) return a / (splat(1.0f) + exp_of_sleef(negative(a)));
  if constexpr (Op == HF_VQ_RELU) return where_less(a, splat(0.0f), splat(0.0f), a);
  if constexpr (Op == HF_VQ_ADD) return a + b;
  if constexpr (Op == HF_VQ_SUBTRACT) return a - b;
  if constexpr (Op == HF_VQ_MULTIPLY) return a * b;
  if constexpr (Op == HF_VQ_DIVIDE) return a / b;
  if constexpr (Op == HF_VQ_MAXIMUM) return max_any(a, b);
  if constexpr (Op == HF_VQ_MINIMUM) return negative(max_any(negative(a), negative(b)));
}

inline Floats rounded_to(Floats a, int dtype) {
  if (dtype == HF_VQ_BFLOAT16) return round_bfloat(a);
  if (dtype == HF_VQ_FLOAT16) {
    uint16_t half[kFloats];
    store_half(half, a);
    return load_half(half);
  }
  return a;
}

// n numbers that follow each other at `from`, or one number again and again.
struct Source {
  const float* from;
  bool same;
  Floats at(int64_t k) const { return same ? splat(*from) : load(from + k); }
  Floats some(int64_t k, int64_t n) const {
    if (same) return splat(*from);
    float lane[kFloats] = {};
    memcpy(lane, from + k, size_t(n) * sizeof(float));
    return load(lane);
  }
};

template <int Op> void map_row(Source a, Source b, int64_t n, float* y, int rounded) {
  int64_t k = 0;
  for (; k + kFloats <= n; k += kFloats) store(y + k, rounded_to(compute<Op>(a.at(k), b.at(k)), rounded));
  if (k == n) return;
  float lane[kFloats];
  store(lane, rounded_to(compute<Op>(a.some(k, n - k), b.some(k, n - k)), rounded));
  memcpy(y + k, lane, size_t(n - k) * sizeof(float));
}

using MapRow = void (*)(Source, Source, int64_t, float*, int);

template <int... Op> inline MapRow map_of(int op, std::integer_sequence<int, Op...>) {
  static constexpr MapRow kRows[] = {map_row<Op>...};
  return kRows[op];
}

inline int64_t offset(const hf_vq_operand& x, int64_t i, int64_t j, int64_t k) {
  return i * x.stride[0] + j * x.stride[1] + k * x.stride[2];
}

// Numbers [i, j, k .. k + n - 1] of an operand.
inline Source read(const hf_vq_operand& x, int64_t i, int64_t j, int64_t k, int64_t n, float* chunk) {
  const int64_t first = offset(x, i, j, k), stride = x.stride[2];
  if (x.dtype == HF_VQ_FLOAT32 && stride <= 1) return {static_cast<const float*>(x.data) + first, stride == 0};
  if (stride == 1) read_floats(x.data, x.dtype, first, n, chunk);
  else
    for (int64_t r = 0; r < (stride == 0 ? 1 : n); ++r) chunk[r] = read_float(x.data, x.dtype, first + r * stride);
  return {chunk, stride == 0};
}

inline void run_elementwise(const hf_vq_instruction& p) {
  const MapRow map = map_of(p.op, std::make_integer_sequence<int, HF_VQ_MEAN>());
  alignas(64) float a_chunk[kChunk], b_chunk[kChunk], y_chunk[kChunk];
  for (int64_t i = 0; i < p.size[0]; ++i)
    for (int64_t j = 0; j < p.size[1]; ++j)
      for (int64_t k = 0; k < p.size[2]; k += kChunk) {
        const int64_t n = p.size[2] - k < kChunk ? p.size[2] - k : kChunk, first = offset(p.y, i, j, k);
        const Source a = read(p.a, i, j, k, n, a_chunk);
        const Source b = p.b.data == nullptr ? Source{&p.number, true} : read(p.b, i, j, k, n, b_chunk);
        const bool dense = p.y.stride[2] == 1;
        float* y = dense && p.y.dtype == HF_VQ_FLOAT32 ? static_cast<float*>(p.y.data) + first : y_chunk;
        map(a, b, n, y, p.rounded);
        if (y != y_chunk) continue;
        if (dense) write_floats(p.y.data, p.y.dtype, first, n, y);
        else
          for (int64_t r = 0; r < n; ++r) write_floats(p.y.data, p.y.dtype, first + r * p.y.stride[2], 1, y + r);
      }
}

// n results in place.
inline void round_row(float* y, int64_t n, int rounded) {
  if (rounded == HF_VQ_FLOAT32) return;
  map_row<HF_VQ_COPY>({y, false}, {y, true}, n, y, rounded);
}

}  // namespace step
}  // namespace
}  // namespace hf_vq
