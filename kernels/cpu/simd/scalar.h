// SPDX-License-Identifier: Apache-2.0
// The SIMD set in plain C++: the meaning of every name that the other files of this folder implement
// with instructions. Kernels are written once over these names; a target includes one of the files.
//
//   Bytes    kBytes codes, table entries, or 8-bit numbers
//   Ints     kFloats = kBytes / 4 sums of 32 bits
//   Floats   kFloats numbers
//
// Codebook<E, X> holds X tables of E = 16, 32 .. 256 bytes: the components of a codebook's entries.
#pragma once
#include <cstdint>
#include <cstring>

#include "../primitives/numbers.h"

namespace hf_vq {
namespace {

constexpr int kBytes = 16;
constexpr int kFloats = kBytes / 4;

// Entries that `dot` reads are stored as value + kLevelBias: some instructions want them unsigned.
constexpr int kLevelBias = 0;

// Softmax weights that `dot_weights` reads are unsigned numbers of this many bits.
constexpr int kWeightBits = 7;

// True if lookup() in 256 entries is faster than loads from the L1 cache.
constexpr bool kWideLookup = false;

// Rows that one input is multiplied with at once, from as many places: they share what is done to the input, and a
// processor fetches several streams faster than one.
constexpr int kStreams = 1;

// Vectors that fit into registers.
constexpr int kRegisters = 16;
// Columns that load_columns takes at once.
constexpr int kColumns = 16;

struct Bytes { uint8_t v[kBytes]; };
struct Ints { int32_t v[kFloats]; };
struct Floats { float v[kFloats]; };

// -- bytes ---------------------------------------------------------------------------------------

inline Bytes load_bytes(const void* p) { Bytes r; memcpy(r.v, p, kBytes); return r; }
inline void store(void* p, Bytes a) { memcpy(p, a.v, kBytes); }
inline Bytes splat_byte(int value) { Bytes r; memset(r.v, value, kBytes); return r; }

// The four bytes at p, again and again.
inline Bytes splat_4(const void* p) {
  Bytes r;
  for (int i = 0; i < kBytes; i += 4) memcpy(r.v + i, p, 4);
  return r;
}

inline Bytes low_nibbles(Bytes a) { for (auto& x : a.v) x &= 15; return a; }
inline Bytes high_nibbles(Bytes a) { for (auto& x : a.v) x >>= 4; return a; }

// The same as codes for lookup<16, X>, which does not need the upper bits to be 0 everywhere.
inline Bytes low_codes(Bytes a) { return low_nibbles(a); }
inline Bytes high_codes(Bytes a) { return high_nibbles(a); }

// Bits 2 I and 2 I + 1 of every byte, as bits 4 and 5: the upper part of a 6-bit code.
template <int I> inline Bytes upper_crumbs(Bytes a) {
  for (auto& x : a.v) x = uint8_t(((x >> (2 * I)) & 3) << 4);
  return a;
}

inline Bytes operator|(Bytes a, Bytes b) { for (int i = 0; i < kBytes; ++i) a.v[i] |= b.v[i]; return a; }
inline Bytes operator&(Bytes a, Bytes b) { for (int i = 0; i < kBytes; ++i) a.v[i] &= b.v[i]; return a; }
inline Bytes operator^(Bytes a, Bytes b) { for (int i = 0; i < kBytes; ++i) a.v[i] ^= b.v[i]; return a; }

// Every byte times 2^bits; no bit may leave its byte.
inline Bytes shift_left(Bytes a, int bits) { for (auto& x : a.v) x = uint8_t(x << bits); return a; }

// Bytes 0, 2, 4 .. of a and then of b; bytes 1, 3, 5 ..
inline Bytes even_bytes(Bytes a, Bytes b) {
  Bytes r;
  for (int i = 0; i < kBytes; ++i) r.v[i] = i < kBytes / 2 ? a.v[2 * i] : b.v[2 * i - kBytes];
  return r;
}
inline Bytes odd_bytes(Bytes a, Bytes b) {
  Bytes r;
  for (int i = 0; i < kBytes; ++i) r.v[i] = i < kBytes / 2 ? a.v[2 * i + 1] : b.v[2 * i + 1 - kBytes];
  return r;
}

// column[c] = bytes c of kBytes rows that begin at p, p + stride, p + 2 stride ..
inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&column)[kColumns]) {
  for (int c = 0; c < kColumns; ++c)
    for (int i = 0; i < kBytes; ++i) column[c].v[i] = p[i * stride + c];
}

