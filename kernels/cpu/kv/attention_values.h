// SPDX-License-Identifier: Apache-2.0
// sum_t w_t v_t of 2 kWeightBits-bit weights and 8-bit entries, for values in planes:
//
//   lanes[s x + c] += step * sum_t (high_t << kWeightBits | low_t) * level_c[code(t, s)]     t in a block
//
// Sums are exact: the sums of the high halves are shifted and added to those of the low halves. A lane accumulates at
// most 64 products of 16 and 8 bits.
//
// A packet holds one sub-quantizer of 256 tokens, whose weights stay in registers for all packets. The kFloats
// partial sums of a component stay separate until all blocks are done: reducing them once per block would cost as
// much as the products.
//
// Bytes: codes once, 4.25 bits per value number of VQ<1,4>.
#pragma once
#include "softmax.h"

namespace hf_vq {
namespace {
namespace kv {

// lanes += step * sum
inline void add_lanes(float* lanes, Floats step, Ints sum) { store(lanes, fma(to_floats(sum), step, load(lanes))); }

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
    Bytes level[kParts][4][X];
    Ints sums[G][X];
    for (int g = 0; g < G; ++g)
      for (int c = 0; c < X; ++c) sums[g][c] = zero_ints();
    for (int part = 0; part < kParts; ++part) {
      Bytes code[4];
      unpack<E, 0, 4>(packets + s * packet_bytes(bits_of(E)), kBytes * part, code);
      for (int v = 0; v < 4; ++v) {
        lookup(book, code[v], level[part][v]);
        for (int g = 0; g < G; ++g)
          for (int c = 0; c < X; ++c) sums[g][c] = dot_weights(sums[g][c], high[g][part][v], level[part][v][c]);
      }
    }
    for (int g = 0; g < G; ++g)
      for (int c = 0; c < X; ++c) {
        Ints sum = shift_left<kWeightBits>(sums[g][c]);
        for (int part = 0; part < kParts; ++part)
          for (int v = 0; v < 4; ++v) sum = dot_weights(sum, low[g][part][v], level[part][v][c]);
        add_lanes(lanes[g] + (s * X + c) * kFloats, splat(w[g].step), sum);
      }
  }
}

using WeighPackets = void (*)(const uint8_t*, int64_t, const uint8_t*, int, const Weights*, float* const*);

// The same over decoded packets, level [n][256].
inline void weigh_decoded(const uint8_t* level, int n, const Weights& w, float* lanes) {
  constexpr int kVectors = kBlock / kBytes;
  Bytes high[kVectors], low[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    high[v] = load_bytes(w.high + kBytes * v);
    low[v] = load_bytes(w.low + kBytes * v);
  }
  for (int i = 0; i < n; ++i, level += kBlock, lanes += kFloats) {
    Ints sum = zero_ints();
    for (int v = 0; v < kVectors; ++v) sum = dot_weights(sum, high[v], load_bytes(level + kBytes * v));
    sum = shift_left<kWeightBits>(sum);
    for (int v = 0; v < kVectors; ++v) sum = dot_weights(sum, low[v], load_bytes(level + kBytes * v));
    add_lanes(lanes, splat(w.step), sum);
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
