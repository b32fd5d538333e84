// SPDX-License-Identifier: Apache-2.0
// Linear layers of published VPTQ checkpoints (hf_vq/formats/published/vptq.py draws the format). Vectors are along the
// output dimension: an entry is `vector` rows of one column.
//
//     y[m, i v + r] = sum_c (book[main(i, c)] + rest[residual(i, c)])[r] x'[m, c] + outliers + <offset, x> + bias
//     x'[m, c] = scale[p[c]] x[m, p[c]]                                              p: the order of columns
//
// A thread owns adjacent vectors and processes runs of 256 codes, eight rows per pass. If the vector size is not a
// multiple of eight, the last pass overlaps the one before. Only the float32 sums round.
//
// Bytes: codes once, 16 per lookup of an entry. Bottleneck: lookups, in L2 for 65536 entries.
#pragma once
#include "../linear/activations.h"
#include "../linear/entries.h"
#include "../primitives/scratch.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {
namespace vptq {

using entries::kEight;
using entries::kRun;
using entries::kStep;
using entries::kSums;

constexpr int kLongest = 64;  // rows of a vector

struct Call {
  const hf_vq_vptq* w;
  entries::Books books;  // of all groups
  const void* x;
  const float* inputs;   // x' [rows, stride]
  const float* outliers; // x' [rows, outliers]
  const float* start;    // <offset, x> [rows]
  int64_t rows, stride, padded, vectors, words;
  const void* bias;
  int bias_dtype, dtype, status;
  void* y;
};

inline float number(const hf_vq_vptq& w, const void* p, int64_t i) { return read_float(p, w.dtype, i); }

// Main and residual codes first..first + n - 1 of a stream of any number of bits.
inline void unpack_any(const hf_vq_vptq& w, const uint32_t* stream, int64_t first, int n, uint16_t* code,
                       uint16_t* rest) {
  const int bits = w.bits + w.rest_bits;
  const uint32_t mask = (1u << w.bits) - 1, rest_mask = (1u << w.rest_bits) - 1;
  for (int i = 0; i < n; ++i) {
    const int64_t at = (first + i) * bits;
    const uint32_t* word = stream + at / 32;
    const int shift = int(at % 32);
    // No word is read that has none of these bits.
    const uint64_t both = (word[0] | uint64_t(word[shift + bits > 32]) << 32) >> shift;
    code[i] = uint16_t(both & mask);
    rest[i] = uint16_t(both >> w.bits & rest_mask);
  }
}

// The same with constant shifts, kStep codes per iteration; `first` is a multiple of kStep. The function above unpacks
// the remainder.
template <int Main, int Rest>
inline void unpack(const hf_vq_vptq& w, const uint32_t* stream, int64_t first, int n, uint16_t* code, uint16_t* rest) {
  constexpr int bits = Main + Rest, words = kStep * bits / 32;
  static_assert(kStep * bits % 32 == 0, "whole words");
  const uint32_t* word = stream + first / kStep * words;
  int i = 0;
  for (; i + kStep <= n; i += kStep, word += words) {
    for (int k = 0; k < kStep; ++k) {
      const int at = k * bits / 32, shift = k * bits % 32;
      uint64_t both = word[at];
      if (shift + bits > 32) both |= uint64_t(word[at + 1]) << 32;
      const uint32_t found = uint32_t(both >> shift);
      code[i + k] = uint16_t(found & ((1u << Main) - 1));
      if constexpr (Rest > 0) rest[i + k] = uint16_t(found >> Main & ((1u << Rest) - 1));
    }
  }
  unpack_any(w, stream, first + i, n - i, code + i, rest + i);
}

// Three bytes: those of the main code, and the residual's.
inline void unpack_bytes(const uint32_t* stream, int64_t first, int n, uint16_t* code, uint16_t* rest) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(stream) + first * 3;
  for (int i = 0; i < n; ++i, p += 3) {
    memcpy(code + i, p, 2);
    rest[i] = p[2];
  }
}

// A code that its codebook does not have counts as the last one.
inline void keep_below(int64_t entries, int bits, int n, uint16_t* code) {
  if (entries == int64_t(1) << bits) return;
  const uint16_t last = uint16_t(entries - 1);
  for (int i = 0; i < n; ++i) code[i] = code[i] < last ? code[i] : last;
}

