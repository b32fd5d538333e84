// SPDX-License-Identifier: Apache-2.0
// Codes of single weights of 6 or 8 bits, VQ<1,6> and VQ<1,8>: levels of 16 bits, in two tables that are looked up in
// registers, times inputs of 16 bits.
//
//     entry ~ unit * level          level  = 256 lh + ll
//     u     ~ scale * number        number = 256 nh + nl          all four in [-127, 127]
//     entry u ~ 256 unit scale (256 lh nh + lh nl + ll nh)        without ll nl / 256
//
// Levels or inputs of 8 bits would lose more than these codes do. What is left out is 2^-16 of the largest product. The
// sum of four such products is less than 2^24, and exact as a float. Multiples of 1/127 of the largest number stay exact.
#pragma once
#include "linear_codes.h"

namespace hf_vq {
namespace {

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

template <int Bits> struct LevelCodes {
  static constexpr int kEntries = 1 << Bits;
  static constexpr int kPlanes = 2, kSets = 1;  // nh, nl
  static constexpr bool kFine = true;
  static constexpr int kBlock = 8;  // rows for which a pass keeps its tables
  static constexpr bool kStepsFirst = false, kStreamed = kWideLookup;
  static constexpr int kStepColumns = kBytes, kStepBytes = kBytes * Bits / 8;
  static constexpr int kTableBytes = 2 * kEntries;
  static constexpr int64_t kBookHalves = kEntries;

  Codebook<kEntries, 2> book;  // lh, ll
  explicit LevelCodes(const uint8_t* tables) : book(load_codebook<kEntries, 2>(tables)) {}

  static float make_tables(const uint16_t* entries, uint8_t* tables) {
    return make_levels(entries, kEntries, tables) * kLevelBase;
  }

  static void arrange(const uint8_t* natural, uint8_t* numbers, int64_t) { memcpy(numbers, natural, kBytes); }

  // sums[m] += levels of the step's codes * numbers of input m, over 256
  template <int M> void dots(const uint8_t* codes, const uint8_t* numbers, int64_t stride, Ints (&sums)[M]) const {
    Bytes level[2];
    lookup(book, Bits == 6 ? load_6_bits(codes) : load_bytes(codes), level);
    for (int m = 0; m < M; ++m) {
      const Bytes high = load_bytes(numbers + m * stride), low = load_bytes(numbers + m * stride + kBytes);
      const Ints both = dot(zero_ints(), level[0], high);
      sums[m] = dot(dot(sums[m], level[0], low), level[1], high) + shift_left<8>(both);
    }
  }
};

}  // namespace
}  // namespace hf_vq