// How codes of `bits` bits, 1 to 8, are packed, the first one in the lowest bits; they are loaded times 2^lift.
struct Packing { int bits, lift; };
inline Packing packing(int bits, int lift = 0) { return {bits, lift}; }

// kBytes codes from the kBytes * bits / 8 bytes at p, each times 2^lift. Bits around them may be anything: use them for
// lookup() in as many entries, or in tables that repeat them, or in merge().
inline Bytes load_codes(const void* p, const Packing& how) {
  const uint8_t* from = static_cast<const uint8_t*>(p);
  Bytes r;
  uint32_t waiting = 0;
  for (int i = 0, count = 0; i < kBytes; ++i, count -= how.bits, waiting >>= how.bits) {
    for (; count < how.bits; count += 8) waiting |= uint32_t(*from++) << count;
    r.v[i] = uint8_t((waiting & ((1u << how.bits) - 1)) << how.lift);
  }
  return r;
}

// The upper code of a byte, and the lower one, whose packing is given. Bits above the upper one may be anything.
inline Bytes merge(Bytes upper, Bytes lower, const Packing&) {
  for (int i = 0; i < kBytes; ++i) upper.v[i] |= lower.v[i];
  return upper;
}

// kBytes / X entries of X bytes each. tables[k * E + c] is entry c, moved up by k entries of a word, so that
// a word is the union of 8 / X of them.
template <int E, int X, class Code> inline Bytes load_words(const uint64_t* tables, const Code* code) {
  Bytes r;
  for (int i = 0; i < kBytes / 8; ++i) {
    uint64_t word = 0;
    for (int k = 0; k < 8 / X; ++k) word |= tables[k * E + code[i * (8 / X) + k]];
    memcpy(r.v + 8 * i, &word, 8);
  }
  return r;
}

// The same bits as kFloats numbers.
inline Floats as_floats(Bytes a) { Floats r; memcpy(r.v, a.v, kBytes); return r; }

// kBytes / 8 entries of 8 bytes, whose codes of 12 bits are packed at `codes`.
inline Bytes load_words_12_bits(const uint64_t* table, const uint8_t* codes) {
  uint16_t code[kBytes / 8];
  unpack_12_bits(codes, code);
  return load_words<4096, 8>(table, code);
}

// -v (mod 256) where bit `bit` of `signs` is 1. Right for entries with a kLevelBias of 0 or 128.
inline Bytes negate_where(Bytes a, Bytes signs, int bit) {
  for (int i = 0; i < kBytes; ++i)
    if (signs.v[i] >> bit & 1) a.v[i] = uint8_t(-a.v[i]);
  return a;
}

// -- tables --------------------------------------------------------------------------------------

template <int E, int X> struct Codebook { const uint8_t* table; };

// X contiguous tables of E bytes. If they do not fit into registers, they stay at `table`.
template <int E, int X> inline Codebook<E, X> load_codebook(const void* table) {
  return {static_cast<const uint8_t*>(table)};
}

// entry[c] = component c of the entries `code`. Every code must be less than E, or come from low_codes or
// high_codes.
template <int E, int X> inline void lookup(const Codebook<E, X>& book, Bytes code, Bytes (&entry)[X]) {
  for (int c = 0; c < X; ++c)
    for (int i = 0; i < kBytes; ++i) entry[c].v[i] = book.table[c * E + code.v[i]];
}

// -- sums of bytes -------------------------------------------------------------------------------

inline Ints zero_ints() { return Ints{}; }
inline Ints load_ints(const int32_t* p) { Ints r; memcpy(r.v, p, sizeof r); return r; }
inline void store(int32_t* p, Ints a) { memcpy(p, a.v, sizeof a); }
inline Ints splat_int(int32_t value) { Ints r; for (auto& x : r.v) x = value; return r; }
inline Ints operator+(Ints a, Ints b) { for (int i = 0; i < kFloats; ++i) a.v[i] += b.v[i]; return a; }
inline Ints operator-(Ints a, Ints b) { for (int i = 0; i < kFloats; ++i) a.v[i] -= b.v[i]; return a; }
template <int N> inline Ints shift_left(Ints a) { for (auto& x : a.v) x = int32_t(uint32_t(x) << N); return a; }
// a / 2^N and a mod 2^N, for a >= 0.
template <int N> inline Ints high_bits(Ints a) { for (auto& x : a.v) x >>= N; return a; }
template <int N> inline Ints low_bits(Ints a) { for (auto& x : a.v) x &= (1 << N) - 1; return a; }
inline int32_t sum(Ints a) { int32_t r = 0; for (int32_t x : a.v) r += x; return r; }

