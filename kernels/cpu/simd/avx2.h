// SPDX-License-Identifier: Apache-2.0
// The SIMD set (defined in scalar.h) with AVX2, FMA and F16C.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "../primitives/numbers.h"

namespace hf_vq {
namespace {

constexpr int kBytes = 32;
constexpr int kFloats = kBytes / 4;
constexpr int kLevelBias = 0;
constexpr int kWeightBits = 7;
constexpr bool kWideLookup = false;
constexpr int kStreams = 4;
constexpr int kRegisters = 16;
constexpr int kColumns = 16;

struct Bytes { __m256i v; };
struct Ints { __m256i v; };
struct Floats { __m256 v; };

// -- bytes ---------------------------------------------------------------------------------------

inline Bytes load_bytes(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
inline void store(void* p, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
inline Bytes splat_byte(int value) { return {_mm256_set1_epi8(char(value))}; }
inline Bytes splat_4(const void* p) {
  int32_t four;
  memcpy(&four, p, 4);
  return {_mm256_set1_epi32(four)};
}
inline Bytes low_nibbles(Bytes a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return low_nibbles({_mm256_srli_epi16(a.v, 4)}); }
inline Bytes low_codes(Bytes a) { return low_nibbles(a); }
inline Bytes high_codes(Bytes a) { return high_nibbles(a); }
template <int I> inline Bytes upper_crumbs(Bytes a) {
  const __m256i moved = I < 2 ? _mm256_slli_epi16(a.v, I < 2 ? 4 - 2 * I : 0)
                              : _mm256_srli_epi16(a.v, I < 2 ? 0 : 2 * I - 4);
  return {_mm256_and_si256(moved, _mm256_set1_epi8(0x30))};
}
inline Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }
inline Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Bytes operator^(Bytes a, Bytes b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Bytes shift_left(Bytes a, int bits) { return {_mm256_sll_epi16(a.v, _mm_cvtsi32_si128(bits))}; }
inline Bytes even_bytes(Bytes a, Bytes b) {
  const __m256i low = _mm256_set1_epi16(255);
  const __m256i both = _mm256_packus_epi16(_mm256_and_si256(a.v, low), _mm256_and_si256(b.v, low));
  return {_mm256_permute4x64_epi64(both, 0xd8)};
}
inline Bytes odd_bytes(Bytes a, Bytes b) {
  const __m256i both = _mm256_packus_epi16(_mm256_srli_epi16(a.v, 8), _mm256_srli_epi16(b.v, 8));
  return {_mm256_permute4x64_epi64(both, 0xd8)};
}
inline void load_columns(const uint8_t* p, int64_t stride, Bytes (&column)[kColumns]) {
  for (int c = 0; c < kColumns; ++c) {
    uint8_t bytes[kBytes];
    for (int i = 0; i < kBytes; ++i) bytes[i] = p[i * stride + c];
    column[c] = load_bytes(bytes);
  }
}
// Two loads of `size` bytes, which may overlap, have 16 codes each. Every 16-bit lane takes the two bytes that hold an
// even code, and then an odd one; a product moves its lowest bit to bit 8 + lift.
struct Packing {
  int size, upper;
  __m256i even, odd, even_factor, odd_factor, mask;
};
inline Packing packing(int bits, int lift = 0) {
  const int size = bits >= 4 ? 16 : bits >= 2 ? 8 : 4;
  alignas(32) uint8_t bytes[2][kBytes];
  alignas(32) uint16_t factor[2][kBytes / 2];
  for (int i = 0; i < kBytes; ++i) {
    const int bit = i % 16 * bits, byte = bit / 8 + (i < 16 ? 0 : size - 2 * bits), odd = i % 2, lane = i / 2;
    bytes[odd][2 * lane] = uint8_t(byte);
    bytes[odd][2 * lane + 1] = uint8_t(byte < 15 ? byte + 1 : byte);
    factor[odd][lane] = uint16_t((256 << lift) >> bit % 8);
  }
  const auto load = [](const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); };
  return {size, 4 * bits - size, load(bytes[0]), load(bytes[1]), load(factor[0]), load(factor[1]),
          _mm256_set1_epi8(char(((1 << bits) - 1) << lift))};
}
inline Bytes load_codes(const void* p, const Packing& how) {
  const uint8_t *from = static_cast<const uint8_t*>(p), *upper = from + how.upper;
  __m128i low, high;
  if (how.size == 16) {
    low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(upper));
  } else if (how.size == 8) {
    low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(upper));
  } else {
    int32_t four;
    memcpy(&four, from, 4);
    low = high = _mm_cvtsi32_si128(four);
  }
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  const __m256i even = _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, how.even), how.even_factor);
  const __m256i odd = _mm256_mullo_epi16(_mm256_shuffle_epi8(bytes, how.odd), how.odd_factor);
  const __m256i second = _mm256_and_si256(odd, _mm256_set1_epi16(int16_t(0xff00)));
  return {_mm256_and_si256(_mm256_or_si256(_mm256_srli_epi16(even, 8), second), how.mask)};
}
inline Bytes merge(Bytes upper, Bytes lower, const Packing&) { return upper | lower; }
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
template <int E, int X, class Code> inline Bytes load_words(const uint64_t* tables, const Code* code) {
  const __m256i first = _mm256_castsi128_si256(load_two_words<E, X>(tables, code));
  const __m128i second = load_two_words<E, X>(tables, code + 16 / X);  // named: the intrinsic is a macro in Clang
  return {_mm256_inserti128_si256(first, second, 1)};
}
inline Floats as_floats(Bytes a) { return {_mm256_castsi256_ps(a.v)}; }
inline Bytes load_words_12_bits(const uint64_t* table, const uint8_t* codes) {
  uint16_t code[kBytes / 8];
  unpack_12_bits(codes, code);
  return load_words<4096, 8>(table, code);
}
inline Bytes negate_where(Bytes a, Bytes signs, int bit) {
  const __m256i one = _mm256_set1_epi8(char(1 << bit));
  const __m256i mask = _mm256_cmpeq_epi8(_mm256_and_si256(signs.v, one), one);
  return {_mm256_sub_epi8(_mm256_xor_si256(a.v, mask), mask)};
}

