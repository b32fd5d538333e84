// SPDX-License-Identifier: Apache-2.0
// R_n m, which is subtracted from keys before they are coded, and m itself, as tokens of a static cache tell it
// (hf_vq/ops/rotary_mean.py: `rotated`, `measure_means`).
//
// Angles and m are those of attention_rotary.cuh: what is subtracted here and added there differs by less than 2^-18 of
// the pair's hypot.
#pragma once
#include "primitives/rotary.cuh"

struct NothingTurns {
  static constexpr bool some = false;
};

// R_n m of a token of one head.
struct TurnedMean {
  static constexpr bool some = true;
  const RotaryMean& mean;
  const float* m;
  int64_t position;  // n

  __device__ float operator()(int channel) const {
    if (channel >= 2 * mean.pairs) return 0.0f;
    const bool second = mean.interleaved ? channel % 2 : channel >= mean.pairs;
    const int pair = mean.interleaved ? channel / 2 : second ? channel - mean.pairs : channel;
    const float a = m[channel_of(mean, pair, false)], b = m[channel_of(mean, pair, true)];
    if (a == 0.0f && b == 0.0f) return 0.0f;
    float cosine, sine;
    cos_sin(2 * position, turns_of(mean.inv_freq[pair]), cosine, sine);
    return second ? fmaf(a, sine, __fmul_rn(b, cosine)) : fmaf(-b, sine, __fmul_rn(a, cosine));
  }
};

// SMALLEST_SHARE, TIE and NOISE of hf_vq/ops/rotary_mean.py
constexpr float smallest_share = 0.02f, tie = 0.7f, noise = 3.0f;
constexpr float largest_in_mean = 1267650600228229401496703205376.0f;  // 2^100

__device__ inline float in_mean(float x) { return fabsf(x) <= largest_in_mean ? x : 0.0f; }

__device__ inline float of_warp(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// Decides, pair by pair, whether the mean of `count` tokens stands or turns, and writes both: [Dim] numbers each. (Weak
// pairs are not left out to save products, as they are where the host decides.) By one
// warp: it happens once for a row. `number(i, channel)` is that of token i, whose position is `position` + i.
template <int Dim, class Number>
__device__ inline void measure_means(const RotaryMean& mean, int64_t position, int count, float* standing, float* m,
                                     const Number& number) {
  constexpr int each = (Dim / 2 + 31) / 32;
  const int lane = threadIdx.x % 32;
  const float share_of_token = 1.0f / count;
  float stood[each][2], turned[each][2];  // means of pairs
  float energy = 0.0f, best = 0.0f, all = 0.0f;  // all: turned
  float told[2] = {};                             // by pairs that turn by a radian or more: turned, stood
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int pair = 32 * i + lane;
#pragma unroll
    for (int c = 0; c < 2; ++c) stood[i][c] = turned[i][c] = 0.0f;
    if (pair >= mean.pairs) continue;
    const int one = channel_of(mean, pair, false), other = channel_of(mean, pair, true);
    const float inv_freq = mean.inv_freq[pair];
    const uint64_t turns = turns_of(inv_freq);
    for (int token = 0; token < count; ++token) {
      const float a = number(token, one), b = number(token, other);
      float cosine, sine;
      cos_sin(2 * (position + token), turns, cosine, sine);
      stood[i][0] += in_mean(a), stood[i][1] += in_mean(b);
      turned[i][0] += in_mean(a * cosine + b * sine), turned[i][1] += in_mean(b * cosine - a * sine);
      energy += in_mean(a * a) + in_mean(b * b);
    }
    float squares[2] = {};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      stood[i][c] *= share_of_token, turned[i][c] *= share_of_token;
      squares[0] += turned[i][c] * turned[i][c], squares[1] += stood[i][c] * stood[i][c];
    }
    best += fmaxf(squares[0], squares[1]), all += squares[0];
    if (inv_freq * count >= 1.0f) told[0] += squares[0], told[1] += squares[1];
  }
  for (int channel = 2 * mean.pairs + lane; channel < Dim; channel += 32) {
    float sum = 0.0f;
    for (int token = 0; token < count; ++token) {
      const float a = number(token, channel);
      sum += in_mean(a), energy += in_mean(a * a);
    }
    sum *= share_of_token;
    best += sum * sum;
    standing[channel] = sum, m[channel] = 0.0f;
  }
  const float left = fmaxf(of_warp(energy) * share_of_token - of_warp(best), 0.0f), share = smallest_share * left;
  const float least = fmaxf(share, left * noise / max(count - 1, 1)), of_pair = 1.0f / max(mean.pairs, 1);
  const bool some = of_warp(all) > least && count > 1, head = of_warp(told[0]) >= tie * of_warp(told[1]) - share;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int pair = 32 * i + lane;
    if (pair >= mean.pairs) continue;
    const float moved = turned[i][0] * turned[i][0] + turned[i][1] * turned[i][1];
    const float fixed = stood[i][0] * stood[i][0] + stood[i][1] * stood[i][1];
    const bool turns = some && head && moved > least * of_pair && moved >= tie * fixed - share * of_pair;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int channel = channel_of(mean, pair, c);
      standing[channel] = turns ? 0.0f : stood[i][c], m[channel] = turns ? turned[i][c] : 0.0f;
    }
  }
}
