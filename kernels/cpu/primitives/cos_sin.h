// SPDX-License-Identifier: Apache-2.0
// Cosine and sine in float64: the library is linked with no libm.
#pragma once
#include <cstdint>

namespace hf_vq {
namespace {

// cos and sin of |x| < 2^40, to 1e-8: multiples of pi / 2 are taken off in three parts, of 33 bits but for the last.
inline void cos_sin(double x, double& cosine, double& sine) {
  const double scaled = x * 0.63661977236758134308;
  const int64_t n = int64_t(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
  const double k = double(n);
  const double r = ((x - k * 1.57079632673412561417) - k * 6.07710050630396597660e-11) - k * 2.02226624879595063154e-21;
  const double z = r * r;
  double c = 1, s = 1;  // Taylor's series up to r^18 and r^19, |r| < .79
  for (int i = 18; i > 0; i -= 2) {
    c = 1 - c * z / double(i * (i - 1));
    s = 1 - s * z / double(i * (i + 1));
  }
  s *= r;
  const double turned[4][2] = {{c, s}, {-s, c}, {-c, -s}, {s, -c}};
  cosine = turned[n & 3][0];
  sine = turned[n & 3][1];
}

}  // namespace
}  // namespace hf_vq
