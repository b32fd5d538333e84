// SPDX-License-Identifier: Apache-2.0
// hf_vq_linear, hf_vq_decode and hf_vq_rotate with random matrices: every instruction set against plain
// double arithmetic on the stored tensors, and against scalar.
#include <cmath>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

struct Family {
  int x, bits, stages, scope;
  int second = 0;  // bits of a nested second pass
};

constexpr Family kFamilies[] = {
    {2, 8, 1, HF_VQ_SHARED}, {2, 6, 1, HF_VQ_SHARED},  {2, 4, 1, HF_VQ_SHARED}, {2, 4, 2, HF_VQ_SHARED}, {4, 8, 1, HF_VQ_SHARED}, {1, 1, 1, HF_VQ_SHARED},
    {1, 2, 1, HF_VQ_SHARED}, {1, 3, 1, HF_VQ_SHARED},  {1, 4, 1, HF_VQ_SHARED}, {1, 5, 1, HF_VQ_SHARED},
    {1, 6, 1, HF_VQ_SHARED}, {1, 7, 1, HF_VQ_SHARED},  {1, 8, 1, HF_VQ_SHARED}, {4, 8, 1, HF_VQ_TILE},
    {2, 6, 1, HF_VQ_TILE},   {8, 8, 1, HF_VQ_SHARED}, {8, 8, 2, HF_VQ_SHARED},  {8, 12, 2, HF_VQ_SHARED}, {8, 16, 1, HF_VQ_E8P},
    {8, 16, 2, HF_VQ_E8P}, {8, 16, 1, HF_VQ_SHARED}, {16, 9, 2, HF_VQ_SHARED}, {8, 10, 3, HF_VQ_SHARED},
    {16, 8, 1, HF_VQ_SHARED}, {8, 4, 2, HF_VQ_SHARED}, {1, 5, 3, HF_VQ_SHARED},  {1, 4, 1, HF_VQ_SHARED, 4},
    {1, 1, 1, HF_VQ_SHARED, 1}, {1, 3, 1, HF_VQ_SHARED, 1}, {1, 1, 1, HF_VQ_SHARED, 2}, {1, 2, 1, HF_VQ_SHARED, 2},
    {1, 2, 1, HF_VQ_SHARED, 3}, {1, 4, 1, HF_VQ_SHARED, 1}, {1, 2, 1, HF_VQ_SHARED, 4}, {1, 3, 1, HF_VQ_SHARED, 4},
    {1, 7, 1, HF_VQ_SHARED, 1},
};

// True for schemes of the catalogue: they have kernels if rows are multiples of 128. Other matrices may be refused and
// are decoded.
bool in_catalogue(const hf_vq_matrix& w) {
  const int shape = w.x * 100 + w.bits;
  bool known = false;
  for (int each : {204, 206, 208, 408, 808, 812}) known |= shape == each;
  known |= w.x == 1 && w.bits <= 8;
  known |= shape == 816 && (w.scope == HF_VQ_E8P || w.group == w.in);
  return known && w.in % 128 == 0 && (w.scope != HF_VQ_TILE || (w.bits == 8 && w.tile_columns % 256 == 0));
}

// A stored matrix of random bytes, and the same as numbers.
struct Matrix {
  hf_vq_matrix w{};
  Guarded<uint8_t> codes, second, signs;
  Guarded<uint16_t> codebook, scale, diagonal;
  int64_t stream = 0;         // bytes of a row of one stage,
  int64_t second_stream = 0;  // and of second codes

