// SPDX-License-Identifier: Apache-2.0
// The SIMD set (defined in scalar.h) with AVX-512 F, BW, DQ, VL, VBMI and VNNI. With HF_VQ_ZEN4, the same results by
// instructions that are faster on AMD processors.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "../primitives/numbers.h"

namespace hf_vq {
namespace {

constexpr int kBytes = 64;
constexpr int kFloats = kBytes / 4;
constexpr int kLevelBias = 128;  // vpdpbusd multiplies unsigned entries with signed numbers
constexpr int kWeightBits = 8;
constexpr bool kWideLookup = true;
constexpr int kStreams = 4;
constexpr int kRegisters = 32;
constexpr int kColumns = 16;

struct Bytes { __m512i v; };
struct Ints { __m512i v; };
struct Floats { __m512 v; };

// -- bytes ---------------------------------------------------------------------------------------

inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store(void* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes splat_byte(int value) { return {_mm512_set1_epi8(char(value))}; }
inline Bytes splat_4(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return {_mm512_set1_epi32(four)};
}
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }
inline Bytes low_codes(Bytes a) { return a; }
inline Bytes high_codes(Bytes a) { return {_mm512_srli_epi16(a.v, 4)}; }
template <int I> inline Bytes upper_crumbs(Bytes a) {
  const __m512i moved = I < 2 ? _mm512_slli_epi16(a.v, I < 2 ? 4 - 2 * I : 0)
                              : _mm512_srli_epi16(a.v, I < 2 ? 0 : 2 * I - 4);
  return {_mm512_and_si512(moved, _mm512_set1_epi8(0x30))};
}
inline Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
inline Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Bytes operator^(Bytes a, Bytes b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Bytes shift_left(Bytes a, int bits) { return {_mm512_sll_epi16(a.v, _mm_cvtsi32_si128(bits))}; }
inline __m512i byte_numbers() {  // 0, 1, 2 .. 63
  const __m512i four = _mm512_set1_epi32(0x03020100);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi8(four, _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x04040404)));
}
inline Bytes even_bytes(Bytes a, Bytes b) {
  const __m512i number = byte_numbers();
  return {_mm512_permutex2var_epi8(a.v, _mm512_add_epi8(number, number), b.v)};
}
inline Bytes odd_bytes(Bytes a, Bytes b) {
  const __m512i number = byte_numbers();
  const __m512i odd = _mm512_add_epi8(_mm512_add_epi8(number, number), _mm512_set1_epi8(1));
  return {_mm512_permutex2var_epi8(a.v, odd, b.v)};
}
inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&column)[kColumns]) {
  const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + r * stride)); };
  __m512i a[kColumns], b[kColumns];
  for (int i = 0; i < kColumns; ++i) {  // rows i, 16 + i, 32 + i, 48 + i
    a[i] = _mm512_castsi128_si512(row(i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00f0, row(16 + i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0f00, row(32 + i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xf000, row(48 + i));
  }
  // Each time the numbers of vector and byte, 8 bits together, are rotated by one.
  for (int times = 0; times < 4; ++times) {
    for (int i = 0; i < kColumns / 2; ++i) {
      b[2 * i] = _mm512_unpacklo_epi8(a[i], a[i + kColumns / 2]);
      b[2 * i + 1] = _mm512_unpackhi_epi8(a[i], a[i + kColumns / 2]);
    }
    for (int i = 0; i < kColumns; ++i) a[i] = b[i];
  }
  for (int i = 0; i < kColumns; ++i) column[i].v = a[i];
}
// Byte j of 64-bit lane i takes byte bits * i + j, and of these 8 bits from bit bits * j - lift on, modulo 64.
struct Packing {
  __m512i from, shift, mask;
  __mmask64 bytes;
};
inline Packing packing(int bits, int lift = 0) {
  const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i skipped = _mm512_mullo_epi64(lane, _mm512_set1_epi64((8 - bits) * 0x0101010101010101));
  const __m512i shift = _mm512_sub_epi8(_mm512_set1_epi64(bits * 0x0706050403020100), _mm512_set1_epi8(char(lift)));
  return {_mm512_sub_epi8(byte_numbers(), skipped), _mm512_and_si512(shift, _mm512_set1_epi8(63)),
          _mm512_set1_epi8(char((1 << bits) - 1)), ~__mmask64{0} >> (64 - 8 * bits)};
}
inline Bytes load_codes(const void* p, const Packing& how) {
  const __m512i bytes = _mm512_permutexvar_epi8(how.from, _mm512_maskz_loadu_epi8(how.bytes, p));
  return {_mm512_multishift_epi64_epi8(how.shift, bytes)};
}
inline Bytes merge(Bytes upper, Bytes lower, const Packing& how) {  // how.mask ? lower : upper
  return {_mm512_ternarylogic_epi64(how.mask, lower.v, upper.v, 0xca)};
}
template <int E, int X, class Code> inline __m128i load_two_words(const uint64_t* tables, const Code* code) {
  if constexpr (X == 8) {
    const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(tables + code[0]));
    const double* second = reinterpret_cast<const double*>(tables + code[1]);
    return _mm_castpd_si128(_mm_loadh_pd(_mm_castsi128_pd(first), second));
  } else {
    static_assert(E == 256);
    uint64_t word[2], codes = 0;  // moving bytes down in a register leaves the load ports to the tables
    memcpy(&codes, code, 16 / X);
    for (int i = 0; i < 2; ++i) {
      word[i] = tables[codes & 255];
      codes >>= 8;
      for (int k = 1; k < 8 / X; ++k, codes >>= 8) word[i] |= tables[k * E + (codes & 255)];
    }
    return _mm_insert_epi64(_mm_cvtsi64_si128(int64_t(word[0])), int64_t(word[1]), 1);
  }
}
template <int E, int X, class Code> inline __m256i load_four_words(const uint64_t* tables, const Code* code) {
  const __m256i first = _mm256_castsi128_si256(load_two_words<E, X>(tables, code));
  const __m128i second = load_two_words<E, X>(tables, code + 16 / X);  // named: the intrinsic is a macro in Clang
  return _mm256_inserti128_si256(first, second, 1);
}
template <int E, int X, class Code> inline Bytes load_words(const uint64_t* tables, const Code* code) {
  const __m512i first = _mm512_castsi256_si512(load_four_words<E, X>(tables, code));
  const __m256i second = load_four_words<E, X>(tables, code + 32 / X);
  return {_mm512_inserti64x4(first, second, 1)};
}
inline Floats as_floats(Bytes a) { return {_mm512_castsi512_ps(a.v)}; }
inline Bytes load_words_12_bits(const uint64_t* table, const uint8_t* codes) {
  const __m512i packed = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(0x0fff, codes));
  const __m512i pair = _mm512_setr_epi64(0x0100, 0x0201, 0x0403, 0x0504, 0x0706, 0x0807, 0x0a09, 0x0b0a);
  const __m512i both = _mm512_permutexvar_epi8(pair, packed);
  const __m512i code = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 4, 0, 4, 0, 4, 0, 4));
  return {_mm512_i64gather_epi64(_mm512_and_si512(code, _mm512_set1_epi64(4095)), table, 8)};
}
inline Bytes negate_where(Bytes a, Bytes signs, int bit) {
  const __mmask64 mask = _mm512_test_epi8_mask(signs.v, _mm512_set1_epi8(char(1 << bit)));
  return {_mm512_mask_sub_epi8(a.v, mask, _mm512_setzero_si512(), a.v)};
}