inline void unpack_run(const hf_vq_vptq& w, const uint32_t* stream, int64_t first, int n, uint16_t* code,
                       uint16_t* rest) {
  switch (w.bits * 100 + w.rest_bits) {
    case 800: unpack<8, 0>(w, stream, first, n, code, rest); break;
    case 1200: unpack<12, 0>(w, stream, first, n, code, rest); break;
    case 1600: unpack<16, 0>(w, stream, first, n, code, rest); break;
    case 1608: unpack_bytes(stream, first, n, code, rest); break;
    case 1612: unpack<16, 12>(w, stream, first, n, code, rest); break;
    case 1616: unpack<16, 16>(w, stream, first, n, code, rest); break;
    default: unpack_any(w, stream, first, n, code, rest);
  }
  keep_below(w.entries, w.bits, n, code);
  if (w.rest_bits > 0) keep_below(w.rest_entries, w.rest_bits, n, rest);
}

// Rows of vector i, from row `from` of the vector on, to `to` [rows, kEight].
template <bool Rest, bool Bfloat> inline void add_eight(const Call& call, int64_t i, int from, float* sums) {
  const hf_vq_vptq& w = *call.w;
  uint16_t code[kRun], rest[kRun];
  memset(sums, 0, size_t(call.rows * kSums) * 4);
  for (int64_t group = 0; group < w.groups; ++group) {
    const uint32_t* stream = w.codes + (group * call.vectors + i) * call.words;
    const entries::Books books{call.books.book + group * w.entries * w.vector + from,
                               Rest ? call.books.rest + group * w.rest_entries * w.vector + from : nullptr, w.vector};
    for (int64_t first = 0; first < w.columns; first += kRun) {
      int n = int(w.columns - first < kRun ? w.columns - first : kRun);
      unpack_run(w, stream, first, n, code, rest);
      for (; n % kStep; ++n) code[n] = rest[n] = 0;
      entries::add_inputs<Rest, Bfloat, false>(books, code, rest, n, call.inputs + group * call.padded + first,
                                               call.stride, call.rows, sums);
    }
  }
}

// The outlier columns of output o, whose vectors have another length.
inline float outlier_sum(const Call& call, int64_t m, int64_t o) {
  const hf_vq_vptq& w = *call.w;
  const uint16_t* code = w.outlier_codes + o / w.outlier_vector * w.outliers;
  const int64_t row = o % w.outlier_vector;
  float total = 0;
  for (int64_t c = 0; c < w.outliers; ++c) {
    const int64_t entry = code[c] < w.outlier_entries ? code[c] : w.outlier_entries - 1;
    total += number(w, w.outlier_book, entry * w.outlier_vector + row) * call.outliers[m * w.outliers + c];
  }
  return total;
}

template <bool Rest, bool Bfloat> inline void run_vectors(int64_t begin, int64_t end, void* context) {
  Call& call = *static_cast<Call*>(context);
  const hf_vq_vptq& w = *call.w;
  const Scratch<float> sums{size_t(call.rows * kSums)};
  if (!sums) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t left = w.out - i * w.vector, rows = left < w.vector ? left : w.vector;
    for (int done = 0; done < rows; done += kEight) {
      const int last = w.vector - kEight, from = done < last || last < 0 ? done : last;
      add_eight<Rest, Bfloat>(call, i, from, sums.get());
      const int n = rows - done < kEight ? int(rows - done) : kEight;
      for (int64_t m = 0; m < call.rows; ++m) {
        float y[kEight];
        for (int r = 0; r < n; ++r) {
          const int64_t o = i * w.vector + done + r;
          y[r] = entries::row_sum(sums.get() + m * kSums, done + r - from) + call.start[m];
          if (w.outliers > 0) y[r] += outlier_sum(call, m, o);
          if (call.bias != nullptr) y[r] += read_float(call.bias, call.bias_dtype, o);
        }
        write_floats(call.y, call.dtype, m * w.out + i * w.vector + done, n, y);
      }
    }
  }
}

