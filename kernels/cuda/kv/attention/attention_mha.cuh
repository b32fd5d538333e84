// SPDX-License-Identifier: Apache-2.0
// One query per KV head (MHA, one token): the query is replicated into all eight MMA columns, one per swizzle order.
//
//     S^T = K q^T      column g is right for token g of a tile of 8: the diagonal, one logit in lanes (g, t = g / 2)
//     O^T = V^T P^T    an entry that a lane looked up is a B fragment without unpacking; its two channels are
//                      neighbours in k:
//
//         k             channel 0 of token 2t    channel 1 of token 2t    (and of token 2t + 1)
//         column 2t             w                        0                sums of channel 0 over tokens 2t, 2t + 1
//         column 2t + 1         0                        w                sums of channel 1
//
// No entry is split into channels, and the accumulators take half the registers of one column per query.
#pragma once
#include "kv/attention/attention_swizzle.cuh"

struct ReplicatedQuery {
  static constexpr int pairs = (value_words + 1) / 2;
  static constexpr int words_per_step = 2;
  using Weights = uint32_t[4];  // fragments: of tokens 2t and 2t + 1, then of those 8 later

  float sums[pairs][4];  // words 2i, 2i + 1, two channels each, of tokens 2t, 2t + 1 (+ 8)
  float most, total;     // m of these tokens; totals of the lane's own
  bool odd, mine;        // token g is 2t + 1; token g is 2t or 2t + 1
  uint32_t low, high;    // byte permutations: a half of a word to the half that counts channels of this column

  // Start from the sums of unquantized tokens, which are in column 0.
  __device__ ReplicatedQuery(const State& state, int lane)
      : odd(lane / 4 % 2), mine(lane / 8 == lane % 4), low(odd ? 0x1044 : 0x4410), high(odd ? 0x3244 : 0x4432) {
    static_assert(
        Plan::swizzle_orders < 8 || (Share<Values, 0>::channels % 4 == 0 && Share<Values, 1>::channels % 4 == 0),
        "words come in pairs");
    const bool first = lane % 4 == 0;
#pragma unroll
    for (int i = 0; i < value_words; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum(i, c) = first ? state.sums[0][i][2 * c] : 0.0f;
    most = first ? state.most[0][0] : lowest, total = first ? state.total[0][0] : 0.0f;
  }

  __device__ float& sum(int word, int channel) { return sums[word / 2][word % 2 * 2 + channel]; }
  __device__ void shift(int, float by, float) { most += by; }

  // Move the logits of tokens g and g + 8 to the registers of column 2t.
  __device__ void choose(Logits& s) const {
    s[0][0] = odd ? s[0][1] : s[0][0];
    s[0][2] = odd ? s[0][3] : s[0][2];
  }

  template <Dtype D, int N>
  __device__ void weigh(Logits (&s)[N], const OfValue (&by)[N][2], Weights (&weights)[N]) {
    float highest = minus_infinity;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i][0][0] = mine ? s[i][0][0] : minus_infinity, s[i][0][2] = mine ? s[i][0][2] : minus_infinity;
      highest = fmaxf(highest, fmaxf(s[i][0][0], s[i][0][2]));
    }
    if (__any_sync(0xffffffff, highest > most + slack)) {
      highest = fmaxf(highest, most);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
      scale(highest);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float one = exp2_of(s[i][0][0] - most), later = exp2_of(s[i][0][2] - most);
      total += one * by[i][0].inverse_scale + later * by[i][1].inverse_scale;
      const uint32_t own = pack_pair<D>(one, later), other = __shfl_xor_sync(0xffffffff, own, 4);
      const uint32_t first = odd ? other : own, second = odd ? own : other;
      weights[i][0] = __byte_perm(first, 0, low), weights[i][1] = __byte_perm(second, 0, low);
      weights[i][2] = __byte_perm(first, 0, high), weights[i][3] = __byte_perm(second, 0, high);
    }
  }

  // Words `i` and `i` + 1 of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  template <Dtype D> __device__ void add(int i, const uint32_t* v0, const uint32_t* v1, const uint32_t* v2,
                                         const uint32_t* v3, const Weights& weights) {
    mma<D>(sums[i / 2], v0[0], v0[1], v1[0], v1[1], weights[0], weights[1]);
    mma<D>(sums[i / 2], v2[0], v2[1], v3[0], v3[1], weights[2], weights[3]);
  }

  // Reduce everything into column 0 of `state`.
  __device__ void leave(State& state, int lane) {
    if constexpr (Values::learned)
      each_part<Values>([&](auto number) {
        constexpr int p = decltype(number)::value, words = Index<Values>::words;
        const int turn = swizzle_order_of<Values, p>(lane % 4 * 2);
#pragma unroll
        for (int b = 1; b < swizzle_size<Values, p>; b *= 2)
#pragma unroll
          for (int i = 0; i < Share<Values, p>::indexes * words; ++i) {
            if (i / words & b) continue;
#pragma unroll
            for (int c = 0; c < 2; ++c)
              exchange_if(turn & b, sum(Share<Values, p>::first_word + i, c),
                          sum(Share<Values, p>::first_word + i + b * words, c));
          }
      });
    float highest = most;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
    scale(highest);
    state = State();
    state.most[0][0] = most, state.total[0][0] = of_all(total);
#pragma unroll
    for (int i = 0; i < value_words; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) state.sums[0][i][2 * c] = of_all(sum(i, c));
  }

 private:
  // Raise the maximum and rescale the sums.
  __device__ void scale(float highest) {
    const float factor = exp2_of(most - highest);
    most = highest, total *= factor;
#pragma unroll
    for (int i = 0; i < pairs; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[i][c] *= factor;
  }

  __device__ static float of_all(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
  }
};
