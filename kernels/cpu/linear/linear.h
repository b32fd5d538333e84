// SPDX-License-Identifier: Apache-2.0
// Linear layers on codes:  y[m, o] = sum_g scale[o, g] * xscale[m, g] * unit * sum_j level[o, j] number[m, j]
//
// A thread owns adjacent rows of W, whose canonical codes are contiguous bytes. A step decodes 16 to 64 codes in
// registers (linear_codes.h, linear_packed.h, linear_e8p.h, linear_words.h) and multiplies the entries by up to four
// inputs. The sums of a step are exact in 32 bits; they are scaled and added as floats, one lane for 4 codes or 8.
//
// A row may take several passes: one per residual codebook, one per half of an 8-vector, one per tile. Each pass
// keeps its tables in registers or L1 for a block of rows, and processes the rows in order, step by step. The codes
// that come next are prefetched in memory order.
//
// Bytes: codes once. Bottleneck: memory for one input; there, a thread reads four rows from four places
// (compute_streams), since more streams hide more latency.
#pragma once
#include "../kernels.h"
#include "linear_codes.h"
#include "linear_decode.h"
#include "linear_e8p.h"
#include "linear_entries.h"
#include "linear_luts.h"
#include "linear_packed.h"
#include "linear_words.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {

constexpr int kInputs = 4;            // inputs that one decoded vector is multiplied with
constexpr int64_t kAhead = 8192;      // bytes between a read and its prefetch
constexpr int64_t kRowsAhead = 16;    // rows between a read of scales and its prefetch
constexpr int64_t kStreamAhead = 4096;  // into L2: L1, which has the inputs, is small
constexpr int64_t kPiece = 64 << 10;  // bytes of codes worth a thread

// Steps first..first + steps - 1 of the stream of one stage, with one set of tables.
struct Pass {
  int64_t stage, first, steps;
  int set;
};

// One call of hf_vq_linear.
struct LinearCall {
  const hf_vq_matrix* w;
  Cut cut;
  Activations x;
  int64_t inputs, row_bytes, stream_bytes, passes, groups;
  int64_t second_bytes;            // of a row of nested codes
  int64_t step_bytes, tail_bytes;  // of one step: of the first stream, of all
  int64_t whole;   // steps that end within a stream
  int shift;       // a span is 2^shift steps,
  int spans;       // or a step has so many spans; 0 otherwise
  const uint8_t* tables;
  const float* units;
  const void* bias;
  int bias_dtype;
  void* y;
  int dtype;
  int status;
};

// The codes of one stage of a row.
inline Place row_of(const LinearCall& call, int64_t row, int64_t stage) {
  return {call.w->codes + row * call.row_bytes + stage * call.stream_bytes, call.w->second + row * call.second_bytes};
}

// A partial last step that was copied.
inline Place tail_of(const LinearCall& call, const uint8_t* tails, int64_t stream) {
  const uint8_t* tail = tails + stream * call.tail_bytes;
  return {tail, tail + call.step_bytes};
}

template <class Codes, int Level> inline void prefetch(Place p, int64_t ahead) {
  __builtin_prefetch(p.codes + ahead, 0, Level);
  if (Codes::kSecond) __builtin_prefetch(p.second + ahead, 0, Level);
}

template <class Codes> inline Pass pass_of(const LinearCall& call, int64_t number) {
  const hf_vq_matrix& w = *call.w;
  Pass pass{0, 0, call.cut.steps, int(number % Codes::kSets)};
  const int64_t stage = number / Codes::kSets;
  if (w.scope != HF_VQ_TILE) {
    pass.stage = stage;
  } else {
    const int64_t steps = divide_up(w.tile_columns, call.cut.step);
    pass.first = stage * steps;
    pass.steps = steps < call.cut.steps - pass.first ? steps : call.cut.steps - pass.first;
  }
  return pass;
}

// Buffers of a thread for a block of rows.
struct BlockWork {
  const uint8_t* tables;
  const float* units;
  float* factors;
  uint8_t* tails;
};

// Inputs of one pass: M of them, `*_stride` apart.
struct PassInputs {
  const uint8_t* numbers;
  const int32_t* start;
  const float* factors;
  int64_t numbers_stride, start_stride, factors_stride;
  int shift, spans;
  Spread spread;
};

