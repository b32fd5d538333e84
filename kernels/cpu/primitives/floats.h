// SPDX-License-Identifier: Apache-2.0
// Rows of float32, float16 or bfloat16 as float32, and back.
#pragma once
#include "../api.h"
#include "numbers.h"

namespace hf_vq {
namespace {

inline float read_float(const void* p, int dtype, int64_t i) {
  if (dtype == HF_VQ_FLOAT32) return static_cast<const float*>(p)[i];
  const uint16_t half = static_cast<const uint16_t*>(p)[i];
  if (dtype == HF_VQ_FLOAT16) return half_to_float(half);
  return bfloat_to_float(half);
}

// Lane i of v[k] becomes lane k of v[i]. Each round trades one bit of the lane's number for one of the vector's.
template <int Bit = 1> inline void transpose(Floats (&v)[kFloats]) {
  for (int k = 0; k < kFloats; k += 2 * Bit)
    for (int i = k; i < k + Bit; ++i) unzip(v[i], v[i + Bit], v[i], v[i + Bit]);
  if constexpr (2 * Bit < kFloats) transpose<2 * Bit>(v);
}

// kFloats numbers at p, from number `first` on.
template <int Dtype> inline Floats load_floats(const void* p, int64_t first) {
  if constexpr (Dtype == HF_VQ_FLOAT32) return load(static_cast<const float*>(p) + first);
  else if constexpr (Dtype == HF_VQ_FLOAT16) return load_half(static_cast<const uint16_t*>(p) + first);
  else return load_bfloat(static_cast<const uint16_t*>(p) + first);
}

// n numbers at p, from number `first` on.
inline void read_floats(const void* p, int dtype, int64_t first, int64_t n, float* to) {
  if (dtype == HF_VQ_FLOAT32) {
    memcpy(to, static_cast<const float*>(p) + first, size_t(n) * 4);
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(p) + first;
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats)
    store(to + i, dtype == HF_VQ_FLOAT16 ? load_floats<HF_VQ_FLOAT16>(from, i) : load_floats<HF_VQ_BFLOAT16>(from, i));
  for (int rest = int(n - i); rest > 0; --rest, ++i) to[i] = read_float(from, dtype, i);
}

inline void write_floats(void* p, int dtype, int64_t first, int64_t n, const float* from) {
  if (dtype == HF_VQ_FLOAT32) {
    memcpy(static_cast<float*>(p) + first, from, size_t(n) * 4);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(p) + first;
  int64_t i = 0;
  if (dtype == HF_VQ_FLOAT16) {
    for (; i + kFloats <= n; i += kFloats) store_half(to + i, load(from + i));
    for (; i < n; ++i) to[i] = float_to_half(from[i]);
  } else {
    for (; i < n; ++i) to[i] = float_to_bfloat(from[i]);
  }
}

}  // namespace
}  // namespace hf_vq
