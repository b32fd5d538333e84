// SPDX-License-Identifier: Apache-2.0
// hf_vq_vptq_linear with random matrices: every instruction set against plain double arithmetic on the stored tensors.
#include <cmath>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

int bits_for(int64_t entries) {
  int bits = 0;
  while (int64_t(1) << bits < entries) ++bits;
  return bits;
}

// A stored matrix of random bits, and the same as numbers.
struct Matrix {
  hf_vq_vptq w{};
  Guarded<uint32_t> codes;
  Guarded<uint16_t> outlier_codes, order;
  Numbers book, rest, outlier_book, scale, offset;
  int64_t words = 0, vectors = 0;

  Matrix() {
    const int64_t counts[] = {2, 16, 100, 256, 4096, 65536};
    w.vector = int32_t(random_int(0, 2) ? int(2 * random_int(2, 8)) : int(random_int(1, 33)));
    w.groups = int32_t(random_int(0, 3) ? 1 : 3);
    w.columns = random_int(0, 3) ? random_int(1, 90) : random_int(250, 600);
    w.out = random_int(1, 60);
    w.outliers = random_int(0, 2) ? 0 : random_int(1, 9);
    w.in = w.outliers + w.groups * w.columns;
    w.dtype = random_bits() % 2 ? HF_VQ_FLOAT16 : HF_VQ_BFLOAT16;
    w.entries = int32_t(counts[random_int(0, random_bits() % 8 ? 4 : 5)]);
    w.bits = bits_for(w.entries);
    w.rest_entries = int32_t(random_bits() % 2 ? 0 : counts[random_int(0, random_bits() % 8 ? 4 : 5)]);
    w.rest_bits = bits_for(w.rest_entries);
    words = (w.columns * (w.bits + w.rest_bits) + 31) / 32;
    vectors = (w.out + w.vector - 1) / w.vector;
    codes = Guarded<uint32_t>(size_t(w.groups * vectors * words));
    fill_some(codes.get(), codes.bytes());
    w.codes = codes.get();
    book = numbers(int64_t(w.groups) * w.entries * w.vector, 1, w.book);
    if (w.rest_entries > 0) rest = numbers(int64_t(w.groups) * w.rest_entries * w.vector, 0.3f, w.rest);
    if (w.outliers > 0) {
      w.outlier_vector = int32_t(random_int(1, 9));
      w.outlier_entries = int32_t(random_int(1, 300));
      outlier_codes = Guarded<uint16_t>(size_t((w.out + w.outlier_vector - 1) / w.outlier_vector * w.outliers));
      fill_some(outlier_codes.get(), outlier_codes.bytes());
      w.outlier_codes = outlier_codes.get();
      outlier_book = numbers(int64_t(w.outlier_entries) * w.outlier_vector, 3, w.outlier_book);
    }
    if (random_bits() % 3) {
      scale = numbers(w.in, 1, w.scale);
      offset = numbers(w.in, 0.1f, w.offset);
    }
    if (random_bits() % 3) {
      order = Guarded<uint16_t>(size_t(w.in));
      for (size_t i = 0; i < order.size(); ++i) order[i] = uint16_t(i);
      for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[size_t(random_int(0, int64_t(i)))]);
      w.order = order.get();
    }
  }

  Numbers numbers(int64_t count, float size, const void*& at) const {
    Numbers made(w.dtype, size_t(count));
    made.fill_normal(size);
    at = made.data();
    return made;
  }

  // Bits at.. of the stream of a row of vectors, one by one.
  int64_t code(int64_t row, int64_t at, int bits, int64_t entries) const {
    int64_t found = 0;
    for (int b = 0; b < bits; ++b) {
      const int64_t place = at + b;
      found |= int64_t(codes[size_t(row * words + place / 32)] >> place % 32 & 1) << b;
    }
    return found < entries ? found : entries - 1;
  }

  // Stored weight in row o of column c, before scales and the order of columns.
  double stored(int64_t o, int64_t c) const {
    if (c < w.outliers) {
      const int64_t found = outlier_codes[size_t(o / w.outlier_vector * w.outliers + c)];
      const int64_t entry = found < w.outlier_entries ? found : w.outlier_entries - 1;
      return double(outlier_book[size_t(entry * w.outlier_vector + o % w.outlier_vector)]);
    }
    const int64_t group = (c - w.outliers) / w.columns, row = group * vectors + o / w.vector, r = o % w.vector;
    const int64_t at = (c - w.outliers) % w.columns * (w.bits + w.rest_bits);
    const int64_t main = group * w.entries + code(row, at, w.bits, w.entries);
    double value = double(book[size_t(main * w.vector + r)]);
    if (w.rest_entries > 0) {
      const int64_t more = group * w.rest_entries + code(row, at + w.bits, w.rest_bits, w.rest_entries);
      value += double(rest[size_t(more * w.vector + r)]);
    }
    return value;
  }
};