// exact[m] = (entries of a step, whose codes lie at p) * numbers of input m. x is at the step.
template <class Codes, int M>
inline void multiply_step(const Codes& codes, Place p, const PassInputs& x, Ints (&exact)[M]) {
  for (int m = 0; m < M; ++m) exact[m] = kLevelBias ? load_ints(x.start + m * x.start_stride) : zero_ints();
  codes.template dots<M>(p, x.numbers, x.numbers_stride, exact);
}

// sums[m] += factor * exact[m]. x is at step v.
template <class Codes, int M, bool OneSpan>
inline void add_step(const Codes& codes, Place p, const PassInputs& x, int64_t v, Floats (&sums)[M]) {
  Ints exact[M];
  multiply_step<Codes, M>(codes, p, x, exact);
  for (int m = 0; m < M; ++m) {
    const float* factor = x.factors + m * x.factors_stride;
    sums[m] = fma(to_floats(exact[m]), OneSpan ? splat(factor[v >> x.shift]) : load(factor, x.spread), sums[m]);
  }
}

// The inputs of step v: x is at step 0.
template <class Codes, bool OneSpan> inline PassInputs at_step(PassInputs x, int64_t v) {
  x.numbers += v * Codes::kPlanes * kBytes;
  if (kLevelBias) x.start += v * kFloats;
  if (!OneSpan) x.factors += v * x.spans;
  return x;
}

// sums[m] of a pass over one row, whose codes lie at `stream`; steps from `whole` on lie at `tail`.
template <class Codes, int M, bool OneSpan>
inline void add_row(const Codes& codes, Place stream, Place tail, int64_t whole, const Pass& pass, PassInputs x,
                    int64_t ahead, Floats (&sums)[M]) {
  const int64_t last = pass.first + pass.steps;
  int64_t v = pass.first, end = last < whole ? last : whole;
  Place p = codes.after(stream, v);
  x = at_step<Codes, OneSpan>(x, v);
  for (int part = 0; part < 2; ++part) {
    for (; v < end; ++v) {
      prefetch<Codes, 1>(p, ahead);
      add_step<Codes, M, OneSpan>(codes, p, x, v, sums);
      p = codes.after(p, 1);
      x = at_step<Codes, OneSpan>(x, 1);
    }
    p = tail;
    end = last;
  }
}

// True if all steps of rows up to this one may be read where they are: behind a row lie codes of the next one, which
// numbers of zero are multiplied with. Only the last rows have nothing behind them.
inline bool is_followed(const LinearCall& call, int64_t row) {
  const int64_t left = call.w->out - row, steps = call.cut.steps;
  const int64_t before = (call.w->stages - 1) * call.stream_bytes;  // of the last stage
  return before + steps * call.step_bytes <= left * call.row_bytes &&
         steps * (call.tail_bytes - call.step_bytes) <= left * call.second_bytes;
}

// Copy the codes of a partial last step: tails[r, stage] = these codes, and zeros. The copy precedes the passes, which
// keep their tables in registers.
template <class Codes>
inline void copy_tails(const LinearCall& call, int64_t first, int rows, uint8_t* tails) {
  const int64_t done = call.whole * call.step_bytes, second_done = call.whole * (call.tail_bytes - call.step_bytes);
  const int64_t streams = rows * call.w->stages;
  memset(tails, 0, size_t(streams * call.tail_bytes));
  for (int64_t i = 0; i < streams; ++i)
    memcpy(tails + i * call.tail_bytes, row_of(call, first, i).codes + done, size_t(call.stream_bytes - done));
  for (int64_t i = 0; i < rows && Codes::kSecond; ++i)
    memcpy(tails + i * call.tail_bytes + call.step_bytes, row_of(call, first + i, 0).second + second_done,
           size_t(call.second_bytes - second_done));
}