// -- tables --------------------------------------------------------------------------------------

// E / 16 shuffles of 16 entries, of which the upper bits of a code select one, bit by bit. Tables of more than 16
// entries do not fit into 16 registers and stay in the L1 cache. Gathers would be fewer instructions, but are several
// times slower where processors are mended against Downfall.
template <int E, int X> struct Codebook { const uint8_t* table; };
template <int X> struct Codebook<16, X> { __m256i table[X]; };

template <int E, int X> inline Codebook<E, X> load_codebook(const void* table) {
  const uint8_t* bytes = static_cast<const uint8_t*>(table);
  if constexpr (E == 16) {
    Codebook<E, X> book;
    for (int c = 0; c < X; ++c)
      book.table[c] = _mm256_broadcastsi128_si256(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + c * E)));
    return book;
  } else {
    return {bytes};
  }
}

// Entries of a table of E; `low` are the lower nibbles of the codes, of which bit b is in bit 7 of bit[b - 4].
template <int E> inline __m256i entries_of(const uint8_t* table, __m256i low, const __m256i (&bit)[4]) {
  if constexpr (E == 16) {
    const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(sixteen), low);
  } else {
    const __m256i lower = entries_of<E / 2>(table, low, bit), upper = entries_of<E / 2>(table + E / 2, low, bit);
    return _mm256_blendv_epi8(lower, upper, bit[E == 32 ? 0 : E == 64 ? 1 : E == 128 ? 2 : 3]);
  }
}

template <int E, int X> inline void lookup(const Codebook<E, X>& book, Bytes code, Bytes (&entry)[X]) {
  if constexpr (E == 16) {
    for (int c = 0; c < X; ++c) entry[c].v = _mm256_shuffle_epi8(book.table[c], code.v);
  } else {
    const __m256i low = low_nibbles(code).v;
    const __m256i bit[4] = {_mm256_slli_epi16(code.v, 3), _mm256_slli_epi16(code.v, 2),
                            _mm256_slli_epi16(code.v, 1), code.v};
    for (int c = 0; c < X; ++c) entry[c].v = entries_of<E>(book.table + c * E, low, bit);
  }
}

// -- sums of bytes -------------------------------------------------------------------------------

inline Ints zero_ints() { return {_mm256_setzero_si256()}; }
inline Ints load_ints(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void store(int32_t* p, Ints a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline Ints splat_int(int32_t value) { return {_mm256_set1_epi32(value)}; }
inline Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Ints operator-(Ints a, Ints b) { return {_mm256_sub_epi32(a.v, b.v)}; }
template <int N> inline Ints shift_left(Ints a) { return {_mm256_slli_epi32(a.v, N)}; }
template <int N> inline Ints high_bits(Ints a) { return {_mm256_srli_epi32(a.v, N)}; }
template <int N> inline Ints low_bits(Ints a) { return {_mm256_and_si256(a.v, _mm256_set1_epi32((1 << N) - 1))}; }
inline int32_t sum(Ints a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

// maddubs wants one unsigned factor: |level| and sign(level) number. Two products stay below 2^15.
inline Ints dot(Ints acc, Bytes level, Bytes number) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(level.v, level.v),
                                             _mm256_sign_epi8(number.v, level.v));
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}
inline Ints dot_weights(Ints acc, Bytes weight, Bytes entry) {
  const __m256i pairs = _mm256_maddubs_epi16(weight.v, entry.v);
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}

// The upper halves of b are 0, and so are their products.
inline Ints add_product(Ints acc, Ints a, Ints b) { return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(a.v, b.v))}; }

