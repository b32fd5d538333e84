// SPDX-License-Identifier: Apache-2.0
// Which entries may be the nearest to a vector, by where it lies: a few of all, so that a search compares only these.
//
//     x = 2        the square [-reach, reach]^2 in 64 x 64 cells           x = 1     the line in 4096
//
//       +--+--+--+     entries that are the nearest to some vector of the cell, divided by one of the factors,
//       |  |##|  |     in ascending order, then the last one again
//       +--+--+--+
//
// A vector outside meets all entries. So what is found is what a search of all finds, to the bit.
#pragma once
#include "../kv/encode.h"

namespace hf_vq {
namespace {
namespace weight {

constexpr int kSide = 64;
static_assert(kSide * kSide == HF_VQ_CELLS, "cells of 2-vectors");
constexpr float kRoundings = 1e-5f;  // by which a place may be wrong, in units of the reach
constexpr float kSlack = 2e-6f;      // and a squared distance, in units of its square: some roundings of float32

template <int X> constexpr int cells_of_an_axis() { return X == 1 ? HF_VQ_CELLS : kSide; }

// The cell of factor * vector, whose components are `stride` apart; -1 = it is outside.
template <int X> inline int place_of(const hf_vq_cells& cells, const float* vector, int stride, float factor) {
  constexpr int kAxis = cells_of_an_axis<X>();
  const float unit = float(kAxis) / (2.0f * cells.reach);
  int place = 0;
  for (int c = 0; c < X; ++c) {
    const float x = vector[c * stride] * factor;
    if (!(x > -cells.reach && x < cells.reach)) return -1;
    const int i = int((x + cells.reach) * unit);
    place = place * kAxis + (i < kAxis ? i : kAxis - 1);
  }
  return place;
}

inline const uint8_t* entries_of(const hf_vq_cells& cells, int place) { return cells.near + int64_t(place) * cells.count; }

// apart[e] = how much farther entry e is from all of a cell's vectors / factor than another one, by the least of its
// values before and now; above 0: not the nearest to any of them, however float32 rounds what a search compares.
template <int X>
inline void compare(const kv::Entries& entries, const float* middle, float radius, float slack, float* apart) {
  alignas(64) float distance[kv::kEntries];
  Floats least = splat(kv::kInfinity);
  for (int e = 0; e < entries.count; e += kFloats) {
    Floats sum = splat(0.0f);
    for (int c = 0; c < X; ++c) {
      const Floats far = load(entries.number[c] + e) - splat(middle[c]);
      sum = fma(far, far, sum);
    }
    store(distance + e, sum);
    least = min(least, sum);
  }
  const float reached = __builtin_sqrtf(-largest(splat(0.0f) - least)) + 2.0f * radius;
  for (int e = 0; e < entries.count; e += kFloats)
    store(apart + e, min(load(apart + e), load(distance + e) - splat(reached * reached + slack)));
}

// near [HF_VQ_CELLS, HF_VQ_MOST_NEAR], of which cell i has length[i]; false if one has more.
template <int X>
inline bool list_all(const kv::Entries& entries, int known, const float* factors, int count, float reach, uint8_t* near,
                     int* length) {
  constexpr int kAxis = cells_of_an_axis<X>();
  const float half = reach / float(kAxis), radius = half * (X == 1 ? 1.0f : 1.4143f) + kRoundings * reach;
  for (int place = 0; place < HF_VQ_CELLS; ++place) {
    alignas(64) float apart[kv::kEntries];
    for (float& each : apart) each = kv::kInfinity;
    for (int f = 0; f < count; ++f) {
      float middle[X];
      for (int c = X - 1, rest = place; c >= 0; --c, rest /= kAxis)
        middle[c] = (float(2 * (rest % kAxis) + 1) * half - reach) / factors[f];
      const float size = reach / factors[f];
      compare<X>(entries, middle, radius / factors[f], kSlack * size * size, apart);
    }
    length[place] = 0;
    for (int e = 0; e < known; ++e) {
      if (apart[e] > 0.0f) continue;
      if (length[place] == HF_VQ_MOST_NEAR) return false;
      near[place * HF_VQ_MOST_NEAR + length[place]++] = uint8_t(e);
    }
  }
  return true;
}

// As long as the longest list, all lists behind each other.
inline int pack_lists(const int* length, uint8_t* near) {
  int most = 1;
  for (int place = 0; place < HF_VQ_CELLS; ++place) most = length[place] > most ? length[place] : most;
  for (int place = 0; place < HF_VQ_CELLS; ++place)
    for (int k = 0; k < most; ++k)
      near[place * most + k] = near[place * HF_VQ_MOST_NEAR + (k < length[place] ? k : length[place] - 1)];
  return most;
}

// Numbers and -|b|^2 / 2 of the entries of all cells; behind the last one of a cell what is never the nearest.
inline void write_numbers(const kv::Entries& entries, int x, const uint8_t* near, int count, float* numbers) {
  for (int place = 0; place < HF_VQ_CELLS; ++place, near += count, numbers += (x + 1) * HF_VQ_NEAR_LANES)
    for (int k = 0; k < HF_VQ_NEAR_LANES; ++k) {
      const int e = near[k < count ? k : 0];
      for (int c = 0; c < x; ++c) numbers[c * HF_VQ_NEAR_LANES + k] = k < count ? entries.number[c][e] : 0.0f;
      numbers[x * HF_VQ_NEAR_LANES + k] = k < count ? entries.bonus[e] : -kv::kInfinity;
    }
}

}  // namespace weight
}  // namespace
}  // namespace hf_vq
