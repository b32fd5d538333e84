// SPDX-License-Identifier: Apache-2.0
// 4-bit integers with one scale and zero per token (QServe's KV4): s (c - z), without a codebook lookup.
//
//     word        c7 c6 c5 c4 c3 c2 c1 c0     & 0x000f000f    fp16 [c4 c0]      the subnormal numbers c 2^-24
//                                             & 0x00f000f0    fp16 [c5 c1]      c 2^-20
//     word >> 8         c7 c6 c5 c4 c3 c2     the same             [c6 c2], [c7 c3]
//
// Tensor cores accept subnormals, so one AND turns a code into a number; no exponent is added or removed. Adjacent
// numbers of a word are 4 channels apart, and every second word is 16 times larger: the queries and the final sums are
// permuted and scaled to match. Scale and zero are applied outside of the products:
//
//     <q, s (c - z)> = s (<q, c> - z sum(q))           sum(w s (c - z)) = sum(w s c) - sum(w s z)
#pragma once
#include "kv/attention/attention_kv_fragments.cuh"

// Codes as numbers, and how the words of a lane's share of a token are made of its channels.
struct Integers {
  static constexpr float unit = 1.0f / (1 << 24), more = 16.0f;  // of a code; of those of every second word
};

template <class Side, int Part> struct Words {
  static constexpr int channels = at_least(Share<Side, Part>::channels, 1);
  // Channels whose codes are taken apart together; those in a word are `apart`.
  static constexpr int together = Side::integers ? at_most(channels, 8) : 2, apart = at_least(together / 2, 1);

  // Position of channel `at` of the share, in fp16 numbers.
  __device__ static constexpr int place(int at) {
    return at / together * together + at % apart * 2 + at % together / apart;
  }
  // Unit of the numbers of a word: number = code * unit.
  __device__ static constexpr float unit(int word) {
    if (!Side::integers) return 1.0f;
    return apart > 1 && word % 2 ? Integers::unit * Integers::more : Integers::unit;
  }
};

template <class Side> struct IntegerTable {
  static constexpr int offset = 0, bytes = 0;
  static_assert(!Side::integers || (Side::x == 1 && Side::entry_bits == 4), "a code is half a byte");

  __device__ IntegerTable(const uint16_t*, int, int) {}

  template <int Part> static constexpr int together() { return at_most(4, Share<Side, Part>::indexes); }

  __device__ void fill(char*, int, int) const {}

  template <int Part, class RowCodes>
  __device__ void look_up(const RowCodes& codes, int i, uint32_t (&entry)[together<Part>()]) const {
    constexpr uint32_t low = 0x000f000f, high = 0x00f000f0;
    if constexpr (together<Part>() == 4) {
      const uint32_t word = codes.word[i / 4], later = word >> 8;
      entry[0] = word & low, entry[1] = word & high, entry[2] = later & low, entry[3] = later & high;
    } else if constexpr (together<Part>() == 2) {
      const uint32_t word = __byte_perm(codes.word[0], 0, 0x4140);
      entry[0] = word & low, entry[1] = word & high;
    } else {
      entry[0] = (codes.word[0] & 0xf) | (codes.word[0] << 12 & 0xf0000);
    }
  }
};
