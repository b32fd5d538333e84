// SPDX-License-Identifier: Apache-2.0
// hf_vq_rotary_table: the array that kv/rotary_table.h draws, in float64.
#include "../kv/rotary_table.h"
#include "../primitives/cos_sin.h"

#include <string.h>

namespace hf_vq {
namespace {
namespace kv {

// The (cos, cos), (sin, -sin) of `distance` tokens, for each pair.
void write_turn(const float* inv_freq, const RotaryTable& table, double distance, float* to) {
  for (int p = 0; p < table.pairs; ++p) {
    double c, s;
    cos_sin(double(inv_freq[p]) * distance, c, s);
    to[2 * p] = to[2 * p + 1] = float(c);
    to[table.lanes + 2 * p] = float(s);
    to[table.lanes + 2 * p + 1] = float(-s);
  }
}

// One of the two functions of p, at distance number i.
void write_functions(const RotaryTable& table, int i, int p, int which, double value, float* to) {
  to[table.functions(i) - table.data + (2 * p + which) * kReach] = float(value);
}

constexpr int kNodes = 32;
constexpr double kPi = 3.14159265358979323846, kLeftOut = 0x1p-17;

// Chebyshev's series of cos u f (even terms) and sin u f (odd ones), from their values at the nodes.
float write_series(double f, float* series) {
  double term[kNodes] = {};
  for (int i = 0; i < kNodes; ++i) {
    const double theta = kPi * (i + 0.5) / kNodes;
    double node, unused, c, s;
    cos_sin(theta, node, unused);
    cos_sin(f * kHalf * node, c, s);
    double before = 1, here = node;  // T_0, T_1
    for (int k = 0; k < kNodes; ++k) {
      term[k] += (k == 0 ? 1.0 : 2.0) / kNodes * before * (k % 2 == 0 ? c : s);
      const double next = 2 * node * here - before;
      before = here;
      here = next;
    }
  }
  double left_out = 0;
  int count = kNodes;
  for (; count > 0; count -= 2) {
    for (int k = count - 2; k < count; ++k) left_out += term[k] < 0 ? -term[k] : term[k];
    if (left_out > kLeftOut) break;
  }
  for (int k = 0; k < kSeries; ++k) series[k] = float(term[k]);
  return count > kSeries ? 0.0f : float(count > 0 ? count : 2);
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq

int64_t hf_vq_rotary_table_size(int32_t pairs) {
  return pairs < 0 || pairs > hf_vq::kv::kMostPairs ? 0 : hf_vq::kv::RotaryTable(nullptr, pairs, false).size;
}

void hf_vq_rotary_table(const float* inv_freq, int32_t pairs, int32_t interleaved, float* to) {
  using namespace hf_vq;
  using namespace hf_vq::kv;
  const RotaryTable table(to, pairs, interleaved != 0);
  memset(to, 0, size_t(table.size) * sizeof(float));
  to[0] = float(pairs);
  to[1] = float(interleaved != 0);
  int64_t weight = 1;
  for (int level = 0; level < kDigits; ++level, weight *= kDigitValues)
    for (int value = 0; value < kDigitValues; ++value) {
      const int64_t tokens = (level < kDigits - 1 ? value : value - kDigitValues / 2) * weight;
      write_turn(inv_freq, table, double(tokens), to + table.digit(level, value));
    }
  write_turn(inv_freq, table, kHalf - 0.5, to + table.middle);
  for (int p = 0; p < pairs; ++p) {
    for (int i = 0; i < kHalf; ++i) {
      double c, s;
      cos_sin(double(inv_freq[p]) * (i + 0.5), c, s);
      write_functions(table, i, p, 0, c, to);
      write_functions(table, i, p, 1, s, to);
    }
    to[table.terms + p] = write_series(double(inv_freq[p]), to + table.series + p * kSeries);
  }
  for (int i = 0; i < kHalf; ++i) {
    const double x = (i + 0.5) / kHalf;
    double before = 1, here = x;
    for (int k = 0; k < kSeries; ++k) {
      write_functions(table, i, table.lanes / 2 + k / 2, k % 2, before, to);
      const double next = 2 * x * here - before;
      before = here;
      here = next;
    }
  }
}