// -- tables --------------------------------------------------------------------------------------

// 64 entries: vpermb, which ignores bits 6 and 7 of a code. 16 and 32: the same of copies, so that bits 4 and
// 5 do not matter either. 128: vpermi2b, which ignores bit 7. 256: four vpermb of 64 entries each, the last three under masks of bits 6 and 7. On
// Intel, two vpermi2b and a blend keep the port of permutations as busy, and the only other one for vectors
// busier; on AMD, where a vpermi2b takes as long as a vpermb, they are half of the permutations.
template <int E, int X> struct Codebook { __m512i table[X][E < 64 ? 1 : E / 64]; };

template <int E, int X> inline Codebook<E, X> load_codebook(const void* table) {
  const uint8_t* bytes = static_cast<const uint8_t*>(table);
  Codebook<E, X> book;
  for (int c = 0; c < X; ++c) {
    if constexpr (E == 16) {
      book.table[c][0] = _mm512_broadcast_i32x4(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + c * E)));
    } else if constexpr (E == 32) {
      book.table[c][0] = _mm512_broadcast_i64x4(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + c * E)));
    } else {
      for (int part = 0; part < E / 64; ++part)
        book.table[c][part] = _mm512_loadu_si512(bytes + c * E + 64 * part);
    }
  }
  return book;
}

