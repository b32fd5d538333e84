// SPDX-License-Identifier: Apache-2.0
// Linear layers with a nested residual pass of 4 + 4 bits, for a few inputs, one by one:
//
//     y[m, o] = sum_g scale[o, g] xscale[m, g] unit sum_j entry[ first(o, j) << 4 | second(o, j) ] number[m, j]
//
// A level has 16 bits, in two tables (linear_levels.h). Both are looked up in registers (VBMI: four tables each) and
// multiplied by 8-bit inputs. The codes of both passes are in separate canonical rows and are merged in registers:
//
//     first  .. b a      low nibbles: even columns     (a & 15) << 4 | (c & 15)
//     second .. d c      high nibbles: odd columns     (a & 240)     | (c >> 4)
//
// A thread reads rows from kStreams places in parallel. Bytes: 1 per weight, and its scales, once for every input.
#pragma once
#include "linear_codes.h"
#include "linear_decode.h"
#include "linear_levels.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {
namespace nested {

using Order = TableCodes<16, 1, 4>;  // of the inputs: even columns of a step, then odd ones

constexpr int kEntries = 256;
constexpr int kPlaces = 4;             // that rows are taken from
constexpr int64_t kFar = 2048;         // bytes between a read and its prefetch

struct Call {
  const hf_vq_matrix& w;
  const uint8_t* second;
  Cut cut;
  Activations x;
  const uint8_t* tables;  // [2, 256]: high, low
  float unit;
  int64_t inputs;
  const void* bias;
  int bias_dtype;
  void* y;
  int dtype;
};

// The same for every target: rows are whole steps, and a step has one scale.
inline bool fits(const hf_vq_matrix& w) {
  return stored_as_said(w) && w.x == 1 && w.bits == 4 && w.stages == 1 && w.scope == HF_VQ_SHARED &&
         w.in % kLargestSpan == 0 && w.group % kLargestSpan == 0;
}

using Book = Codebook<kEntries, 1>;

// Input m of `Rows` rows of W, `apart` rows apart.
template <int Rows>
inline void compute_rows(const Call& call, const Book& high, const Book& low, int64_t m, int64_t row, int64_t apart) {
  const hf_vq_matrix& w = call.w;
  const int64_t row_bytes = w.in / 2, groups = w.in / w.group;
  const uint8_t* numbers = call.x.numbers + m * call.cut.numbers();
  const int32_t* start = call.x.start + m * call.cut.starts();
  const float* inputs = call.x.scale + m * call.cut.scales;
  const Bytes upper = splat_byte(240);
  Floats sums[Rows];
  for (Floats& each : sums) each = splat(0.0f);
  for (int64_t v = 0; v < call.cut.steps; ++v) {
    const int64_t column = v * Order::kStepColumns;
    const Bytes even = load_bytes(numbers + 2 * v * kBytes), odd = load_bytes(numbers + (2 * v + 1) * kBytes);
    const Ints from = kLevelBias ? load_ints(start + v * kFloats) : zero_ints();
    for (int k = 0; k < Rows; ++k) {
      const int64_t o = row + k * apart, at = o * row_bytes + v * Order::kStepBytes;
      __builtin_prefetch(w.codes + at + kFar, 0, 2);
      __builtin_prefetch(call.second + at + kFar, 0, 2);
      const Bytes one = load_bytes(w.codes + at), other = load_bytes(call.second + at);
      const Bytes first = shift_left(low_nibbles(one), 4) | low_nibbles(other);
      const Bytes last = (one & upper) | high_nibbles(other);
      Bytes a[1], b[1], c[1], d[1];
      lookup(high, first, a);
      lookup(high, last, b);
      lookup(low, first, c);
      lookup(low, last, d);
      const Floats highs = to_floats(dot(dot(from, a[0], even), b[0], odd));
      const Floats lows = to_floats(dot(dot(from, c[0], even), d[0], odd));
      const float scale = half_to_float(w.scale[o * groups + column / w.group]);
      const Floats factor = splat(scale * inputs[column / kLargestSpan]);
      sums[k] = fma(fma(highs, splat(float(kLevelBase)), lows), factor, sums[k]);
    }
  }
  for (int k = 0; k < Rows; ++k) {
    const int64_t o = row + k * apart;
    float y = sum(sums[k]) * call.unit;
    if (call.bias != nullptr) y += read_float(call.bias, call.bias_dtype, o);
    write_floats(call.y, call.dtype, m * w.out + o, 1, &y);
  }
}

inline void run_rows(int64_t begin, int64_t end, void* context) {
  const Call& call = *static_cast<Call*>(context);
  const Book high = load_codebook<kEntries, 1>(call.tables), low = load_codebook<kEntries, 1>(call.tables + kEntries);
  const int64_t apart = (end - begin) / kPlaces;
  for (int64_t m = 0; m < call.inputs; ++m) {
    for (int64_t row = begin; row < begin + apart; ++row) compute_rows<kPlaces>(call, high, low, m, row, apart);
    for (int64_t row = begin + kPlaces * apart; row < end; ++row) compute_rows<1>(call, high, low, m, row, 0);
  }
}

inline int compute(const hf_vq_matrix& w, const uint8_t* second, const void* x, int dtype, int64_t rows,
                   const void* bias, int bias_dtype, void* y) {
  const Cut cut = cut_row(w, Order::kStepColumns, Order::kPlanes, 1);
  const size_t columns = size_t(cut.steps * cut.step);
  const Scratch<uint8_t> numbers{size_t(rows * cut.numbers())}, natural{columns};
  const Scratch<int32_t> start{size_t(rows * cut.starts())};
  const Scratch<float> scale{size_t(rows * cut.scales)}, u{columns};
  if (!numbers || !start || !scale || !natural || !u) return HF_VQ_NO_MEMORY;
  const Activations to{numbers.get(), start.get(), scale.get()};
  for (int64_t m = 0; m < rows; ++m) prepare_row<Order>(w, cut, x, dtype, m, to, u.get(), natural.get());
  alignas(64) uint8_t tables[2 * kEntries];
  const float unit = make_levels(w.codebook, kEntries, tables);
  Call call{w, second, cut, to, tables, unit, rows, bias, bias_dtype, y, dtype};
  parallel_for(w.out, divide_up(32 << 10, w.in / 2), run_rows, &call);
  return HF_VQ_OK;
}

}  // namespace nested

int nested_supports(const hf_vq_matrix* w) { return nested::fits(*w) ? HF_VQ_OK : HF_VQ_UNSUPPORTED; }

int nested_linear(const hf_vq_matrix* w, const uint8_t* second, const void* x, int dtype, int64_t rows,
                  const void* bias, int bias_dtype, void* y) {
  if (dtype > HF_VQ_BFLOAT16 || bias_dtype > HF_VQ_BFLOAT16 || !nested::fits(*w)) return HF_VQ_UNSUPPORTED;
  return nested::compute(*w, second, x, dtype, rows, bias, bias_dtype, y);
}

}  // namespace
}  // namespace hf_vq