// Every 16-bit lane of `whole` sums even + 256 odd (mod 2^16), of `odd` the odd bytes.
struct Sums16 { __m256i whole, odd; };
inline Sums16 zero_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline void add(Sums16& sums, Bytes a) {
  sums.whole = _mm256_add_epi16(sums.whole, a.v);
  sums.odd = _mm256_add_epi16(sums.odd, _mm256_srli_epi16(a.v, 8));
}
inline void store(uint16_t* p, const Sums16& sums) {
  const __m256i even = _mm256_sub_epi16(sums.whole, _mm256_slli_epi16(sums.odd, 8));
  const __m256i low = _mm256_unpacklo_epi16(even, sums.odd), high = _mm256_unpackhi_epi16(even, sums.odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), _mm256_permute2x128_si256(low, high, 0x31));
}

// -- floats --------------------------------------------------------------------------------------

inline Floats load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm256_storeu_ps(p, a.v); }
inline Floats splat(float value) { return {_mm256_set1_ps(value)}; }
inline Floats splat_2(const float* p) {
  double both;
  memcpy(&both, p, 8);
  return {_mm256_castpd_ps(_mm256_set1_pd(both))};
}
inline Floats reverse(Floats a) {
  return {_mm256_permutevar8x32_ps(a.v, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0))};
}
struct Spread { __m256i lane; };
inline Spread spread(int count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_srli_epi32(_mm256_mullo_epi32(lane, _mm256_set1_epi32(count)), 3)};
}
inline Floats load(const float* p, Spread s) { return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(p), s.lane)}; }
inline Floats take(Floats a, Spread s, int first) {
  return {_mm256_permutevar8x32_ps(a.v, _mm256_add_epi32(s.lane, _mm256_set1_epi32(first)))};
}
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Floats sqrt(Floats a) { return {_mm256_sqrt_ps(a.v)}; }
inline float sum(Floats a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline float largest(Floats a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
inline Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.v)}; }
// Shuffles stay within 128 bits: the middle two quarters of each result change places afterwards.
inline void unzip(Floats a, Floats b, Floats& even, Floats& odd) {
  const __m256d first = _mm256_castps_pd(_mm256_shuffle_ps(a.v, b.v, 0x88));
  const __m256d second = _mm256_castps_pd(_mm256_shuffle_ps(a.v, b.v, 0xdd));
  even = {_mm256_castpd_ps(_mm256_permute4x64_pd(first, 0xd8))};
  odd = {_mm256_castpd_ps(_mm256_permute4x64_pd(second, 0xd8))};
}
inline Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.v)}; }
inline Floats exp2_of(Ints n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.v, _mm256_set1_epi32(127)), 23))};
}
inline Floats where_less(Floats a, Floats b, Floats x, Floats y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline Ints where_less(Floats a, Floats b, Ints x, Ints y) {
  return {_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(y.v), _mm256_castsi256_ps(x.v),
                                               _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)))};
}
inline Ints count_less(Ints n, Floats a, Floats b) {
  return {_mm256_sub_epi32(n.v, _mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)))};
}
inline int first_at_least(Floats a, Floats b) {
  return __builtin_ctz(uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ))) | 0x100u);
}
template <int N> inline Floats pick(const float* table, Ints index) {
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index.v);
  if constexpr (N == 8) return {low};
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + N - 8), index.v);
  return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index.v, 28)))};
}
inline void store_low_bytes(void* p, Ints a) {
  const __m256i first = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                         0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i packed = _mm256_shuffle_epi8(a.v, first);
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), both);
}
inline Bytes join(Ints a, Ints b, Ints c, Ints d) {
  const __m256i low = _mm256_or_si256(a.v, _mm256_slli_epi32(b.v, 8));
  const __m256i high = _mm256_or_si256(_mm256_slli_epi32(c.v, 16), _mm256_slli_epi32(d.v, 24));
  return {_mm256_or_si256(low, high)};
}
inline Floats load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_half(uint16_t* p, Floats a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats load_unsigned(const uint16_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Floats load_bfloat(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline Floats round_bfloat(Floats a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 kept = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(int(0xffff0000))));
  return {_mm256_blendv_ps(kept, a.v, _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q))};
}
inline Floats load_halves(const uint16_t* first, const uint16_t*) { return load_half(first); }
inline Floats load_bfloats(const uint16_t* first, const uint16_t*) { return load_bfloat(first); }

}  // namespace
}  // namespace hf_vq
