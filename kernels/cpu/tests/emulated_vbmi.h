// SPDX-License-Identifier: Apache-2.0
// Included before everything else, this builds the AVX-512 target for processors that have F, BW, DQ and
// VL, but neither VBMI nor VNNI: the instructions of those are written out, and dispatch.cpp is
// told that they are there. For tests on such machines only; nothing in it is fast.
#pragma once
#include <immintrin.h>

#if defined(__AVX512BW__)
#include <cstdint>
#include <cstring>

namespace {

// vpermb
inline __m512i emulated_permutexvar_epi8(__m512i index, __m512i table) {
  uint8_t i[64], t[64], r[64];
  memcpy(i, &index, 64);
  memcpy(t, &table, 64);
  for (int lane = 0; lane < 64; ++lane) r[lane] = t[i[lane] & 63];
  memcpy(&table, r, 64);
  return table;
}

inline __m512i emulated_mask_permutexvar_epi8(__m512i others, __mmask64 mask, __m512i index, __m512i table) {
  return _mm512_mask_blend_epi8(mask, others, emulated_permutexvar_epi8(index, table));
}

// vpermi2b
inline __m512i emulated_permutex2var_epi8(__m512i low, __m512i index, __m512i high) {
  uint8_t i[64], t[128], r[64];
  memcpy(i, &index, 64);
  memcpy(t, &low, 64);
  memcpy(t + 64, &high, 64);
  for (int lane = 0; lane < 64; ++lane) r[lane] = t[i[lane] & 127];
  memcpy(&low, r, 64);
  return low;
}

// vpmultishiftqb: 8 bits of each 64-bit lane, from the bits that the bytes of `shift` name
inline __m512i emulated_multishift_epi64_epi8(__m512i shift, __m512i from) {
  uint8_t s[64], r[64];
  uint64_t lanes[8];
  memcpy(s, &shift, 64);
  memcpy(lanes, &from, 64);
  for (int i = 0; i < 64; ++i) {
    const uint64_t lane = lanes[i / 8];
    const int by = s[i] & 63;
    r[i] = uint8_t(by == 0 ? lane : lane >> by | lane << (64 - by));
  }
  memcpy(&from, r, 64);
  return from;
}

// vpdpbusd: unsigned times signed bytes, without saturation
inline __m512i emulated_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  uint8_t u[64];
  int8_t s[64];
  uint32_t total[16];
  memcpy(u, &a, 64);
  memcpy(s, &b, 64);
  memcpy(total, &sums, 64);
  for (int i = 0; i < 64; ++i) total[i / 4] += uint32_t(u[i] * s[i]);
  memcpy(&sums, total, 64);
  return sums;
}

}  // namespace

#define _mm512_permutexvar_epi8 emulated_permutexvar_epi8
#define _mm512_mask_permutexvar_epi8 emulated_mask_permutexvar_epi8
#define _mm512_permutex2var_epi8 emulated_permutex2var_epi8
#define _mm512_multishift_epi64_epi8 emulated_multishift_epi64_epi8
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32
#endif

// Of all strings in dispatch.cpp, only "avx512vbmi" and "avx512vnni" have a v at this position.
#define __builtin_cpu_supports(name) \
  ((sizeof(name) == 11 && name[6] == 'v') || __builtin_cpu_supports(name))
