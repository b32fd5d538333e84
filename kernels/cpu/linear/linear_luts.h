// SPDX-License-Identifier: Apache-2.0
// One input times VQ<8,8,z> with one scale per row, by tables (asymmetric distances; NoMAD-Attention's in-register
// lookups, for weights). A position p is sub-vector j of codebook s: one byte in every row of codes.
//
//     table[p][e] = 128 + round(<entry e, u_p> / unit)           unit: of a codebook and a span of columns
//     y[o] = scale[o] * sum over spans of unit (sum_p table[p][code(o, p)] - 128 positions)
//
// A table of 256 bytes takes four registers, so many rows must use it while it is loaded:
//
//     codes [256 rows][64 positions]  --transposed-->  columns [64 positions][256 rows]  --looked up-->  sums [256]
//
// Codes stay in canonical rows; transposing them costs about as much as looking them up. A special layout would avoid
// that but would have to be undone when a model is saved. Decoding the entries instead (linear_codes.h) takes one
// lookup per component; for vectors of 4 or fewer that is as fast.
#pragma once
#include "activations.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {
namespace luts {

constexpr int kSize = 8;          // of a vector
constexpr int kEntries = 256;
constexpr int kMiddle = 128;      // what zero is in a table
constexpr int kBlock = 256;       // rows that meet a table
constexpr int kLine = 64;         // positions that are transposed together
constexpr int64_t kPanel = 512;   // positions whose tables stay in the L2 cache, together with their codes

// One call of hf_vq_linear.
struct Call {
  const hf_vq_matrix& w;
  const float* u;            // [in], rotated
  const float* entries;      // [stages, 8, 256]
  const float* reach;        // [stages], the largest norm of an entry
  uint8_t* tables;           // [positions, 256]
  float* unit;               // [stages, spans]
  int64_t span, spans;       // columns of a span; spans of a row
  int64_t parts, positions;  // positions of a stage; of all of them
  const void* bias;
  int bias_dtype;
  void* y;
  int dtype;
  int status;
};

// The tables of spans first..last - 1 of all stages. Meanwhile the first codes come from memory.
inline void make_tables(int64_t first, int64_t last, void* context) {
  const Call& call = *static_cast<Call*>(context);
  const int64_t bytes = call.w.out * call.positions;
  for (int64_t number = first; number < last; ++number) {
    const int64_t stage = number / call.spans, begin = number % call.spans * call.span;
    const int64_t rest = call.w.in - begin, count = (rest < call.span ? rest : call.span) / kSize;
    const float* u = call.u + begin;
    float size = 0.0f, energy = 0.0f, not_finite = 0.0f;
    for (int64_t i = 0; i < count * kSize; ++i) {
      const float magnitude = __builtin_fabsf(u[i]);
      size = magnitude > size ? magnitude : size;
      not_finite += u[i] * 0.0f;  // 0, or NaN
    }
    // In units of the largest number: squares neither overflow nor vanish.
    const float whole = size > 1e-30f ? 1.0f / size : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      float norm = 0.0f;
      for (int c = 0; c < kSize; ++c) norm += (u[i * kSize + c] * whole) * (u[i * kSize + c] * whole);
      energy = norm > energy ? norm : energy;
    }
    // No product is larger than that of the norms, so that no table overflows.
    const float most = __builtin_sqrtf(energy) * size * call.reach[stage];
    const float inverse = most > 1e-36f ? 127.0f / most : 0.0f;
    call.unit[number] = most / 127.0f + not_finite;

    const int64_t position = stage * call.parts + begin / kSize;
    const float* entries = call.entries + stage * kSize * kEntries;
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* table = call.tables + (position + i) * kEntries;
      Floats part[kSize];
      for (int c = 0; c < kSize; ++c) part[c] = splat(u[i * kSize + c] * inverse);
      for (int e = 0; e < kEntries; e += kFloats) {
        Floats product = splat(float(kMiddle));
        for (int c = 0; c < kSize; ++c) product = fma(load(entries + c * kEntries + e), part[c], product);
        store_low_bytes(table + e, to_ints(product));
      }
      for (int64_t line = (position + i) * kBlock; line < (position + i + 1) * kBlock && line < bytes; line += 64)
        __builtin_prefetch(call.w.codes + line, 0, 2);
    }
  }
}