  Matrix(const Family& f, int64_t out, int64_t in, bool rotated, bool whole_rows) {
    w.out = out;
    w.in = in;
    w.x = f.x;
    w.bits = f.bits;
    w.stages = f.stages;
    w.scope = f.scope;
    w.second_bits = f.second;
    // Blocks of formats/scheme.py: powers of two that divide the row.
    const int64_t power = in & -in, most = power < 128 ? power : 128;
    w.group = int32_t(whole_rows ? in : most);
    w.block = int32_t(rotated ? most : 1);
    w.tile_rows = f.scope == HF_VQ_TILE ? int32_t(random_bits() % 2 ? 256 : 16 * random_int(1, 4)) : 0;
    w.tile_columns = f.scope == HF_VQ_TILE ? int32_t(random_bits() % 2 ? 256 : 32 * random_int(1, 4)) : 0;
    stream = (in / f.x * f.bits + 7) / 8;
    codes = Guarded<uint8_t>(size_t(out * stream * f.stages));
    fill_some(codes.get(), codes.bytes());
    if (f.second != 0) {
      second_stream = (in * f.second + 7) / 8;
      second = Guarded<uint8_t>(size_t(out * second_stream));
      fill_some(second.get(), second.bytes());
      w.second = second.get();
    }
    scale = random_halves(size_t(out * (in / w.group)), 0.1f, true);
    size_t tables = size_t(f.stages);
    if (f.scope == HF_VQ_TILE)
      tables = size_t((out + w.tile_rows - 1) / w.tile_rows * ((in + w.tile_columns - 1) / w.tile_columns));
    codebook = f.scope == HF_VQ_E8P ? patterns(tables) : random_halves((tables * size_t(f.x)) << (f.bits + f.second), 1, false);
    const uint64_t kind = rotated ? random_bits() % 4 : 0;  // before the rotation: nothing, a diagonal, or (twice) signs
    if (kind == 1) {
      diagonal = random_halves(size_t(in), 1, false);
      w.diagonal = diagonal.get();
    } else if (kind > 1) {
      signs = Guarded<uint8_t>(size_t(in + 7) / 8);
      fill_random(signs.get(), signs.bytes());
      w.signs = signs.get();
    }
    w.codes = codes.get();
    w.codebook = codebook.get();
    w.scale = scale.get();
  }

  // E8P: 256 rows of 1/2, 3/2 and 5/2, and the shift of 1/4.
  static Guarded<uint16_t> patterns(size_t stages) {
    Guarded<uint16_t> rows(stages * 257 * 8);
    for (size_t i = 0; i < rows.size(); ++i) {
      const bool shift = i % (257 * 8) >= 256 * 8;
      const float size = i / (257 * 8) == 0 ? 1.0f : 0.125f;
      rows[i] = float_to_half(size * (shift ? 0.25f : 0.5f + float(random_int(0, 2))));
    }
    return rows;
  }

  // Code number `number` of a stream.
  static uint32_t code_of(const uint8_t* stream, int64_t number, int bits) {
    const int64_t at = number * bits;
    uint32_t code = 0;
    for (int64_t byte = at / 8; byte <= (at + bits - 1) / 8; ++byte)
      code |= uint32_t(stream[byte]) << 8 * (byte - at / 8);
    return code >> at % 8 & ((1u << bits) - 1);
  }

  // Component c of an entry, before the scale.
  double entry(int64_t o, int64_t vector, int stage, int c) const {
    uint32_t code = code_of(codes.get() + (o * w.stages + stage) * stream, vector, w.bits);
    if (w.second_bits != 0)
      code = code << w.second_bits | code_of(second.get() + o * second_stream, vector, w.second_bits);
    int64_t table = stage;
    if (w.scope == HF_VQ_TILE)
      table = o / w.tile_rows * ((w.in + w.tile_columns - 1) / w.tile_columns) + vector * w.x / w.tile_columns;
    if (w.scope != HF_VQ_E8P)
      return double(half_to_float(codebook[size_t((table << w.bits) + code) * size_t(w.x) + size_t(c)]));
    const uint16_t* book = codebook.get() + stage * 257 * 8;
    const uint16_t* pattern = book + (code & 255) * 8;
    const double shift = double(half_to_float(book[256 * 8 + size_t(c)]));
    double total = 0;
    for (int i = 0; i < 8; ++i) total += double(half_to_float(pattern[i]));
    const bool odd = int64_t(std::lround(total / (4 * shift))) & 1;
    bool negative = c < 7 ? code >> (8 + c) & 1 : odd;
    if (c == 7)
      for (int b = 8; b < 15; ++b) negative ^= code >> b & 1;
    const double value = double(half_to_float(pattern[c]));
    return (negative ? -value : value) + (code >> 15 ? -shift : shift);
  }

  double weight(int64_t o, int64_t i) const {
    double total = 0;
    for (int stage = 0; stage < w.stages; ++stage) total += entry(o, i / w.x, stage, int(i % w.x));
    return total * scale_of(o, i / w.group);
  }
  double scale_of(int64_t o, int64_t g) const { return double(half_to_float(scale[size_t(o * (w.in / w.group) + g)])); }

  // True if AVX-512 may use tables of products (linear_luts.h).
  bool by_tables(int64_t rows) const {
    return w.scope == HF_VQ_SHARED && w.x == 8 && w.bits == 8 && w.group == w.in && w.out >= 512 && rows == 1;
  }

