// SPDX-License-Identifier: Apache-2.0
// The SIMD set (defined in scalar.h) with NEON; `dot` uses the dot-product extension if the target has it.
#pragma once
#include <arm_neon.h>

#include <cstdint>

#include "../primitives/numbers.h"

namespace hf_vq {
namespace {

constexpr int kBytes = 16;
constexpr int kFloats = kBytes / 4;
constexpr int kLevelBias = 0;
constexpr int kWeightBits = 7;
constexpr bool kWideLookup = false;
constexpr int kStreams = 1;
constexpr int kRegisters = 32;
constexpr int kColumns = 16;

struct Bytes { uint8x16_t v; };
struct Ints { int32x4_t v; };
struct Floats { float32x4_t v; };

// -- bytes ---------------------------------------------------------------------------------------

inline Bytes load_bytes(const void* p) { return {vld1q_u8(static_cast<const uint8_t*>(p))}; }
inline void store(void* p, Bytes a) { vst1q_u8(static_cast<uint8_t*>(p), a.v); }
inline Bytes splat_byte(int value) { return {vdupq_n_u8(uint8_t(value))}; }
inline Bytes splat_4(const void* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return {vreinterpretq_u8_u32(vdupq_n_u32(four))};
}
inline Bytes low_nibbles(Bytes a) { return {vandq_u8(a.v, vdupq_n_u8(15))}; }
inline Bytes high_nibbles(Bytes a) { return {vshrq_n_u8(a.v, 4)}; }
inline Bytes low_codes(Bytes a) { return low_nibbles(a); }
inline Bytes high_codes(Bytes a) { return high_nibbles(a); }
template <int I> inline Bytes upper_crumbs(Bytes a) {
  if constexpr (I < 2) {
    return {vandq_u8(vshlq_n_u8(a.v, 4 - 2 * I), vdupq_n_u8(0x30))};
  } else if constexpr (I == 2) {
    return {vandq_u8(a.v, vdupq_n_u8(0x30))};
  } else {
    return {vandq_u8(vshrq_n_u8(a.v, 2), vdupq_n_u8(0x30))};
  }
}
inline Bytes operator|(Bytes a, Bytes b) { return {vorrq_u8(a.v, b.v)}; }
inline Bytes operator&(Bytes a, Bytes b) { return {vandq_u8(a.v, b.v)}; }
inline Bytes operator^(Bytes a, Bytes b) { return {veorq_u8(a.v, b.v)}; }
inline Bytes shift_left(Bytes a, int bits) { return {vshlq_u8(a.v, vdupq_n_s8(int8_t(bits)))}; }
inline Bytes even_bytes(Bytes a, Bytes b) { return {vuzp1q_u8(a.v, b.v)}; }
inline Bytes odd_bytes(Bytes a, Bytes b) { return {vuzp2q_u8(a.v, b.v)}; }
inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&column)[kColumns]) {
  for (int c = 0; c < kColumns; ++c) {
    uint8_t bytes[kBytes];
    for (int i = 0; i < kBytes; ++i) bytes[i] = p[i * stride + c];
    column[c] = load_bytes(bytes);
  }
}
// A code lies in one byte or in two: the upper bits of `first`, the lower ones of `next`. They are read by two loads of
// `size` bytes, which overlap.
struct Packing {
  int bits, size;
  uint8x16_t first, next, mask;
  int8x16_t down, up;
};
inline Packing packing(int bits, int lift = 0) {
  uint8_t first[kBytes], next[kBytes];
  int8_t down[kBytes], up[kBytes];
  const int size = bits >= 4 ? 8 : bits >= 2 ? 4 : 2, last = 2 * bits - 1;
  const auto place = [&](int byte) { return uint8_t(byte > last ? 255 : byte < size ? byte : byte - 2 * bits + size + 8); };
  for (int i = 0; i < kBytes; ++i) {
    first[i] = place(i * bits / 8);
    next[i] = place(i * bits / 8 + 1);
    down[i] = int8_t(lift - i * bits % 8);
    up[i] = int8_t(lift + 8 - i * bits % 8);
  }
  return {bits, size, vld1q_u8(first), vld1q_u8(next), vdupq_n_u8(uint8_t(((1 << bits) - 1) << lift)), vld1q_s8(down), vld1q_s8(up)};
}
inline Bytes load_codes(const void* p, const Packing& how) {
  const uint8_t *from = static_cast<const uint8_t*>(p), *upper = from + 2 * how.bits - how.size;
  uint64_t half[2] = {};
  if (how.size == 8) {
    memcpy(half, from, 8);
    memcpy(half + 1, upper, 8);
  } else if (how.size == 4) {
    memcpy(half, from, 4);
    memcpy(half + 1, upper, 4);
  } else {
    memcpy(half, from, 2);
  }
  const uint8x16_t bytes = vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(half[0]), vcreate_u64(half[1])));
  const uint8x16_t low = vshlq_u8(vqtbl1q_u8(bytes, how.first), how.down);
  return {vandq_u8(vorrq_u8(low, vshlq_u8(vqtbl1q_u8(bytes, how.next), how.up)), how.mask)};
}
inline Bytes merge(Bytes upper, Bytes lower, const Packing&) { return {vorrq_u8(upper.v, lower.v)}; }
template <int E, int X, class Code> inline Bytes load_words(const uint64_t* tables, const Code* code) {
  uint64_t word[2];
  for (int i = 0; i < 2; ++i) {
    word[i] = tables[code[i * (8 / X)]];
    for (int k = 1; k < 8 / X; ++k) word[i] |= tables[k * E + code[i * (8 / X) + k]];
  }
  return {vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(word[0]), vcreate_u64(word[1])))};
}
inline Floats as_floats(Bytes a) { return {vreinterpretq_f32_u8(a.v)}; }
inline Bytes load_words_12_bits(const uint64_t* table, const uint8_t* codes) {
  uint16_t code[kBytes / 8];
  unpack_12_bits(codes, code);
  return load_words<4096, 8>(table, code);
}
inline Bytes negate_where(Bytes a, Bytes signs, int bit) {
  const uint8x16_t mask = vtstq_u8(signs.v, vdupq_n_u8(uint8_t(1 << bit)));
  return {vsubq_u8(veorq_u8(a.v, mask), mask)};
}

