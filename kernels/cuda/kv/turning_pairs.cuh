// SPDX-License-Identifier: Apache-2.0
// Which pairs of a head's channels turn, decided by one warp (hf_vq/ops/rotary_mean.py: `KeyMoments.means`).
#pragma once
#include "primitives/rotary.cuh"

// Of hf_vq/ops/rotary_mean.py, by the same names.
constexpr float smallest_share = 0.02f, tie = 0.7f, noise = 3.0f, little = 3.0f, far = 131072.0f, different = 0.9f;
constexpr float largest_in_mean = 1267650600228229401496703205376.0f;  // 2^100

__device__ inline float in_mean(float x) { return fabsf(x) <= largest_in_mean ? x : 0.0f; }

__device__ inline float of_warp(float x) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// Squared means of pairs; a lane has pairs lane, 32 + lane, ..; of pairs that do not exist all are 0.
template <int Each> struct Energies {
  float turned[Each], stood[Each];
  bool tell[Each];  // it turns by a radian or more
};

// Whether each pair of this lane turns. `left`: mean squared norm of what is left to the codes. Returns the energy of all
// pairs that turn.
template <int Each>
__device__ inline float find_turning(const Energies<Each>& of, int pairs, float left, int tokens, bool (&turns)[Each]) {
  float all = 0.0f, told[2] = {};  // turned, stood
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    all += of.turned[i];
    if (of.tell[i]) told[0] += of.turned[i], told[1] += of.stood[i];
  }
  const float share = smallest_share * left, of_pair = 1.0f / max(pairs, 1);
  const float least = fmaxf(share, left * noise / max(tokens - 1, 1));
  const bool some = of_warp(all) > least && tokens > 1, head = of_warp(told[0]) >= tie * of_warp(told[1]) - share;
  float held = 0.0f;
#pragma unroll
  for (int i = 0; i < Each; ++i) {
    turns[i] = some && head && of.turned[i] > least * of_pair && of.turned[i] >= tie * of.stood[i] - share * of_pair;
    held += turns[i] ? of.turned[i] : 0.0f;
  }
  return of_warp(held);
}

// Let the weakest pairs stand where that saves a product of `together` pairs and gives the codes little. `given`: what a
// pair that stands gives them, 0 if it stands anyway.
template <int Each>
__device__ inline void leave_strongest(const float (&given)[Each], int pairs, float left, int together,
                                       bool (&turns)[Each]) {
  const int lane = threadIdx.x % 32;
  int rank[Each] = {};
#pragma unroll
  for (int j = 0; j < Each; ++j)
    for (int other = 0; other < min(pairs - 32 * j, 32); ++other) {
      const float its = __shfl_sync(0xffffffff, given[j], other);
#pragma unroll
      for (int i = 0; i < Each; ++i)
        rank[i] += its > given[i] || (its == given[i] && 32 * j + other < 32 * i + lane);
    }
  int count = together;
  for (int first = together; first < pairs; first += together) {
    float behind = 0.0f;
#pragma unroll
    for (int i = 0; i < Each; ++i) behind += rank[i] >= first ? given[i] : 0.0f;
    if (of_warp(behind) > little * left) count += together;
  }
#pragma unroll
  for (int i = 0; i < Each; ++i) turns[i] = turns[i] && rank[i] < count;
}
