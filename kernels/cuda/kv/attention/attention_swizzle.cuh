// SPDX-License-Identifier: Apache-2.0
// Bank-conflict-free lookups in learned codebooks: at step k, the lane with number r reads channel group k ^ r.
//
// Without the XOR swizzle, all lanes would read the same channel group, and so the same banks, at the same step.
//
//     lane 0    g0 g1 g2 g3      keys      r = g        token g of a tile (and g + 8), 8 lanes share 4 t's groups
//     lane 1    g1 g0 g3 g2      values    r = g / 2    of the tokens g that lane t has, 4 lanes share their channels
//     lane 2    g2 g3 g0 g1
//     lane 3    g3 g2 g1 g0
//
// Each bit b of r is undone in one of two ways:
//
//     selects         swap entries k and k ^ 2^b, one select per register
//     MMA columns     no instruction: replicate each query over `swizzle_orders` spare columns (1 to 8) of the tile.
//                     The high bits of a column's number (mask `known`) are the r of the tokens that it counts:
//
//     S^T = K q^T     column c holds its query in the order of its r; logits of tokens with another r are masked
//     O^T = V^T P^T   column c has weights of tokens with its r only, so word k of its sums is of group k ^ r
//
// Every token of a query is counted in exactly one of its columns. After the last token, the sums of the columns are
// put in channel order and added.
#pragma once
#include "kv/attention/attention_softmax.cuh"

constexpr int columns_of_query = Plan::paired ? 2 : Plan::swizzle_orders;
constexpr int queries_of_block = columns_of_block / columns_of_query;
constexpr int columns_of_lane = Plan::swizzle_orders == 8 || Plan::paired ? 1 : 2;  // whose logits it makes to weights
static_assert(columns_of_query == 1 || Plan::query_tiles == 1, "all columns of a query are in one tile");

struct SwizzleColumns {
  static constexpr int queries = 8 / Plan::swizzle_orders;  // column c belongs to query c % queries
  static constexpr int known = 8 - queries;                 // bits of a token's number that select its column

  // True if a column counts token g of a tile.
  __device__ static bool meet(int g, int column) { return ((g ^ column) & known) == 0; }
  // With all eight orders, attention_mha.cuh handles codes, and unquantized tokens use the first column.
  static constexpr bool some = Plan::swizzle_orders > 1 && Plan::swizzle_orders < 8;
};

// Channel groups of a part that lanes permute: as many as lanes of one phase that would read the same group.
template <class Side> constexpr int conflicting_groups = !Side::learned ? 1 : Side::sharers == 8 ? 4 : 8 / Index<Side>::words;
template <class Side, int Part>
constexpr int swizzle_size = at_least(at_most(conflicting_groups<Side>, Share<Side, Part>::indexes), 1);

// r, the swizzle order, of token g.
template <class Side, int Part> __device__ inline int swizzle_order_of(int g) {
  return (Side::sharers == 8 ? g >> 1 : g) & (swizzle_size<Side, Part> - 1);
}

template <class T> __device__ inline void exchange_if(bool exchanged, T& one, T& other) {
  const T low = one, high = other;
  one = exchanged ? high : low, other = exchanged ? low : high;
}

// Sums of columns 2 t, 2 t + 1 from swizzle order to channel order, or back (the permutation is its own inverse).
__device__ inline void unswizzle(State& state, int lane) {
  if constexpr (Values::learned && SwizzleColumns::some)
    each_part<Values>([&](auto number) {
      constexpr int p = decltype(number)::value, words = Index<Values>::words;
      const int turn = swizzle_order_of<Values, p>(lane % 4 * 2 & SwizzleColumns::known);
#pragma unroll
      for (int b = 1; b < swizzle_size<Values, p>; b *= 2)
#pragma unroll
        for (int i = 0; i < Share<Values, p>::indexes * words; ++i) {
          if (i / words & b) continue;
#pragma unroll
          for (int c = 0; c < 4; ++c)
            exchange_if(turn & b, state.sums[0][Share<Values, p>::first_word + i][c],
                        state.sums[0][Share<Values, p>::first_word + i + b * words][c]);
        }
    });
}

// All-reduce over the columns of a query: maximum, total and sums.
__device__ inline void reduce_columns(State& state) {
  if constexpr (SwizzleColumns::some) {
    const auto all = [](float (&of)[2], auto together) {
#pragma unroll
      for (int step = 2; step > 0; step /= 2)
        if (SwizzleColumns::known & 2 * step)
#pragma unroll
          for (int c = 0; c < 2; ++c) of[c] = together(of[c], __shfl_xor_sync(0xffffffff, of[c], step));
    };
    const auto sum = [](float a, float b) { return a + b; };
    float highest[2] = {state.most[0][0], state.most[0][1]}, factor[2];
    all(highest, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      factor[c] = exp2_of(state.most[0][c] - highest[c]);
      state.most[0][c] = highest[c], state.total[0][c] *= factor[c];
    }
    all(state.total[0], sum);
#pragma unroll
    for (int i = 0; i < value_words; ++i)
#pragma unroll
      for (int row = 0; row < 4; row += 2) {
        float of[2] = {state.sums[0][i][row] * factor[0], state.sums[0][i][row + 1] * factor[1]};
        all(of, sum);
        state.sums[0][i][row] = of[0], state.sums[0][i][row + 1] = of[1];
      }
  }
}