// sum[i] += sum_{j<4} level[4i+j] * number[4i+j]
// level: value + kLevelBias with value in [-127, 127]; number: signed, in [-127, 127].
inline Ints dot(Ints acc, Bytes level, Bytes number) {
  for (int i = 0; i < kBytes; ++i) acc.v[i / 4] += int8_t(level.v[i]) * int8_t(number.v[i]);
  return acc;
}

// The same with weights in [0, 2^kWeightBits) and signed entries without bias, in [-127, 127].
inline Ints dot_weights(Ints acc, Bytes weight, Bytes entry) {
  for (int i = 0; i < kBytes; ++i) acc.v[i / 4] += weight.v[i] * int8_t(entry.v[i]);
  return acc;
}

// acc + a * b of numbers of 16 bits: a in (-2^15, 2^15), b in [0, 2^15).
inline Ints add_product(Ints acc, Ints a, Ints b) {
  for (int i = 0; i < kFloats; ++i) acc.v[i] += a.v[i] * b.v[i];
  return acc;
}

// kBytes sums of 16 bits, to which unsigned bytes are added: exact for 257 additions.
struct Sums16 { uint16_t v[kBytes]; };
inline Sums16 zero_sums() { return Sums16{}; }
inline void add(Sums16& sums, Bytes a) {
  for (int i = 0; i < kBytes; ++i) sums.v[i] = uint16_t(sums.v[i] + a.v[i]);
}
// The sums in the order of their bytes.
inline void store(uint16_t* p, const Sums16& sums) { memcpy(p, sums.v, sizeof sums.v); }

// -- floats --------------------------------------------------------------------------------------

inline Floats load(const float* p) { Floats r; memcpy(r.v, p, sizeof r); return r; }
inline void store(float* p, Floats a) { memcpy(p, a.v, sizeof a); }
inline Floats splat(float value) { Floats r; for (auto& x : r.v) x = value; return r; }
// The two numbers at p in turn.
inline Floats splat_2(const float* p) { Floats r; for (int i = 0; i < kFloats; ++i) r.v[i] = p[i % 2]; return r; }
// The lanes in reverse order.
inline Floats reverse(Floats a) { Floats r; for (int i = 0; i < kFloats; ++i) r.v[i] = a.v[kFloats - 1 - i]; return r; }

