// SPDX-License-Identifier: Apache-2.0
// Codebooks in the layout of kernels: component by component, as floats or as 8-bit levels.
#pragma once
#include "../primitives/floats.h"
#include "packets.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kDim = 256;          // the largest head_dim
constexpr int kEntries = 256;      // of a codebook, at most
constexpr int kComponents = 4;     // of an entry, at most
constexpr float kInfinity = __builtin_inff();
constexpr float kSmallest = 1e-30f;  // smaller numbers have no reciprocal to scale with

inline int padded(int64_t dim) { return int(dim + 15) / 16 * 16; }

// <a, b> of n numbers, a multiple of 16.
inline float dot_floats(const float* a, const float* b, int n) {
  constexpr int kSums = 16 / kFloats;
  Floats sums[kSums];
  for (Floats& each : sums) each = splat(0.0f);
  for (int i = 0; i < n; i += 16)
    for (int k = 0; k < kSums; ++k) sums[k] = fma(load(a + i + k * kFloats), load(b + i + k * kFloats), sums[k]);
  for (int k = 1; k < kSums; ++k) sums[0] = sums[0] + sums[k];
  return sum(sums[0]);
}

// Component c of entry e.
using Components = float[kComponents][kEntries];

inline void unzip_all(const float* mixed, int n, float* even, float* odd) {
  int i = 0;
  do {  // n > 0
    Floats first, second;
    unzip(load(mixed + i), load(mixed + i + kFloats), first, second);
    store(even + i / 2, first);
    store(odd + i / 2, second);
    i += 2 * kFloats;
  } while (i < n);
}

// From fp16 entries [count, x].
inline void read_entries(const uint16_t* entries, int count, int x, Components& number) {
  if (x == 1) {
    read_floats(entries, HF_VQ_FLOAT16, 0, count, number[0]);
    return;
  }
  float mixed[kEntries * kComponents], even[kEntries * 2], odd[kEntries * 2];
  read_floats(entries, HF_VQ_FLOAT16, 0, count * x, mixed);
  if (x == 2) {
    unzip_all(mixed, count * 2, number[0], number[1]);
    return;
  }
  unzip_all(mixed, count * 4, even, odd);
  unzip_all(even, count * 2, number[0], number[2]);
  unzip_all(odd, count * 2, number[1], number[3]);
}

// x tables of `count` bytes, round(number / step) + bias; the step is returned.
inline float round_entries(const Components& number, int count, int x, int bias, uint8_t* table) {
  Floats top = splat(0.0f);
  for (int c = 0; c < x; ++c)
    for (int e = 0; e < count; e += kFloats) {
      const Floats entry = load(number[c] + e);
      top = max(top, max(entry, splat(0.0f) - entry));
    }
  const float highest = largest(top);
  const Floats factor = splat(highest > kSmallest ? 127.0f / highest : 0.0f);
  for (int c = 0; c < x; ++c)
    for (int e = 0; e < count; e += kFloats) {
      const Floats level = min(max(load(number[c] + e) * factor, splat(-127.0f)), splat(127.0f));
      store_low_bytes(table + c * count + e, to_ints(level) + splat_int(bias));
    }
  return highest / 127.0f;
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