// x' of one row, and <offset, x>.
inline float prepare(const Call& call, int64_t m, float* inputs, float* outliers) {
  const hf_vq_vptq& w = *call.w;
  float start = 0;
  if (w.offset != nullptr)
    for (int64_t j = 0; j < w.in; ++j) start += number(w, w.offset, j) * read_float(call.x, call.dtype, m * w.in + j);
  const auto moved = [&](int64_t c) {
    int64_t j = c;
    if (w.order != nullptr) j = w.order[c] < w.in ? w.order[c] : w.in - 1;
    return read_float(call.x, call.dtype, m * w.in + j) * (w.scale != nullptr ? number(w, w.scale, j) : 1.0f);
  };
  for (int64_t c = 0; c < w.outliers; ++c) outliers[c] = moved(c);
  for (int64_t group = 0; group < w.groups; ++group)
    for (int64_t c = 0; c < w.columns; ++c)
      inputs[group * call.padded + c] = moved(w.outliers + group * w.columns + c);
  return start;
}

inline bool fits(const hf_vq_vptq& w) {
  const bool numbers = w.dtype == HF_VQ_FLOAT16 || w.dtype == HF_VQ_BFLOAT16;
  const bool sizes = w.out > 0 && w.groups > 0 && w.columns > 0 && w.outliers >= 0 &&
                     w.in == w.outliers + w.groups * w.columns && w.vector >= 1 && w.vector <= kLongest;
  const bool codes = w.bits >= 1 && w.bits <= 16 && w.entries >= 1 && w.entries <= 1 << w.bits && w.rest_bits >= 0 &&
                     w.rest_bits <= 16 && w.rest_entries >= 0 && w.rest_entries <= 1 << w.rest_bits &&
                     (w.rest_bits == 0 || w.rest_entries > 0);
  return numbers && sizes && codes && (w.outliers == 0 || (w.outlier_vector > 0 && w.outlier_entries > 0));
}

// `count` numbers of 16 bits, with eight behind them where entries are shorter than what a lookup reads.
inline const uint16_t* readable(const void* book, int64_t count, bool copy, uint16_t* room) {
  if (!copy) return static_cast<const uint16_t*>(book);
  memcpy(room, book, size_t(count) * 2);
  memset(room + count, 0, kEight * 2);
  return room;
}

inline int compute(const hf_vq_vptq& w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype,
                   void* y) {
  Call call{};
  call.w = &w;
  call.x = x;
  call.rows = rows;
  call.padded = divide_up(w.columns, kStep) * kStep;
  call.stride = w.groups * call.padded;
  call.vectors = divide_up(w.out, w.vector);
  call.words = divide_up(w.columns * (w.bits + w.rest_bits), 32);
  call.bias = bias;
  call.bias_dtype = bias_dtype;
  call.dtype = dtype;
  call.y = y;
  const bool copy = w.vector < kEight;
  const int64_t main = w.groups * w.entries * w.vector, rest = w.groups * w.rest_entries * w.vector;
  const Scratch<uint16_t> room{size_t(copy ? main + rest + 2 * kEight : 0)};
  const Scratch<float> inputs{size_t(rows * call.stride + kFloats)}, outliers{size_t(rows * w.outliers)};
  const Scratch<float> start{size_t(rows)};
  if (!room || !inputs || !outliers || !start) return HF_VQ_NO_MEMORY;
  call.books.book = readable(w.book, main, copy, room.get());
  if (w.rest_bits > 0) call.books.rest = readable(w.rest, rest, copy, room.get() + main + kEight);
  memset(inputs.get(), 0, size_t(rows * call.stride + kFloats) * 4);
  for (int64_t m = 0; m < rows; ++m)
    start[size_t(m)] = prepare(call, m, inputs.get() + m * call.stride, outliers.get() + m * w.outliers);
  call.inputs = inputs.get();
  call.outliers = outliers.get();
  call.start = start.get();
  const bool bfloat = w.dtype == HF_VQ_BFLOAT16;
  const Range run = w.rest_bits > 0 ? (bfloat ? run_vectors<true, true> : run_vectors<true, false>)
                                    : (bfloat ? run_vectors<false, true> : run_vectors<false, false>);
  parallel_for(call.vectors, divide_up(16 << 10, w.groups * w.columns), run, &call);
  return call.status;
}

}  // namespace vptq

int vptq_supports(const hf_vq_vptq* w) { return vptq::fits(*w) ? HF_VQ_OK : HF_VQ_UNSUPPORTED; }

int vptq_linear(const hf_vq_vptq* w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype, void* y) {
  if (dtype > HF_VQ_BFLOAT16 || bias_dtype > HF_VQ_BFLOAT16 || !vptq::fits(*w)) return HF_VQ_UNSUPPORTED;
  return vptq::compute(*w, x, dtype, rows, bias, bias_dtype, y);
}

}  // namespace
}  // namespace hf_vq