// `count` numbers at p, each in kFloats / count neighbouring lanes; kFloats numbers at p are read.
struct Spread { int count; };
inline Spread spread(int count) { return {count}; }
inline Floats load(const float* p, Spread s) {
  Floats r;
  for (int i = 0; i < kFloats; ++i) r.v[i] = p[i * s.count / kFloats];
  return r;
}
// Lane i: number first + i * count / kFloats of a, which it has.
inline Floats take(Floats a, Spread s, int first) {
  Floats r;
  for (int i = 0; i < kFloats; ++i) r.v[i] = a.v[first + i * s.count / kFloats];
  return r;
}
inline Floats operator+(Floats a, Floats b) { for (int i = 0; i < kFloats; ++i) a.v[i] += b.v[i]; return a; }
inline Floats operator-(Floats a, Floats b) { for (int i = 0; i < kFloats; ++i) a.v[i] -= b.v[i]; return a; }
inline Floats operator*(Floats a, Floats b) { for (int i = 0; i < kFloats; ++i) a.v[i] *= b.v[i]; return a; }
inline Floats operator/(Floats a, Floats b) { for (int i = 0; i < kFloats; ++i) a.v[i] /= b.v[i]; return a; }
inline Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
inline float fma(float a, float b, float c) { return a * b + c; }  // as one of its lanes
inline Floats max(Floats a, Floats b) { for (int i = 0; i < kFloats; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline Floats min(Floats a, Floats b) { for (int i = 0; i < kFloats; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline Floats sqrt(Floats a) { for (auto& x : a.v) x = __builtin_sqrtf(x); return a; }
inline float sum(Floats a) { float r = 0; for (float x : a.v) r += x; return r; }
inline float largest(Floats a) { float r = a.v[0]; for (float x : a.v) r = x > r ? x : r; return r; }

inline Floats to_floats(Ints a) { Floats r; for (int i = 0; i < kFloats; ++i) r.v[i] = float(a.v[i]); return r; }

// The even and the odd ones of the 2 kFloats numbers a, b.
inline void unzip(Floats a, Floats b, Floats& even, Floats& odd) {
  for (int i = 0; i < kFloats; ++i) {
    const Floats& from = i < kFloats / 2 ? a : b;
    even.v[i] = from.v[2 * i % kFloats];
    odd.v[i] = from.v[2 * i % kFloats + 1];
  }
}

// Rounded to nearest, ties to even; |a| < 2^22.
inline Ints to_ints(Floats a) {
  Ints r;
  for (int i = 0; i < kFloats; ++i) {
    const float magic = 12582912.0f;  // 1.5 * 2^23
    volatile float shifted = a.v[i] + magic;
    r.v[i] = int32_t(shifted - magic);
  }
  return r;
}

// 2^n for n in [-126, 127].
inline Floats exp2_of(Ints n) {
  Floats r;
  for (int i = 0; i < kFloats; ++i) {
    const int32_t bits = (n.v[i] + 127) << 23;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

// a < b ? x : y
inline Floats where_less(Floats a, Floats b, Floats x, Floats y) {
  for (int i = 0; i < kFloats; ++i) x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
inline Ints where_less(Floats a, Floats b, Ints x, Ints y) {
  for (int i = 0; i < kFloats; ++i) x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}

// n + 1 where a < b, else n
inline Ints count_less(Ints n, Floats a, Floats b) {
  for (int i = 0; i < kFloats; ++i) n.v[i] += a.v[i] < b.v[i] ? 1 : 0;
  return n;
}

// The first lane where a >= b; kFloats if there is none.
inline int first_at_least(Floats a, Floats b) {
  int lane = 0;
  while (lane < kFloats && !(a.v[lane] >= b.v[lane])) ++lane;
  return lane;
}

// table[index], 0 <= index < N, from N = 8 or 16 numbers.
template <int N> inline Floats pick(const float* table, Ints index) {
  Floats r;
  for (int i = 0; i < kFloats; ++i) r.v[i] = table[index.v[i]];
  return r;
}

// The low bytes of kFloats ints.
inline void store_low_bytes(void* p, Ints a) {
  for (int i = 0; i < kFloats; ++i) static_cast<uint8_t*>(p)[i] = uint8_t(a.v[i]);
}

// Byte 4 i + j: the low byte of lane i of a, b, c, d for j = 0, 1, 2, 3. The lanes are less than 256.
inline Bytes join(Ints a, Ints b, Ints c, Ints d) {
  Bytes r;
  for (int i = 0; i < kFloats; ++i) {
    const Ints* four[] = {&a, &b, &c, &d};
    for (int j = 0; j < 4; ++j) r.v[4 * i + j] = uint8_t(four[j]->v[i]);
  }
  return r;
}

inline Floats load_half(const uint16_t* p) { Floats r; for (int i = 0; i < kFloats; ++i) r.v[i] = half_to_float(p[i]); return r; }
// fp16, rounded to nearest, ties to even.
inline void store_half(uint16_t* p, Floats a) { for (int i = 0; i < kFloats; ++i) p[i] = float_to_half(a.v[i]); }
// Numbers of 16 bits without a sign.
inline Floats load_unsigned(const uint16_t* p) { Floats r; for (int i = 0; i < kFloats; ++i) r.v[i] = float(p[i]); return r; }
// Eight numbers of fp16 or bf16 at each of two addresses; vectors of eight and less begin with those at the first.
inline Floats load_halves(const uint16_t* first, const uint16_t*) { return load_half(first); }
inline Floats load_bfloat(const uint16_t* p) {
  Floats r;
  for (int i = 0; i < kFloats; ++i) {
    const uint32_t bits = uint32_t(p[i]) << 16;
    memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
// The nearest numbers of bf16, ties to even.
inline Floats round_bfloat(Floats a) {
  for (auto& x : a.v) x = bfloat_to_float(float_to_bfloat(x));
  return a;
}
inline Floats load_bfloats(const uint16_t* first, const uint16_t*) { return load_bfloat(first); }

}  // namespace
}  // namespace hf_vq