// factors[r, m, g] = scale of row first + r * scale of input m, for a matrix with several scales per row.
inline void make_factors(const LinearCall& call, int64_t first, int rows, int64_t input, int inputs, float* factors) {
  const hf_vq_matrix& w = *call.w;
  const int64_t groups = call.groups;
  for (int r = 0; r < rows; ++r) {
    const uint16_t* scale = w.scale + (first + r) * groups;
    for (int64_t g = 0; g < groups; g += 32) __builtin_prefetch(scale + kRowsAhead * groups + g, 0, 1);
    for (int m = 0; m < inputs; ++m) {
      const float* x = call.x.scale + (input + m) * call.cut.scales;
      float* to = factors + (r * inputs + m) * call.cut.scales;
      int64_t g = 0;
      if (w.group == call.cut.span) {  // what the last vector takes of the next row is overwritten by zeros
        const int64_t readable = (w.out - first - r) * groups;
        for (; g < groups && g + kFloats <= readable; g += kFloats) store(to + g, load_half(scale + g) * load(x + g));
        if (g > groups) g = groups;
      }
      for (; g < call.cut.spans; ++g) to[g] = half_to_float(scale[g * call.cut.span / w.group]) * x[g];
      for (; g + kFloats <= call.cut.scales; g += kFloats) store(to + g, splat(0.0f));
      for (; g < call.cut.scales; ++g) to[g] = 0.0f;
    }
  }
}

// The factors of spans g .. g + kFloats - 1 of a row and the only input, in registers: 0 beyond the last one.
inline Floats factors_of(const LinearCall& call, int64_t row, int64_t g) {
  static constexpr float kLane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const hf_vq_matrix& w = *call.w;
  const float* inputs = call.x.scale + g;
  if (w.group >= w.in) return load(inputs);
  const uint16_t* scale = w.scale + row * call.groups;
  const int64_t count = call.groups - g;
  if (w.group == call.cut.span && (w.out - row) * call.groups - g >= kFloats) {
    const Floats found = load_half(scale + g) * load(inputs);
    return count >= kFloats ? found : where_less(load(kLane), splat(float(count)), found, splat(0.0f));
  }
  alignas(64) float some[kFloats] = {};
  for (int i = 0; i < kFloats && g + i < call.cut.spans; ++i)
    some[i] = half_to_float(scale[(g + i) * call.cut.span / w.group]) * inputs[i];
  return load(some);
}

// M outputs of each of `rows` rows, at most a block, from row `first` and input `input` on. `readable` steps of each
// may be read where they are, others are copies.
template <class Codes, int M, bool OneSpan>
inline void compute_block(const LinearCall& call, const BlockWork& work, int64_t first, int rows, int64_t input,
                          int64_t readable) {
  const hf_vq_matrix& w = *call.w;
  const Cut& cut = call.cut;
  const bool grouped = w.group < w.in;
  if (grouped) make_factors(call, first, rows, input, M, work.factors);

  PassInputs x{};
  x.numbers_stride = cut.numbers();
  x.start_stride = cut.starts();
  x.factors_stride = cut.scales;
  x.shift = call.shift;
  x.spans = call.spans;
  x.spread = spread(OneSpan ? 1 : call.spans);

  Floats total[Codes::kBlock][M];
  for (int r = 0; r < Codes::kBlock; ++r)
    for (int m = 0; m < M; ++m) total[r][m] = splat(0.0f);
  const int64_t row_factors = grouped ? M * cut.scales : 0;
  for (int64_t number = 0; number < call.passes; ++number) {
    const Pass pass = pass_of<Codes>(call, number);
    const Codes codes(work.tables + number * Codes::kTableBytes, w);
    const Floats unit = splat(work.units[number / Codes::kSets]);
    x.numbers = call.x.numbers + input * x.numbers_stride + pass.set * cut.steps * Codes::kPlanes * kBytes;
    x.start = call.x.start + input * x.start_stride + (kLevelBias ? pass.set * cut.steps * kFloats : 0);
    x.factors = grouped ? work.factors : call.x.scale + input * cut.scales;
    const auto tail = [&](int r) { return tail_of(call, work.tails, r * w.stages + pass.stage); };
    if (Codes::kStepsFirst && call.passes > 1) {
      const Place next_block = row_of(call, first + rows, 0);
      for (int64_t v = pass.first; v < pass.first + pass.steps; ++v) {
        const bool whole = v < readable;
        Place p = whole ? codes.after(row_of(call, first, pass.stage), v) : tail(0);
        const int64_t next = whole ? call.row_bytes : w.stages * call.tail_bytes;
        const Place ahead = codes.after(next_block, (pass.stage * cut.steps + v) * rows);
        PassInputs at = at_step<Codes, OneSpan>(x, v);
        for (int r = 0; r < rows; ++r) {
          prefetch<Codes, 1>(codes.after(ahead, r), 0);
          Floats sums[M];
          for (int m = 0; m < M; ++m) sums[m] = splat(0.0f);
          add_step<Codes, M, OneSpan>(codes, p, at, v, sums);
          for (int m = 0; m < M; ++m) total[r][m] = fma(sums[m], unit, total[r][m]);
          p.codes += next;
          at.factors += row_factors;
        }
      }
    } else {
      const int64_t ahead = call.passes > 1 ? call.row_bytes : kAhead;
      for (int r = 0; r < rows; ++r) {
        Floats sums[M];
        for (int m = 0; m < M; ++m) sums[m] = splat(0.0f);
        const Place row = row_of(call, first + r, pass.stage);
        add_row<Codes, M, OneSpan>(codes, row, tail(r), readable, pass, x, ahead, sums);
        for (int m = 0; m < M; ++m) total[r][m] = fma(sums[m], unit, total[r][m]);
        x.factors += row_factors;
      }
    }
  }

  for (int m = 0; m < M && input + m < call.inputs; ++m) {
    float y[Codes::kBlock];
    for (int r = 0; r < rows; ++r) {
      y[r] = sum(total[r][m]);
      if (!grouped) y[r] *= half_to_float(w.scale[first + r]);
      if (call.bias != nullptr) y[r] += read_float(call.bias, call.bias_dtype, first + r);
    }
    write_floats(call.y, call.dtype, (input + m) * w.out + first, rows, y);
  }
}

