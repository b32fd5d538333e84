// SPDX-License-Identifier: Apache-2.0
// Inputs of a linear layer in the format of its kernels: rotated, quantized to 8 or 16 bits, in the order of codes.
//
//     u = H (x * d)                                    per block of the row; d are signs, or a diagonal in fp16
//     scale[g] = max |u| / 127,  number = round(u / scale[g])      per span g of columns
//
// A span has one scale: it is a scale group of the weights, or 128 columns of a larger group. A step is one
// iteration of a kernel: it decodes `planes` vectors of kBytes entries. Its numbers are in the same number of
// vectors, in the order in which the kernel finds the entries. Numbers beyond the end of the row are zero. A span
// with infinity or NaN has the scale NaN, which propagates to every output.
//
// Codes with kFine inputs take numbers of 16 bits, 256 high + low, whose high and low bytes are two planes.
#pragma once
#include "../api.h"
#include "../primitives/floats.h"
#include "../primitives/hadamard.h"
#include "../primitives/scratch.h"

namespace hf_vq {
namespace {

constexpr int64_t kLargestSpan = 128;

// Numbers of 16 bits as two bytes: kLevelBase high + low, high and low in [-127, 127].
constexpr int kLevelBase = 256;
constexpr int kMostLevel = kLevelBase * 127;

// Partition of a row of `columns` weights into spans and steps of a kernel.
struct Cut {
  int64_t columns, span, spans, step, steps;
  int planes;            // vectors of entries that one step finds
  int sets;              // kernels with too few registers find the planes of `sets` steps in order
  int64_t scales;        // floats kept per row of scales: the spans, then zeros up to the last step's end
  int64_t numbers() const { return sets * steps * planes * kBytes; }
  int64_t starts() const { return kLevelBias ? sets * steps * kFloats : 0; }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline bool power_of_two(int64_t a) { return a > 0 && (a & (a - 1)) == 0; }

// The row's cut into steps of `planes` vectors; `step` columns are `sets` such steps.
inline Cut cut_row(const hf_vq_matrix& w, int64_t step, int planes, int sets) {
  Cut cut{};
  cut.columns = w.in;
  cut.span = w.group < kLargestSpan ? w.group : kLargestSpan;
  cut.spans = divide_up(w.in, cut.span);
  cut.step = step;
  cut.steps = divide_up(w.in, step);
  cut.planes = planes;
  cut.sets = sets;
  const int64_t reached = divide_up(cut.steps * step, cut.span);
  cut.scales = (reached > cut.spans ? reached : cut.spans) + kFloats;
  return cut;
}

// The inputs of one call. `start` is what sums start from so that kLevelBias counts as zero.
struct Activations {
  uint8_t* numbers;  // [rows, sets, steps, planes, kBytes]
  int32_t* start;    // [rows, sets, steps, kFloats]
  float* scale;      // [rows, scales]
};

// u[i] *= d[i], i < n.
inline void multiply_halves(const uint16_t* d, int64_t n, float* u) {
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats) store(u + i, load(u + i) * load_half(d + i));
  for (int rest = int(n - i); rest > 0; --rest, ++i) u[i] *= half_to_float(d[i]);
}

// u [in] <- R u.
inline void rotate_floats(const hf_vq_matrix& w, float* u) {
  if (w.signs != nullptr) {
    uint32_t bits[16];
    int64_t i = 0;
    for (; i + 16 <= w.in; i += 16) {
      const uint32_t negative = w.signs[i / 8] | uint32_t(w.signs[i / 8 + 1]) << 8;
      memcpy(bits, u + i, 64);
      for (int j = 0; j < 16; ++j) bits[j] ^= negative >> j << 31;
      memcpy(u + i, bits, 64);
    }
    for (; i < w.in; ++i)
      if (w.signs[i / 8] >> (i % 8) & 1) u[i] = -u[i];
  }
  if (w.diagonal != nullptr) multiply_halves(w.diagonal, w.in, u);
  hadamard_blocks(u, w.in, w.block);
}

// u[0..in) = x[row] * d, rotated.
inline void rotate_row(const hf_vq_matrix& w, const void* x, int dtype, int64_t row, float* u) {
  read_floats(x, dtype, row * w.in, w.in, u);
  rotate_floats(w, u);
}

// The nearest integers in [-127, 127]; any of them for NaN.
inline Ints to_levels(Floats a) { return to_ints(min(max(a, splat(-127.0f)), splat(127.0f))); }

// n numbers of one span, n a multiple of kFloats: their scale, and number[i] = round(u[i] / scale).
inline float round_span(const float* u, int64_t n, uint8_t* number) {
  const Floats none = splat(0.0f);
  Floats most = none, not_finite = none;
  for (int64_t i = 0; i < n; i += kFloats) {
    const Floats a = load(u + i);
    most = max(most, max(a, none - a));
    not_finite = fma(a, none, not_finite);  // 0, or NaN
  }
  const float magnitude = largest(most);
  const Floats inverse = splat(magnitude > 1e-30f ? 127.0f / magnitude : 0.0f);
  for (int64_t i = 0; i < n; i += kFloats) store_low_bytes(number + i, to_levels(load(u + i) * inverse));
  return magnitude / 127.0f + sum(not_finite);
}

// The same with numbers of 16 bits, number[i] = 256 high[i] + low[i] = round(u[i] / scale), or 1 off where low would be
// 128 or -128.
inline float round_span_finely(const float* u, int64_t n, uint8_t* high, uint8_t* low) {
  const Floats none = splat(0.0f), most_level = splat(float(kMostLevel)), least_level = none - most_level;
  Floats most = none, not_finite = none;
  for (int64_t i = 0; i < n; i += kFloats) {
    const Floats a = load(u + i);
    most = max(most, max(a, none - a));
    not_finite = fma(a, none, not_finite);  // 0, or NaN
  }
  const float magnitude = largest(most);
  const Floats inverse = splat(magnitude > 1e-30f ? float(kMostLevel) / magnitude : 0.0f);
  for (int64_t i = 0; i < n; i += kFloats) {
    const Ints whole = to_ints(min(max(load(u + i) * inverse, least_level), most_level));
    const Ints upper = to_ints(to_floats(whole) * splat(1.0f / kLevelBase));
    store_low_bytes(high + i, upper);
    store_low_bytes(low + i, to_levels(to_floats(whole - shift_left<8>(upper))));
  }
  return magnitude / float(kMostLevel) + sum(not_finite);
}

// v[c] <- components c of the X-vectors that are contiguous in v.
template <int X> inline void deinterleave(Bytes (&v)[X]) {
  if constexpr (X > 1) {
    Bytes even[X / 2], odd[X / 2];
    for (int i = 0; i < X / 2; ++i) {
      even[i] = even_bytes(v[2 * i], v[2 * i + 1]);
      odd[i] = odd_bytes(v[2 * i], v[2 * i + 1]);
    }
    deinterleave<X / 2>(even);
    deinterleave<X / 2>(odd);
    for (int i = 0; i < X / 2; ++i) {
      v[2 * i] = even[i];
      v[2 * i + 1] = odd[i];
    }
  }
}

// Row `row` of the inputs. u and natural: scratch of steps * step numbers, of as many more at `natural` for low bytes.
// Codes::arrange writes the numbers of a step, found at `natural` in the order of columns, as planes.
template <class Codes>
inline void prepare_row(const hf_vq_matrix& w, const Cut& cut, const void* x, int dtype, int64_t row,
                        const Activations& to, float* u, uint8_t* natural) {
  rotate_row(w, x, dtype, row, u);
  memset(u + w.in, 0, size_t(cut.steps * cut.step - w.in) * 4);
  const int64_t columns = cut.steps * cut.step;
  memset(natural, 0, size_t(columns * (Codes::kFine ? 2 : 1)));

  float* scale = to.scale + row * cut.scales;
  memset(scale, 0, size_t(cut.scales) * 4);
  for (int64_t g = 0; g < cut.spans; ++g) {
    const int64_t first = g * cut.span, rest = cut.columns - first;
    const int64_t n = divide_up(rest < cut.span ? rest : cut.span, kFloats) * kFloats;
    scale[g] = Codes::kFine ? round_span_finely(u + first, n, natural + first, natural + columns + first)
                            : round_span(u + first, n, natural + first);
  }

  const int64_t set_bytes = cut.steps * cut.planes * kBytes;
  uint8_t* numbers = to.numbers + row * cut.numbers();
  for (int64_t v = 0; v < cut.steps; ++v) {
    uint8_t* planes = numbers + v * cut.planes * kBytes;
    Codes::arrange(natural + v * cut.step, planes, set_bytes);
    if (Codes::kFine) Codes::arrange(natural + columns + v * cut.step, planes + cut.planes / 2 * kBytes, set_bytes);
  }
  for (int64_t v = 0; v < cut.starts() / kFloats; ++v) {
    Ints biased = zero_ints();
    for (int plane = 0; plane < cut.planes; ++plane) {
      if (Codes::kFine && plane == cut.planes / 2) biased = biased + shift_left<8>(biased);
      biased = dot(biased, splat_byte(kLevelBias), load_bytes(numbers + (v * cut.planes + plane) * kBytes));
    }
    store(to.start + row * cut.starts() + v * kFloats, zero_ints() - biased);
  }
}

}  // namespace
}  // namespace hf_vq
