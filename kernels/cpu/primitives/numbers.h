// SPDX-License-Identifier: Apache-2.0
// Scalar conversions: fp16 and bf16 to float and back, according to IEEE 754; packed codes.
#pragma once
#include <cstdint>
#include <cstring>

namespace hf_vq {
namespace {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = uint32_t(h & 0x7fff) << 13;
  uint32_t bits = rest + (112u << 23);                    // a normal number
  float value;
  if ((h & 0x7c00) == 0x7c00) bits = rest | 0x7f800000u;  // infinity or NaN
  if ((h & 0x7c00) == 0) {                                // zero or subnormal: multiples of 2^-24
    value = float(h & 0x3ff) * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}

inline float bfloat_to_float(uint16_t b) {
  const uint32_t bits = uint32_t(b) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Rounded to nearest, ties to even; too large is infinity.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the mantissa
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

inline uint16_t float_to_bfloat(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  return uint16_t((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);  // no branch, so that loops use vectors
}

// Two codes of 12 bits lie in three bytes.
template <int N> inline void unpack_12_bits(const uint8_t* packed, uint16_t (&code)[N]) {
  for (int i = 0; i < N; i += 2, packed += 3) {
    uint16_t first, second;
    memcpy(&first, packed, 2);
    memcpy(&second, packed + 1, 2);
    code[i] = first & 4095;
    code[i + 1] = second >> 4;
  }
}

}  // namespace
}  // namespace hf_vq