// The only input, for kStreams rows from row `first` on, `count` apart: sums[k] of row first + k count. `across` says
// which spans the lanes of a step have.
template <class Codes, bool OneSpan>
inline void add_streams(const LinearCall& call, const Codes& codes, uint8_t* tails, Spread across, int64_t first,
                        int64_t count, Floats (&sums)[kStreams]) {
  const int64_t steps = call.cut.steps;
  // Steps whose factors fit into a vector.
  const int64_t at_once = OneSpan ? int64_t(kFloats) << (call.shift < 32 ? call.shift : 32) : kFloats / call.spans;
  const bool copied = call.whole < steps && !is_followed(call, first + (kStreams - 1) * count);
  Place stream[kStreams];
  Floats factors[kStreams], total[kStreams];
#pragma GCC unroll 4
  for (int k = 0; k < kStreams; ++k) {
    if (copied) copy_tails<Codes>(call, first + k * count, 1, tails + k * call.tail_bytes);
    stream[k] = row_of(call, first + k * count, 0);
    total[k] = splat(0.0f);
    __builtin_prefetch(call.w->scale + (first + k * count + kRowsAhead) * call.groups, 0, 1);
  }
  PassInputs x{};
  x.numbers = call.x.numbers;
  x.start = call.x.start;
  for (int64_t begin = 0; begin < steps; begin += at_once) {
    const int64_t end = begin + at_once < steps ? begin + at_once : steps;
    int span = 0;  // of this step, modulo kFloats
#pragma GCC unroll 4
    for (int k = 0; k < kStreams; ++k)
      factors[k] = factors_of(call, first + k * count, OneSpan ? begin >> call.shift : begin * call.spans);
    for (int64_t v = begin; v < end; ++v) {
      if (copied && v == call.whole)
        for (int k = 0; k < kStreams; ++k) stream[k] = tail_of(call, tails, k);
      if (OneSpan) span = int((v - begin) >> call.shift);
#pragma GCC unroll 4
      for (int k = 0; k < kStreams; ++k) {
        prefetch<Codes, 2>(stream[k], kStreamAhead);
        Ints exact[1];
        multiply_step<Codes, 1>(codes, stream[k], x, exact);
        total[k] = fma(to_floats(exact[0]), take(factors[k], across, span), total[k]);
        stream[k] = codes.after(stream[k], 1);
      }
      if (!OneSpan) span += call.spans;
      x = at_step<Codes, true>(x, 1);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < kStreams; ++k) sums[k] = total[k];
}

// The only input, with `count` rows from each of kStreams places on, which lie `count` rows apart, beginning with
// row `first`: a processor fetches several streams faster than one, and their rows share what they multiply with.
template <class Codes, bool OneSpan>
inline void compute_streams(const LinearCall& call, const BlockWork& work, int64_t first, int64_t count) {
  constexpr int kRows = 16;  // that are written at once
  const hf_vq_matrix& w = *call.w;
  const Codes codes(work.tables, w);
  const Spread across = spread(OneSpan ? 1 : call.spans);
  const Floats unit = splat(work.units[0]);
  for (int64_t row = 0; row < count; row += kRows) {
    const int rows = count - row < kRows ? int(count - row) : kRows;
    float y[kStreams][kRows];
    for (int r = 0; r < rows; ++r) {
      Floats sums[kStreams];
      add_streams<Codes, OneSpan>(call, codes, work.tails, across, first + row + r, count, sums);
#pragma GCC unroll 4
      for (int k = 0; k < kStreams; ++k) y[k][r] = sum(sums[k] * unit);
    }
    for (int k = 0; k < kStreams; ++k) {
      const int64_t o = first + row + k * count;
      if (w.group >= w.in)
        for (int r = 0; r < rows; ++r) y[k][r] *= half_to_float(w.scale[o + r]);
      if (call.bias != nullptr)
        for (int r = 0; r < rows; ++r) y[k][r] += read_float(call.bias, call.bias_dtype, o + r);
      write_floats(call.y, call.dtype, o, rows, y[k]);
    }
  }
}

// All inputs of rows first..last - 1, which share their tables.
template <class Codes, bool OneSpan>
inline void compute_rows(const LinearCall& call, const BlockWork& work, int64_t first, int64_t last) {
  if (kStreams > 1 && Codes::kStreamed && call.inputs == 1 && call.passes == 1) {
    const int64_t count = (last - first) / kStreams;
    compute_streams<Codes, OneSpan>(call, work, first, count);
    first += kStreams * count;
  }
  for (; first < last; first += Codes::kBlock) {
    const int rows = last - first < Codes::kBlock ? int(last - first) : Codes::kBlock;
    const bool copied = call.whole < call.cut.steps && !is_followed(call, first + rows - 1);
    if (copied) copy_tails<Codes>(call, first, rows, work.tails);
    const int64_t readable = copied ? call.whole : call.cut.steps;
    int64_t m = 0;
    for (; m + 1 < call.inputs; m += kInputs)
      compute_block<Codes, kInputs, OneSpan>(call, work, first, rows, m, readable);
    if (m < call.inputs) compute_block<Codes, 1, OneSpan>(call, work, first, rows, m, readable);
  }
}

template <class Codes> inline void run_rows(int64_t first, int64_t last, void* context) {
  LinearCall& call = *static_cast<LinearCall*>(context);
  const hf_vq_matrix& w = *call.w;
  const auto compute = call.spans ? compute_rows<Codes, false> : compute_rows<Codes, true>;
  const bool tiles = w.scope == HF_VQ_TILE;
  const int64_t books = call.passes / Codes::kSets;
  const Scratch<float> factors{size_t(Codes::kBlock * kInputs * call.cut.scales)};
  const Scratch<uint8_t> tails{size_t(Codes::kBlock * w.stages * call.tail_bytes)};
  const Scratch<uint8_t> tables{size_t(tiles ? call.passes * Codes::kTableBytes : 0)};
  const Scratch<float> units{size_t(tiles ? books : 0)};
  if (!factors || !tails || !tables || !units) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  if (!tiles) {
    compute(call, {call.tables, call.units, factors.get(), tails.get()}, first, last);
    return;
  }
  while (first < last) {  // one row of tiles per iteration
    const int64_t row = first / w.tile_rows, next = (row + 1) * w.tile_rows;
    for (int64_t book = 0; book < books; ++book)
      units[size_t(book)] = Codes::make_tables(w, w.codebook + (row * books + book) * Codes::book_halves(w),
                                               tables.get() + book * Codes::kTableBytes * Codes::kSets);
    compute(call, {tables.get(), units.get(), factors.get(), tails.get()}, first, next < last ? next : last);
    first = next;
  }
}

struct PrepareCall {
  LinearCall* linear;
  const void* x;
};

template <class Codes> inline void run_prepare(int64_t first, int64_t last, void* context) {
  const PrepareCall& call = *static_cast<PrepareCall*>(context);
  const Cut& cut = call.linear->cut;
  const size_t columns = size_t(cut.steps * cut.step);
  const Scratch<float> u(columns);
  const Scratch<uint8_t> natural(columns * (Codes::kFine ? 2 : 1));
  if (!u || !natural) {
    call.linear->status = HF_VQ_NO_MEMORY;
    return;
  }
  for (int64_t row = first; row < last; ++row)
    prepare_row<Codes>(*call.linear->w, cut, call.x, call.linear->dtype, row, call.linear->x, u.get(), natural.get());
}

template <class Codes> inline Cut cut_for(const hf_vq_matrix& w) {
  return cut_row(w, Codes::kStepColumns, Codes::kPlanes, Codes::kSets);
}

// True if the kernels support a matrix with such codes; the same for every target. Four codes are summed before they
// are scaled, and tiles end with a step.
inline bool fits(const hf_vq_matrix& w) {
  const int64_t span = w.group < kLargestSpan ? w.group : kLargestSpan;
  if (w.in > span && (!power_of_two(span) || span < 16 || span < 4 * w.x)) return false;
  if (w.group < w.in && !power_of_two(w.group)) return false;
  const int64_t step = 64 * w.x < 128 ? 128 : 64 * w.x;
  return w.scope != HF_VQ_TILE || (w.bits == 8 && (w.tile_columns >= w.in || w.tile_columns % step == 0));
}

template <class Codes>
inline int compute(const hf_vq_matrix& w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype,
                   void* y) {
  LinearCall call{};
  call.w = &w;
  call.cut = cut_for<Codes>(w);
  const Cut& cut = call.cut;
  call.inputs = rows;
  call.groups = w.in / w.group;
  call.stream_bytes = divide_up(w.in / w.x * w.bits, 8);
  call.row_bytes = call.stream_bytes * w.stages;
  call.second_bytes = divide_up(w.in * w.second_bits, 8);
  call.step_bytes = Codes::step_bytes(w);
  const int64_t second_step = Codes::kStepColumns * w.second_bits / 8;
  call.tail_bytes = call.step_bytes + second_step;
  call.whole = call.stream_bytes / call.step_bytes;
  if (Codes::kSecond && call.second_bytes / second_step < call.whole) call.whole = call.second_bytes / second_step;
  const bool tiles = w.scope == HF_VQ_TILE;
  const int64_t books = tiles ? divide_up(w.in, w.tile_columns) : w.stages;
  call.passes = books * Codes::kSets;
  call.shift = 62;
  if (cut.spans > 1) {
    for (call.shift = 0; cut.step << call.shift < cut.span;) ++call.shift;
    if (cut.step > cut.span) call.spans = int(cut.step / cut.span);
  }
  call.bias = bias;
  call.bias_dtype = bias_dtype;
  call.y = y;
  call.dtype = dtype;

  // Inputs that fill up the last four count as zero.
  const int64_t padded = rows % kInputs > 1 ? divide_up(rows, kInputs) * kInputs : rows;
  const Scratch<uint8_t> numbers{size_t(padded * cut.numbers())};
  const Scratch<int32_t> start{size_t(padded * cut.starts())};
  const Scratch<float> scale{size_t(padded * cut.scales)};
  const Scratch<uint8_t> tables{size_t(tiles ? 0 : call.passes * Codes::kTableBytes)};
  const Scratch<float> units{size_t(books)};
  if (!numbers || !start || !scale || !tables || !units) return HF_VQ_NO_MEMORY;
  call.x = {numbers.get(), start.get(), scale.get()};
  memset(numbers.get() + rows * cut.numbers(), 0, size_t((padded - rows) * cut.numbers()));
  memset(start.get() + rows * cut.starts(), 0, size_t((padded - rows) * cut.starts()) * 4);
  memset(scale.get() + rows * cut.scales, 0, size_t((padded - rows) * cut.scales) * 4);
  call.tables = tables.get();
  call.units = units.get();
  for (int64_t stage = 0; stage < books && !tiles; ++stage)
    units[size_t(stage)] = Codes::make_tables(w, w.codebook + stage * Codes::book_halves(w),
                                              tables.get() + stage * Codes::kTableBytes * Codes::kSets);

  PrepareCall prepare{&call, x};
  parallel_for(rows, 1, run_prepare<Codes>, &prepare);
  const int64_t blocks = divide_up(kPiece, (call.row_bytes + call.second_bytes) * Codes::kBlock);
  if (call.status == HF_VQ_OK) parallel_for(w.out, blocks * Codes::kBlock, run_rows<Codes>, &call);
  return call.status;
}

// Call visit.operator()<Codes>() with the codes of the matrix; HF_VQ_UNSUPPORTED if there are none.
template <class Visit> inline int with_codes(const hf_vq_matrix& w, const Visit& visit) {
  if (!stored_as_said(w) || !fits(w)) return HF_VQ_UNSUPPORTED;
  const int shape = w.x * 100 + w.bits, both = w.bits + w.second_bits;
  if (w.second_bits != 0) {
    if (both <= 4) return visit.template operator()<PackedCodes<16, NestedBits>>();
    if (both == 5) return visit.template operator()<PackedCodes<32, NestedBits>>();
    if (both == 6) return visit.template operator()<PackedCodes<64, NestedBits>>();
    if (both == 7) return visit.template operator()<PackedCodes<128, NestedBits>>();
    if (w.bits == 4) return visit.template operator()<PackedCodes<256, NestedNibbles>>();
    return visit.template operator()<PackedCodes<256, NestedBits>>();
  }
  if (w.scope == HF_VQ_E8P) return visit.template operator()<E8PCodes>();
  if (shape == 104) return visit.template operator()<TableCodes<16, 1, 4>>();
  if (shape == 108) return visit.template operator()<PackedCodes<256, WholeBytes>>();
  if (w.x == 1 && w.bits < 4) return visit.template operator()<PackedCodes<16, PackedBits>>();
  if (shape == 105) return visit.template operator()<PackedCodes<32, PackedBits>>();
  if (shape == 106) return visit.template operator()<PackedCodes<64, PackedBits>>();
  if (shape == 107) return visit.template operator()<PackedCodes<128, PackedBits>>();
  if (shape == 204) return visit.template operator()<TableCodes<16, 2, 4>>();
  if (shape == 206) return visit.template operator()<TableCodes<64, 2, 6>>();
  if (shape == 812) return visit.template operator()<WordCodes<8, 12>>();
  if constexpr (kWideLookup) {
    if (shape == 208) return visit.template operator()<TableCodes<256, 2, 8>>();
    if (shape == 408) return visit.template operator()<TableCodes<256, 4, 8>>();
    if (shape == 808) return visit.template operator()<TableCodes<256, 4, 8, 2>>();
  } else {
    if (shape == 208) return visit.template operator()<WordCodes<2, 8>>();
    if (shape == 408) return visit.template operator()<WordCodes<4, 8>>();
    if (shape == 808) return visit.template operator()<WordCodes<8, 8>>();
  }
  return HF_VQ_UNSUPPORTED;
}

// True if linear_entries.h is the only kernel for a matrix.
inline bool by_entries(const hf_vq_matrix& w) {
  return entries::fits(w) && with_codes(w, []<class Codes>() -> int { return HF_VQ_OK; }) == HF_VQ_UNSUPPORTED;
}

int linear_supports(const hf_vq_matrix* w) {
  if (by_entries(*w)) return HF_VQ_OK;
  return with_codes(*w, []<class Codes>() -> int { return HF_VQ_OK; });
}

int linear(const hf_vq_matrix* w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype, void* y) {
  if (dtype > HF_VQ_BFLOAT16 || bias_dtype > HF_VQ_BFLOAT16) return HF_VQ_UNSUPPORTED;
  if (by_entries(*w)) return entries::compute(*w, x, dtype, rows, bias, bias_dtype, y);
  if (kWideLookup && luts::worth_it(*w, rows) && linear_supports(w) == HF_VQ_OK)
    return luts::compute(*w, x, dtype, bias, bias_dtype, y);
  return with_codes(*w, [&]<class Codes>() -> int { return compute<Codes>(*w, x, dtype, rows, bias, bias_dtype, y); });
}

}  // namespace
}  // namespace hf_vq
