// SPDX-License-Identifier: Apache-2.0
// R_n m at one token n, from the digits of n (rotary_table.h).
#pragma once
#include "rotary_table.h"
#include "tables.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kTurnLanes = 2 * kMostPairs;

// The turn by n tokens: (cos, cos) and (sin, -sin) of each pair.
struct Turn {
  alignas(64) float cosine[kTurnLanes];
  alignas(64) float sine[kTurnLanes];
};

// turn <- the turn by both angles.
inline void turn_on(const float* by, int lanes, Turn& turn) {
  for (int i = 0; i < lanes; i += kFloats) {
    const Floats c = load(turn.cosine + i), s = load(turn.sine + i), other = load(by + i), side = load(by + lanes + i);
    store(turn.cosine + i, c * other - s * side);
    store(turn.sine + i, fma(s, other, c * side));
  }
}

// The digits of n from `level` on.
inline void turn_by(const RotaryTable& table, int64_t n, int level, Turn& turn) {
  const int64_t number = n - kFirstToken;
  const auto digit = [&](int l) {
    return table.data + table.digit(l, int(number >> l * kDigitBits & (kDigitValues - 1)));
  };
  memcpy(turn.cosine, digit(level), size_t(table.lanes) * 4);
  memcpy(turn.sine, digit(level) + table.lanes, size_t(table.lanes) * 4);
  while (++level < kDigits) turn_on(digit(level), table.lanes, turn);
}

inline bool turns(const hf_vq_codes& codes) { return codes.rotary_mean != nullptr; }

// Whether the table is one for such rows.
inline bool rotary_supported(const hf_vq_codes& codes) {
  if (!turns(codes)) return true;
  const float pairs = codes.rotary_table[0];
  return pairs >= 0.0f && pairs <= float(kMostPairs) && 2 * int(pairs) <= codes.dim;
}

inline const float* rotary_mean_of(const hf_vq_codes& codes, int64_t batch, int64_t head) {
  return codes.rotary_mean + batch * codes.rotary_stride[0] + head * codes.rotary_stride[1];
}

// Whether a head turns at all: others have zeros.
inline bool any_turns(const float* m, int dim) {
  int i = 0;
  while (i < dim && m[i] == 0.0f) ++i;
  return i < dim;
}

// to [dim] <- mean + R_n m
inline void add_turned(const RotaryTable& table, const Turn& turn, const float* mean, const float* m, int dim,
                       float* to) {
  for (int i = 0; i < dim; ++i) to[i] = mean[i] + (i < 2 * table.pairs ? 0.0f : m[i]);
  for (int p = 0; p < table.pairs; ++p) {
    const int first = table.first(p), second = table.second(p);
    const float c = turn.cosine[2 * p], s = turn.sine[2 * p], a = m[first], b = m[second];
    to[first] += a * c - b * s;
    to[second] += b * c + a * s;
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
