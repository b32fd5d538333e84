// SPDX-License-Identifier: Apache-2.0
// R_n m, which is subtracted from keys before they are coded, and m itself, as tokens of a static cache tell it
// (hf_vq/ops/rotary_mean.py: `rotated`, `measure_means`).
//
// Angles and m are those of attention_rotary.cuh: what is subtracted here and added there differs by less than 2^-18 of
// the pair's hypot.
#pragma once
#include "kv/turning_pairs.cuh"

// A channel of R_n m, of what is m there and at the other channel of its pair.
struct TurningChannel {
  float own = 0.0f, partner = 0.0f;
  uint64_t turns = 0;

  // May come before the grids that are waited for: frequencies are copied before a prompt (cache/static_layer.py), and
  // other kernels run between.
  __device__ void load_frequency(const RotaryMean& mean, int channel) {
    if (channel < 2 * mean.pairs) turns = turns_of(mean.inv_freq[pair_of(mean, channel)]);
  }

  __device__ void load(const RotaryMean& mean, const float* m, int channel) {
    if (channel >= 2 * mean.pairs) return;
    const bool second = is_second(mean, channel);
    own = m[channel], partner = m[channel_of(mean, pair_of(mean, channel), !second)];
  }

  __device__ float at(const RotaryMean& mean, int channel, int64_t position) const {
    float cosine, sine;
    cos_sin(2 * position, turns, cosine, sine);
    return fmaf(is_second(mean, channel) ? partner : -partner, sine, __fmul_rn(own, cosine));
  }

 private:
  static __device__ bool is_second(const RotaryMean& mean, int channel) {
    return mean.interleaved ? channel % 2 : channel >= mean.pairs;
  }
  static __device__ int pair_of(const RotaryMean& mean, int channel) {
    return mean.interleaved ? channel / 2 : channel - (is_second(mean, channel) ? mean.pairs : 0);
  }
};

// What a row of tokens has of R_n m: nothing, or numbers in shared memory, or what is computed for it.
struct NothingTurns {
  static constexpr bool some = false;
  template <int N> struct Part {
    __device__ Part(const NothingTurns&, int) {}
    __device__ void load() {}
  };
};

struct TurnedRow {
  static constexpr bool some = true;
  const float* row;
  int first;  // channel of row[0]

  template <int N> struct Part {
    const float* from;
    float number[N];
    __device__ Part(const TurnedRow& turned, int channel) : from(turned.row + channel - turned.first) {}
    __device__ void load() { load_floats<Dtype::FLOAT32>(from, number); }
    __device__ float operator()(int i) const { return number[i]; }
  };
};

struct TurnedMean {
  static constexpr bool some = true;
  const RotaryMean& mean;
  const float* m;
  int64_t position;  // n

  template <int N> struct Part {
    const RotaryMean& mean;
    const float* m;
    int64_t position;
    int first;
    __device__ Part(const TurnedMean& turned, int channel)
        : mean(turned.mean), m(turned.m), position(turned.position), first(channel) {}
    __device__ void load() {}
    __device__ float operator()(int i) const {
      TurningChannel channel;
      channel.load_frequency(mean, first + i);
      channel.load(mean, m, first + i);
      return channel.own == 0.0f && channel.partner == 0.0f ? 0.0f : channel.at(mean, first + i, position);
    }
  };
};

// R_n m for up to `Rows` tokens per call, channels `first` to `first` + Channels, by `Threads` threads: a warp or a block.
// Where there are few tokens, a thread computes a channel for all others, and has its frequency before it waits for the
// grids before.
template <bool Rotary, bool Few, int Threads, int Channels, int Rows> struct Turner {
  __device__ Turner(const RotaryMean*, int, uint32_t*) {}
  __device__ NothingTurns operator()(const float*, int64_t, int, int) const { return {}; }
};

template <int Threads, int Channels, int Rows> struct Turner<true, false, Threads, Channels, Rows> {
  const RotaryMean& mean;
  __device__ Turner(const RotaryMean* mean, int, uint32_t*) : mean(*mean) {}
  __device__ TurnedMean operator()(const float* m, int64_t position, int, int row) const { return {mean, m, position + row}; }
};

template <int Threads, int Channels, int Rows> struct Turner<true, true, Threads, Channels, Rows> {
  static constexpr int across = Channels > 128 ? 256 : Channels > 64 ? 128 : Channels > 32 ? 64 : 32;  // threads for a row
  static_assert(across <= Threads, "a thread for each channel");
  const RotaryMean& mean;
  int first, at, row;  // channel and first row of this thread
  TurningChannel channel;
  float* numbers;  // [Rows][Channels], in shared memory

  __device__ Turner(const RotaryMean* mean, int first, uint32_t* shared) : mean(*mean), first(first) {
    at = threadIdx.x % across, row = threadIdx.x % Threads / across;
    numbers = reinterpret_cast<float*>(shared) + threadIdx.x / Threads * Rows * Channels;
    channel.load_frequency(*mean, first + at);
  }

  // Row `of` of `count` tokens from `position` on. All of the threads.
  __device__ TurnedRow operator()(const float* m, int64_t position, int count, int of) {
    synchronize();  // earlier rows were read
    if (at < Channels && row < count) {
      channel.load(mean, m, first + at);
      for (int token = row; token < count; token += Threads / across)
        numbers[token * Channels + at] = channel.at(mean, first + at, position + token);
    }
    synchronize();
    return {numbers + of * Channels, first};
  }

 private:
  static __device__ void synchronize() {
    if constexpr (Threads > 32) __syncthreads();
    else __syncwarp();
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
