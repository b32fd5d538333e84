// SPDX-License-Identifier: Apache-2.0
// Unpacking of codes of 1 to 16 bits from the dense little-endian stream of a row (hf_vq/formats/packing.py).
//
//     word 0: c3[1:0] c2 c1 c0    word 1: c6[..] c5 c4 c3[9:2] ...         10 bits
//
// A thread loads the contiguous codes of one unit of weights, which may begin at any bit: whole aligned words, one
// funnel shift for each, then a shift by a constant per code.
#pragma once
#include "primitives/numbers.cuh"

// `Count` codes of `Bits` bits.
template <int Bits, int Count> struct Codes {
  static constexpr int words = (Bits * Count + 31) / 32;
  uint32_t word[words];

  // From bit `at` of a stream. No word is read that has none of these bits.
  __device__ void load(const uint32_t* stream, int64_t at) {
    const uint32_t* from = stream + at / 32;
    const int shift = int(at % 32);
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = __ldg(from + i);
    if (shift == 0) return;  // the same for all threads where a unit has whole words
    const uint32_t after = shift + Bits * Count > 32 * words ? __ldg(from + words) : 0;
#pragma unroll
    for (int i = 0; i < words; ++i)
      word[i] = __funnelshift_r(word[i], i + 1 < words ? word[i + 1] : after, shift);
  }

  // All bits begin at `from`, an address that is a multiple of `Bytes`. Streamed (`Line` too): they are read once.
  template <int Bytes, bool Line = false> __device__ void load_aligned(const char* from) {
    static_assert(Bits * Count % 32 == 0 && words * 4 % Bytes == 0, "whole words");
#pragma unroll
#if WITHOUT_CODES
    for (int k = 0; k < words; ++k) {  // pseudo-random, so that lookups have bank conflicts
      const uint32_t at = uint32_t(size_t(from) / 4 + k) * 2654435761u;
      word[k] = at ^ at >> 15;
    }
#else
    for (int i = 0; i < words * 4 / Bytes; ++i) stream_words<Bytes, Line>(from + i * Bytes, word + i * Bytes / 4);
#endif
  }

  // `Width` bits from bit `at` on (a constant once loops are unrolled), times `Factor`, a power of two.
  template <int Width, int Factor> __device__ uint32_t field(int at) const {
    constexpr int up = log2_of(Factor);
    constexpr uint32_t mask = ((1u << Width) - 1) << up;
    const int i = at / 32, shift = at % 32;
    if (shift + Width > 32) return __funnelshift_r(word[i], word[i + 1], shift - up) & mask;
    return (shift >= up ? word[i] >> (shift - up) : word[i] << (up - shift)) & mask;
  }

  // Code `i`, a constant once the caller's loop is unrolled; always below 2^Bits.
  __device__ uint32_t operator[](int i) const {
    const int bit = i * Bits, at = bit / 32, shift = bit % 32;
    uint32_t code = word[at] >> shift;
    if (shift + Bits > 32) code |= word[at + 1] << (32 - shift);
    return code & ((1u << Bits) - 1);
  }
};

// `Count` codes of two nested passes, each read from its own stream; together (first << Second | second) is one code.
template <int First, int Second, int Count> struct NestedCodes {
  Codes<First, Count> first;
  Codes<Second, Count> second;

  template <int Bytes, bool Line = false> __device__ void load_aligned(const char* from) {
    first.template load_aligned<Bytes, Line>(from);
  }

  // 4 + 4 bits: the word of four byte-wide codes that contains the code at bit `at`.
  //
  //     first  h7 h6 .. h1 h0    second  l7 l6 .. l1 l0    ->    h6 l6 h4 l4 h2 l2 h0 l0  or  h7 l7 h5 l5 h3 l3 h1 l1
  __device__ uint32_t bytes_of(int at) const {
    const uint32_t high = first.word[at / 64], low = second.word[at / 64];
    if (at / 8 % 2) return (high & 0xf0f0f0f0) | (low >> 4 & 0x0f0f0f0f);
    return (high << 4 & 0xf0f0f0f0) | (low & 0x0f0f0f0f);
  }

  // Same as in `Codes`; `at` counts bits of both codes together.
  template <int Width, int Factor> __device__ uint32_t field(int at) const {
    const int i = at / (First + Second);
    return first.template field<First, (Factor << Second)>(i * First) |
           second.template field<Second, Factor>(i * Second);
  }

  __device__ uint32_t operator[](int i) const { return first[i] << Second | second[i]; }
};
