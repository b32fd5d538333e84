// SPDX-License-Identifier: Apache-2.0
// E8P codes (QuIP#, section 4; hf_vq/formats/lattice.py draws the bits), decoded in registers.
//
// In units of the shift an entry is s +- 1 with s in {+-2, +-6, +-10}^8: an exact 8-bit number. |s| of a row of the
// pattern table has 2 bits per component: two tables of 256 bytes, in which a nibble is two components. The sign of
// component 7 is the parity of the other signs and of the number of |s| = 6. Instead of adding the shift to 8
// components, the kernel multiplies it by the sum of 8 inputs, kept as 8 a + b with two 8-bit numbers.
#pragma once
#include "linear_codes.h"

namespace hf_vq {
namespace {

struct E8PCodes : FixedSteps<2 * kBytes> {
  static constexpr int kPlanes = 10, kSets = 1;
  static constexpr bool kFine = false;
  static constexpr int kBlock = 8;  // rows for which a pass keeps its tables
  static constexpr bool kStepsFirst = false, kStreamed = kWideLookup;
  static constexpr int kStepColumns = 8 * kBytes;
  static constexpr int kTableBytes = 512 + 32 + 32;
  static constexpr int64_t kBookHalves = 257 * 8;

  Codebook<256, 2> patterns;
  Codebook<16, 2> levels;  // of the two components of a nibble
  Codebook<16, 2> parity;  // of a nibble's bits; of its bits but the upper one

  E8PCodes(const uint8_t* table, const hf_vq_matrix&)
      : patterns(load_codebook<256, 2>(table)),
        levels(load_codebook<16, 2>(table + 512)),
        parity(load_codebook<16, 2>(table + 544)) {}

  static constexpr int64_t book_halves(const hf_vq_matrix&) { return kBookHalves; }

  static float make_tables(const hf_vq_matrix&, const uint16_t* book, uint8_t* tables) {
    const float shift = half_to_float(book[256 * 8]);
    uint8_t level[256 * 8];
    round_halves(book, 256 * 8, inverse_of(shift), level);
    for (int row = 0; row < 256; ++row)
      for (int half = 0; half < 2; ++half) {
        int packed = 0;
        for (int c = 0; c < 4; ++c)
          packed |= ((level[row * 8 + half * 4 + c] - kLevelBias - 2) >> 2 & 3) << (2 * c);
        tables[half * 256 + row] = uint8_t(packed);
      }
    for (int nibble = 0; nibble < 16; ++nibble) {
      tables[512 + nibble] = uint8_t(2 + 4 * (nibble & 3) + kLevelBias);
      tables[528 + nibble] = uint8_t(2 + 4 * (nibble >> 2) + kLevelBias);
      const int lower = (nibble ^ nibble >> 1 ^ nibble >> 2) & 1;
      tables[544 + nibble] = uint8_t(lower ^ nibble >> 3);
      tables[560 + nibble] = uint8_t(lower);
    }
    return shift;
  }

  static void arrange(const uint8_t* natural, uint8_t* numbers, int64_t) {
    Bytes v[8];
    for (int i = 0; i < 8; ++i) v[i] = load_bytes(natural + i * kBytes);
    deinterleave<8>(v);
    for (int i = 0; i < 8; ++i) store(numbers + i * kBytes, v[i]);
    for (int i = 0; i < kBytes; ++i) {
      int total = 1024 + 4;
      for (int c = 0; c < 8; ++c) total += int8_t(natural[8 * i + c]);
      numbers[8 * kBytes + i] = uint8_t((total >> 3) - 128);
      numbers[9 * kBytes + i] = uint8_t((total & 7) - 4);
    }
  }

  template <int M> void dots(Place p, const uint8_t* numbers, int64_t stride, Ints (&sums)[M]) const {
    const auto add = [&](int plane, Bytes level) {
      for (int m = 0; m < M; ++m)
        sums[m] = dot(sums[m], level, load_bytes(numbers + m * stride + plane * kBytes));
    };
    const Bytes first = load_bytes(p.codes), last = load_bytes(p.codes + kBytes);
    const Bytes signs = odd_bytes(first, last);
    Bytes pattern[2];
    lookup(patterns, even_bytes(first, last), pattern);
    const Bytes sixes = (pattern[0] ^ pattern[1]) & splat_byte(0x55);
    const Bytes bits = signs ^ sixes;
    Bytes low[2], high[2];
    lookup(parity, low_nibbles(bits), low);
    lookup(parity, high_nibbles(bits), high);
    const Bytes sign_7 = low[0] ^ high[1];
    for (int half = 0; half < 2; ++half) {
      Bytes even[2], odd[2];
      lookup(levels, low_nibbles(pattern[half]), even);
      lookup(levels, high_nibbles(pattern[half]), odd);
      const int c = 4 * half;
      add(c, negate_where(even[0], signs, c));
      add(c + 1, negate_where(even[1], signs, c + 1));
      add(c + 2, negate_where(odd[0], signs, c + 2));
      add(c + 3, half ? negate_where(odd[1], sign_7, 0) : negate_where(odd[1], signs, c + 3));
    }
    add(8, negate_where(splat_byte(8 + kLevelBias), signs, 7));
    add(9, negate_where(splat_byte(1 + kLevelBias), signs, 7));
  }
};

}  // namespace
}  // namespace hf_vq
