// SPDX-License-Identifier: Apache-2.0
// hf_vq_append: every code is that of a nearest entry, every scale that of the reference
// (hf_vq/ops/reference/codes.py), and nothing else on the tape changes.
#include <algorithm>
#include <cmath>

#include "library.h"
#include "tapes.h"

namespace hf_vq::check {
namespace {

// The codes and the scale of one token against plain arithmetic. `row` is what is coded: s (x - mean).
void check_token(const Tape& tape, const char* isa, int64_t b, int64_t h, int64_t token, double* row) {
  const hf_vq_codes& c = tape.c;
  tape.rotate(row);
  double energy = 0, along = 0;
  for (int i = 0; i < c.dim; ++i) energy += row[i] * row[i];
  const double unit = c.learned ? 1 : std::fmax(std::sqrt(energy / c.dim), 1e-30);
  bool nearest = true;
  for (int64_t s = 0; s < tape.vectors; ++s) {
    const int chosen = tape.code(c.data, b, h, token, s);
    double best = INFINITY, taken = 0;
    for (int code = 0; code < 1 << c.bits; ++code) {
      double distance = 0;
      for (int i = 0; i < c.x; ++i) {
        const double step = row[s * c.x + i] / unit - tape.entry(h, s, code, i);
        distance += step * step;
      }
      best = std::fmin(best, distance);
      if (code == chosen) taken = distance;
    }
    nearest = nearest && taken <= best + 1e-4 * (1 + best);
    for (int i = 0; i < c.x; ++i) along += row[s * c.x + i] * tape.entry(h, s, chosen, i);
  }
  that(nearest, "append %s %s dim %d: a code of token %d is not the nearest", isa, tape.coding.name, c.dim,
       int(token));
  if (c.learned) return;
  const double want = energy == 0 ? 0 : energy / along, got = tape.scale_of(b, h, token);
  that(std::fabs(got - want) <= 2e-3 * std::fabs(want) + 6e-8, "append %s %s: scale %g, not %g", isa,
       tape.coding.name, got, want);
}

// The entries of each codebook of numbers in order, as fits make them: they are searched in another way.
void sort_entries(Tape& tape) {
  const size_t count = size_t(1) << tape.coding.bits;
  for (size_t first = 0; first < tape.codebook.size(); first += count)
    std::sort(&tape.codebook[first], &tape.codebook[first] + count,
              [](uint16_t a, uint16_t b) { return half_to_float(a) < half_to_float(b); });
}

// As keys are: what is coded is small next to the means.
void add_means(const Tape& tape, int64_t at, Rows& x) {
  const auto mean = Guarded<double>(size_t(x.dim));
  for (int64_t b = 0; b < tape.batch; ++b)
    for (int64_t h = 0; h < tape.heads; ++h)
      for (int64_t t = 0; t < x.f.tokens; ++t) {
        for (int64_t i = 0; i < x.dim; ++i) mean[size_t(i)] = tape.mean_of(b, h, i);
        tape.add_turned(b, h, at + t, mean.get());
        for (int64_t i = 0; i < x.dim; ++i)
          x.numbers.set(x.index(b, h, t, i), float(x.at(b, h, t, i) + mean[size_t(i)]));
      }
}

void check_append(const Coding& coding, int dim, int64_t n, int64_t at, const char* isa, Tally& tally) {
  const int64_t batch = random_int(1, 2), heads = random_int(1, 2);
  Tape tape(coding, batch, heads, at + n + random_int(0, 3), dim, random_bits() % 2);
  if (coding.x == 1 && random_bits() % 2) sort_entries(tape);
  if (random_bits() % 2) tape.add_smoothing();
  Rows x(random_dtype(), batch, heads, n, dim);
  const bool rotary = random_bits() % 3 == 0;
  if (rotary) {
    tape.add_rotary(random_bits() % 2 ? 0.5f : 20.0f);
    add_means(tape, at, x);
  }
  // One row of zeros, one that is not finite, or huge: the memory around it is what counts.
  const int64_t some = n > 2 ? random_int(0, n - 1) : -1, zero = rotary ? -1 : some, wild = n > 2 ? (some + 1) % n : -1;
  for (int64_t i = 0; i < dim && some >= 0; ++i) {
    if (zero >= 0) x.numbers.set(x.index(0, 0, zero, i), float(tape.mean_of(0, 0, i)));
    const float values[] = {NAN, INFINITY, -INFINITY, 3e38f};
    if (random_bits() % 8 == 0 || i == 3) x.numbers.set(x.index(0, 0, wild, i), values[random_int(0, 3)]);
  }
  const Guarded<uint8_t> before = tape.data.copy();
  const Guarded<uint16_t> scales = tape.scale.copy();
  use_some_threads();
  if (!tally.computed(library.append(&tape.c, &x.f, batch, heads, at))) {
    that(library.codes_supported(&tape.c, 0) != HF_VQ_OK, "append %s %s refuses what it supports", isa, coding.name);
    return;
  }
  const auto decoded = Guarded<double>(size_t(dim));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t t = 0; t < n; ++t) {
        if (n > 20 && t > 4 && t < n - 4 && random_bits() % 16 != 0 && t != zero) continue;
        if (b == 0 && h == 0 && t == wild) continue;
        for (int64_t i = 0; i < dim; ++i)
          decoded[size_t(i)] = 0;
        tape.add_turned(b, h, at + t, decoded.get());
        for (int64_t i = 0; i < dim; ++i)
          decoded[size_t(i)] = rotary ? x.at(b, h, t, i) - tape.mean_of(b, h, i) - decoded[size_t(i)]
                                      : double(float(x.at(b, h, t, i)) - float(tape.mean_of(b, h, i)));
        for (int64_t i = 0; i < dim; ++i) decoded[size_t(i)] *= tape.smoothing_of(b, h, i);
        check_token(tape, isa, b, h, at + t, decoded.get());
      }
      bool kept = true;
      for (int64_t t = 0; t < (tape.tokens + 255) / 256 * 256; ++t) {
        if (t >= at && t < at + n) continue;
        for (int64_t s = 0; s < tape.vectors; ++s)
          kept = kept && tape.code(before.get(), b, h, t, s) == tape.code(tape.c.data, b, h, t, s);
        const size_t place = size_t(b * tape.c.scale_stride[0] + h * tape.c.scale_stride[1] + t);
        if (scales.size() > 0 && t < tape.tokens) kept = kept && scales[place] == tape.scale[place];
      }
      that(kept, "append %s %s at %d + %d: another token changed", isa, coding.name, int(at), int(n));
    }
  }
  const int64_t blocks_end = (tape.tokens + 255) / 256 * tape.block_bytes;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h + 1 < heads; ++h) {
      const int64_t end = b * tape.c.data_stride[0] + h * tape.c.data_stride[1] + blocks_end;
      for (int64_t i = end; i < end + tape.c.data_stride[1] - blocks_end; ++i)
        that(before[size_t(i)] == tape.data[size_t(i)], "append %s: a byte between heads changed", isa);
    }
  if (wild < 0 || coding.learned) return;
  bool finite = true;  // with a number of 3e38
  for (int64_t i = 0; i < dim; ++i) finite = finite && std::isfinite(float(x.at(0, 0, wild, i)));
  const float found = float(tape.scale_of(0, 0, at + wild));
  that(finite ? found == 65504.0f : !std::isfinite(found), "append %s %s: the scale %g of a row that is %sfinite", isa,
       coding.name, double(found), finite ? "" : "not ");
}