// Buffers of a thread: `lines` and `columns` as in the drawing above.
struct Work {
  alignas(64) uint8_t lines[kBytes * kLine];
  alignas(64) uint8_t columns[kLine * kBlock];
};

// Codes that will be needed next, line by line: `width` bytes of each row. Asked for all the time, half of them
// while codes are transposed and half while they are looked up, so that memory never waits.
struct Ahead {
  const uint8_t *line, *row, *last;
  int64_t width, stride;
  void prefetch() {
    __builtin_prefetch(line, 0, 2);
    line += 64;
    if (line < row + width) return;
    if (row < last) row += stride;
    line = row;
  }
};

// columns[c][r] = from[r * stride + c] for r < rows and c < n.
inline void transpose(const uint8_t* from, int64_t stride, int rows, int n, Ahead& ahead, Work& work) {
  for (int first = 0; first < rows; first += kBytes) {
    // A copy, because rows whose stride is a power of two would push each other out of the cache.
    for (int r = 0; r < kBytes && first + r < rows; ++r, from += stride) {
      if (n == kLine) memcpy(work.lines + r * kLine, from, kLine);
      else memcpy(work.lines + r * kLine, from, size_t(n));
      if (r % 2 != 0) ahead.prefetch();
    }
    for (int c = 0; c < n; c += kColumns) {
      Bytes column[kColumns];
      load_columns(work.lines + c, kLine, column);
      for (int i = 0; i < kColumns; ++i) store(work.columns + (c + i) * kBlock + first, column[i]);
    }
  }
}

// sums[r] += unit sum_p (table[p][columns[p][r]] - 128) of `count` positions, at most 257.
inline void look_up(const uint8_t* tables, const uint8_t* columns, int64_t count, float unit, Ahead& ahead,
                    float* sums) {
  constexpr int kVectors = kBlock / kBytes;
  Sums16 sum[kVectors];
  for (Sums16& each : sum) each = zero_sums();
  for (int64_t p = 0; p < count; ++p) {
    const Codebook<kEntries, 1> table = load_codebook<kEntries, 1>(tables + p * kEntries);
    for (int v = 0; v < kVectors; ++v) {
      Bytes value[1];
      lookup(table, load_bytes(columns + p * kBlock + v * kBytes), value);
      add(sum[v], value[0]);
    }
    for (int line = 0; line < kBlock / 128; ++line) ahead.prefetch();
  }
  const Floats middle = splat(float(kMiddle * count)), size = splat(unit);
  for (int v = 0; v < kVectors; ++v) {
    alignas(64) uint16_t total[kBytes];
    store(total, sum[v]);
    for (int r = 0; r < kBytes; r += kFloats, sums += kFloats)
      store(sums, fma(load_unsigned(total + r) - middle, size, load(sums)));
  }
}

// The part of rows row..row + rows - 1 that positions begin..end - 1 contribute.
inline void add_panel(const Call& call, int64_t row, int rows, int64_t begin, int64_t end, Ahead& ahead, Work& work,
                      float* sums) {
  for (int64_t at = begin; at < end; at += kLine) {
    const int64_t stop = at + kLine < end ? at + kLine : end;
    transpose(call.w.codes + row * call.positions + at, call.positions, rows, int(stop - at), ahead, work);
    for (int64_t p = at, next = at; p < stop; p = next) {  // a span, or what of it lies in these columns
      const int64_t stage = p / call.parts, span = p % call.parts * kSize / call.span;
      next = stage * call.parts + (span + 1 < call.spans ? (span + 1) * call.span / kSize : call.parts);
      if (next > stop) next = stop;
      look_up(call.tables + p * kEntries, work.columns + (p - at) * kBlock, next - p,
              call.unit[stage * call.spans + span], ahead, sums);
    }
  }
}

