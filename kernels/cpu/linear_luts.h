// SPDX-License-Identifier: Apache-2.0
// One input times codes of 8 bits by tables (asymmetric distances; NoMAD-Attention's in-register lookups, for
// weights). A position p is sub-vector j of stage s: a byte of every row of codes.
//
//     table[p][e] = 128 + round(<entry e, u_p> / unit)           unit: of a stage and a span of columns
//     y[o] = sum over spans of scale unit (sum_p table[p][code(o, p)] - 128 positions)
//
// 256 entries are found in four registers, so that a table must meet many rows while it is in them:
//
//     codes [256 rows][64 positions]  --transposed-->  columns [64 positions][256 rows]  --looked up-->  sums [256]
//
// Codes stay in their canonical rows: turning them costs as much as looking them up, and both together less than
// reading them from memory. Decoding the entries instead (linear_codes.h) takes a lookup for every component.
#pragma once
#include "activations.h"
#include "threads.h"

namespace hf_vq {
namespace {
namespace luts {

constexpr int kBlock = 256;          // rows that meet a table
constexpr int kLine = 64;            // positions that are transposed together
constexpr int kEntries = 256;
constexpr int kMiddle = 128;         // what zero is in a table
constexpr int64_t kPanel = 1024;     // positions whose tables stay in the L2 cache

// One call of hf_vq_linear.
struct Call {
  const hf_vq_matrix& w;
  const float* u;            // [in], rotated
  const float* entries;      // [stages, x, 256]
  const float* reach;        // [stages], the largest norm of an entry
  uint8_t* tables;           // [positions, 256]
  float* unit;               // [stages, spans]
  int64_t span, spans;       // columns of a span; spans of a row
  int64_t parts, positions;  // positions of a stage; of all of them
  bool grouped;              // several scales per row
  const void* bias;
  int bias_dtype;
  void* y;
  int dtype;
  int status;
};

// The tables of spans first..last - 1 of all stages. Meanwhile the first codes come from memory.
template <int X> void make_tables(int64_t first, int64_t last, void* context) {
  const Call& call = *static_cast<Call*>(context);
  const int64_t bytes = call.w.out * call.positions;
  for (int64_t number = first; number < last; ++number) {
    const int64_t stage = number / call.spans, begin = number % call.spans * call.span;
    const int64_t rest = call.w.in - begin, count = (rest < call.span ? rest : call.span) / X;
    const float* u = call.u + begin;
    float energy = 0.0f, not_finite = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      float norm = 0.0f;
      for (int c = 0; c < X; ++c) norm += u[i * X + c] * u[i * X + c];
      energy = norm > energy ? norm : energy;
      not_finite += norm * 0.0f;  // 0, or NaN
    }
    // No product is larger than that of the norms, so that no table overflows.
    const float most = __builtin_sqrtf(energy) * call.reach[stage];
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    call.unit[number] = most / 127.0f + not_finite;

    const int64_t position = stage * call.parts + begin / X;
    const float* entries = call.entries + stage * X * kEntries;
    for (int64_t i = 0; i < count; ++i) {
      uint8_t* table = call.tables + (position + i) * kEntries;
      Floats part[X];
      for (int c = 0; c < X; ++c) part[c] = splat(u[i * X + c] * inverse);
      for (int e = 0; e < kEntries; e += kFloats) {
        Floats product = splat(float(kMiddle));
        for (int c = 0; c < X; ++c) product = fma(load(entries + c * kEntries + e), part[c], product);
        store_low_bytes(table + e, to_ints(product));
      }
      for (int64_t line = (position + i) * kBlock; line < (position + i + 1) * kBlock && line < bytes; line += 64)
        __builtin_prefetch(call.w.codes + line, 0, 2);
    }
  }
}

// What a thread works with: `lines` and `columns` as in the picture.
struct Work {
  alignas(64) uint8_t lines[kBytes * kLine];
  alignas(64) uint8_t columns[kLine * kBlock];
  uint16_t* scales;  // fp16 [groups, 256] of the block
  float* sums;       // of all rows of the thread
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

// work.scales[g] = scales first + g of `rows` rows from row `row` on.
inline void transpose_scales(const Call& call, int64_t row, int rows, int64_t first, int64_t last, Ahead& ahead,
                             Work& work) {
  const int64_t groups = call.w.in / call.w.group;
  constexpr int kHalves = kLine / 2;
  for (int64_t g = first; g < last; g += kHalves) {
    const int count = last - g < kHalves ? int(last - g) : kHalves;
    transpose(reinterpret_cast<const uint8_t*>(call.w.scale + row * groups + g), groups * 2, rows, count * 2, ahead,
              work);
    for (int i = 0; i < count; ++i)
      for (int r = 0; r < kBlock; r += kBytes)
        store_pairs(work.scales + (g - first + i) * kBlock + r, load_bytes(work.columns + 2 * i * kBlock + r),
                    load_bytes(work.columns + (2 * i + 1) * kBlock + r));
  }
}

// sums[r] += scale[r] unit sum_p (table[p][columns[p][r]] - 128) of `count` positions, at most 257.
inline void look_up(const uint8_t* tables, const uint8_t* columns, int64_t count, float unit, const uint16_t* scale,
                    Ahead& ahead, float* sums) {
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
    for (int r = 0; r < kBytes; r += kFloats) {
      const int row = v * kBytes + r;
      const Floats factor = scale == nullptr ? size : load_half(scale + row) * size;
      store(sums + row, fma(load_unsigned(total + r) - middle, factor, load(sums + row)));
    }
  }
}

// The part of rows row..row + rows - 1 that positions begin..end - 1 contribute.
inline void add_panel(const Call& call, int64_t row, int rows, int64_t begin, int64_t end, Ahead& ahead, Work& work,
                      float* sums) {
  const hf_vq_matrix& w = call.w;
  int64_t first_group = 0;
  if (call.grouped) {
    int64_t last_group = w.in / w.group;
    if (w.stages == 1) {
      first_group = begin * w.x / w.group;
      last_group = (end * w.x - 1) / w.group + 1;
    }
    transpose_scales(call, row, rows, first_group, last_group, ahead, work);
  }
  for (int64_t at = begin; at < end; at += kLine) {
    const int64_t stop = at + kLine < end ? at + kLine : end;
    transpose(w.codes + row * call.positions + at, call.positions, rows, int(stop - at), ahead, work);
    for (int64_t p = at, next = at; p < stop; p = next) {  // a span, or what of it lies in these columns
      const int64_t stage = p / call.parts, column = p % call.parts * w.x, span = column / call.span;
      next = stage * call.parts + (span + 1) * call.span / w.x;
      if (next > (stage + 1) * call.parts) next = (stage + 1) * call.parts;
      if (next > stop) next = stop;
      const uint16_t* scale = call.grouped ? work.scales + (column / w.group - first_group) * kBlock : nullptr;
      look_up(call.tables + p * kEntries, work.columns + (p - at) * kBlock, next - p,
              call.unit[stage * call.spans + span], scale, ahead, sums);
    }
  }
}

inline void run_rows(int64_t first, int64_t last, void* context) {
  Call& call = *static_cast<Call*>(context);
  const hf_vq_matrix& w = call.w;
  const size_t rows = size_t(divide_up(last - first, kBlock) * kBlock);
  const Scratch<float> sums(rows);
  const Scratch<uint16_t> scales(call.grouped ? size_t(w.in / w.group * kBlock) : 0);
  const Scratch<Work> work(1);
  if (!sums || !scales || !work) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  memset(sums.get(), 0, rows * 4);
  memset(work.get(), 0, sizeof(Work));
  work[0].scales = scales.get();
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
    if (!call.grouped) y *= half_to_float(w.scale[row]);
    if (call.bias != nullptr) y += read_float(call.bias, call.bias_dtype, row);
  }
  write_floats(call.y, call.dtype, first, last - first, sums.get());
}

// entries[c][e] = component c of entry e; returns the largest norm of an entry.
inline float read_entries(const uint16_t* codebook, int x, float* entries) {
  float most = 0.0f;
  for (int e = 0; e < kEntries; ++e) {
    float norm = 0.0f;
    for (int c = 0; c < x; ++c) {
      const float value = half_to_float(codebook[e * x + c]);
      entries[c * kEntries + e] = value;
      norm += value * value;
    }
    most = norm > most ? norm : most;
  }
  return __builtin_sqrtf(most);
}

// Whether tables save more than making them costs: every thread reads them all, and decoding an 8-vector takes
// twice as long as decoding a 4-vector. More than one input shares the decoded entries instead.
inline bool worth_it(const hf_vq_matrix& w, int64_t inputs) {
  if (inputs != 1 || w.scope != HF_VQ_SHARED || w.bits != 8) return false;
  return (w.x == 8 && w.out >= 512 * threads()) || (w.x == 4 && w.out >= 2048 * threads());
}

inline int compute(const hf_vq_matrix& w, const void* x, int dtype, const void* bias, int bias_dtype, void* y) {
  const int64_t span = w.group < kLargestSpan ? w.group : kLargestSpan;
  const int64_t spans = divide_up(w.in, span), parts = w.in / w.x, positions = parts * w.stages;
  const Scratch<float> u{size_t(w.in)}, entries{size_t(w.stages * w.x * kEntries)}, reach{size_t(w.stages)};
  const Scratch<float> unit{size_t(w.stages * spans)};
  const Scratch<uint8_t> tables{size_t(positions * kEntries)};
  if (!u || !entries || !reach || !unit || !tables) return HF_VQ_NO_MEMORY;
  rotate_row(w, x, dtype, 0, u.get());
  for (int stage = 0; stage < w.stages; ++stage)
    reach[size_t(stage)] = read_entries(w.codebook + stage * w.x * kEntries, w.x, entries.get() + stage * w.x * kEntries);
  Call call{w, u.get(), entries.get(), reach.get(), tables.get(), unit.get(), span, spans, parts, positions,
            w.group < w.in, bias, bias_dtype, y, dtype, HF_VQ_OK};
  parallel_for(w.stages * spans, 8, w.x == 4 ? make_tables<4> : make_tables<8>, &call);
  parallel_for(w.out, kBlock, run_rows, &call);
  return call.status;
}

}  // namespace luts
}  // namespace
}  // namespace hf_vq
