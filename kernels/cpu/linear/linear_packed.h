// SPDX-License-Identifier: Apache-2.0
// Codes of single weights of any number of bits, VQ<1,1> to VQ<1,8>, and of two nested passes, whose table has an entry
// for both codes of a weight:
//
//     code = first                             a stream of 1 to 8 bits
//     code = first << bits of second | second  two streams, of up to 8 bits together
//
// Tables have 16 entries or more; where there are fewer, they are repeated.
//
// Up to 16 entries are levels of 8 bits, as in linear_codes.h. Levels or inputs of 8 bits would lose more than codes of
// more bits do, so theirs have 16 bits, in two tables that are looked up in registers:
//
//     entry ~ unit * level          level  = 256 lh + ll
//     u     ~ scale * number        number = 256 nh + nl          all four in [-127, 127]
//     entry u ~ 256 unit scale (256 lh nh + lh nl + ll nh)        without ll nl / 256
//
// What is left out is 2^-16 of the largest product. The sum of four such products is less than 2^24, and exact as a
// float; that of eight, of 4 + 4 bits, is exact in 32 bits. Multiples of 1/127 of the largest number stay exact.
#pragma once
#include "linear_codes.h"

namespace hf_vq {
namespace {

// kParts vectors of codes of 8 bits.
struct WholeBytes : FixedSteps<kBytes> {
  static constexpr int kParts = 1;
  explicit WholeBytes(const hf_vq_matrix&) {}
  void load(Place p, Bytes (&code)[kParts]) const { code[0] = load_bytes(p.codes); }
};

// Of fewer.
struct PackedBits {
  static constexpr int kParts = 1;
  static constexpr bool kSecond = false;
  Packing how;
  int64_t step;

  explicit PackedBits(const hf_vq_matrix& w) : how(packing(w.bits)), step(step_bytes(w)) {}
  static int64_t step_bytes(const hf_vq_matrix& w) { return kBytes * w.bits / 8; }
  Place after(Place p, int64_t steps) const { return {p.codes + steps * step, p.second}; }
  void load(Place p, Bytes (&code)[kParts]) const { code[0] = load_codes(p.codes, how); }
};

// Of two passes.
struct NestedBits {
  static constexpr int kParts = 1;
  static constexpr bool kSecond = true;
  Packing first, second;
  int64_t step, second_step;

  explicit NestedBits(const hf_vq_matrix& w)
      : first(packing(w.bits, w.second_bits)), second(packing(w.second_bits)), step(step_bytes(w)),
        second_step(kBytes * w.second_bits / 8) {}
  static int64_t step_bytes(const hf_vq_matrix& w) { return kBytes * w.bits / 8; }
  Place after(Place p, int64_t steps) const { return {p.codes + steps * step, p.second + steps * second_step}; }
  void load(Place p, Bytes (&code)[kParts]) const {
    code[0] = merge(load_codes(p.codes, first), load_codes(p.second, second), second);
  }
};

// Of two passes of 4 bits: even columns, then odd ones.
struct NestedNibbles {
  static constexpr int kParts = 2;
  static constexpr bool kSecond = true;

  explicit NestedNibbles(const hf_vq_matrix&) {}
  static constexpr int64_t step_bytes(const hf_vq_matrix&) { return kBytes; }
  static Place after(Place p, int64_t steps) { return {p.codes + steps * kBytes, p.second + steps * kBytes}; }
  void load(Place p, Bytes (&code)[kParts]) const {
    const Bytes first = load_bytes(p.codes), second = load_bytes(p.second);
    code[0] = shift_left(low_nibbles(first), 4) | low_nibbles(second);
    code[1] = (first & splat_byte(240)) | high_nibbles(second);
  }
};

// tables [2, entries] <- high and low bytes of the levels of fp16 entries; returns the unit. Entries are a multiple of
// 16; one that is no number becomes a level, too.
inline float make_levels(const uint16_t* entry, int entries, uint8_t* tables) {
  const float unit = unit_of(entry, entries) * (127.0f / float(kMostLevel)), inverse = inverse_of(unit);
  constexpr float kMost = float(kMostLevel);
  for (int e = 0; e < entries; ++e) {
    const float found = half_to_float(entry[e]) * inverse;
    const float level = found < kMost ? (found > -kMost ? found : -kMost) : kMost;
    const int whole = int(level + (level < 0 ? -0.5f : 0.5f));
    const int high = (whole + (whole < 0 ? -kLevelBase / 2 : kLevelBase / 2)) / kLevelBase;
    const int rest = whole - kLevelBase * high, low = rest < -127 ? -127 : rest > 127 ? 127 : rest;
    tables[e] = uint8_t(high + kLevelBias);
    tables[entries + e] = uint8_t(low + kLevelBias);
  }
  return unit;
}

// Codes that `Reader` takes from memory, with a table of E entries.
template <int E, class Reader> struct PackedCodes : Reader {
  static constexpr bool kFine = E > 16;
  static constexpr int kParts = Reader::kParts;
  static constexpr int kPlanes = kFine ? 2 * kParts : kParts, kSets = 1;  // of 16 bits nh, nl
  static constexpr int kBlock = 8;  // rows for which a pass keeps its tables
  static constexpr bool kStepsFirst = false, kStreamed = E == 16 || kWideLookup;
  static constexpr int kStepColumns = kParts * kBytes;
  static constexpr int kTables = kFine ? 2 : 1;
  static constexpr int kTableBytes = kTables * E;

  Codebook<E, kTables> book;  // of 16 bits lh, ll
  PackedCodes(const uint8_t* tables, const hf_vq_matrix& w) : Reader(w), book(load_codebook<E, kTables>(tables)) {}

  static int64_t book_halves(const hf_vq_matrix& w) { return int64_t(1) << (w.bits + w.second_bits); }

  static float make_tables(const hf_vq_matrix& w, const uint16_t* entries, uint8_t* tables) {
    uint16_t all[E];
    for (int64_t e = 0; e < E; ++e) all[e] = entries[e % book_halves(w)];
    if (kFine) return make_levels(all, E, tables) * kLevelBase;
    const float unit = unit_of(all, E);
    round_halves(all, E, inverse_of(unit), tables);
    return unit;
  }

  static void arrange(const uint8_t* natural, uint8_t* numbers, int64_t) {
    Bytes v[kParts];
    for (int i = 0; i < kParts; ++i) v[i] = load_bytes(natural + i * kBytes);
    deinterleave<kParts>(v);
    for (int i = 0; i < kParts; ++i) store(numbers + i * kBytes, v[i]);
  }

  // sums[m] += levels of the step's codes * numbers of input m; of 16 bits over 256
  template <int M> void dots(Place p, const uint8_t* numbers, int64_t stride, Ints (&sums)[M]) const {
    Bytes code[kParts], level[kParts][kTables];
    this->load(p, code);
    for (int part = 0; part < kParts; ++part) lookup(book, code[part], level[part]);
    for (int m = 0; m < M; ++m) {
      const uint8_t* number = numbers + m * stride;
      Ints high = zero_ints();
      for (int part = 0; part < kParts; ++part, number += kBytes) {
        const Bytes upper = load_bytes(number);
        if constexpr (kFine) {
          high = dot(high, level[part][0], upper);
          sums[m] = dot(sums[m], level[part][0], load_bytes(number + kParts * kBytes));
          sums[m] = dot(sums[m], level[part][1], upper);
        } else {
          sums[m] = dot_of<M>(sums[m], level[part][0], upper);
        }
      }
      if constexpr (kFine) sums[m] = sums[m] + shift_left<8>(high);
    }
  }
};

}  // namespace
}  // namespace hf_vq
