// SPDX-License-Identifier: Apache-2.0
// Up to four queries per KV head (small GQA groups): each query has two of the eight MMA columns of a tile.
//
//     S^T = K q^T      words 4i .. 4i + 3 of one token and lane are a fragment: rows g have the even ones, rows g + 8
//                      the odd ones. Column 2c has the query's numbers for even words, 2c + 1 those for odd ones:
//
//                                        column 2c    column 2c + 1
//                          row g         logit        -              their sum, in one lane, is the logit of token g
//                          row g + 8     -            rest of it     (8 tokens a product)
//
//     O^T = V^T P^T    two channels of a word are neighbours in k, words 2i and 2i + 1 are rows g and g + 8:
//
//                          k             channel 0 of token 2t    channel 1 of token 2t    (and of token 2t + 1)
//                          column 2c         w                        0                    sums of channel 0
//                          column 2c + 1     0                        w                    sums of channel 1
//
// Entries are fragments without packing or unpacking. Queries and sums take half the registers of one column each.
#pragma once
#include "kv/attention/attention_swizzle.cuh"

struct Paired {
  static constexpr int pairs = (value_words + 1) / 2;
  static constexpr int words_per_step = 2;
  using Weights = uint32_t[4];  // fragments: of tokens 2t and 2t + 1, then of those 8 later

  float sums[pairs][4];  // of query t: words 2i, 2i + 1, two channels each
  float most, total;     // m; totals of the lane's own tokens
  float zero;            // and of their zeros, if values are integers
  uint32_t low, high;    // byte permutations: a half of a word to the half that counts channels of this column

  // Goes on with the sums of floats, in both columns of a query.
  __device__ Paired(const State& state, int lane) : most(state.most[0][0]), total(state.total[0][0]), zero(0.0f) {
    static_assert(!Plan::paired || (Share<Values, 0>::channels % 4 == 0 && Share<Values, 1>::channels % 4 == 0 &&
                                    Share<Keys, 0>::channels % 8 == 0 && Share<Keys, 1>::channels % 8 == 0),
                  "words come in pairs, those of keys in fours");
    const bool odd = lane / 4 % 2;
    low = odd ? 0x1044 : 0x4410, high = odd ? 0x3244 : 0x4432;
#pragma unroll
    for (int i = 0; i < value_words; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum(i, c) = state.sums[0][i][2 * c];
  }

  __device__ float& sum(int word, int channel) { return sums[word / 2][word % 2 * 2 + channel]; }
  __device__ void shift(int, float by, float) { most += by; }
  __device__ void choose(Logits&) const {}

  template <Dtype D, int N>
  __device__ void weigh(Logits (&s)[N], const OfValue (&by)[N][2], Weights (&weights)[N]) {
    float highest = fmaxf(s[0][0][0], s[0][0][2]);
#pragma unroll
    for (int i = 1; i < N; ++i) highest = fmaxf(highest, fmaxf(s[i][0][0], s[i][0][2]));
    if (__any_sync(0xffffffff, highest > most + slack)) {
      highest = fmaxf(highest, most);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
      const float factor = exp2_of(most - highest);
      most = highest, total *= factor, zero *= factor;
#pragma unroll
      for (int i = 0; i < pairs; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][c] *= factor;
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float weight = exp2_of(s[i][0][2 * upper] - most);
        total += weight * by[i][upper].inverse_scale;
        const uint32_t twice = pack_pair<D>(weight, weight), both = transposed(twice);  // of tokens 2t, 2t + 1
        if constexpr (Values::integers) zero += half_to_float(twice) * by[i][upper].zero;
        weights[i][2 * upper] = __byte_perm(both, 0, low), weights[i][2 * upper + 1] = __byte_perm(both, 0, high);
      }
  }

  // Words `i` and `i` + 1 of tokens 2t, 2t + 1, 2t + 8, 2t + 9.
  template <Dtype D> __device__ void add(int i, const uint32_t* v0, const uint32_t* v1, const uint32_t* v2,
                                         const uint32_t* v3, const Weights& weights) {
    mma<D>(sums[i / 2], v0[0], v0[1], v1[0], v1[1], weights[0], weights[1]);
    mma<D>(sums[i / 2], v2[0], v2[1], v3[0], v3[1], weights[2], weights[3]);
  }

  // To columns of `state`, of a query each.
  __device__ void leave(State& state, int lane) {
    const auto to_columns = [&](float of_query, float& even, float& odd) {
      even = __shfl_sync(0xffffffff, of_query, lane / 4 * 4 + lane * 2 % 4);
      odd = __shfl_sync(0xffffffff, of_query, lane / 4 * 4 + lane * 2 % 4 + 1);
    };
    to_columns(most, state.most[0][0], state.most[0][1]);
    to_columns(total, state.total[0][0], state.total[0][1]);
    if constexpr (Values::integers) to_columns(zero, state.zero[0][0], state.zero[0][1]);
#pragma unroll
    for (int i = 0; i < value_words; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) to_columns(sum(i, c), state.sums[0][i][2 * c], state.sums[0][i][2 * c + 1]);
  }
};
