// SPDX-License-Identifier: Apache-2.0
// A packet: 256 codes of 4, 6 or 8 bits in 32 * bits bytes, so that no code needs more than one shift.
// Its codes are four groups of 64, c[64 v + j]:
//
//   8 bits   256 bytes in order
//   4 bits   byte j = c[j] | c[64 + j] << 4, byte 64 + j = c[128 + j] | c[192 + j] << 4
//   6 bits   128 bytes as above of c & 15, then byte j = sum_v (c[64 v + j] >> 4) << 2 v
//
// The cache has blocks of 256 tokens, S = dim / x sub-quantizers per token and S packets per block:
//
//   planes   packet s: sub-quantizer s of the block's tokens
//   quads    packet (S / 4) u + r: code 64 v + 4 i + j is sub-quantizer 4 r + j of token 64 u + 16 v + i
#pragma once
#include "../api.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kBlock = 256;  // tokens of a block, codes of a packet
constexpr int kStrip = 64;   // tokens of a strip, codes of a group

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr int bits_of(int entries) { return entries == 16 ? 4 : entries == 64 ? 6 : 8; }
constexpr int packet_bytes(int bits) { return 32 * bits; }

// Position of code i in a packet: a byte, and a shift for its 4 lower bits.
inline int code_byte(int i) { return i % 64 + i / 128 * 64; }
inline int code_shift(int i) { return i / 64 % 2 * 4; }

// While packet s of `count` is read, as many lines of the `count` behind them are fetched, one from each of
// `bits / 2` parts: a processor follows streams within pages, and so several bring them in at once.
inline void prefetch(const uint8_t* packets, int count, int bits, int s) {
  const uint8_t* next = packets + int64_t(count) * packet_bytes(bits) + 64 * s;
  for (int part = 0; part < bits / 2; ++part) __builtin_prefetch(next + int64_t(part) * count * 64, 0, 1);
}

// code[v] = the kBytes codes from 64 (First + v) + at on.
template <int E, int First, int Count> inline void unpack(const uint8_t* packet, int at, Bytes (&code)[Count]) {
  if constexpr (E == 256) {
    for (int v = 0; v < Count; ++v) code[v] = load_bytes(packet + 64 * (First + v) + at);
  } else {
    static_assert(First % 2 == 0 && Count % 2 == 0);
    for (int v = 0; v < Count; v += 2) {
      const Bytes both = load_bytes(packet + 32 * (First + v) + at);
      code[v] = E == 16 ? low_codes(both) : low_nibbles(both);
      code[v + 1] = E == 16 ? high_codes(both) : high_nibbles(both);
    }
    if constexpr (E == 64) {
      const Bytes upper = load_bytes(packet + 128 + at);
      code[0] = code[0] | upper_crumbs<First>(upper);
      code[1] = code[1] | upper_crumbs<First + 1>(upper);
      if constexpr (Count == 4) {
        code[2] = code[2] | upper_crumbs<2>(upper);
        code[3] = code[3] | upper_crumbs<3>(upper);
      }
    }
  }
}

// entry[c][i] = component c of the entry of code i, for `count` consecutive packets.
// `table_stride`: bytes from the tables of one packet to those of the next; 0 = all share them.
template <int E, int X>
void decode_packets(const uint8_t* table, int64_t table_stride, const uint8_t* packets, int count, uint8_t* entry) {
  Codebook<E, X> book = load_codebook<E, X>(table);
  for (int s = 0; s < count; ++s, entry += X * kBlock) {
    if (table_stride != 0) book = load_codebook<E, X>(table + s * table_stride);
    prefetch(packets, count, bits_of(E), s);
    for (int at = 0; at < kStrip; at += kBytes) {
      Bytes code[4];
      unpack<E, 0, 4>(packets + s * packet_bytes(bits_of(E)), at, code);
      for (int v = 0; v < 4; ++v) {
        Bytes entries[X];
        lookup(book, code[v], entries);
        for (int c = 0; c < X; ++c) store(entry + c * kBlock + kStrip * v + at, entries[c]);
      }
    }
  }
}

using DecodePackets = void (*)(const uint8_t*, int64_t, const uint8_t*, int, uint8_t*);

// Codes as bytes of a word: of Bytes, or of an unsigned number that holds as many as are written at once.
template <class Word> inline Word load_word(const uint8_t* p) { Word a; memcpy(&a, p, sizeof a); return a; }
template <> inline Bytes load_word<Bytes>(const uint8_t* p) { return load_bytes(p); }
template <class Word> inline Word splat_word(int byte) { return Word(Word(-1) / 255 * Word(byte)); }
template <> inline Bytes splat_word<Bytes>(int byte) { return splat_byte(byte); }
template <class Word> inline Word shift_left(Word a, int bits) { return Word(a << bits); }
template <class Word> inline Word high_nibbles(Word a) { return Word(a >> 4 & splat_word<Word>(15)); }
template <class Word> inline void store_word(uint8_t* p, Word a) { memcpy(p, &a, sizeof a); }
template <> inline void store_word<Bytes>(uint8_t* p, Bytes a) { store(p, a); }

// The bits of `part` in every byte at `to` become those of `code`, where `where` has ones.
template <class Word> inline void write_bits(uint8_t* to, Word code, Word where, int part, int shift) {
  const Word mask = Word(where & splat_word<Word>(part)), held = load_word<Word>(to);
  store_word(to, Word(held ^ ((held ^ shift_left(Word(code & mask), shift)) & shift_left(mask, shift))));
}

// Codes i.. of a packet become `code` where `where` has ones: Count words of neighbours of one group.
template <int Bits, class Word, int Count>
inline void write_codes(uint8_t* packet, int i, const uint8_t* code, const Word (&where)[Count]) {
  uint8_t* low = packet + (Bits == 8 ? i : code_byte(i));
  for (size_t k = 0; k < Count; ++k) {
    const size_t at = k * sizeof(Word);
    const Word fresh = load_word<Word>(code + at);
    write_bits(low + at, fresh, where[k], Bits == 8 ? 255 : 15, Bits == 8 ? 0 : code_shift(i));
    if (Bits == 6) write_bits(packet + 128 + i % 64 + at, high_nibbles(fresh), where[k], 3, i / 64 * 2);
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
