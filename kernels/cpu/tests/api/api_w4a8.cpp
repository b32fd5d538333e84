// SPDX-License-Identifier: Apache-2.0
// hf_vq_w4a8_linear with random matrices: every instruction set against sums of 64 bits on the stored tensors.
#include <cmath>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

struct Matrix {
  hf_vq_w4a8 w{};
  Guarded<uint8_t> codes, step, zero;
  Guarded<uint16_t> scale;
  Guarded<float> row_zero;

  Matrix() {
    const bool grouped = random_bits() % 4 != 0;
    w.group = int64_t(32) << random_int(0, 3);
    w.in = grouped ? w.group * random_int(1, 9) : random_int(1, 700);
    if (!grouped) w.group = w.in;
    w.out = random_int(1, 40);
    codes = Guarded<uint8_t>(size_t(w.out * ((w.in + 1) / 2)));
    fill_some(codes.get(), codes.bytes());
    w.codes = codes.get();
    scale = Guarded<uint16_t>(size_t(w.out));
    for (size_t n = 0; n < scale.size(); ++n) scale[n] = uint16_t(random_int(0, 0x7bff));  // finite
    w.scale = scale.get();
    if (!grouped) {
      row_zero = Guarded<float>(size_t(w.out));
      for (size_t n = 0; n < row_zero.size(); ++n) row_zero[n] = float(random_int(-1 << 16, 1 << 16)) / 64;
      w.row_zero = row_zero.get();
      return;
    }
    step = Guarded<uint8_t>(size_t(w.out * (w.in / w.group)));
    zero = Guarded<uint8_t>(step.size());
    for (size_t g = 0; g < step.size(); ++g) {  // q * step - zero stays in [-127, 127]
      step[g] = uint8_t(random_int(0, 17));
      const int largest = step[g] == 17 ? 14 : 15;  // 15 * 17 - 127 does not
      const int least = largest * step[g] - 127;
      zero[g] = uint8_t(random_int(least > 0 ? least : 0, 127));
      if (largest == 15) continue;
      const size_t bytes = size_t(w.group / 2);
      for (size_t b = g * bytes; b < (g + 1) * bytes; ++b) codes[b] &= 0xee;  // even codes
    }
    w.step = step.get();
    w.zero = zero.get();
  }

  // The integer of a weight, without the zero of a row.
  int64_t level(int64_t n, int64_t k) const {
    const int64_t q = codes[size_t(n * ((w.in + 1) / 2) + k / 2)] >> (k % 2 * 4) & 15;
    if (w.step == nullptr) return q;
    const size_t g = size_t(n * (w.in / w.group) + k / w.group);
    return q * step[g] - zero[g];
  }
};

void check(const Matrix& m, const Numbers& x, int64_t rows, const Numbers& bias, const char* isa, Tally& tally) {
  const hf_vq_w4a8& w = m.w;
  Numbers y(x.dtype(), size_t(rows * w.out));
  use_some_threads();
  const void* added = bias.size() > 0 ? bias.data() : nullptr;
  const int status = library.w4a8_linear(&w, x.data(), x.dtype(), rows, added, bias.dtype(), y.data());
  that(library.w4a8_supports(&w) == status, "w4a8 %s computes other matrices than it supports", isa);
  if (!tally.computed(status)) return;
  for (int64_t r = 0; r < rows; ++r) {
    float most = 1e-30f;
    for (int64_t k = 0; k < w.in; ++k) most = std::fmax(most, std::fabs(float(x[size_t(r * w.in + k)])));
    const float inverse = 127.0f / most, size = most * (1.0f / 127.0f);
    for (int64_t n = 0; n < w.out; ++n) {
      int64_t total = 0, sum = 0;
      for (int64_t k = 0; k < w.in; ++k) {
        const int64_t number = int64_t(std::nearbyintf(float(x[size_t(r * w.in + k)]) * inverse));
        total += number * m.level(n, k);
        sum += number;
      }
      double value = double(half_to_float(m.scale[size_t(n)])) * double(total);
      if (w.row_zero != nullptr) value -= double(m.row_zero[size_t(n)]) * double(sum);
      float want = float(value) * size;
      if (bias.size() > 0) want += float(bias[size_t(n)]);
      if (y.dtype() == HF_VQ_FLOAT16) want = half_to_float(float_to_half(want));
      if (y.dtype() == HF_VQ_BFLOAT16) want = bfloat_to_float(float_to_bfloat(want));
      const float got = float(y[size_t(r * w.out + n)]);
      that(got == want, "w4a8 %s [%d, %d] group %d, %d rows: y[%d, %d] = %.9g, not %.9g", isa, int(w.out), int(w.in),
           int(w.group), int(rows), int(r), int(n), double(got), double(want));
    }
  }
}

}  // namespace

void test_w4a8() {
  Tally tally{"w4a8"};
  for (int repeat = 0; repeat < 12 * repeats; ++repeat) {
    const Matrix matrix;
    const int64_t rows = random_bits() % 2 ? random_int(1, 8) : random_int(9, 70);
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
  hf_vq_w4a8 wrong{};
  wrong.out = 1;
  wrong.in = wrong.group = int64_t(1) << 17;
  that(library.w4a8_supports(&wrong) == HF_VQ_UNSUPPORTED, "w4a8 supports rows whose sums overflow");
  wrong.in = 256;
  wrong.group = 16;
  that(library.w4a8_supports(&wrong) == HF_VQ_UNSUPPORTED, "w4a8 supports groups of 16");
  tally.report();
}

}  // namespace hf_vq::check
