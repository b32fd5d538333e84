// SPDX-License-Identifier: Apache-2.0
// The nearest entry of each sub-vector u_s: c_s = argmin_c |u_s - b_c|, for kTogether rows in parallel. Row r is lane
// r of all arrays: component c of sub-vector s is at u[(s x + c) kTogether + r], so that no step reduces across
// lanes.
//
//   16 ascending numbers   count the midpoints below u, by four steps of a binary search in registers
//   all others             argmax <u, b> - |b|^2 / 2 over groups of sixteen entries; then the entry within the
//                          winning group
//   16 others              the same, keeping the best entry so far
//   few rows               argmin |u - b|^2, kFloats entries in parallel, row after row
#pragma once
#include "tables.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kTogether = 16;                 // rows
constexpr int kParts = kTogether / kFloats;   // vectors that hold one number of each
constexpr int kSome = 16;                     // entries searched together

struct Entries {
  alignas(64) Components number;
  alignas(64) float bonus[kEntries];  // -|b|^2 / 2
  alignas(64) float tree[4][kSome];   // of 16 numbers: the 2^k midpoints that step k of the search compares with
  int count;
  bool ascending;  // 16 numbers in order
};

// The tree of 16 ascending numbers; says whether they are.
inline bool read_tree(Entries& entries) {
  static const int32_t next[kSome] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 15};
  static const int32_t place[4][kSome] = {{7}, {3, 11}, {1, 5, 9, 13}, {0, 2, 4, 6, 8, 10, 12, 14}};
  const float* number = entries.number[0];
  alignas(64) float middle[kSome];  // of numbers i and i + 1
  Ints descents = zero_ints();
  for (int e = 0; e < kSome; e += kFloats) {
    const Floats low = load(number + e), high = pick<16>(number, load_ints(next + e));
    descents = count_less(descents, high, low);
    store(middle + e, (low + high) * splat(0.5f));
  }
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 8; i += kFloats) store(entries.tree[k] + i, pick<16>(middle, load_ints(place[k] + i)));
  return sum(descents) == 0;
}

inline void read_entries(const uint16_t* codebook, int count, int x, Entries& entries) {
  entries.count = count;
  read_entries(codebook, count, x, entries.number);
  entries.ascending = x == 1 && count == kSome && read_tree(entries);
  if (entries.ascending) return;
  for (int e = 0; e < count; e += kFloats) {
    Floats norm = splat(0.0f);
    for (int c = 0; c < x; ++c) norm = fma(load(entries.number[c] + e), load(entries.number[c] + e), norm);
    store(entries.bonus + e, norm * splat(-0.5f));
  }
}

// Address of the code of row 0 for sub-quantizer s, in the byte order of packets; rows are `code_step` apart.
inline uint8_t* code_of(int layout, uint8_t* code, int s) {
  return code + (layout == HF_VQ_QUADS ? s / 4 * 4 * kTogether + s % 4 : s * kTogether);
}
inline int code_step(int layout) { return layout == HF_VQ_QUADS ? 4 : 1; }

// The nearest of 16 ascending numbers to each u[j]; their steps alternate, because each waits for the one before.
template <int N> inline void nearest_level(const Entries& entries, const Floats (&u)[N], Ints (&index)[N]) {
  for (int j = 0; j < N; ++j) index[j] = count_less(zero_ints(), splat(entries.tree[0][0]), u[j]);
  for (int k = 1; k < 4; ++k)
    for (int j = 0; j < N; ++j)
      index[j] = count_less(index[j] + index[j], pick<8>(entries.tree[k], index[j]), u[j]);
}

// Codes of all numbers of kFloats rows u, times `factor`; returns sum_s u_s b_code(s). S is a multiple of 4.
template <int Layout>
Floats nearest_levels(const Entries& entries, const float* u, Floats factor, int vectors, uint8_t* code) {
  Floats along = splat(0.0f);
  for (int s = 0; s < vectors; s += 4) {
    Floats number[4];
    Ints index[4];
    for (int j = 0; j < 4; ++j) number[j] = load(u + (s + j) * kTogether) * factor;
    nearest_level(entries, number, index);
    for (int j = 0; j < 4; ++j) along = fma(number[j], pick<16>(entries.number[0], index[j]), along);
    if constexpr (Layout == HF_VQ_QUADS) store(code_of(Layout, code, s), join(index[0], index[1], index[2], index[3]));
    else for (int j = 0; j < 4; ++j) store_low_bytes(code_of(Layout, code, s + j), index[j]);
  }
  return along;
}

// <u, b> - |b|^2 / 2; every search computes it in this order, so that equal means equal.
template <int X> inline Floats affinity(const Floats (&u)[X], const Floats (&b)[X], Floats bonus) {
  for (int c = 0; c < X; ++c) bonus = fma(u[c], b[c], bonus);
  return bonus;
}

