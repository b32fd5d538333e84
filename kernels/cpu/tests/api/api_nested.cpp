// SPDX-License-Identifier: Apache-2.0
// hf_vq_nested_linear with random matrices: every instruction set against plain double arithmetic on the stored tensors.
#include <cmath>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

constexpr int kEntries = 256, kSpan = 128;

struct Matrix {
  hf_vq_matrix w{};
  Guarded<uint8_t> first, second, signs;
  Guarded<uint16_t> codebook, scale, diagonal;

  Matrix(int64_t out, int64_t in, bool rotated, bool whole_rows) {
    w.out = out;
    w.in = in;
    w.x = w.stages = 1;
    w.bits = 4;
    w.scope = HF_VQ_SHARED;
    w.group = int32_t(whole_rows ? in : kSpan);
    w.block = rotated ? kSpan : 1;
    for (Guarded<uint8_t>* codes : {&first, &second}) {
      *codes = Guarded<uint8_t>(size_t(out * in / 2));
      fill_some(codes->get(), codes->bytes());
    }
    codebook = random_halves(kEntries, 1, false);
    scale = random_halves(size_t(out * (in / w.group)), 0.1f, true);
    if (rotated && random_bits() % 2 != 0) {
      diagonal = random_halves(size_t(in), 1, false);
      w.diagonal = diagonal.get();
    } else if (rotated) {
      signs = Guarded<uint8_t>(size_t(in / 8));
      fill_random(signs.get(), signs.bytes());
      w.signs = signs.get();
    }
    w.codes = first.get();
    w.codebook = codebook.get();
    w.scale = scale.get();
  }

  double entry(int64_t o, int64_t i) const {
    const size_t byte = size_t((o * w.in + i) / 2);
    const int shift = i % 2 * 4;
    const int code = (first[byte] >> shift & 15) << 4 | (second[byte] >> shift & 15);
    return double(half_to_float(codebook[size_t(code)]));
  }
};

// x * signs or x * diagonal, each block times the Hadamard matrix over its root.
void rotated(const hf_vq_matrix& w, const Numbers& x, int64_t row, double* u) {
  for (int64_t begin = 0; begin < w.in; begin += w.block)
    for (int64_t i = 0; i < w.block; ++i) {
      double total = 0;
      for (int64_t j = 0; j < w.block; ++j) {
        const bool negated = w.signs != nullptr && (w.signs[(begin + j) / 8] >> ((begin + j) % 8) & 1) != 0;
        const bool odd = __builtin_parityll(uint64_t(i & j)) != 0;
        const double factor = w.diagonal != nullptr ? double(half_to_float(w.diagonal[begin + j])) : 1;
        const double value = factor * double(x[size_t(row * w.in + begin + j)]);
        total += negated != odd ? -value : value;
      }
      u[begin + i] = total / std::sqrt(double(w.block));
    }
}

void check(const Matrix& m, const Numbers& x, int64_t rows, const Numbers& bias, const char* isa, Tally& tally) {
  const hf_vq_matrix& w = m.w;
  Numbers y(x.dtype(), size_t(rows * w.out));
  use_some_threads();
  const void* added = bias.size() > 0 ? bias.data() : nullptr;
  const int status =
      library.nested_linear(&w, m.second.get(), x.data(), x.dtype(), rows, added, bias.dtype(), y.data());
  that(library.nested_supports(&w) == status, "nested %s computes other matrices than it supports", isa);
  if (!tally.computed(status)) return;
  double largest = 0;
  for (int e = 0; e < kEntries; ++e) largest = std::fmax(largest, std::fabs(double(half_to_float(m.codebook[size_t(e)]))));
  const double level = largest / (255 * 127 + 127);
  Guarded<double> u(size_t(w.in));
  for (int64_t r = 0; r < rows; ++r) {
    rotated(w, x, r, u.get());
    for (int64_t o = 0; o < w.out; ++o) {
      double total = bias.size() > 0 ? double(bias[size_t(o)]) : 0, size = std::fabs(total), rounding = 0;
      for (int64_t begin = 0; begin < w.in; begin += kSpan) {
        double most = 0;
        for (int64_t i = begin; i < begin + kSpan; ++i) most = std::fmax(most, std::fabs(u[size_t(i)]));
        const double scale = double(half_to_float(m.scale[size_t(o * (w.in / w.group) + begin / w.group)]));
        for (int64_t i = begin; i < begin + kSpan; ++i) {
          const double weight = m.entry(o, i) * scale, input = u[size_t(i)];
          total += weight * input;
          size += std::fabs(weight * input);
          // Half a step of the input, half a level of the entry.
          rounding += std::fabs(weight) * most / 254 + std::fabs(scale) * level / 2 * (std::fabs(input) + most / 254);
        }
      }
      const double got = double(y[size_t(r * w.out + o)]);
      const double allowed = rounding * 1.001 + 1e-5 * size + step_of(y.dtype()) * std::fabs(total);
      if (!that(std::fabs(got - total) <= allowed, "nested %s [%d, %d] group %d rows %d: %g, not %g, allowed %g", isa,
                int(w.out), int(w.in), w.group, int(rows), got, total, allowed))
        return;
    }
  }
}

}  // namespace

void test_nested() {
  Tally tally{"nested"};
  const int64_t ins[] = {64, 128, 256, 384, 1152};
  // Some problems have no kernel: of four, which is what emulators get, now and then each one.
  for (int repeat = 0; repeat < 4 * repeats || (tally.ran == 0 && repeat < 64); ++repeat) {
    const Matrix matrix(random_int(1, 70), ins[random_int(0, 4)], random_bits() % 3 != 0, random_bits() % 2);
    const int64_t rows = random_int(1, 3);
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
  // Entries that are no numbers, or as large as fp16 has: no result, but nothing undefined on the way.
  for (const uint16_t entry : {0x7c00, 0xfc00, 0x7e00, 0x7bff, 0xfbff}) {
    Matrix hostile(3, 128, false, false);
    hostile.codebook[5] = entry;
    Numbers x(HF_VQ_FLOAT32, 128), y(HF_VQ_FLOAT32, 3);
    x.fill_normal();
    for (int i = 0; i < isas.count; ++i) {
      library.use_isa(isas.names[i]);
      library.nested_linear(&hostile.w, hostile.second.get(), x.data(), HF_VQ_FLOAT32, 1, nullptr, HF_VQ_FLOAT32, y.data());
    }
  }
  Matrix wrong(1, 128, false, true);
  wrong.w.bits = 3;
  that(library.nested_supports(&wrong.w) == HF_VQ_UNSUPPORTED, "nested supports passes of 3 bits");
  tally.report();
}

}  // namespace hf_vq::check
