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

template <int Apart, int Count> inline void butterflies(Floats (&v)[Count]) {
  for (int k = 0; k < Count; k += 2 * Apart)
    for (int i = k; i < k + Apart; ++i) {
      const Floats a = v[i], b = v[i + Apart];
      v[i] = a + b;
      v[i + Apart] = a - b;
    }
  if constexpr (2 * Apart < Count) butterflies<2 * Apart>(v);
}

// Passes at once, log2(Count) of them, the first between numbers `half` apart, a multiple of kFloats.
template <int Count> inline void many_butterflies(float* x, int64_t n, int64_t half) {
  for (int64_t i = 0; i < n; i += Count * half)
    for (int64_t j = i; j < i + half; j += kFloats) {
      Floats v[Count];
      for (int k = 0; k < Count; ++k) v[k] = load(x + j + k * half);
      butterflies<1>(v);
      for (int k = 0; k < Count; ++k) store(x + j + k * half, v[k]);
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

// 1 / sqrt(n) of a power of two.
inline float inverse_root(int64_t n) {
  const int log2 = __builtin_ctzll(uint64_t(n));
  return (log2 % 2 ? 0.70710678118654752f : 1.0f) / float(int64_t(1) << (log2 / 2));
}

// x [n] <- H x / sqrt(n), n a power of two.
inline void hadamard(float* x, int64_t n) {
  const float root = inverse_root(n);
  int64_t half = 1;
  if (n >= 2 * kFloats) {
    for (int64_t i = 0; i < n; i += 2 * kFloats) small_hadamard(x + i, splat(root));
    half = 2 * kFloats;
    for (; 2 * half < n; half *= 4) many_butterflies<4>(x, n, half);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] *= root;
  }
  for (; half < n; half *= 2) butterflies(x, n, half);
}

// x [n][lanes] <- sqrt(block) H x for every block of `block` rows, where blocks of `done` rows have been
// transformed before; lanes is a multiple of kFloats.
inline void hadamard_lanes(float* x, int64_t n, int64_t done, int64_t block, int64_t lanes) {
  constexpr int kCount = kRegisters / 2;
  int64_t half = done * lanes, rest = block / done;
  for (; rest >= kCount; rest /= kCount, half *= kCount) many_butterflies<kCount>(x, n * lanes, half);
  if (rest == 8) many_butterflies<8>(x, n * lanes, half);
  if (rest == 4) many_butterflies<4>(x, n * lanes, half);
  if (rest == 2) many_butterflies<2>(x, n * lanes, half);
}

// Every block of `block` numbers of x [n].
inline void hadamard_blocks(float* x, int64_t n, int64_t block) {
  if (block <= 1) return;
  for (int64_t i = 0; i + block <= n; i += block) hadamard(x + i, block);
}

}  // namespace
}  // namespace hf_vq
