// SPDX-License-Identifier: Apache-2.0
// <q, k_t> by table lookups only, for keys in planes with a codebook per head and sub-quantizer
// (NoMAD-Attention, section 3.2 and algorithm 2; with 256 entries VQ-LLM's CQ):
//
//   T_s[e] = <q_s, b_s,e>       u_s[e] = round((T_s[e] - min_s) / step_g)        dot[t] = sum_g step_g
//                                                                  sum_{s in g} u_s[code(t, s)] + sum_s min_s
//
// Equation 1 of the paper has a step per sub-quantizer, but a sum needs a common step. A single step would follow
// the widest table, and outlier channels make that wide. So there are up to four steps: for tables within a factor
// of two of the widest, of half of it, .. A 16-bit sum holds all of the at most 256 tables.
//
// Bytes: 4 or 8 bits per code and nothing else. Bottleneck: L1, one load of 16 bytes per lookup of 256 4-bit codes.
#pragma once
#include "tables.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kSteps = 4;

// The tables of one query: sub-quantizers order[begin[g]..begin[g + 1]) have step[g].
struct Luts {
  uint8_t* table;  // [S][entries]
  uint8_t order[kDim];
  int begin[kSteps + 1];
  float step[kSteps];
  float constant;  // sum of the minima
};

// `query` [S x]; `codebook` of its head, fp16 [S, entries, x]; `memory` floats [S][entries].
inline void make_luts(const float* query, const uint16_t* codebook, int vectors, int entries, int x, float* memory,
                      Luts& luts) {
  alignas(64) Components number;
  float lowest[kDim], span[kDim], widest = 0.0f;
  luts.constant = 0.0f;
  for (int s = 0; s < vectors; ++s) {
    read_entries(codebook + int64_t(s) * entries * x, entries, x, number);
    Floats top = splat(-3e38f), bottom = splat(3e38f);
    for (int e = 0; e < entries; e += kFloats) {
      Floats dot = load(number[0] + e) * splat(query[s * x]);
      for (int c = 1; c < x; ++c) dot = fma(load(number[c] + e), splat(query[s * x + c]), dot);
      store(memory + s * entries + e, dot);
      top = max(dot, top);
      bottom = min(dot, bottom);
    }
    lowest[s] = -largest(splat(0.0f) - bottom);
    span[s] = largest(top) - lowest[s];
    widest = span[s] > widest ? span[s] : widest;
    luts.constant += lowest[s];
  }
  for (int g = 0, count = 0; g < kSteps; ++g) {
    luts.begin[g] = count;
    float wide = 0.0f;
    for (int s = 0; s < vectors; ++s) {
      const float part = span[s] * 2.0f;
      const int group = part > widest ? 0 : part * 2.0f > widest ? 1 : part * 4.0f > widest ? 2 : kSteps - 1;
      if (group != g) continue;
      luts.order[count++] = uint8_t(s);
      wide = span[s] > wide ? span[s] : wide;
    }
    luts.begin[g + 1] = count;
    luts.step[g] = wide / 255.0f;
    const Floats factor = splat(wide > kSmallest ? 255.0f / wide : 0.0f);
    for (int i = luts.begin[g]; i < count; ++i) {
      const int s = luts.order[i];
      for (int e = 0; e < entries; e += kFloats) {
        const Floats above = (load(memory + s * entries + e) - splat(lowest[s])) * factor;
        store_low_bytes(luts.table + s * entries + e, to_ints(min(max(above, splat(0.0f)), splat(255.0f))));
      }
    }
  }
}

// sums[t] += table[s][code(t, s)] over the `count` sub-quantizers s of `order`. `next`: the block that will be
// read after this one; as much of it is asked for as is read here.
template <int E>
void sum_tables(const uint8_t* table, const uint8_t* order, int count, const uint8_t* packets, const uint8_t* next,
                uint16_t* sums) {
  constexpr int kSize = packet_bytes(bits_of(E));
  for (int at = 0; at < kStrip; at += kBytes) {
    Sums16 sum[4];
    for (Sums16& each : sum) each = zero_sums();
    for (int i = 0; i < count; ++i, next += kSize) {
      for (int line = at; line < kSize; line += kStrip) __builtin_prefetch(next + line);
      Bytes code[4], value[1];
      unpack<E, 0, 4>(packets + order[i] * kSize, at, code);
      const Codebook<E, 1> book = load_codebook<E, 1>(table + order[i] * E);
      for (int v = 0; v < 4; ++v) {
        lookup(book, code[v], value);
        add(sum[v], value[0]);
      }
    }
    next -= count * kSize;
    for (int v = 0; v < 4; ++v) store(sums + kStrip * v + at, sum[v]);
  }
}

using SumTables = void (*)(const uint8_t*, const uint8_t*, int, const uint8_t*, const uint8_t*, uint16_t*);

// out[t] = dot[t] of a block of 256 tokens, without the constant.
inline void score_tables(SumTables sum, const Luts& luts, int entries, const uint8_t* block, int64_t block_bytes,
                         float* out) {
  const int size = packet_bytes(bits_of(entries));
  memset(out, 0, kBlock * sizeof(float));
  for (int g = 0; g < kSteps; ++g) {
    const int begin = luts.begin[g], count = luts.begin[g + 1] - begin;
    if (count == 0) continue;
    alignas(64) uint16_t sums[kBlock];
    sum(luts.table, luts.order + begin, count, block, block + block_bytes + begin * size, sums);
    const Floats step = splat(luts.step[g]);
    for (int t = 0; t < kBlock; t += kFloats) store(out + t, fma(load_unsigned(sums + t), step, load(out + t)));
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