  // True if linear_entries.h runs: neither entries nor inputs are quantized.
  bool as_it_is() const {
    const bool tables = w.x == 8 && (w.bits == 8 || w.bits == 12);
    return w.scope == HF_VQ_SHARED && w.x % 8 == 0 && !tables && w.group == w.in;
  }

  // How many steps the largest entry and the largest input have: linear_packed.h has numbers of 16 bits.
  double steps() const { return w.x == 1 && w.bits + w.second_bits > 4 ? 256 * 127 : 127; }

  // max |u_p| of n columns, times the largest norm of an entry, summed over the stages.
  double largest_product(const double* u, int64_t n) const {
    double longest = 0, reach = 0;
    for (int64_t i = 0; i < n; i += 8) longest = std::fmax(longest, norm(u + i));
    for (int stage = 0; stage < w.stages; ++stage) {
      double most = 0, entry[8];
      for (size_t e = 0; e < 256; ++e) {
        for (size_t c = 0; c < 8; ++c) entry[c] = double(half_to_float(codebook[(size_t(stage) * 256 + e) * 8 + c]));
        most = std::fmax(most, norm(entry));
      }
      reach += most;
    }
    return longest * reach;
  }
  static double norm(const double* vector) {
    double square = 0;
    for (int c = 0; c < 8; ++c) square += vector[c] * vector[c];
    return std::sqrt(square);
  }

  // One row of inputs, rotated.
  void rotate(const Numbers& x, int64_t row, double* to) const {
    for (int64_t i = 0; i < w.in; ++i) {
      const bool negative = w.signs != nullptr && signs[size_t(i / 8)] >> i % 8 & 1;
      const double factor = w.diagonal != nullptr ? double(half_to_float(diagonal[size_t(i)])) : negative ? -1 : 1;
      to[i] = double(x[size_t(row * w.in + i)]) * factor;
    }
    for (int64_t i = 0; i < w.in; i += w.block) plain_hadamard(to + i, w.block);
  }
};

// Shared by all instruction sets: a problem, its exact results, and those of scalar.
//
// Kernels round inputs to numbers, max |u| / steps() apart in each span of columns, and entries, too. On two
// instruction sets an input that is undecided may become either of its neighbours.
struct Problem {
  const Matrix& matrix;
  Numbers x, bias;
  int64_t rows, first, count;  // count rows of W from first on are decoded
  int dense_dtype;
  Guarded<double> dense, rotated, y;
  Guarded<double> most;   // what rounding entries and inputs may do to an output
  Guarded<double> apart;  // what rounding to float32 may do to it, on two instruction sets
  Guarded<double> tables;  // what rounding products of whole vectors may do, where they come from tables
  Numbers scalar_y;

  Problem(const Matrix& m, int64_t rows_of_x, int dtype)
      : matrix(m), x(dtype, size_t(rows_of_x * m.w.in)), rows(rows_of_x) {
    const int64_t in = m.w.in, out = m.w.out;
    x.fill_normal();
    if (random_bits() % 2) {
      bias = Numbers(random_dtype(), size_t(out));
      bias.fill_normal();
    }
    first = random_int(0, out - 1);
    count = random_int(0, out - first);
    dense_dtype = random_bits() % 2 ? HF_VQ_FLOAT32 : HF_VQ_BFLOAT16;
    dense = Guarded<double>(size_t(out * in));
    rotated = Guarded<double>(size_t(rows * in));
    y = Guarded<double>(size_t(rows * out));
    most = Guarded<double>(size_t(rows * out));
    apart = Guarded<double>(size_t(rows * out));
    tables = Guarded<double>(size_t(rows * out));
    for (int64_t i = 0; i < out * in; ++i) dense[size_t(i)] = m.weight(i / in, i % in);
    for (int64_t r = 0; r < rows; ++r) m.rotate(x, r, rotated.get() + r * in);
    // Half a step of the largest entry.
    double entry = 0;
    for (size_t i = 0; i < m.codebook.size(); ++i)
      entry = std::fmax(entry, std::fabs(double(half_to_float(m.codebook[i]))));
    entry *= m.w.stages / (2 * m.steps());
    if (m.steps() > 127) entry *= 3;  // levels may be 1 off
    for (int64_t i = 0; i < rows * out; ++i) {
      const double start = bias.size() > 0 ? double(bias[size_t(i % out)]) : 0;
      y[size_t(i)] = start;
      most[size_t(i)] = tables[size_t(i)] = 0;
      apart[size_t(i)] = 4 * kHalfUlp * std::fabs(start);
    }
    const int64_t span = m.w.group < 128 ? m.w.group : 128;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t from = 0; from < in; from += span)
        add_span(r, from, from + span < in ? from + span : in, entry);
  }

 private:
  // Columns from..to - 1 of row r of the inputs, times all weights.
  void add_span(int64_t r, int64_t from, int64_t to, double entry) {
    const hf_vq_matrix& w = matrix.w;
    const double* u = rotated.get() + r * w.in;
    double step;
    const double doubt = doubt_of_rounding(u + from, to - from, w.block, step, matrix.steps());
    if (step == 0) return;
    // Error of a float sum, which grows like a random walk, and of the span's scale.
    const double sums = 8 * kHalfUlp * std::sqrt(double(w.in) / 16 + 8) + doubt / matrix.steps();
    const double product = matrix.by_tables(rows) ? matrix.largest_product(u + from, to - from) : 0;
    for (int64_t o = 0; o < w.out; ++o) {
      const double *weights = dense.get() + o * w.in, lost = entry * matrix.scale_of(o, from / w.group);
      double total = 0, rounding = 0, either = 0, size = 0;
      for (int64_t i = from; i < to; ++i) {
        const double weight = std::fabs(weights[i]) + lost;
        total += weights[i] * u[i];
        size += weight * std::fabs(u[i]);
        rounding += weight * step / 2 + lost * std::fabs(u[i]);
        if (matrix.steps() > 127) rounding += weight * step + 2 * lost * step * 127 * 127;  // low times low is left out
        if (undecided(u[i] / step, doubt)) either += weight * step;
      }
      const size_t at = size_t(r * w.out + o);
      y[at] += total;
      most[at] += rounding;
      tables[at] += double((to - from) / w.x) * product * matrix.scale_of(o, from / w.group) / 254;
      apart[at] += either + sums * size;
    }
  }
};

