// SPDX-License-Identifier: Apache-2.0
// <q, k_t> of 8-bit queries and 8-bit entries, for keys in quads:
//
//   dot[t] = sum_r sum_c sum_{j<4} q[(4 r + j) x + c] * level_c[code(t, 4 r + j)]
//
// A packet holds 64 tokens x 4 sub-quantizers. One `dot` adds the four of a token into the token's own 32-bit
// sum, so no reduction follows. Up to four queries: unpack, lookup and dot in registers. More queries: a strip is
// decoded into 64 dim bytes of L1, and all queries read it in tiles of four.
//
// Bytes: codes once, 4.25 bits per key number of VQ<1,4> with its scale. Bottleneck: lookups and memory for one
// query, `dot` for many.
#pragma once
#include "tables.h"

namespace hf_vq {
namespace {
namespace kv {

// Groups of a packet whose sums stay in registers at once: 4, 2 or 1.
constexpr int groups_in_registers(int taken, int rows) {
  const int room = (kRegisters - taken) / rows;
  return room >= 4 ? 4 : room >= 2 ? 2 : 1;
}

// Sums over the groups First.. at byte `at` of the packets of strip `u` of `strips`, for G queries.
template <int E, int X, int G, int First, int Count>
inline void sum_groups(const Codebook<E, X>& book, const uint8_t* packets, int strips, int u, int quads, int at,
                       const uint8_t* query, const int32_t* bias, float* const* out) {
  Ints sums[G][Count];
  for (int g = 0; g < G; ++g)
    for (Ints& each : sums[g]) each = splat_int(bias[g]);
  for (int s = u * quads; s < (u + 1) * quads; ++s, query += 4 * X * G) {
    if (First == 0 && at == 0) prefetch(packets, strips * quads, bits_of(E), s);
    Bytes code[Count];
    unpack<E, First, Count>(packets + int64_t(s) * packet_bytes(bits_of(E)), at, code);
    for (int v = 0; v < Count; ++v) {
      Bytes level[X];
      lookup(book, code[v], level);
      for (int c = 0; c < X; ++c)
        for (int g = 0; g < G; ++g) sums[g][v] = dot(sums[g][v], level[c], splat_4(query + 4 * (c * G + g)));
    }
  }
  for (int g = 0; g < G; ++g)
    for (int v = 0; v < Count; ++v) store(out[g] + 16 * (First + v) + at / 4, to_floats(sums[g][v]));
}

constexpr int kSharing = 4;  // queries that one lookup in registers serves, at most

// out[g][t] = bias[g] + <query g, level(t)> of the tokens of `strips` strips. query: bytes [quads][X][G][4].
template <int E, int X, int G>
void score_strips(const uint8_t* table, const uint8_t* packets, int strips, int quads, const uint8_t* query,
                  const int32_t* bias, float* const* out) {
  constexpr int kTables = kBytes == 64 ? (E == 256 ? 4 * X : X) : (E == 16 ? X : 0);
  constexpr int kRoom = groups_in_registers(kTables + X + 4, G);
  constexpr int kCount = E == 256 || kRoom > 1 ? kRoom : 2;  // codes of 4 and 6 bits come in pairs of groups
  const Codebook<E, X> book = load_codebook<E, X>(table);
  float* to[G];
  for (int g = 0; g < G; ++g) to[g] = out[g];
  for (int u = 0; u < strips; ++u) {
    for (int at = 0; at < kStrip; at += kBytes) {
      sum_groups<E, X, G, 0, kCount>(book, packets, strips, u, quads, at, query, bias, to);
      if constexpr (kCount == 1) sum_groups<E, X, G, 1, 1>(book, packets, strips, u, quads, at, query, bias, to);
      if constexpr (kCount <= 2) sum_groups<E, X, G, 2, kCount>(book, packets, strips, u, quads, at, query, bias, to);
      if constexpr (kCount == 1) sum_groups<E, X, G, 3, 1>(book, packets, strips, u, quads, at, query, bias, to);
    }
    for (float*& each : to) each += kStrip;
  }
}

using ScoreStrips = void (*)(const uint8_t*, const uint8_t*, int, int, const uint8_t*, const int32_t*, float* const*);

// The same for G queries over a decoded strip, level [n][256]. query: bytes [n][G][4].
template <int G>
void score_decoded(const uint8_t* level, int n, const uint8_t* query, const int32_t* bias, float* const* out) {
  constexpr int kCount = groups_in_registers(8, G);
  for (int at = 0; at < kStrip; at += kBytes)
    for (int first = 0; first < 4; first += kCount) {
      Ints sums[G][kCount];
      for (int g = 0; g < G; ++g)
        for (Ints& each : sums[g]) each = splat_int(bias[g]);
      const uint8_t *p = level + kStrip * first + at, *q = query;
      for (int i = 0; i < n; ++i, p += kBlock, q += 4 * G) {
        Bytes levels[kCount];
        for (int v = 0; v < kCount; ++v) levels[v] = load_bytes(p + kStrip * v);
        for (int g = 0; g < G; ++g)
          for (int v = 0; v < kCount; ++v) sums[g][v] = dot(sums[g][v], levels[v], splat_4(q + 4 * g));
      }
      for (int g = 0; g < G; ++g)
        for (int v = 0; v < kCount; ++v) store(out[g] + 16 * (first + v) + at / 4, to_floats(sums[g][v]));
    }
}

inline void score_decoded(int rows, const uint8_t* level, int n, const uint8_t* query, const int32_t* bias,
                          float* const* out) {
  if (rows == 1) score_decoded<1>(level, n, query, bias, out);
  if (rows == 2) score_decoded<2>(level, n, query, bias, out);
  if (rows == 3) score_decoded<3>(level, n, query, bias, out);
  if (rows == 4) score_decoded<4>(level, n, query, bias, out);
}

// A query [dim] rounded to bytes, scale * byte, in tiles of rows as score_decoded reads them.
// Byte (r, c, j) of row g of G is channel (4 r + j) x + c. Returns the sum of all bytes.
inline int32_t round_query(const float* query, int dim, int x, int g, int rows, uint8_t* bytes, float& scale) {
  float top = 0.0f, finite = 0.0f;
  for (int i = 0; i < dim; ++i) {
    const float magnitude = query[i] < 0.0f ? -query[i] : query[i];
    top = magnitude > top ? magnitude : top;
    finite += query[i] - query[i];
  }
  const bool usable = finite == 0.0f && top > kSmallest;
  scale = finite == 0.0f ? top / 127.0f : finite;
  const Floats factor = splat(usable ? 127.0f / top : 0.0f);
  uint8_t rounded[kFloats];
  int32_t total = 0;
  for (int i = 0; i < dim; i += kFloats) {
    float some[kFloats];
    const int count = dim - i < kFloats ? dim - i : kFloats;
    for (int k = 0; k < kFloats; ++k) some[k] = k < count && usable ? query[i + k] : 0.0f;
    store_low_bytes(rounded, to_ints(load(some) * factor));
    for (int k = 0; k < count; ++k) {
      const int s = (i + k) / x, c = (i + k) % x;
      bytes[(s / 4 * x + c) * rows * 4 + g * 4 + s % 4] = rounded[k];
      total += int8_t(rounded[k]);
    }
  }
  return total;
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
