// SPDX-License-Identifier: Apache-2.0
// R_n m, which is subtracted from keys before they are coded, and m itself, as tokens of a static cache tell it
// (hf_vq/ops/rotary_mean.py: `rotated`, `measure_means`).
//
// Angles and m are those of attention_rotary.cuh: what is subtracted here and added there differs by less than 2^-18 of
// the pair's hypot.
#pragma once
#include "kv/turning_pairs.cuh"

struct NothingTurns {
  static constexpr bool some = false;
  template <int N, bool AtOnce> struct Part {
    __device__ Part(const NothingTurns&, int) {}
    __device__ void load() {}
  };
  __device__ void prefetch() const {}
};

// R_n m of a token of one head.
struct TurnedMean {
  static constexpr bool some = true;
  const RotaryMean& mean;
  const float* m;
  int64_t position;  // n

  // Of `N` channels from `first` on. `AtOnce`: `load` asks for all numbers while those of the token are on their way, since
  // consecutive trips to memory take longer than the rest of a launch for few tokens; else fewer registers are needed.
  template <int N, bool AtOnce> struct Part {
    static constexpr int kept = AtOnce ? N : 1;
    const TurnedMean& turned;
    int first;
    float own[kept], partner[kept], inv_freq[kept];  // m of a channel, and of the other one of its pair

    __device__ Part(const TurnedMean& turned, int first) : turned(turned), first(first) {}

    __device__ bool second(int channel) const {
      return turned.mean.interleaved ? channel % 2 : channel >= turned.mean.pairs;
    }

    __device__ void load() {
      if constexpr (AtOnce)
#pragma unroll
        for (int i = 0; i < N; ++i) load(i);
    }
    __device__ void load(int i) {
      const RotaryMean& mean = turned.mean;
      const int channel = first + i, at = i % kept, other = second(channel);
      const bool some = channel < 2 * mean.pairs;
      const int pair = mean.interleaved ? channel / 2 : other ? channel - mean.pairs : channel;
      own[at] = some ? turned.m[channel] : 0.0f;
      partner[at] = some ? turned.m[channel_of(mean, pair, !other)] : 0.0f;
      inv_freq[at] = some ? mean.inv_freq[pair] : 0.0f;
    }

    __device__ float operator()(int i) {
      if constexpr (!AtOnce) load(i);
      const int at = i % kept;
      if (own[at] == 0.0f && partner[at] == 0.0f) return 0.0f;
      float cosine, sine;
      cos_sin(2 * turned.position, turns_of(inv_freq[at]), cosine, sine);
      return fmaf(second(first + i) ? partner[at] : -partner[at], sine, __fmul_rn(own[at], cosine));
    }
  };

  // L2 prefetch of what is loaded, by a thread each for 32 bytes. It is safe while earlier kernels still write.
  __device__ void prefetch() const {
    const int at = 8 * threadIdx.x;
    if (at < 2 * mean.pairs) prefetch_line(m + at);
    if (at < mean.pairs) prefetch_line(mean.inv_freq + at);
  }
};

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
  Energies<each> energies{};
  float energy = 0.0f, best = 0.0f;
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
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      stood[i][c] *= share_of_token, turned[i][c] *= share_of_token;
      energies.turned[i] += turned[i][c] * turned[i][c], energies.stood[i] += stood[i][c] * stood[i][c];
    }
    best += fmaxf(energies.turned[i], energies.stood[i]);
    energies.tell[i] = inv_freq * count >= 1.0f;
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
  const float left = fmaxf(of_warp(energy) * share_of_token - of_warp(best), 0.0f);
  bool turns[each];
  find_turning(energies, mean.pairs, left, count, turns);
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int pair = 32 * i + lane;
    if (pair >= mean.pairs) continue;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int channel = channel_of(mean, pair, c);
      standing[channel] = turns[i] ? 0.0f : stood[i][c], m[channel] = turns[i] ? turned[i][c] : 0.0f;
    }
  }
}
