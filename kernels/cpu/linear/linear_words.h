// SPDX-License-Identifier: Apache-2.0
// Codes whose entries are loaded from L1: VQ<8,12> everywhere, since 4096 entries do not fit into registers, and
// <2,8>, <4,8>, <8,8> on targets where lookup() of 256 entries is slow.
//
// One load finds all components of a code. Entries of less than eight bytes have a table for every position in a
// word, so that a word is the OR of several loads. Numbers stay in column order.
#pragma once
#include "linear_codes.h"

namespace hf_vq {
namespace {

template <int X, int Bits> struct WordCodes : FixedSteps<kBytes / X * Bits / 8> {
  static constexpr int kEntries = 1 << Bits;
  static constexpr int kPlaces = 8 / X;
  static constexpr int kPlanes = 1, kSets = 1;
  static constexpr bool kFine = false;
  static constexpr int kBlock = 32;  // rows for which a pass keeps its tables
  static constexpr bool kStepsFirst = false;
  static constexpr bool kStreamed = kWideLookup || X == 4;  // of 2-vectors its loads are the bottleneck
  static constexpr int kStepColumns = kBytes;
  static constexpr int kTableBytes = kPlaces * kEntries * 8;
  static constexpr int64_t kBookHalves = kEntries * X;

  const uint64_t* tables;
  WordCodes(const uint8_t* words, const hf_vq_matrix&) : tables(reinterpret_cast<const uint64_t*>(words)) {}

  static constexpr int64_t book_halves(const hf_vq_matrix&) { return kBookHalves; }

  static float make_tables(const hf_vq_matrix&, const uint16_t* entries, uint8_t* words) {
    const float unit = unit_of(entries, kBookHalves);
    if constexpr (X == 8) {
      round_halves(entries, kBookHalves, inverse_of(unit), words);
    } else {
      uint8_t level[kBookHalves];
      round_halves(entries, kBookHalves, inverse_of(unit), level);
      for (int place = 0; place < kPlaces; ++place)
        for (int e = 0; e < kEntries; ++e) {
          uint64_t word = 0;
          memcpy(&word, level + e * X, X);
          word <<= 8 * X * place;
          memcpy(words + (place * kEntries + e) * 8, &word, 8);
        }
    }
    return unit;
  }

  static void arrange(const uint8_t* natural, uint8_t* numbers, int64_t) { memcpy(numbers, natural, kBytes); }

  // sums[m] += entries of the step's codes * numbers of input m
  template <int M> void dots(Place p, const uint8_t* numbers, int64_t stride, Ints (&sums)[M]) const {
    const Bytes level = Bits == 8 ? load_words<kEntries, X>(tables, p.codes) : load_words_12_bits(tables, p.codes);
    for (int m = 0; m < M; ++m) sums[m] = dot_of<M>(sums[m], level, load_bytes(numbers + m * stride));
  }
};

}  // namespace
}  // namespace hf_vq
