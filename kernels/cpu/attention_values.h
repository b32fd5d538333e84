// SPDX-License-Identifier: Apache-2.0
// sum_t w_t v_t of 2 kWeightBits-bit weights and 8-bit entries, for values in planes:
//
//   lanes[s x + c] += step * sum_t (high_t << kWeightBits | low_t) * level_c[code(t, s)]     t in a block
//
// A packet holds one sub-quantizer of 256 tokens, whose weights stay in registers for all packets. The
// kFloats sums of a component stay apart, as floats, until all blocks are done: adding them up once per
// block would cost as much as the products. 4.25 bits per value of VQ<1,4> are read once.
#pragma once
#include "softmax.h"

namespace hf_vq {
namespace {
namespace kv {

// lanes += high_step * high + low_step * low
inline void add_lanes(float* lanes, Floats high_step, Floats low_step, Ints high, Ints low) {
  store(lanes, fma(to_floats(low), low_step, fma(to_floats(high), high_step, load(lanes))));
}

// `count` packets for G queries. `table_stride`: see decode_packets.
template <int E, int X, int G>
void weigh_packets(const uint8_t* table, int64_t table_stride, const uint8_t* packets, int count, const Weights* w,
                   float* const* lanes) {
  constexpr int kParts = kStrip / kBytes;
  Codebook<E, X> book = load_codebook<E, X>(table);
  Bytes high[G][kParts][4], low[G][kParts][4];
  for (int g = 0; g < G; ++g)
    for (int part = 0; part < kParts; ++part)
      for (int v = 0; v < 4; ++v) {
        high[g][part][v] = load_bytes(w[g].high + kStrip * v + kBytes * part);
        low[g][part][v] = load_bytes(w[g].low + kStrip * v + kBytes * part);
      }
  for (int s = 0; s < count; ++s) {
    if (table_stride != 0) book = load_codebook<E, X>(table + s * table_stride);
    prefetch(packets, count, bits_of(E), s);
    Ints high_sum[G][X], low_sum[G][X];
    for (int g = 0; g < G; ++g)
      for (int c = 0; c < X; ++c) high_sum[g][c] = low_sum[g][c] = zero_ints();
    for (int part = 0; part < kParts; ++part) {
      Bytes code[4];
      unpack<E, 0, 4>(packets + s * packet_bytes(bits_of(E)), kBytes * part, code);
      for (int v = 0; v < 4; ++v) {
        Bytes level[X];
        lookup(book, code[v], level);
        for (int g = 0; g < G; ++g)
          for (int c = 0; c < X; ++c) {
            high_sum[g][c] = dot_weights(high_sum[g][c], high[g][part][v], level[c]);
            low_sum[g][c] = dot_weights(low_sum[g][c], low[g][part][v], level[c]);
          }
      }
    }
    for (int g = 0; g < G; ++g) {
      const Floats high_step = splat(w[g].step * float(1 << kWeightBits)), low_step = splat(w[g].step);
      for (int c = 0; c < X; ++c)
        add_lanes(lanes[g] + (s * X + c) * kFloats, high_step, low_step, high_sum[g][c], low_sum[g][c]);
    }
  }
}

using WeighPackets = void (*)(const uint8_t*, int64_t, const uint8_t*, int, const Weights*, float* const*);

// The same over decoded packets, level [n][256].
inline void weigh_decoded(const uint8_t* level, int n, const Weights& w, float* lanes) {
  constexpr int kVectors = kBlock / kBytes;
  const Floats high_step = splat(w.step * float(1 << kWeightBits)), low_step = splat(w.step);
  Bytes high[kVectors], low[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    high[v] = load_bytes(w.high + kBytes * v);
    low[v] = load_bytes(w.low + kBytes * v);
  }
  for (int i = 0; i < n; ++i, level += kBlock, lanes += kFloats) {
    Ints high_sum = zero_ints(), low_sum = zero_ints();
    for (int v = 0; v < kVectors; ++v) {
      const Bytes levels = load_bytes(level + kBytes * v);
      high_sum = dot_weights(high_sum, high[v], levels);
      low_sum = dot_weights(low_sum, low[v], levels);
    }
    add_lanes(lanes, high_step, low_step, high_sum, low_sum);
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
