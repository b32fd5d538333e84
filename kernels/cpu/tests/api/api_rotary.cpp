// SPDX-License-Identifier: Apache-2.0
// hf_vq_rotary_table against the cosines of the C library, in double.
#include <cmath>

#include "../../kv/rotary_table.h"
#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

using kv::RotaryTable;

// cos and sin of n f as the product of the digits of n, in double: errors are those of the table.
void turn(const RotaryTable& table, int64_t n, int p, double& c, double& s) {
  c = 1;
  s = 0;
  for (int level = 0; level < kv::kDigits; ++level) {
    const int64_t at = table.digit(level, int((n - kv::kFirstToken) >> level * kv::kDigitBits & 63)) + 2 * p;
    const double by = double(table.data[at]), side = double(table.data[at + table.lanes]), before = c;
    that(table.data[at] == table.data[at + 1] && table.data[at + table.lanes] == -table.data[at + table.lanes + 1],
         "rotary_table: lanes of pair %d", p);
    c = before * by - s * side;
    s = s * by + before * side;
  }
}

void check_table(int pairs, double base) {
  Guarded<float> inv_freq{size_t(pairs)};
  for (int p = 0; p < pairs; ++p) inv_freq[size_t(p)] = float(std::pow(base, -double(p) / pairs));
  Guarded<float> data(size_t(library.rotary_table_size(pairs)));
  library.rotary_table(inv_freq.get(), pairs, pairs % 2, data.get());
  const RotaryTable table(data.get());
  that(table.pairs == pairs && table.interleaved == (pairs % 2 != 0) && table.size == int64_t(data.size()),
       "rotary_table: the header of %d pairs", pairs);
  for (int p = 0; p < pairs; ++p) {
    const double f = double(inv_freq[size_t(p)]);
    double wrong = 0;
    for (const int64_t n : {int64_t(0), int64_t(1), int64_t(255), int64_t(131072), random_int(0, 1 << 20),
                            -random_int(1, 1 << 20), kv::kFirstToken, -kv::kFirstToken - 1}) {
      double c, s;
      turn(table, n, p, c, s);
      wrong = std::fmax(wrong, std::hypot(c - std::cos(double(n) * f), s - std::sin(double(n) * f)));
    }
    wrong = std::fmax(wrong, std::fabs(double(data[size_t(table.middle + 2 * p)]) - std::cos(127.5 * f)));
    that(wrong <= 4 * 2 * kHalfUlp, "rotary_table: pair %d of %d turns by %g too much", p, pairs, wrong);
    const float* series = table.data + table.series + p * kv::kSeries;
    const auto function = [&](int row, int which, int i) {
      return double(table.functions(i)[(2 * row + which) * kv::kReach]);
    };
    const int terms = int(table.data[table.terms + p]);
    that(terms >= 0 && terms <= kv::kSeries && terms % 2 == 0, "rotary_table: %d terms", terms);
    that(terms > 0 || f * kv::kHalf > 2, "rotary_table: no series of a pair that turns by %g", f * kv::kHalf);
    for (int i = 0; i < kv::kHalf; ++i) {
      const double want[2] = {std::cos((i + 0.5) * f), std::sin((i + 0.5) * f)};
      double sums[2] = {0, 0};
      for (int k = 0; k < terms; ++k)
        sums[k % 2] += double(series[k]) * function(table.lanes / 2 + k / 2, k % 2, i);
      for (int which = 0; which < 2; ++which) {
        const double direct = function(p, which, i);
        that(std::fabs(direct - want[which]) <= 2 * kHalfUlp, "rotary_table: function %d of pair %d", which, p);
        // 2^-17 of what is left out, and the roundings of 16 terms whose factors add up to 3 at most.
        if (terms > 0)
          that(std::fabs(sums[which] - want[which]) <= 0x1p-17 + 6 * kHalfUlp,
               "rotary_table: series of pair %d is %g, not %g", p, sums[which], want[which]);
      }
    }
  }
}

}  // namespace

void test_rotary_table() {
  for (const int pairs : {0, 1, 15, 16, 17, 32, 128}) check_table(pairs, 1e4);
  for (const double base : {2.0, 10.0, 1e6}) check_table(int(random_int(1, 128)), base);
  that(library.rotary_table_size(129) == 0 && library.rotary_table_size(-1) == 0, "rotary_table: too many pairs");
}

}  // namespace hf_vq::check
