// SPDX-License-Identifier: Apache-2.0
// Online softmax over coded tokens: exponents of 2 below a running maximum that is rarely raised.
//
// Lane 4 g + t has the logits of tokens g and g + 8 and of columns (queries) 2 t, 2 t + 1 of every tile of 8, as mma.cuh
// leaves them. A value is scale * entry. The scale multiplies the weight, as a summand of its logarithm, so that the
// operands of the tensor cores stay in the range of fp16 for any scale:
//
//     w = 2^(s + log2 scale - m)          sum of values += w * entry          sum of weights += w / scale
//
// For integers, sums of w * zero are accumulated as well, with w rounded like the operand of the tensor cores.
//
// The maximum m is raised, and the sums rescaled, only if an exponent would exceed `slack`: lanes then need no reduction
// of the maximum per tile.
#pragma once
#include "kv/attention/attention_integers.cuh"
#include "primitives/mma.cuh"

constexpr int columns_of_block = 8 * Plan::query_tiles;
constexpr int value_words = Share<Values, 0>::channels / 2 + Share<Values, 1>::channels / 2;  // of a lane and token
constexpr float slack = 8.0f;  // of exponents, before m is raised
constexpr float minus_infinity = -1.0f / 0.0f;
constexpr float lowest = -2e30f;  // a maximum of nothing; finite, so that no difference is NaN

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_of_float(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rows and columns of two 8 x 8 matrices of 16-bit numbers change places.
__device__ inline uint32_t transposed(uint32_t pairs) {
  uint32_t word;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(word) : "r"(pairs));
  return word;
}

// Two numbers of each of two words: those in the low halves, those in the high ones.
__device__ inline uint32_t low_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7632); }

// Factors of a token's value, in addition to its weight. (Without defaults: in a local array of arrays, NVRTC and
// nvcc 13.0 to 13.5 set those of the first array only.)
struct OfValue {
  float inverse_scale, zero;
};
constexpr OfValue of_floats = {1.0f, 0.0f};

// Add two weights times a zero to the sums of zeros.
template <Dtype D> __device__ inline void add_zeros(uint32_t weights, float zero, float& first, float& second) {
  float one, other;
  unpack_pair<D>(weights, one, other);
  first += one * zero, second += other * zero;
}

using Logits = float[Plan::query_tiles][4];      // of a tile of 16 tokens
// Accumulators of a warp. sums[n][i]: rows g and g + 8 are the two channels of the lane's word i.
struct State {
  static constexpr int words_per_step = 1;
  using Weights = uint32_t[Plan::query_tiles][2];  // fragments: tokens 2 t, 2 t + 1 (+ 8) of column g

  float sums[Plan::query_tiles][value_words][4] = {};
  float most[Plan::query_tiles][2], total[Plan::query_tiles][2] = {};  // m; totals of the lane's own tokens
  float zero[Plan::query_tiles][2] = {};                               // and of their zeros, if values are integers