template <int E, int X> inline void lookup(const Codebook<E, X>& book, Bytes code, Bytes (&entry)[X]) {
  if constexpr (E <= 64) {
    for (int c = 0; c < X; ++c) entry[c].v = _mm512_permutexvar_epi8(code.v, book.table[c][0]);
  } else if constexpr (E == 128) {
    for (int c = 0; c < X; ++c)
      entry[c].v = _mm512_permutex2var_epi8(book.table[c][0], code.v, book.table[c][1]);
  } else {
    const __mmask64 bit_7 = _mm512_movepi8_mask(code.v);
#if defined(HF_VQ_ZEN4)
    for (int c = 0; c < X; ++c) {
      const __m512i* t = book.table[c];
      const __m512i low = _mm512_permutex2var_epi8(t[0], code.v, t[1]);
      const __m512i high = _mm512_permutex2var_epi8(t[2], code.v, t[3]);
      entry[c].v = _mm512_mask_blend_epi8(bit_7, low, high);
    }
#else
    const __mmask64 bit_6 = _mm512_movepi8_mask(_mm512_slli_epi16(code.v, 1)), both = _kand_mask64(bit_6, bit_7);
    for (int c = 0; c < X; ++c) {
      const __m512i* t = book.table[c];
      __m512i found = _mm512_permutexvar_epi8(code.v, t[0]);
      found = _mm512_mask_permutexvar_epi8(found, bit_6, code.v, t[1]);
      found = _mm512_mask_permutexvar_epi8(found, bit_7, code.v, t[2]);
      entry[c].v = _mm512_mask_permutexvar_epi8(found, both, code.v, t[3]);
    }
#endif
  }
}

// -- sums of bytes -------------------------------------------------------------------------------

inline Ints zero_ints() { return {_mm512_setzero_si512()}; }
inline Ints load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store(int32_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline Ints splat_int(int32_t value) { return {_mm512_set1_epi32(value)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int N> inline Ints shift_left(Ints a) { return {_mm512_slli_epi32(a.v, N)}; }
template <int N> inline Ints high_bits(Ints a) { return {_mm512_srli_epi32(a.v, N)}; }
template <int N> inline Ints low_bits(Ints a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32((1 << N) - 1))}; }
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline Ints dot(Ints acc, Bytes level, Bytes number) { return {_mm512_dpbusd_epi32(acc.v, level.v, number.v)}; }
inline Ints dot_weights(Ints acc, Bytes weight, Bytes entry) { return {_mm512_dpbusd_epi32(acc.v, weight.v, entry.v)}; }

// The upper halves of b are 0, and so are their products.
inline Ints add_product(Ints acc, Ints a, Ints b) { return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)}; }