inline void run_rows(int64_t first, int64_t last, void* context) {
  Call& call = *static_cast<Call*>(context);
  const hf_vq_matrix& w = call.w;
  const size_t rows = size_t(divide_up(last - first, kBlock) * kBlock);
  const Scratch<float> sums(rows);
  const Scratch<Work> work(1);
  if (!sums || !work) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  memset(sums.get(), 0, rows * 4);
  memset(work.get(), 0, sizeof(Work));
  for (int64_t begin = 0; begin < call.positions; begin += kPanel) {
    const int64_t end = begin + kPanel < call.positions ? begin + kPanel : call.positions;
    for (int64_t row = first; row < last; row += kBlock) {
      const int64_t next = row + kBlock < last ? row + kBlock : first, from = next == first ? end : begin;
      const uint8_t* codes = w.codes + next * call.positions + (from < call.positions ? from : 0);
      Ahead ahead{codes, codes, w.codes + (last - 1) * call.positions, end - begin, call.positions};
      add_panel(call, row, int(last - row < kBlock ? last - row : kBlock), begin, end, ahead, work[0],
                sums.get() + (row - first));
    }
  }
  for (int64_t row = first; row < last; ++row) {
    float& y = sums[size_t(row - first)];
    y *= half_to_float(w.scale[row]);
    if (call.bias != nullptr) y += read_float(call.bias, call.bias_dtype, row);
  }
  write_floats(call.y, call.dtype, first, last - first, sums.get());
}

// entries[c][e] = component c of entry e; returns the largest norm of an entry.
inline float read_entries(const uint16_t* codebook, float* entries) {
  float most = 0.0f;
  for (int e = 0; e < kEntries; ++e) {
    float norm = 0.0f;
    for (int c = 0; c < kSize; ++c) {
      const float value = half_to_float(codebook[e * kSize + c]);
      entries[c * kEntries + e] = value;
      norm += value * value;
    }
    most = norm > most ? norm : most;
  }
  return __builtin_sqrtf(most);
}

// True if the tables save more time than building them costs. Every thread reads all tables, so this depends on the
// number of threads. Several inputs share decoded entries instead.
inline bool worth_it(const hf_vq_matrix& w, int64_t inputs) {
  return inputs == 1 && w.scope == HF_VQ_SHARED && w.bits == 8 && w.x == kSize && w.group == w.in &&
         w.out >= 512 * threads();
}

inline int compute(const hf_vq_matrix& w, const void* x, int dtype, const void* bias, int bias_dtype, void* y) {
  const int64_t span = w.in < kLargestSpan ? w.in : kLargestSpan;
  const int64_t spans = divide_up(w.in, span), parts = w.in / kSize, positions = parts * w.stages;
  const Scratch<float> u{size_t(w.in)}, entries{size_t(w.stages * kSize * kEntries)}, reach{size_t(w.stages)};
  const Scratch<float> unit{size_t(w.stages * spans)};
  const Scratch<uint8_t> tables{size_t(positions * kEntries)};
  if (!u || !entries || !reach || !unit || !tables) return HF_VQ_NO_MEMORY;
  rotate_row(w, x, dtype, 0, u.get());
  for (int stage = 0; stage < w.stages; ++stage)
    reach[size_t(stage)] = read_entries(w.codebook + stage * kSize * kEntries, entries.get() + stage * kSize * kEntries);
  Call call{w, u.get(), entries.get(), reach.get(), tables.get(), unit.get(), span, spans, parts, positions,
            bias, bias_dtype, y, dtype, HF_VQ_OK};
  parallel_for(w.stages * spans, 8, make_tables, &call);
  parallel_for(w.out, kBlock, run_rows, &call);
  return call.status;
}

}  // namespace luts
}  // namespace
}  // namespace hf_vq