// -- tables --------------------------------------------------------------------------------------

// 16 entries: vqtbl1q. 32: vqtbl2q. 64: vqtbl4q. 128 and 256: several of those, each zero outside its own 64 entries.
template <int E, int X> struct Codebook { const uint8_t* table; };
template <int X> struct Codebook<16, X> { uint8x16_t table[X]; };
template <int X> struct Codebook<32, X> { uint8x16x2_t table[X]; };
template <int X> struct Codebook<64, X> { uint8x16x4_t table[X]; };

template <int E, int X> inline Codebook<E, X> load_codebook(const void* table) {
  const uint8_t* bytes = static_cast<const uint8_t*>(table);
  if constexpr (E > 64) {
    return {bytes};
  } else {
    Codebook<E, X> book;
    for (int c = 0; c < X; ++c) {
      if constexpr (E == 16) book.table[c] = vld1q_u8(bytes + c * E);
      if constexpr (E == 32) book.table[c] = vld1q_u8_x2(bytes + c * E);
      if constexpr (E == 64) book.table[c] = vld1q_u8_x4(bytes + c * E);
    }
    return book;
  }
}

template <int E, int X> inline void lookup(const Codebook<E, X>& book, Bytes code, Bytes (&entry)[X]) {
  for (int c = 0; c < X; ++c) {
    if constexpr (E == 16) entry[c].v = vqtbl1q_u8(book.table[c], code.v);
    if constexpr (E == 32) entry[c].v = vqtbl2q_u8(book.table[c], code.v);
    if constexpr (E == 64) entry[c].v = vqtbl4q_u8(book.table[c], code.v);
    if constexpr (E > 64) {
      entry[c].v = vqtbl4q_u8(vld1q_u8_x4(book.table + c * E), code.v);
      for (int part = 1; part < E / 64; ++part) {
        const uint8x16_t within = veorq_u8(code.v, vdupq_n_u8(uint8_t(part << 6)));
        entry[c].v = vorrq_u8(entry[c].v, vqtbl4q_u8(vld1q_u8_x4(book.table + c * E + 64 * part), within));
      }
    }
  }
}