bool close(double got, double want, double size, int dtype) {
  return std::fabs(got - want) <= 1e-4 * size + step_of(dtype) * std::fabs(want) && std::isfinite(got);
}

void check_linear(Problem& p, const char* isa, Tally& tally) {
  const hf_vq_matrix& w = p.matrix.w;
  Numbers y(p.x.dtype(), size_t(p.rows * w.out));
  use_some_threads();
  const void* bias = p.bias.size() > 0 ? p.bias.data() : nullptr;
  if (!tally.computed(library.linear(&w, p.x.data(), p.x.dtype(), p.rows, bias, p.bias.dtype(), y.data()))) {
    that(library.linear_supports(&w) != HF_VQ_OK, "linear %s refuses what it supports", isa);
    that(!in_catalogue(w), "linear %s refuses <%d,%d,%d>, group %d", isa, w.x, w.bits, w.stages, w.group);
    return;
  }
  that(library.linear_supports(&w) == HF_VQ_OK, "linear %s computes what it does not support", isa);
  const bool by_tables = p.matrix.by_tables(p.rows) && (strcmp(isa, "avx512") == 0 || strcmp(isa, "zen4") == 0);
  for (size_t i = 0; i < y.size(); ++i) {
    const double got = double(y[i]), last_bit = step_of(y.dtype()) * std::fabs(p.y[i]);
    // With many threads entries are decoded after all.
    const double rounded = by_tables ? std::fmax(p.most[i], p.tables[i]) : p.matrix.as_it_is() ? 0 : p.most[i];
    const double allowed = rounded + p.apart[i] + last_bit;
    that(std::fabs(got - p.y[i]) <= allowed,
         "linear %s <%d,%d,%d> scope %d [%d, %d] group %d block %d rows %d: %g, not %g, allowed %g", isa, w.x, w.bits,
         w.stages, w.scope, int(w.out), int(w.in), w.group, w.block, int(p.rows), got, p.y[i], allowed);
    if (by_tables || p.scalar_y.size() != y.size()) continue;
    const double scalar = double(p.scalar_y[i]), near = p.apart[i] + step_of(y.dtype()) * std::fabs(got);
    that(std::fabs(got - scalar) <= near, "linear %s <%d,%d,%d> [%d, %d]: %g, scalar %g, allowed %g apart", isa, w.x,
         w.bits, w.stages, int(w.out), int(w.in), got, scalar, near);
  }
  if (strcmp(isa, "scalar") == 0) p.scalar_y = std::move(y);
}

