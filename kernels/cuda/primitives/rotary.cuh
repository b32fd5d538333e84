// SPDX-License-Identifier: Apache-2.0
// Angles of rotary position embeddings, position times frequency, at positions up to 2^29.
//
// An angle of 10^5 radians has no fraction to speak of in float32. Here a frequency is a 64-bit fraction of a turn, and a
// product modulo 2^64 drops whole turns exactly:
//
//     f / 4 pi = 2^-64 w        2n w mod 2^64 = the fraction of a turn of n f, wrong by 2^-64 * 2n
//
// Positions are doubled, because blocks of an even number of tokens have their middle between two tokens. cos and sin are
// wrong by 2^-20.5 (sin.approx of PTX) + 2^-23 (the rounded angle): together less than 2^-20.
#pragma once
#include "primitives/numbers.cuh"

// Arguments of kernels that turn means of keys.
struct RotaryMean {
  const float* mean;      // m, [B, H, D]
  const float* inv_freq;  // [pairs] radians per token, of pairs of channels
  int64_t row, head;      // numbers, from one m to the next
  int pairs;              // channels 2 pairs .. D are not turned
  int interleaved;        // pairs are channels (2 p, 2 p + 1), else (p, p + pairs)
  int64_t start;          // position of the token at index 0
};

// Arguments of a kernel, and a rotary mean if the plan has one: without it nothing is added to them.
template <class Arguments, bool Some> struct WithRotaryMean : Arguments {};
template <class Arguments> struct WithRotaryMean<Arguments, true> : Arguments {
  RotaryMean rotary;
};
template <class Arguments> __device__ inline const RotaryMean& rotary_of(const Arguments& a) {
  static_assert(sizeof(WithRotaryMean<Arguments, true>) == sizeof(Arguments) + sizeof(RotaryMean), "one after the other");
  return static_cast<const WithRotaryMean<Arguments, true>&>(a).rotary;
}

template <bool Some, class Arguments> __device__ inline const RotaryMean* rotary_or_null(const Arguments& a) {
  if constexpr (Some) return &rotary_of(a);
  return nullptr;
}

// The first, or the second, channel of a pair.
__device__ inline int channel_of(const RotaryMean& mean, int pair, bool second) {
  return mean.interleaved ? 2 * pair + second : pair + (second ? mean.pairs : 0);
}

// w of a frequency in radians per token.
__device__ inline uint64_t turns_of(float inv_freq) {
  // mantissa 2^(exponent - 150) / 4 pi, with 2 / pi = 2^-64 0xa2f9...
  const uint32_t bits = __float_as_uint(inv_freq), mantissa = (bits & 0x7fffff) | 0x800000;
  const uint64_t product = __umul64hi(uint64_t(mantissa) << 40, 0xa2f9836e4e44152aull);
  const int shift = int(bits >> 23 & 0xff) - 129;
  if (shift <= -64 || shift >= 64 || (bits & 0x7fffffff) < 0x800000) return 0;  // no angle, or none that makes sense
  const uint64_t turns = shift < 0 ? product >> -shift : product << shift;
  return bits >> 31 ? 0 - turns : turns;
}

// cos and sin of an angle in units of 2 pi / 2^32.
__device__ inline void cos_sin(int phase, float& cosine, float& sine) {
  const float angle = float(phase) * 1.4629180792671596e-9f;
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(cosine) : "f"(angle));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(sine) : "f"(angle));
}

// cos and sin of the angle at half of `twice`.
__device__ inline void cos_sin(int64_t twice, uint64_t turns, float& cosine, float& sine) {
  cos_sin(int(uint64_t(twice) * turns >> 32), cosine, sine);
}