// -- sums of bytes -------------------------------------------------------------------------------

inline Ints zero_ints() { return {vdupq_n_s32(0)}; }
inline Ints load_ints(const int32_t* p) { return {vld1q_s32(p)}; }
inline void store(int32_t* p, Ints a) { vst1q_s32(p, a.v); }
inline Ints splat_int(int32_t value) { return {vdupq_n_s32(value)}; }
inline Ints operator+(Ints a, Ints b) { return {vaddq_s32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {vsubq_s32(a.v, b.v)}; }
template <int N> inline Ints shift_left(Ints a) { return {vshlq_n_s32(a.v, N)}; }
template <int N> inline Ints high_bits(Ints a) { return {vshrq_n_s32(a.v, N)}; }
template <int N> inline Ints low_bits(Ints a) { return {vandq_s32(a.v, vdupq_n_s32((1 << N) - 1))}; }
inline int32_t sum(Ints a) { return vaddvq_s32(a.v); }

inline Ints dot(Ints acc, Bytes level, Bytes number) {
  const int8x16_t a = vreinterpretq_s8_u8(level.v), b = vreinterpretq_s8_u8(number.v);
#if defined(__ARM_FEATURE_DOTPROD)
  return {vdotq_s32(acc.v, a, b)};
#else
  // Pairs of neighbours stay below 2^15; pairs of pairs are added in 32 bits.
  const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return {vaddq_s32(acc.v, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))};
#endif
}
// Weights have 7 bits: as signed bytes they are the same numbers.
inline Ints dot_weights(Ints acc, Bytes weight, Bytes entry) { return dot(acc, weight, entry); }
inline Ints add_product(Ints acc, Ints a, Ints b) { return {vmlaq_s32(acc.v, a.v, b.v)}; }

struct Sums16 { uint16x8_t low, high; };
inline Sums16 zero_sums() { return {vdupq_n_u16(0), vdupq_n_u16(0)}; }
inline void add(Sums16& sums, Bytes a) {
  sums.low = vaddw_u8(sums.low, vget_low_u8(a.v));
  sums.high = vaddw_high_u8(sums.high, a.v);
}
inline void store(uint16_t* p, const Sums16& sums) {
  vst1q_u16(p, sums.low);
  vst1q_u16(p + 8, sums.high);
}

// -- floats --------------------------------------------------------------------------------------