void check_decode(const Problem& p, const char* isa, Tally& tally) {
  const hf_vq_matrix& w = p.matrix.w;
  Numbers dense(p.dense_dtype, size_t(p.count * w.in));
  use_some_threads();
  const int status = library.decode(&w, p.first, p.count, dense.data(), p.dense_dtype);
  if (!that(tally.computed(status), "decode %s refuses <%d,%d,%d>", isa, w.x, w.bits, w.stages)) return;
  for (size_t i = 0; i < dense.size(); ++i) {
    const double want = p.dense[size_t(p.first * w.in) + i];
    if (!that(close(double(dense[i]), want, 0.1, p.dense_dtype),
              "decode %s <%d,%d,%d>: %g, not %g", isa, w.x, w.bits, w.stages, double(dense[i]), want))
      return;
  }
}

void check_rotate(const Problem& p, const char* isa, Tally& tally) {
  const hf_vq_matrix& w = p.matrix.w;
  Numbers rotated(p.dense_dtype, size_t(p.rows * w.in));
  use_some_threads();
  const int status = library.rotate(&w, p.x.data(), p.x.dtype(), p.rows, rotated.data(), p.dense_dtype);
  if (!that(tally.computed(status), "rotate %s refuses blocks of %d", isa, w.block)) return;
  for (size_t i = 0; i < rotated.size(); ++i)
    if (!that(close(double(rotated[i]), p.rotated[i], 1, p.dense_dtype), "rotate %s: %g, not %g", isa,
              double(rotated[i]), p.rotated[i]))
      return;
}

// Memory is all that counts here: floats of any bits, and the codes of any bytes that there always are.
void check_wild(const Family& family, int64_t out, int64_t in) {
  Matrix matrix(family, out, in, true, random_bits() % 2);
  fill_random(matrix.codebook.get(), matrix.codebook.bytes());
  fill_random(matrix.scale.get(), matrix.scale.bytes());
  const int64_t rows = random_bits() % 2 ? 1 : random_int(2, 5);
  Numbers x(random_dtype(), size_t(rows * in)), y(x.dtype(), size_t(rows * out));
  Numbers dense(HF_VQ_FLOAT32, size_t(out * in));
  x.make_wild();
  use_some_threads();
  library.linear(&matrix.w, x.data(), x.dtype(), rows, nullptr, HF_VQ_FLOAT32, y.data());
  library.decode(&matrix.w, 0, out, dense.data(), HF_VQ_FLOAT32);
}

}  // namespace

void test_linear() {
  Tally linear{"linear"}, decode{"decode"}, rotate{"rotate"};
  const int64_t ins[] = {16, 32, 64, 96, 128, 256, 288, 384, 512, 640, 1152, 11008};
  const int64_t outs[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 130};
  const int64_t batches[] = {1, 1, 1, 2, 3, 4, 5, 8, 9, 17, 0};
  for (const Family& family : kFamilies) {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      int64_t in = ins[random_int(0, 11)], out = in > 2000 ? random_int(1, 3) : outs[random_int(0, 12)];
      int64_t rows = in * out > 20000 ? random_int(0, 2) : batches[random_int(0, 10)];
      const bool tables = family.x == 8 && family.bits == 8 && random_bits() % 2 == 0;
      if (tables) {
        in = ins[random_int(0, 9)];
        out = random_int(512, 1100);
        rows = 1;
      }
      const Matrix matrix(family, out, in, random_bits() % 4 != 0, tables || random_bits() % 4 == 0);
      Problem problem(matrix, rows, random_dtype());
      for (int i = 0; i < isas.count; ++i) {
        library.use_isa(isas.names[i]);
        check_linear(problem, isas.names[i], linear);
        check_decode(problem, isas.names[i], decode);
        check_rotate(problem, isas.names[i], rotate);
      }
    }
    for (int i = 0; i < isas.count; ++i) {
      library.use_isa(isas.names[i]);
      check_wild(family, outs[random_int(0, 12)], ins[random_int(0, 9)]);
      if (family.x == 8 && family.bits == 8) check_wild(family, random_int(512, 1100), ins[random_int(0, 9)]);
    }
  }
  for (const Family& family : {Family{1, 7, 1, HF_VQ_SHARED, 2}, Family{2, 4, 1, HF_VQ_SHARED, 4}, Family{1, 4, 2, HF_VQ_SHARED, 4},
                               Family{1, 4, 1, HF_VQ_TILE, 4}}) {
    const Matrix wrong(family, 1, 128, false, true);
    that(library.linear_supports(&wrong.w) == HF_VQ_UNSUPPORTED, "linear supports <%d,%d+%d,%d>", family.x, family.bits,
         family.second, family.stages);
  }
  linear.report();
  decode.report();
  rotate.report();
}

}  // namespace hf_vq::check