// The first of entries begin..begin + 15 whose affinity to u is `best`; one of them if none is.
template <int X> inline int find_entry(const Entries& entries, int begin, const float* u, float best) {
  Floats vector[X], b[X];
  for (int c = 0; c < X; ++c) vector[c] = splat(u[c * kTogether]);
  int found = 0;
  for (int e = kSome - kFloats; e >= 0; e -= kFloats) {
    for (int c = 0; c < X; ++c) b[c] = load(entries.number[c] + begin + e);
    const int lane = first_at_least(affinity<X>(vector, b, load(entries.bonus + begin + e)), splat(best));
    found = lane < kFloats ? e + lane : found;
  }
  return begin + found;
}

// code[k][i step] = the code of sub-vector i of the kFloats at u[k]; along[k] = <them, their entries>.
template <int X, int V>
inline void nearest_some(const Entries& entries, const float* const* u, uint8_t* const* code, int step,
                         Floats (&along)[V]) {
  constexpr float kLowest = -3e38f;
  alignas(64) float best[V][kFloats], bonus[V][kFloats];
  alignas(64) int32_t begin[V][kFloats];
  Floats vector[V][X], top[V];
  Ints block[V];
  for (int k = 0; k < V; ++k) {
    for (int c = 0; c < X; ++c) vector[k][c] = load(u[k] + c * kTogether);
    top[k] = splat(kLowest);
    block[k] = zero_ints();
  }
  for (int e = 0; e < entries.count; e += kSome) {
    Floats highest[V];
    for (Floats& each : highest) each = splat(kLowest);
    for (int i = e; i < e + kSome; ++i) {
      Floats b[X];
      for (int c = 0; c < X; ++c) b[c] = splat(entries.number[c][i]);
      for (int k = 0; k < V; ++k) highest[k] = max(affinity<X>(vector[k], b, splat(entries.bonus[i])), highest[k]);
    }
    for (int k = 0; k < V; ++k) {
      block[k] = where_less(top[k], highest[k], splat_int(e), block[k]);
      top[k] = max(highest[k], top[k]);
    }
  }
  for (int k = 0; k < V; ++k) {
    store(best[k], top[k]);
    store(begin[k], block[k]);
  }
  for (int k = 0; k < V; ++k)
    for (int i = 0; i < kFloats; ++i) {
      const int entry = find_entry<X>(entries, begin[k][i], u[k] + i, best[k][i]);
      code[k][i * step] = uint8_t(entry);
      bonus[k][i] = entries.bonus[entry];
    }
  for (int k = 0; k < V; ++k) along[k] = top[k] - load(bonus[k]);
}

// The same of 16 entries, whose numbers are remembered on the way.
template <int X, int V> inline void nearest_of_16(const Entries& entries, const float* const* u, uint8_t* const* code) {
  Floats vector[V][X], top[V];
  Ints best[V];
  for (int k = 0; k < V; ++k) {
    for (int c = 0; c < X; ++c) vector[k][c] = load(u[k] + c * kTogether);
    top[k] = splat(-kInfinity);
    best[k] = zero_ints();
  }
  for (int e = 0; e < kSome; ++e) {
    Floats b[X];
    for (int c = 0; c < X; ++c) b[c] = splat(entries.number[c][e]);
    for (int k = 0; k < V; ++k) {
      const Floats found = affinity<X>(vector[k], b, splat(entries.bonus[e]));
      best[k] = where_less(top[k], found, splat_int(e), best[k]);
      top[k] = max(found, top[k]);
    }
  }
  for (int k = 0; k < V; ++k) store_low_bytes(code[k], best[k]);
}

// code[k][i] = the code of sub-vector i of the kFloats at u[k], for a codebook of one sub-quantizer.
template <int X, int V>
inline void nearest_own_entry(const Entries& entries, const float* const* u, uint8_t* const* code) {
  if (X == 1 && entries.ascending) {
    Floats number[V];
    Ints index[V];
    for (int k = 0; k < V; ++k) number[k] = load(u[k]);
    nearest_level(entries, number, index);
    for (int k = 0; k < V; ++k) store_low_bytes(code[k], index[k]);
  } else if (entries.count == kSome) {
    nearest_of_16<X, V>(entries, u, code);
  } else {
    Floats along[V];  // of no use here
    nearest_some<X, V>(entries, u, code, 1, along);
  }
}

// The entry nearest to u, whose components are kTogether apart; one of them if u is NaN.
template <int X> inline int nearest_entry(const Entries& entries, const float* u) {
  Floats vector[X], best = splat(kInfinity), begin = splat(0.0f);
  for (int c = 0; c < X; ++c) vector[c] = splat(u[c * kTogether]);
  for (int e = 0; e < entries.count; e += kFloats) {
    Floats distance = splat(0.0f);
    for (int c = 0; c < X; ++c) {
      const Floats apart = load(entries.number[c] + e) - vector[c];
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
