// SPDX-License-Identifier: Apache-2.0
// y = W x + bias of one x: an output head. And rows of W.
//
//   W in int8    x is hi + lo / 128 in units of its largest / 127; both halves are sums of 8-bit products, exact in 32 bits
//   W in floats  sums of float32
//
// Bytes: W once. Bottleneck: memory.
#pragma once
#include "../host/threads.h"
#include "../linear/activations.h"
#include "elementwise.h"

namespace hf_vq {
namespace {
namespace step {

constexpr int64_t kWorth = 64 << 10;      // bytes of W worth a thread
constexpr int64_t kBytesAhead = 1024;     // between a read and its prefetch

struct DenseCall {
  const hf_vq_instruction* p;
  const hf_vq_dense* w;
  const float* x;
  const uint8_t *high, *low;  // of int8
  float unit;                 // of `low`
  int64_t whole;              // columns in whole vectors
};

inline void put(const DenseCall& call, int64_t row, float sum) {
  const hf_vq_instruction& p = *call.p;
  if (p.c.data != nullptr) sum += read_float(p.c.data, p.c.dtype, row * p.c.stride[2]);
  static_cast<float*>(p.y.data)[row] = sum;
}

// Rows `row`, row + apart, .. of W: a processor fetches several streams faster than one.
template <int Rows>
inline void multiply_int8(const DenseCall& call, Ints start_high, Ints start_low, int64_t row, int64_t apart) {
  const hf_vq_dense& w = *call.w;
  const Bytes bias = splat_byte(kLevelBias);
  const uint8_t* codes[Rows];
  Ints high[Rows], low[Rows];
  for (int r = 0; r < Rows; ++r) {
    codes[r] = static_cast<const uint8_t*>(w.data) + (row + r * apart) * w.out_stride;
    high[r] = start_high;
    low[r] = start_low;
  }
  for (int64_t k = 0; k < call.whole; k += kBytes) {
    const Bytes upper = load_bytes(call.high + k), lower = load_bytes(call.low + k);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const Bytes level = load_bytes(codes[r] + k) ^ bias;
      high[r] = dot(high[r], level, upper);
      low[r] = dot(low[r], level, lower);
      __builtin_prefetch(codes[r] + k + kBytesAhead, 0, 1);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float total = sum(fma(to_floats(high[r]), splat(128.0f), to_floats(low[r])));
    for (int64_t k = call.whole; k < w.in; ++k)
      total += float(int8_t(codes[r][k])) * (float(int8_t(call.high[k])) * 128.0f + float(int8_t(call.low[k])));
    uint16_t scale;
    memcpy(&scale, codes[r] + w.in, 2);
    put(call, row + r * apart, total * call.unit * half_to_float(scale));
  }
}

inline void run_int8(int64_t first, int64_t last, void* context) {
  const DenseCall& call = *static_cast<DenseCall*>(context);
  const Bytes bias = splat_byte(kLevelBias);
  Ints high = zero_ints(), low = zero_ints();  // what sums start from, so that the bias counts as zero
  for (int64_t k = 0; k < call.whole && kLevelBias != 0; k += kBytes) {
    high = dot(high, bias, load_bytes(call.high + k));
    low = dot(low, bias, load_bytes(call.low + k));
  }
  high = zero_ints() - high;
  low = zero_ints() - low;
  const int64_t apart = (last - first) / kStreams;
  for (int64_t row = first; row < first + apart; ++row) multiply_int8<kStreams>(call, high, low, row, apart);
  for (int64_t row = first + kStreams * apart; row < last; ++row) multiply_int8<1>(call, high, low, row, 0);
}

// Rows `row`, row + apart, .. of W in floats. Each row has one order of sums, wherever it lies.
template <int Dtype, int Rows> inline void multiply_floats(const DenseCall& call, int64_t row, int64_t apart) {
  const hf_vq_dense& w = *call.w;
  const char* stored[Rows];
  Floats sums[Rows], more[Rows];
  for (int r = 0; r < Rows; ++r) {
    stored[r] = static_cast<const char*>(w.data) + (row + r * apart) * w.out_stride * bytes_of(Dtype);
    sums[r] = more[r] = splat(0.0f);
  }
  int64_t k = 0;
  for (; k + 2 * kFloats <= w.in; k += 2 * kFloats) {
    const Floats x0 = load(call.x + k), x1 = load(call.x + k + kFloats);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      sums[r] = fma(load_floats<Dtype>(stored[r], k), x0, sums[r]);
      more[r] = fma(load_floats<Dtype>(stored[r], k + kFloats), x1, more[r]);
      __builtin_prefetch(stored[r] + k * bytes_of(Dtype) + kBytesAhead, 0, 1);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    float total = sum(sums[r] + more[r]);
    for (int64_t i = k; i < w.in; ++i) total += read_float(stored[r], Dtype, i) * call.x[i];
    put(call, row + r * apart, total);
  }
}

template <int Dtype> inline void run_floats(int64_t first, int64_t last, void* context) {
  const DenseCall& call = *static_cast<DenseCall*>(context);
  const int64_t apart = (last - first) / kStreams;
  for (int64_t row = first; row < first + apart; ++row) multiply_floats<Dtype, kStreams>(call, row, apart);
  for (int64_t row = first + kStreams * apart; row < last; ++row) multiply_floats<Dtype, 1>(call, row, 0);
}

// x[k] = (128 high[k] + low[k]) unit, both in [-127, 127]; the unit is returned.
inline float split_input(const float* x, int64_t n, uint8_t* high, uint8_t* low) {
  float most = 0.0f, check = 0.0f;
  for (int64_t k = 0; k < n; ++k) {
    const float size = x[k] < 0 ? -x[k] : x[k];
    most = size > most ? size : most;
    check += x[k] * 0.0f;
  }
  const float unit = most / 16319.0f, inverse = most > 1e-30f ? 1.0f / unit : 0.0f;  // 127 * 128 + 63
  for (int64_t k = 0; k < n; ++k) {
    const float number = x[k] * inverse;
    const int32_t whole = number == number ? int32_t(number < 0 ? number - 0.5f : number + 0.5f) : 0;
    const int32_t upper = (whole + 64 + (1 << 20)) / 128 - (1 << 13);
    high[k] = uint8_t(int8_t(upper));
    low[k] = uint8_t(int8_t(whole - 128 * upper));
  }
  return unit + check;  // NaN stays
}

inline int run_dense(const hf_vq_instruction& p) {
  const hf_vq_dense& w = *static_cast<const hf_vq_dense*>(p.detail);
  DenseCall call{&p, &w, static_cast<const float*>(p.a.data), nullptr, nullptr, 0.0f, w.in / kBytes * kBytes};
  const bool integers = w.dtype == HF_VQ_INT8;
  const Scratch<uint8_t> halves{size_t(integers ? 2 * w.in : 1)};
  if (!halves) return HF_VQ_NO_MEMORY;
  auto* rows = w.dtype == HF_VQ_FLOAT16 ? run_floats<HF_VQ_FLOAT16> : w.dtype == HF_VQ_FLOAT32 ? run_floats<HF_VQ_FLOAT32> : run_floats<HF_VQ_BFLOAT16>;
  if (integers) {
    call.high = halves.get();
    call.low = halves.get() + w.in;
    call.unit = split_input(call.x, w.in, halves.get(), halves.get() + w.in);
    rows = run_int8;
  }
  parallel_for(w.out, divide_up(kWorth, w.in * (integers ? 1 : bytes_of(w.dtype))), rows, &call);
  round_row(static_cast<float*>(p.y.data), w.out, p.rounded);
  return HF_VQ_OK;
}

// y = row number a of the matrix
inline int look_up(const hf_vq_instruction& p) {
  const hf_vq_dense& w = *static_cast<const hf_vq_dense*>(p.detail);
  const float number = *static_cast<const float*>(p.a.data);
  if (!(number >= 0.0f && number < float(w.out))) return HF_VQ_UNSUPPORTED;
  const int64_t row = int64_t(number);
  float* y = static_cast<float*>(p.y.data);
  if (w.dtype == HF_VQ_INT8) {
    const uint8_t* codes = static_cast<const uint8_t*>(w.data) + row * w.out_stride;
    uint16_t scale;
    memcpy(&scale, codes + w.in, 2);
    for (int64_t k = 0; k < w.in; ++k) y[k] = float(int8_t(codes[k])) * half_to_float(scale);
  } else if (w.in_stride == 1) {
    read_floats(w.data, w.dtype, row * w.out_stride, w.in, y);
  } else {
    for (int64_t k = 0; k < w.in; ++k) y[k] = read_float(w.data, w.dtype, row * w.out_stride + k * w.in_stride);
  }
  round_row(y, w.in, p.rounded);
  return HF_VQ_OK;
}

}  // namespace step
}  // namespace
}  // namespace hf_vq
