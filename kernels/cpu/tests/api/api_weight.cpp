// SPDX-License-Identifier: Apache-2.0
// hf_vq_encode_weight and hf_vq_round_weight with random rows: on every instruction set each code is of the nearest
// entry, by double arithmetic on the same scales.
#include <cmath>
#include <cstring>
#include <vector>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

struct Case {
  hf_vq_rows w{};
  int64_t size, vectors;
  Guarded<float> rows, scales, feedback;
  Guarded<uint16_t> codebook;

  Case() {
    w.x = 1 << random_int(0, 3);
    w.entries = 1 << random_int(1, 9);
    size = int64_t(1) << random_int(2, 8);
    w.group = size << random_int(0, 3);
    w.in = w.group * random_int(1, 4);
    w.n = random_int(1, 150);
    vectors = w.in / w.x;
    rows = normal(w.n * w.in, 1);
    scales = normal(w.n * (w.in / w.group), 0);
    feedback = normal(w.in * size, 0.05f);
    codebook = random_halves(size_t(w.entries) * size_t(w.x), 1, false);
    for (size_t i = 0; i < scales.size(); ++i) scales[i] = half_to_float(float_to_half(0.1f + 0.5f * random_float() + 0.5f));
    w.rows = rows.get();
    w.codebook = codebook.get();
  }

  static Guarded<float> normal(int64_t count, float size) {
    Guarded<float> numbers{size_t(count)};
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = random_normal() * size;
    return numbers;
  }

  double entry(int code, int c) const { return half_to_float(codebook[size_t(code * w.x + c)]); }

  // Whether `code` is the nearest entry to u, up to the rounding of float32.
  bool is_nearest(const double* u, int code) const {
    if (code >= w.entries) return false;
    double best = INFINITY, found = 0, size2 = 1;
    for (int e = 0; e < w.entries; ++e) {
      double apart = 0;
      for (int c = 0; c < w.x; ++c) apart += (u[c] - entry(e, c)) * (u[c] - entry(e, c));
      if (e == code) found = apart;
      best = apart < best ? apart : best;
    }
    for (int c = 0; c < w.x; ++c) size2 += u[c] * u[c];
    return found <= best + 1e-5 * size2;
  }
};

// The cells of a codebook, in memory that ends where it says; none if they are not wanted, or too many are near.
struct Near {
  Guarded<uint8_t> near{size_t(HF_VQ_CELLS * HF_VQ_MOST_NEAR)};
  Guarded<float> numbers;
  hf_vq_cells cells{};
  bool made = false;

  Near(const hf_vq_rows& w, const float* factors, int count, bool lanes)
      : numbers{size_t(HF_VQ_CELLS * (w.x + 1) * HF_VQ_NEAR_LANES)} {
    if (count == 0) return;
    const int status = library.make_cells(&w, factors, count, near.get(), lanes ? numbers.get() : nullptr, &cells);
    made = status == HF_VQ_OK;
    that(made || status == HF_VQ_UNSUPPORTED, "cells of %d entries: status %d", w.entries, status);
  }
  const hf_vq_cells* get() const { return made ? &cells : nullptr; }
};

int64_t by_cells;  // problems

void check(const Case& it, const char* isa, Tally& tally) {
  hf_vq_rows w = it.w;
  Guarded<uint8_t> codes{size_t(w.n * it.vectors)}, others{size_t(w.n * it.vectors)};
  Guarded<uint16_t> scale{size_t(w.n * (w.in / w.group))}, other_scale{size_t(w.n * (w.in / w.group))};
  const float factors[] = {0.8f, 0.9f, 1.0f, 1.1f}, one = 1.0f;
  const int count = random_bits() % 2 ? 4 : 1;
  const bool wanted = w.x <= 2 && w.entries <= 256;
  const Near of_factors(w, factors, wanted ? count : 0, false), of_scale(w, &one, wanted ? 1 : 0, true);
  if (of_scale.made) {  // the same bits as without
    if (!tally.computed(library.encode_weight(&w, factors, count, 1, others.get(), other_scale.get()))) return;
    w.factor_cells = of_factors.get();
    w.scale_cells = of_scale.get();
    library.encode_weight(&w, factors, count, 1, codes.get(), scale.get());
    that(memcmp(codes.get(), others.get(), codes.size()) == 0 && memcmp(scale.get(), other_scale.get(), 2 * scale.size()) == 0,
         "encode %s x %d, %d entries: cells give other codes", isa, w.x, w.entries);
    library.round_weight(&w, it.scales.get(), it.feedback.get(), it.size, codes.get());
    library.round_weight(&it.w, it.scales.get(), it.feedback.get(), it.size, others.get());
    that(memcmp(codes.get(), others.get(), codes.size()) == 0, "round %s x %d, %d entries: cells give other codes", isa,
         w.x, w.entries);
    ++by_cells;
  }
  use_some_threads();
  if (!tally.computed(library.encode_weight(&w, factors, count, 0, codes.get(), scale.get()))) return;
  double u[4];
  for (int64_t r = 0; r < w.n; ++r)
    for (int64_t v = 0; v < it.vectors; ++v) {
      const double unit = half_to_float(scale[size_t(r * (w.in / w.group) + v * w.x / w.group)]);
      for (int c = 0; c < w.x; ++c) u[c] = double(it.rows[size_t(r * w.in + v * w.x + c)]) / unit;
      if (!that(it.is_nearest(u, codes[size_t(r * it.vectors + v)]), "encode %s x %d, %d entries: code %d is not the nearest",
                isa, w.x, w.entries, codes[size_t(r * it.vectors + v)]))
        return;
    }
  use_some_threads();
  if (!tally.computed(library.round_weight(&w, it.scales.get(), it.feedback.get(), it.size, codes.get()))) return;
  std::vector<double> error(size_t(w.in));
  for (int64_t r = 0; r < w.n; ++r)
    for (int64_t v = 0; v < it.vectors; ++v) {
      const int64_t first = v * w.x, block = first / it.size, start = block * it.size;
      const double unit = double(it.scales[size_t(r * (w.in / w.group) + first / w.group)]);
      const int code = codes[size_t(r * it.vectors + v)];
      double most = 0;
      for (int c = 0; c < w.x; ++c) {
        double left = double(it.rows[size_t(r * w.in + first + c)]);
        for (int64_t i = start; i < first; ++i)
          left += error[size_t(i)] * double(it.feedback[size_t((block * it.size + first + c - start) * it.size + i - start)]);
        u[c] = left / unit;
        most = std::fabs(left) > most ? std::fabs(left) : most;
        if (code < w.entries) error[size_t(first + c)] = left - it.entry(code, c) * unit;
      }
      if (most > 1e3) return;  // wild feedback: float32 has lost it
      if (!that(it.is_nearest(u, code), "round %s x %d, %d entries, blocks of %d: code %d is not the nearest", isa, w.x,
                w.entries, int(it.size), code))
        return;
    }
}

}  // namespace

void test_weight() {
  Tally tally{"weight"};
  for (int repeat = 0; repeat < 12 * repeats; ++repeat) {
    const Case it;
    for (int i = 0; i < isas.count; ++i) {
      library.use_isa(isas.names[i]);
      check(it, isas.names[i], tally);
    }
  }
  that(by_cells > 0, "no search by cells in %d repeats", 12 * repeats);
  Case wrong;
  wrong.w.x = 8;
  that(library.rows_supported(&wrong.w) == HF_VQ_UNSUPPORTED, "entries of 8 numbers are supported");
  tally.report();
}

}  // namespace hf_vq::check
