// SPDX-License-Identifier: Apache-2.0
// The orthonormal Hadamard transform (Sylvester's order), which is its own inverse.
#pragma once
#include <cstdint>

namespace hf_vq {
namespace {

// One pass of butterflies between numbers `half` apart.
inline void butterflies(float* x, int64_t n, int64_t half) {
  for (int64_t i = 0; i < n; i += 2 * half) {
    int64_t j = i;
    for (; j + kFloats <= i + half; j += kFloats) {
      const Floats a = load(x + j), b = load(x + j + half);
      store(x + j, a + b);
      store(x + j + half, a - b);
    }
    for (; j < i + half; ++j) {
      const float a = x[j], b = x[j + half];
      x[j] = a + b;
      x[j + half] = a - b;
    }
  }
}

// Two passes at once, between numbers `half` and 2 `half` apart; half is a multiple of kFloats.
inline void double_butterflies(float* x, int64_t n, int64_t half) {
  for (int64_t i = 0; i < n; i += 4 * half)
    for (int64_t j = i; j < i + half; j += kFloats) {
      const Floats a = load(x + j), b = load(x + j + half), c = load(x + j + 2 * half), d = load(x + j + 3 * half);
      const Floats ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
      store(x + j, ab + cd);
      store(x + j + half, a_b + c_d);
      store(x + j + 2 * half, ab - cd);
      store(x + j + 3 * half, a_b - c_d);
    }
}

// The transform of 2 kFloats numbers, times `factor`. Sums and differences of neighbours, the sums in front,
// log2 times: each pass is H_2 on the lowest bit of the index, which it moves to the top.
inline void small_hadamard(float* x, Floats factor) {
  Floats a = load(x), b = load(x + kFloats);
  for (int half = 1; half < 2 * kFloats; half *= 2) {
    Floats even, odd;
    unzip(a, b, even, odd);
    a = even + odd;
    b = even - odd;
  }
  store(x, a * factor);
  store(x + kFloats, b * factor);
}

// x [n] <- H x / sqrt(n), n a power of two.
inline void hadamard(float* x, int64_t n) {
  const int log2 = __builtin_ctzll(uint64_t(n));
  // 2^-(log2 / 2), times sqrt(1/2) where log2 is odd.
  const float root = (log2 % 2 ? 0.70710678118654752f : 1.0f) / float(int64_t(1) << (log2 / 2));
  int64_t half = 1;
  if (n >= 2 * kFloats) {
    for (int64_t i = 0; i < n; i += 2 * kFloats) small_hadamard(x + i, splat(root));
    half = 2 * kFloats;
    for (; 2 * half < n; half *= 4) double_butterflies(x, n, half);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] *= root;
  }
  for (; half < n; half *= 2) butterflies(x, n, half);
}

// Every block of `block` numbers of x [n].
inline void hadamard_blocks(float* x, int64_t n, int64_t block) {
  if (block <= 1) return;
  for (int64_t i = 0; i + block <= n; i += block) hadamard(x + i, block);
}

}  // namespace
}  // namespace hf_vq
