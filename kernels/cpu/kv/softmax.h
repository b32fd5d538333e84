// SPDX-License-Identifier: Apache-2.0
// Softmax in one pass over a stream of logits (Milakov and Gimelshein's running maximum), and its
// weights as numbers of 2 * kWeightBits bits.
#pragma once
#include "tables.h"

namespace hf_vq {
namespace {
namespace kv {

// e^x for x <= 0; below -87 it is 0. Cephes' polynomial: a relative error of 2e-7.
inline Floats exp_of(Floats x) {
  const Floats y = max(x, splat(-87.0f));  // and NaN becomes -87
  const Ints whole = to_ints(y * splat(1.44269504f));
  const Floats n = to_floats(whole);
  const Floats r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), y));  // y - n log 2
  Floats p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r + splat(1.0f));
  return where_less(x, splat(-87.0f), splat(0.0f), p * exp2_of(whole));
}

inline float exp_of(float x) {
  float all[kFloats];
  store(all, exp_of(splat(x)));
  return all[0];
}

// tanh x = sign(x) (1 - 2 t / (1 + t)), t = e^(-2 |x|)
inline Floats tanh_of(Floats x) {
  const Floats magnitude = max(x, splat(0.0f) - x);
  const Floats t = exp_of(magnitude * splat(-2.0f));
  const Floats y = (splat(1.0f) - t) / (splat(1.0f) + t);
  return where_less(x, splat(0.0f), splat(0.0f) - y, where_less(x, splat(kInfinity), y, x));
}

// The running sums of one query.
struct Running {
  float largest;  // of the logits so far; they count as e^(logit - largest)
  float total;    // of those
  bool broken;    // some logit or scale was infinite or NaN
};

constexpr Running kNothing = {-kInfinity, 0.0f, false};

// Logits s [n] become e^(s - largest); n is a multiple of kFloats, tokens out of sight are -infinity.
// `grown`: what sums over earlier tokens must be multiplied with. False if nothing is in sight.
inline bool soften(Running& run, float* s, int n, float& grown) {
  Floats top = splat(-kInfinity), sums = splat(0.0f);  // of fractions, which do not overflow
  for (int i = 0; i < n; i += kFloats) {
    const Floats x = load(s + i);
    top = max(x, top);
    sums = fma(x, splat(0x1p-10f), sums);
  }
  if (!(sum(sums) < kInfinity)) run.broken = true;
  const float highest = largest(top);
  grown = 1.0f;
  if (highest == -kInfinity || run.broken) return false;
  if (highest > run.largest) {
    grown = exp_of(run.largest - highest);
    run.largest = highest;
    run.total *= grown;
  }
  Floats total = splat(0.0f);
  for (int i = 0; i < n; i += kFloats) {
    const Floats p = exp_of(load(s + i) - splat(run.largest));
    store(s + i, p);
    total = total + p;
  }
  run.total += sum(total);
  return true;
}

// step * (high << kWeightBits | low) of each token of a block.
struct Weights {
  alignas(64) uint8_t high[kBlock];
  alignas(64) uint8_t low[kBlock];
  float step;  // 0: all are zero
};

// The largest and the smallest of p [256] times scale [256], which becomes p; false if one of them is
// infinite or NaN. Where p is 0 the product is.
inline bool scale_weights(float* p, const float* scale, float& highest, float& lowest) {
  Floats top = splat(0.0f), bottom = splat(0.0f), finite = splat(0.0f);
  for (int i = 0; i < kBlock; i += kFloats) {
    const Floats weight = load(p + i);
    const Floats x = where_less(splat(0.0f), weight, weight * load(scale + i), splat(0.0f));
    store(p + i, x);
    top = max(x, top);
    bottom = min(x, bottom);
    finite = fma(x, splat(0.0f), finite);
  }
  highest = largest(top);
  lowest = -largest(splat(0.0f) - bottom);
  return sum(finite) == 0.0f;
}

// The positive ones of sign * x [256], whose largest is given, rounded to 2 kWeightBits bits.
inline void round_weights(const float* x, float sign, float highest, Weights& w) {
  constexpr float kSteps = float((1 << 2 * kWeightBits) - 1);
  w.step = highest > kSmallest ? highest / kSteps : 0.0f;
  if (w.step == 0.0f) return;
  const Floats factor = splat(sign * kSteps / highest);
  for (int i = 0; i < kBlock; i += kFloats) {
    const Ints whole = to_ints(min(max(load(x + i) * factor, splat(0.0f)), splat(kSteps)));
    store_low_bytes(w.high + i, high_bits<kWeightBits>(whole));
    store_low_bytes(w.low + i, low_bits<kWeightBits>(whole));
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
