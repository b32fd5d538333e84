// SPDX-License-Identifier: Apache-2.0
// The nearest entry of each sub-vector of a row: c_s = argmin_c |u_s - b_c|.
//
//   shared, x = 1, ascending   entries passed on the way up: one comparison per midpoint, kFloats numbers
//                              at once
//   shared                     argmax <u, b> - |b|^2 / 2 for kFloats sub-vectors at once, sixteen entries
//                              at a time; the winning sixteen are then searched for the entry
//   one codebook per s         argmin |u_s - b|^2, kFloats entries at once
#pragma once
#include "tables.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kSome = 16;  // entries searched together

// A codebook that all sub-vectors share.
struct Entries {
  alignas(64) Components number;
  alignas(64) float bonus[kEntries];   // -|b|^2 / 2
  alignas(64) float middle[kEntries];  // of entries i and i + 1
  int count, x;
  bool ascending;
};

inline void read_entries(const uint16_t* codebook, int count, int x, Entries& entries) {
  entries.count = count;
  entries.x = x;
  read_entries(codebook, count, x, entries.number);
  for (int e = 0; e < count; ++e) {
    float norm = 0.0f;
    for (int c = 0; c < x; ++c) norm += entries.number[c][e] * entries.number[c][e];
    entries.bonus[e] = -0.5f * norm;
  }
  entries.ascending = x == 1;
  for (int e = 0; e + 1 < count && entries.ascending; ++e) {
    entries.middle[e] = (entries.number[0][e] + entries.number[0][e + 1]) / 2;
    entries.ascending = entries.number[0][e] <= entries.number[0][e + 1];
  }
}

// code[i] = the nearest level of u[i], chosen[i] = that level; n numbers in buffers of a multiple of 16.
inline void nearest_levels(const Entries& entries, const float* u, int n, uint8_t* code, float* chosen) {
  for (int i = 0; i < n; i += kFloats) {
    const Floats number = load(u + i);
    Floats index = splat(0.0f), level = splat(entries.number[0][0]);
    for (int e = 0; e + 1 < entries.count; ++e) {
      const Floats middle = splat(entries.middle[e]);
      index = where_less(middle, number, splat(float(e + 1)), index);
      level = where_less(middle, number, splat(entries.number[0][e + 1]), level);
    }
    store_low_bytes(code + i, to_ints(index));
    store(chosen + i, level);
  }
}

// <u, b> - |b|^2 / 2; every search computes it in this order, so that equal means equal.
template <int X> inline Floats affinity(const Floats (&u)[X], const Floats (&b)[X], Floats bonus) {
  for (int c = 0; c < X; ++c) bonus = fma(u[c], b[c], bonus);
  return bonus;
}

// The first of entries begin..begin + 15 whose affinity to one sub-vector is `best` (begin if none is).
template <int X> inline int find_entry(const Entries& entries, int begin, const float* u, float best) {
  constexpr float kNone = 1e9f;
  Floats vector[X], first = splat(kNone);
  for (int c = 0; c < X; ++c) vector[c] = splat(u[c]);
  for (int e = 0; e < kSome; e += kFloats) {
    alignas(64) float index[kFloats];
    for (int i = 0; i < kFloats; ++i) index[i] = float(e + i);
    Floats b[X];
    for (int c = 0; c < X; ++c) b[c] = load(entries.number[c] + begin + e);
    const Floats score = affinity<X>(vector, b, load(entries.bonus + begin + e));
    first = min(first, where_less(score, splat(best), splat(kNone), load(index)));
  }
  const float found = -largest(splat(0.0f) - first);
  return found == kNone ? begin : begin + int(found);
}

// code[s] of `vectors` sub-vectors u[s X + c]; buffers of a multiple of 16 sub-vectors.
template <int X> void nearest_vectors(const Entries& entries, const float* u, int vectors, uint8_t* code) {
  constexpr int kVectors = 16 / kFloats < 2 ? 2 : 16 / kFloats;  // of kFloats sub-vectors, at once
  for (int s = 0; s < vectors; s += kVectors * kFloats) {
    alignas(64) float part[X][kVectors * kFloats], best[kVectors * kFloats];
    alignas(64) int32_t begin[kVectors * kFloats];
    const int count = vectors - s < kVectors * kFloats ? vectors - s : kVectors * kFloats;
    for (int i = 0; i < kVectors * kFloats; ++i)
      for (int c = 0; c < X; ++c) part[c][i] = u[(s + (i < count ? i : 0)) * X + c];
    Floats vector[kVectors][X], top[kVectors];
    Ints block[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      for (int c = 0; c < X; ++c) vector[k][c] = load(part[c] + k * kFloats);
      top[k] = splat(-3e38f);
      block[k] = zero_ints();
    }
    for (int e = 0; e < entries.count; e += kSome) {
      Floats highest[kVectors];
      for (Floats& each : highest) each = splat(-3e38f);
      for (int i = e; i < e + kSome; ++i) {
        Floats b[X];
        for (int c = 0; c < X; ++c) b[c] = splat(entries.number[c][i]);
        const Floats bonus = splat(entries.bonus[i]);
        for (int k = 0; k < kVectors; ++k) highest[k] = max(affinity<X>(vector[k], b, bonus), highest[k]);
      }
      for (int k = 0; k < kVectors; ++k) {
        block[k] = where_less(top[k], highest[k], splat_int(e), block[k]);
        top[k] = max(highest[k], top[k]);
      }
    }
    for (int k = 0; k < kVectors; ++k) {
      store(best + k * kFloats, top[k]);
      store(begin + k * kFloats, block[k]);
    }
    for (int i = 0; i < count; ++i)
      code[s + i] = uint8_t(find_entry<X>(entries, begin[i], u + (s + i) * X, best[i]));
  }
}

// Codes of a row u [dim] under a shared codebook, and the row of the chosen entries.
inline void nearest_shared(const Entries& entries, const float* u, int dim, uint8_t* code, float* chosen) {
  const int x = entries.x, vectors = dim / x;
  if (entries.ascending) {
    nearest_levels(entries, u, dim, code, chosen);
    return;
  }
  if (x == 1) nearest_vectors<1>(entries, u, vectors, code);
  if (x == 2) nearest_vectors<2>(entries, u, vectors, code);
  if (x == 4) nearest_vectors<4>(entries, u, vectors, code);
  for (int s = 0; s < vectors; ++s)
    for (int c = 0; c < x; ++c) chosen[s * x + c] = entries.number[c][code[s]];
}

// The entry of number[component][entry] nearest to u [X]; the first one if u is NaN.
template <int X> inline int nearest_entry(const Components& number, int count, const float* u) {
  Floats vector[X], best = splat(kInfinity), index = splat(0.0f);
  for (int c = 0; c < X; ++c) vector[c] = splat(u[c]);
  for (int e = 0; e < count; e += kFloats) {
    Floats distance = splat(0.0f);
    for (int c = 0; c < X; ++c) {
      const Floats apart = load(number[c] + e) - vector[c];
      distance = fma(apart, apart, distance);
    }
    index = where_less(distance, best, splat(float(e)), index);
    best = min(distance, best);
  }
  alignas(64) float distances[kFloats], begins[kFloats];
  store(distances, best);
  store(begins, index);
  int lane = 0;
  for (int i = 1; i < kFloats; ++i)
    if (distances[i] < distances[lane]) lane = i;
  return int(begins[lane]) + lane;
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