void check(const Matrix& m, const Numbers& x, int64_t rows, const Numbers& bias, const char* isa, Tally& tally) {
  const hf_vq_vptq& w = m.w;
  Numbers y(x.dtype(), size_t(rows * w.out));
  use_some_threads();
  const void* added = bias.size() > 0 ? bias.data() : nullptr;
  const int status = library.vptq_linear(&w, x.data(), x.dtype(), rows, added, bias.dtype(), y.data());
  that(library.vptq_supports(&w) == status, "vptq %s computes other matrices than it supports", isa);
  if (!tally.computed(status)) return;
  for (int64_t o = 0; o < w.out; ++o)
    for (int64_t r = 0; r < rows; ++r) {
      double total = bias.size() > 0 ? double(bias[size_t(o)]) : 0, size = std::fabs(total);
      for (int64_t c = 0; c < w.in; ++c) {
        const int64_t j = w.order != nullptr ? m.order[size_t(c)] : c;
        double weight = m.stored(o, c), most = std::fabs(weight);
        if (w.scale != nullptr) {
          weight = weight * double(m.scale[size_t(j)]) + double(m.offset[size_t(j)]);
          most = most * std::fabs(double(m.scale[size_t(j)])) + std::fabs(double(m.offset[size_t(j)]));
        }
        const double input = double(x[size_t(r * w.in + j)]);
        total += weight * input;
        size += most * std::fabs(input);
      }
      // Sums of floats, sequential at worst; entries and x' are rounded once more.
      const double got = double(y[size_t(r * w.out + o)]);
      const double allowed = kHalfUlp * double(w.in + 8) * size + step_of(y.dtype()) * std::fabs(total);
      if (!that(std::fabs(got - total) <= allowed,
                "vptq %s v%d-k%d-%d [%d, %d] groups %d outliers %d rows %d: %g, not %g, allowed %g", isa, w.vector,
                w.entries, w.rest_entries, int(w.out), int(w.in), w.groups, int(w.outliers), int(rows), got, total,
                allowed))
        return;
    }
}

}  // namespace

void test_vptq() {
  Tally tally{"vptq"};
  for (int repeat = 0; repeat < 12 * repeats; ++repeat) {
    const Matrix matrix;
    const int64_t rows = random_int(0, 3) ? random_int(1, 5) : random_int(6, 11);
    Numbers x(random_dtype(), size_t(rows * matrix.w.in)), bias;
    x.fill_normal();
    if (random_bits() % 2) {
      bias = Numbers(random_dtype(), size_t(matrix.w.out));
      bias.fill_normal();
    }
    for (int i = 0; i < isas.count; ++i) {
      library.use_isa(isas.names[i]);
      check(matrix, x, rows, bias, isas.names[i], tally);
    }
  }
  Matrix wrong;
  wrong.w.dtype = HF_VQ_FLOAT32;
  that(library.vptq_supports(&wrong.w) == HF_VQ_UNSUPPORTED, "vptq supports entries of float32");
  tally.report();
}

}  // namespace hf_vq::check