// Memory is all that counts here: floats of any bits.
void check_wild(const Coding& coding, int dim) {
  Tape tape(coding, 1, 2, 300, dim, true);
  if (random_bits() % 2) tape.add_rotary(1);
  if (random_bits() % 2) tape.add_smoothing();
  tape.make_wild();
  Rows x(random_dtype(), 1, 2, random_int(1, 300), dim);
  x.numbers.make_wild();
  use_some_threads();
  library.append(&tape.c, &x.f, 1, 2, 300 - x.f.tokens);
}

}  // namespace

void test_append() {
  Tally tally{"append"};
  const int dims[] = {16, 32, 64, 80, 96, 128, 256};
  const int64_t counts[] = {0, 1, 1, 2, 3, 5, 17, 64}, places[] = {0, 1, 63, 64, 200, 255, 256, 257};
  for (const Coding& coding : kCodings) {
    for (int i = 0; i < isas.count; ++i) {
      library.use_isa(isas.names[i]);
      for (int repeat = 0; repeat < repeats; ++repeat)
        check_append(coding, dims[random_int(0, 6)], counts[random_int(0, 7)], places[random_int(0, 7)],
                     isas.names[i], tally);
      const int any = 4 * coding.x * int(random_int(1, 12));
      check_append(coding, any, counts[random_int(0, 7)], random_int(0, 300), isas.names[i], tally);
      check_wild(coding, dims[random_int(0, 6)]);
      const int64_t whole[] = {255, 256, 257};
      check_append(coding, 32, whole[random_int(0, 2)], places[random_int(0, 7)], isas.names[i], tally);
    }
  }
  tally.report();
}

}  // namespace hf_vq::check