inline Floats load(const float* p) { return {vld1q_f32(p)}; }
inline void store(float* p, Floats a) { vst1q_f32(p, a.v); }
inline Floats splat(float value) { return {vdupq_n_f32(value)}; }
inline Floats splat_2(const float* p) { return {vcombine_f32(vld1_f32(p), vld1_f32(p))}; }
inline Floats reverse(Floats a) {
  const float32x4_t swapped = vrev64q_f32(a.v);
  return {vcombine_f32(vget_high_f32(swapped), vget_low_f32(swapped))};
}
struct Spread { uint8x16_t bytes; };
inline Spread spread(int count) {
  const uint32_t lanes[4] = {0, 1, 2, 3};
  const uint32x4_t lane = vshrq_n_u32(vmulq_n_u32(vld1q_u32(lanes), uint32_t(count)), 2);
  return {vreinterpretq_u8_u32(vmlaq_n_u32(vdupq_n_u32(0x03020100), lane, 0x04040404))};
}
inline Floats load(const float* p, Spread s) {
  return {vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(vld1q_f32(p)), s.bytes))};
}
inline Floats take(Floats a, Spread s, int first) {
  const uint8x16_t bytes = vaddq_u8(s.bytes, vdupq_n_u8(uint8_t(4 * first)));
  return {vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(a.v), bytes))};
}
inline Floats operator+(Floats a, Floats b) { return {vaddq_f32(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {vsubq_f32(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {vmulq_f32(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {vdivq_f32(a.v, b.v)}; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
inline Floats sqrt(Floats a) { return {vsqrtq_f32(a.v)}; }
inline float sum(Floats a) { return vaddvq_f32(a.v); }
inline float largest(Floats a) { return vmaxvq_f32(a.v); }
inline Floats to_floats(Ints a) { return {vcvtq_f32_s32(a.v)}; }
inline void unzip(Floats a, Floats b, Floats& even, Floats& odd) {
  even = {vuzp1q_f32(a.v, b.v)};
  odd = {vuzp2q_f32(a.v, b.v)};
}
inline Ints to_ints(Floats a) { return {vcvtnq_s32_f32(a.v)}; }
inline Floats exp2_of(Ints n) {
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.v, vdupq_n_s32(127)), 23))};
}
inline Floats where_less(Floats a, Floats b, Floats x, Floats y) { return {vbslq_f32(vcltq_f32(a.v, b.v), x.v, y.v)}; }
inline Ints where_less(Floats a, Floats b, Ints x, Ints y) { return {vbslq_s32(vcltq_f32(a.v, b.v), x.v, y.v)}; }
inline Ints count_less(Ints n, Floats a, Floats b) {
  return {vsubq_s32(n.v, vreinterpretq_s32_u32(vcltq_f32(a.v, b.v)))};
}
inline int first_at_least(Floats a, Floats b) {
  const uint32_t bits[4] = {1, 2, 4, 8};
  return __builtin_ctz(vaddvq_u32(vandq_u32(vcgeq_f32(a.v, b.v), vld1q_u32(bits))) | 16u);
}
template <int N> inline Floats pick(const float* table, Ints index) {
  const uint32x4_t first = vmulq_n_u32(vreinterpretq_u32_s32(index.v), 0x04040404);  // of a number's bytes
  const uint8x16_t bytes = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x03020100)));
  const uint8_t* from = reinterpret_cast<const uint8_t*>(table);
  if constexpr (N == 8) return {vreinterpretq_f32_u8(vqtbl2q_u8(vld1q_u8_x2(from), bytes))};
  return {vreinterpretq_f32_u8(vqtbl4q_u8(vld1q_u8_x4(from), bytes))};
}
inline void store_low_bytes(void* p, Ints a) {
  int32_t four[4];
  vst1q_s32(four, a.v);
  for (int i = 0; i < 4; ++i) static_cast<uint8_t*>(p)[i] = uint8_t(four[i]);
}
inline Bytes join(Ints a, Ints b, Ints c, Ints d) {
  const int32x4_t low = vorrq_s32(a.v, vshlq_n_s32(b.v, 8));
  const int32x4_t high = vorrq_s32(vshlq_n_s32(c.v, 16), vshlq_n_s32(d.v, 24));
  return {vreinterpretq_u8_s32(vorrq_s32(low, high))};
}
inline Floats load_half(const uint16_t* p) {
  return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))};
}
inline void store_half(uint16_t* p, Floats a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a.v))); }
inline Floats load_unsigned(const uint16_t* p) { return {vcvtq_f32_u32(vmovl_u16(vld1_u16(p)))}; }
inline Floats load_bfloat(const uint16_t* p) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))};
}
inline Floats round_bfloat(Floats a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a.v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const float32x4_t kept = vreinterpretq_f32_u32(vandq_u32(up, vdupq_n_u32(0xffff0000)));
  return {vbslq_f32(vceqq_f32(a.v, a.v), kept, a.v)};
}
inline Floats load_halves(const uint16_t* first, const uint16_t*) { return load_half(first); }
inline Floats load_bfloats(const uint16_t* first, const uint16_t*) { return load_bfloat(first); }

}  // namespace
}  // namespace hf_vq
