// SPDX-License-Identifier: Apache-2.0
// A packet: 256 codes of 4, 6 or 8 bits in 32 * bits bytes, so that no code needs more than one shift.
// Its codes are four groups of 64, c[64 v + j]:
//
//   8 bits   256 bytes in order
//   4 bits   byte j = c[j] | c[64 + j] << 4, byte 64 + j = c[128 + j] | c[192 + j] << 4
//   6 bits   128 bytes as above of c & 15, then byte j = sum_v (c[64 v + j] >> 4) << 2 v
//
// A tape in blocks of 256 tokens has S = dim / x sub-quantizers a token and S packets a block:
//
//   planes   packet s: sub-quantizer s of the block's tokens
//   quads    packet (S / 4) u + r: code 64 v + 4 i + j is sub-quantizer 4 r + j of token 64 u + 16 v + i
#pragma once
#include "api.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kBlock = 256;  // tokens of a block, codes of a packet
constexpr int kStrip = 64;   // tokens of a strip, codes of a group

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr int bits_of(int entries) { return entries == 16 ? 4 : entries == 64 ? 6 : 8; }
constexpr int packet_bytes(int bits) { return 32 * bits; }

// Where a packet holds code i: a byte, and a shift for its 4 lower bits.
inline int code_byte(int i) { return i % 64 + i / 128 * 64; }
inline int code_shift(int i) { return i / 64 % 2 * 4; }

// The stream behind p will be read soon; p may lie beyond the end.
inline void prefetch(const uint8_t* p) { __builtin_prefetch(p + 4096, 0, 1); }

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

// entry[c][i] = component c of the entry of code i, for `count` packets one after another.
// `table_stride`: bytes from the tables of one packet to those of the next; 0 = all share them.
template <int E, int X>
void decode_packets(const uint8_t* table, int64_t table_stride, const uint8_t* packets, int count, uint8_t* entry) {
  Codebook<E, X> book = load_codebook<E, X>(table);
  for (int s = 0; s < count; ++s, packets += packet_bytes(bits_of(E)), entry += X * kBlock) {
    if (table_stride != 0) book = load_codebook<E, X>(table + s * table_stride);
    for (int at = 0; at < kStrip; at += kBytes) {
      for (int line = at; line < packet_bytes(bits_of(E)); line += kStrip) prefetch(packets + line);
      Bytes code[4];
      unpack<E, 0, 4>(packets, at, code);
      for (int v = 0; v < 4; ++v) {
        Bytes entries[X];
        lookup(book, code[v], entries);
        for (int c = 0; c < X; ++c) store(entry + c * kBlock + kStrip * v + at, entries[c]);
      }
    }
  }
}

using DecodePackets = void (*)(const uint8_t*, int64_t, const uint8_t*, int, uint8_t*);

// Write the codes [S] of token t of a block in planes over what its packets hold.
template <int Bits> void write_planes(uint8_t* packets, int vectors, int t, const uint8_t* code) {
  const int byte = Bits == 8 ? t : code_byte(t), shift = code_shift(t), crumb = t / 64 * 2;
  for (int s = 0; s < vectors; ++s, packets += packet_bytes(Bits)) {
    if (Bits == 8) {
      packets[byte] = code[s];
      continue;
    }
    packets[byte] = uint8_t((packets[byte] & 0xf0 >> shift) | (code[s] & 15) << shift);
    if (Bits == 6) packets[128 + t % 64] = uint8_t((packets[128 + t % 64] & ~(3 << crumb)) | code[s] >> 4 << crumb);
  }
}

// The same in quads: four neighbouring codes lie in four neighbouring bytes.
template <int Bits> void write_quads(uint8_t* packets, int vectors, int t, const uint8_t* code) {
  const int i = t % 64 / 16 * 64 + t % 16 * 4, byte = Bits == 8 ? i : code_byte(i), shift = code_shift(i);
  const int crumb = i / 64 * 2;
  packets += t / 64 * (vectors / 4) * packet_bytes(Bits);
  for (int s = 0; s < vectors; s += 4, packets += packet_bytes(Bits)) {
    uint32_t four, held;
    memcpy(&four, code + s, 4);
    memcpy(&held, packets + byte, 4);
    held = Bits == 8 ? four : (held & 0xf0f0f0f0u >> shift) | (four & 0x0f0f0f0fu) << shift;
    memcpy(packets + byte, &held, 4);
    if (Bits != 6) continue;
    memcpy(&held, packets + 128 + i % 64, 4);
    held = (held & ~(0x03030303u << crumb)) | (four >> 4 & 0x03030303u) << crumb;
    memcpy(packets + 128 + i % 64, &held, 4);
  }
}

inline void write_token(int layout, int bits, uint8_t* packets, int vectors, int t, const uint8_t* code) {
  const bool planes = layout == HF_VQ_PLANES;
  if (bits == 4) (planes ? write_planes<4> : write_quads<4>)(packets, vectors, t, code);
  if (bits == 6) (planes ? write_planes<6> : write_quads<6>)(packets, vectors, t, code);
  if (bits == 8) (planes ? write_planes<8> : write_quads<8>)(packets, vectors, t, code);
}

// A whole packet from its 256 codes.
inline void pack(const uint8_t* code, int bits, uint8_t* packet) {
  if (bits == 8) {
    memcpy(packet, code, kBlock);
    return;
  }
  for (int half = 0; half < 2; ++half)
    for (int j = 0; j < 64; ++j)
      packet[64 * half + j] = uint8_t((code[128 * half + j] & 15) | (code[128 * half + 64 + j] & 15) << 4);
  if (bits == 4) return;
  for (int j = 0; j < 64; ++j)
    packet[128 + j] = uint8_t(code[j] >> 4 | code[64 + j] >> 4 << 2 | code[128 + j] >> 4 << 4 | code[192 + j] >> 4 << 6);
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
