// SPDX-License-Identifier: Apache-2.0
// The nearest entry of each sub-vector of a row: c_s = argmin_c |u_s - b_c|.
//
//   shared, x = 1, ascending   the midpoints below u are counted, kFloats numbers at once; for 16 entries by
//                              four steps of a binary search in registers
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
  alignas(64) float tree[4][8];        // of 16 entries: the midpoints that step k of the search compares with
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
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 8; ++i) entries.tree[k][i] = entries.middle[i < 1 << k ? (2 * i + 1) * (8 >> k) - 1 : 0];
}

// code[i] = the nearest level of factor * x[i]; returns <x, those levels>. n numbers, a multiple of 16, of
// which those from dim on are 0 and their codes nothing.
inline float nearest_levels(const Entries& entries, const float* x, int n, float factor, uint8_t* code) {
  Floats along = splat(0.0f);
  for (int i = 0; i < n; i += kFloats) {
    const Floats number = load(x + i), unit = number * splat(factor);
    Ints index = zero_ints();
    if (entries.count == 16) {
      for (int k = 0; k < 4; ++k) index = count_less(index + index, pick<8>(entries.tree[k], index), unit);
      along = fma(number, pick<16>(entries.number[0], index), along);
      store_low_bytes(code + i, index);
      continue;
    }
    for (int e = 0; e + 1 < entries.count; ++e) index = count_less(index, splat(entries.middle[e]), unit);
    store_low_bytes(code + i, index);
    alignas(64) float level[kFloats];
    for (int k = 0; k < kFloats; ++k) level[k] = entries.number[0][code[i + k]];
    along = fma(number, load(level), along);
  }
  return sum(along);
}

// <u, b> - |b|^2 / 2; every search computes it in this order, so that equal means equal.
template <int X> inline Floats affinity(const Floats (&u)[X], const Floats (&b)[X], Floats bonus) {
  for (int c = 0; c < X; ++c) bonus = fma(u[c], b[c], bonus);
  return bonus;
}

// The first of entries begin..begin + 15 whose affinity to u [X] is `best`; one of them if none is.
template <int X> inline int find_entry(const Entries& entries, int begin, const float* u, float best) {
  Floats vector[X], b[X];
  for (int c = 0; c < X; ++c) vector[c] = splat(u[c]);
  int e = begin, lane = kFloats;
  for (; e < begin + kSome; e += kFloats) {
    for (int c = 0; c < X; ++c) b[c] = load(entries.number[c] + e);
    lane = first_at_least(affinity<X>(vector, b, load(entries.bonus + e)), splat(best));
    if (lane < kFloats) return e + lane;
  }
  return begin;
}

// u [n][X] -> part[c][i]; n is a multiple of kFloats.
template <int X, int N> inline void split_vectors(const float* u, float (&part)[X][N]) {
  if constexpr (X == 1) {
    memcpy(part[0], u, sizeof part);
  } else if constexpr (X == 2) {
    unzip_all(u, 2 * N, part[0], part[1]);
  } else {
    float even[2 * N], odd[2 * N];
    unzip_all(u, 4 * N, even, odd);
    unzip_all(even, 2 * N, part[0], part[2]);
    unzip_all(odd, 2 * N, part[1], part[3]);
  }
}

// Codes of the first `count` of V kFloats sub-vectors u; returns sum_s <u_s, b_code(s)>.
template <int X, int V> inline float nearest_some(const Entries& entries, const float* u, int count, uint8_t* code) {
  constexpr float kLowest = -3e38f;
  alignas(64) float part[X][V * kFloats], best[V * kFloats];
  alignas(64) int32_t begin[V * kFloats];
  split_vectors(u, part);
  Floats vector[V][X], top[V];
  Ints block[V];
  for (int k = 0; k < V; ++k) {
    for (int c = 0; c < X; ++c) vector[k][c] = load(part[c] + k * kFloats);
    top[k] = splat(kLowest);
    block[k] = zero_ints();
  }
  for (int e = 0; e < entries.count; e += kSome) {
    Floats highest[V];
    for (Floats& each : highest) each = splat(kLowest);
    for (int i = e; i < e + kSome; ++i) {
      Floats b[X];
      for (int c = 0; c < X; ++c) b[c] = splat(entries.number[c][i]);
      const Floats bonus = splat(entries.bonus[i]);
      for (int k = 0; k < V; ++k) highest[k] = max(affinity<X>(vector[k], b, bonus), highest[k]);
    }
    for (int k = 0; k < V; ++k) {
      block[k] = where_less(top[k], highest[k], splat_int(e), block[k]);
      top[k] = max(highest[k], top[k]);
    }
  }
  for (int k = 0; k < V; ++k) {
    store(best + k * kFloats, top[k]);
    store(begin + k * kFloats, block[k]);
  }
  float along = 0.0f;
  for (int i = 0; i < count; ++i) {
    code[i] = uint8_t(find_entry<X>(entries, begin[i], u + i * X, best[i]));
    along += best[i] - entries.bonus[code[i]];
  }
  return along;
}

// Codes of `vectors` sub-vectors u; returns sum_s <u_s, b_code(s)>. u may be read up to 64 numbers X further on.
template <int X> float nearest_vectors(const Entries& entries, const float* u, int vectors, uint8_t* code) {
  constexpr int kMany = X <= 2 ? 4 : 2;
  float along = 0.0f;
  while (vectors > 0) {
    const bool many = vectors > 2 * kFloats;
    const int room = (many ? kMany : 2) * kFloats, count = vectors < room ? vectors : room;
    along += many ? nearest_some<X, kMany>(entries, u, count, code) : nearest_some<X, 2>(entries, u, count, code);
    u += count * X;
    code += count;
    vectors -= count;
  }
  return along;
}

// Codes of the sub-vectors of x / rms under a shared codebook; returns <x, the chosen entries>. x [dim], then
// zeros up to a multiple of 16.
inline float nearest_shared(const Entries& entries, const float* x, int dim, float rms, uint8_t* code) {
  const float factor = 1.0f / rms;
  if (entries.ascending) return nearest_levels(entries, x, padded(dim), factor, code);
  alignas(64) float unit[kDim + 64 * kComponents];
  for (int i = 0; i < padded(dim); i += kFloats) store(unit + i, load(x + i) * splat(factor));
  for (int i = padded(dim); i < padded(dim) + 64 * entries.x; i += kFloats) store(unit + i, splat(0.0f));
  const int vectors = dim / entries.x;
  if (entries.x == 1) return rms * nearest_vectors<1>(entries, unit, vectors, code);
  if (entries.x == 2) return rms * nearest_vectors<2>(entries, unit, vectors, code);
  return rms * nearest_vectors<4>(entries, unit, vectors, code);
}

// The entry of number[component][entry] nearest to u [X]; one of them if u is NaN.
template <int X> inline int nearest_entry(const Components& number, int count, const float* u) {
  Floats vector[X], best = splat(kInfinity), begin = splat(0.0f);
  for (int c = 0; c < X; ++c) vector[c] = splat(u[c]);
  for (int e = 0; e < count; e += kFloats) {
    Floats distance = splat(0.0f);
    for (int c = 0; c < X; ++c) {
      const Floats apart = load(number[c] + e) - vector[c];
      distance = fma(apart, apart, distance);
    }
    begin = where_less(distance, best, splat(float(e)), begin);
    best = min(distance, best);
  }
  const Floats lowest = splat(-largest(splat(0.0f) - best));
  const int lane = first_at_least(lowest, best) % kFloats;
  alignas(64) float begins[kFloats];
  store(begins, begin);
  return int(begins[lane]) + lane;
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