  __device__ State() {
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n) most[n][0] = most[n][1] = lowest;
  }

  // Both columns of a lane in tile `n`.
  __device__ void shift(int n, float first, float second) { most[n][0] += first, most[n][1] += second; }

  // Takes logits of `N` tiles (in units of log2, with that of the value's scale added) for weights in `D`.
  template <Dtype D, int N>
  __device__ void weigh(Logits (&s)[N], const OfValue (&by)[N][2], Weights (&weights)[N]) {
    bool raise = false;
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float highest = fmaxf(s[0][n][c], s[0][n][c + 2]);
#pragma unroll
        for (int i = 1; i < N; ++i) highest = fmaxf(highest, fmaxf(s[i][n][c], s[i][n][c + 2]));
        raise |= highest > most[n][c] + slack;
      }
    if (__any_sync(0xffffffff, raise)) raise_to(s);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int n = 0; n < Plan::query_tiles; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float weight = exp2_of(s[i][n][c] - most[n][c % 2]);
          total[n][c % 2] += weight * by[i][c / 2].inverse_scale;
          s[i][n][c] = weight;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t both = pack_pair<D>(s[i][n][2 * half], s[i][n][2 * half + 1]);
          if constexpr (Values::integers) add_zeros<D>(both, by[i][half].zero, zero[n][0], zero[n][1]);
          weights[i][n][half] = transposed(both);
        }
      }
  }

  __device__ void choose(Logits&) const {}

  // sums += entries of four tokens (2 t, 2 t + 1, 2 t + 8, 2 t + 9) times weights; word `i` of each.
  template <Dtype D>
  __device__ void add(int i, const uint32_t* v0, const uint32_t* v1, const uint32_t* v2, const uint32_t* v3,
                      const Weights& weights) {
    const uint32_t a0 = low_halves(*v0, *v1), a1 = high_halves(*v0, *v1);
    const uint32_t a2 = low_halves(*v2, *v3), a3 = high_halves(*v2, *v3);
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n) mma<D>(sums[n][i], a0, a1, a2, a3, weights[n][0], weights[n][1]);
  }

  // The maximum of the columns to that of these logits too.
  template <int N> __device__ void raise_to(const Logits (&s)[N]) {
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float highest = most[n][c];
#pragma unroll
        for (int i = 0; i < N; ++i) highest = fmaxf(highest, fmaxf(s[i][n][c], s[i][n][c + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
        const float factor = exp2_of(most[n][c] - highest);
        most[n][c] = highest;
        total[n][c] *= factor, zero[n][c] *= factor;
#pragma unroll
        for (int i = 0; i < value_words; ++i) sums[n][i][c] *= factor, sums[n][i][c + 2] *= factor;
      }
  }

  // Sums of numbers -> of codes, in the order and the units of attention_integers.cuh.
  __device__ void to_integers() {
    each_part<Values>([&](auto number) {
      constexpr int p = decltype(number)::value;
      const State before = *this;
#pragma unroll
      for (int at = 0; at < Share<Values, p>::channels; ++at)
#pragma unroll
        for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int place = Words<Values, p>::place(at);
            sum<p>(n, place, c) = before.sum<p>(n, at, c) * Words<Values, p>::unit(place / 2);
          }
    });
  }

  // And back again, without their zeros.
  __device__ void from_integers() {
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) zero[n][c] += __shfl_xor_sync(0xffffffff, zero[n][c], step);
    each_part<Values>([&](auto number) {
      constexpr int p = decltype(number)::value;
      const State before = *this;
#pragma unroll
      for (int at = 0; at < Share<Values, p>::channels; ++at)
#pragma unroll
        for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int place = Words<Values, p>::place(at);
            sum<p>(n, at, c) = before.sum<p>(n, place, c) * (1.0f / Words<Values, p>::unit(place / 2)) - zero[n][c];
          }
    });
  }

  // Sums of unrotated values -> of rotated ones, before entries of the codebook are added.
  __device__ void rotate(int lane) {
    each_part<Values>([&](auto number) {
      using S = Share<Values, decltype(number)::value>;
#pragma unroll
      for (int stride = 1; stride < Values::block; stride *= 2)
#pragma unroll
        for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
          for (int k = 0; k < S::channels / 2; ++k) {
            const int i = S::first_word + k;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              if (stride >= S::channels) {
                const int across = stride / S::channels;
                const float other = __shfl_xor_sync(0xffffffff, sums[n][i][c], 4 * across);
                sums[n][i][c] = lane / 4 & across ? other - sums[n][i][c] : sums[n][i][c] + other;
              } else if (stride == 1 ? c < 2 : !(k & stride / 2)) {
                float& low = sums[n][i][c];
                float& high = stride == 1 ? sums[n][i][c + 2] : sums[n][i + stride / 2][c];
                const float sum = low + high;
                high = low - high, low = sum;
              }
            }
          }
#pragma unroll
      for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
        for (int k = 0; k < S::channels / 2; ++k)
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[n][S::first_word + k][c] *= inverse_root(Values::block);
    });
  }

 private:
  // Sum of half `at` of the lane's words of a part, in column `c`.
  template <int Part> __device__ float& sum(int n, int at, int c) {
    return sums[n][Share<Values, Part>::first_word + at / 2][at % 2 * 2 + c];
  }
  template <int Part> __device__ float sum(int n, int at, int c) const {
    return sums[n][Share<Values, Part>::first_word + at / 2][at % 2 * 2 + c];
  }
};