// Every 16-bit lane of `whole` sums even + 256 odd (mod 2^16), of `odd` the odd bytes.
struct Sums16 { __m512i whole, odd; };
inline Sums16 zero_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
inline void add(Sums16& sums, Bytes a) {
  sums.whole = _mm512_add_epi16(sums.whole, a.v);
  sums.odd = _mm512_add_epi16(sums.odd, _mm512_srli_epi16(a.v, 8));
}
inline void store(uint16_t* p, const Sums16& sums) {
  const __m512i even = _mm512_sub_epi16(sums.whole, _mm512_slli_epi16(sums.odd, 8));
  const __m512i low = _mm512_unpacklo_epi16(even, sums.odd), high = _mm512_unpackhi_epi16(even, sums.odd);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  _mm512_storeu_si512(p, _mm512_permutex2var_epi64(low, first, high));
  _mm512_storeu_si512(p + 32, _mm512_permutex2var_epi64(low, last, high));
}

// -- floats --------------------------------------------------------------------------------------

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats splat(float value) { return {_mm512_set1_ps(value)}; }
inline Floats splat_2(const float* p) {
  double both;
  memcpy(&both, p, 8);
  return {_mm512_castpd_ps(_mm512_set1_pd(both))};
}
inline Floats reverse(Floats a) {
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), a.v)};
}
struct Spread { __m512i lane; };
inline Spread spread(int count) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_srli_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(count)), 4)};
}
inline Floats load(const float* p, Spread s) { return {_mm512_permutexvar_ps(s.lane, _mm512_loadu_ps(p))}; }
inline Floats take(Floats a, Spread s, int first) {
  return {_mm512_permutexvar_ps(_mm512_add_epi32(s.lane, _mm512_set1_epi32(first)), a.v)};
}
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats sqrt(Floats a) { return {_mm512_sqrt_ps(a.v)}; }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline void unzip(Floats a, Floats b, Floats& even, Floats& odd) {
  const __m512i first = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = {_mm512_permutex2var_ps(a.v, first, b.v)};
  odd = {_mm512_permutex2var_ps(a.v, _mm512_add_epi32(first, _mm512_set1_epi32(1)), b.v)};
}
inline Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Floats exp2_of(Ints n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
inline Floats where_less(Floats a, Floats b, Floats x, Floats y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline Ints where_less(Floats a, Floats b, Ints x, Ints y) {
  return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline Ints count_less(Ints n, Floats a, Floats b) {
  return {_mm512_mask_add_epi32(n.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), n.v, _mm512_set1_epi32(1))};
}
inline int first_at_least(Floats a, Floats b) {
  return __builtin_ctz(uint32_t(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)) | 0x10000u);
}
template <int N> inline Floats pick(const float* table, Ints index) {
  const __m512 all = N == 16 ? _mm512_loadu_ps(table) : _mm512_castps256_ps512(_mm256_loadu_ps(table));
  return {_mm512_permutexvar_ps(index.v, all)};
}
inline void store_low_bytes(void* p, Ints a) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline Bytes join(Ints a, Ints b, Ints c, Ints d) {
  const __m512i low = _mm512_or_si512(a.v, _mm512_slli_epi32(b.v, 8));
  const __m512i high = _mm512_or_si512(_mm512_slli_epi32(c.v, 16), _mm512_slli_epi32(d.v, 24));
  return {_mm512_or_si512(low, high)};
}
inline Floats load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint16_t* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats load_unsigned(const uint16_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))))};
}
inline Floats load_bfloat(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Floats round_bfloat(Floats a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i kept = _mm512_and_si512(up, _mm512_set1_epi32(int(0xffff0000)));
  return {_mm512_mask_mov_ps(_mm512_castsi512_ps(kept), _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}
// Sixteen numbers of 16 bits, eight from each address.
inline __m256i two_eights(const uint16_t* first, const uint16_t* second) {
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)));
  return _mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)), 1);
}
inline Floats load_halves(const uint16_t* first, const uint16_t* second) {
  return {_mm512_cvtph_ps(two_eights(first, second))};
}
inline Floats load_bfloats(const uint16_t* first, const uint16_t* second) {
  const __m512i wide = _mm512_cvtepu16_epi32(two_eights(first, second));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

}  // namespace
}  // namespace hf_vq
