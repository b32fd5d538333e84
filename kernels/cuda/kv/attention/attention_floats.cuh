// SPDX-License-Identifier: Apache-2.0
// Attention to unquantized tokens: the sinks and the recent tokens of a cache, in tiles of 16.
#pragma once
#include "kv/attention/attention_query.cuh"

// c tanh(s / c), in units of log2.
__device__ inline float capped(float s, float c) {
  return c * (1.0f - 2.0f * reciprocal(1.0f + exp2_of(2.0f * log2_e * s * reciprocal(c))));
}

// The tile of 16 floats from `first` on, sinks or tail, for all columns of the warp.
__device__ inline void add_floats(const Arguments& a, const Tokens& tokens, int row, int kv_head, int first_column,
                                  bool sinks, int first, State& state) {
  int thread;  // read again, so that no register is kept for the lane until here
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  const int lane = thread % 32, g = lane / 4, t = lane % 4;
  const auto token = [&](const Floats& x, int i) {
    int slot = sinks ? min(i, a.sinks - 1) : max(min(i, tokens.total - 1), tokens.tail_start) - tokens.tail_start;
    if (!sinks) slot += slot + tokens.first_slot < a.tail_slots ? tokens.first_slot : tokens.first_slot - a.tail_slots;
    return place(x, row, kv_head, slot);
  };
  Logits chain[2] = {}, both[1];
  bool any = false;
  Logits& s = both[0];
  const Floats &k = sinks ? a.sink_k : a.tail_k, &v = sinks ? a.sink_v : a.tail_v;
  const uint16_t *const low = token(k, first + g), *const high = token(k, first + g + 8);
  const uint16_t* const from[4] = {token(v, first + 2 * t), token(v, first + 2 * t + 1), token(v, first + 2 * t + 8),
                                   token(v, first + 2 * t + 9)};
  constexpr int key_words = Share<Keys, 0>::channels / 2 + Share<Keys, 1>::channels / 2;
  // If registers suffice, keys and values are loaded first; else values are loaded after the logits are known.
  constexpr int others = Keys::learned || Values::learned ? 72 : 56;
  constexpr int needed = others + 4 * value_words * (Plan::query_tiles + 1) + key_words * (Plan::query_tiles + 2);
  constexpr bool early = needed <= at_most(255, 65536 / (Plan::threads * Plan::blocks_per_sm));
  uint32_t value[4][value_words], key[2][key_words], query[Plan::query_tiles][key_words];
  const auto load = [&](const uint16_t* token, auto side, uint32_t* word) {
    using Side = decltype(side);
    each_part<Side>([&](auto number) {
      using S = Share<Side, decltype(number)::value>;
      constexpr int each = at_most(S::channels, 8);
#pragma unroll
      for (int j = 0; j < S::channels; j += each)
        load_words<2 * each>(token + S::first + S::owner(lane) * S::channels + j, word + S::first_word + j / 2);
    });
  };
  load(low, Keys(), key[0]), load(high, Keys(), key[1]);
#pragma unroll
  for (int n = 0; n < Plan::query_tiles; ++n) {
    const Column at(a, kv_head, first_column, 8 * n + query_of(g));
    load(place(a.query, row, at.head, at.query), Keys(), query[n]);
  }
  const auto load_values = [&] {
#pragma unroll
    for (int k = 0; k < 4; ++k) load(from[k], Values(), value[k]);
  };
  if (early) load_values();
#pragma unroll
  for (int i = 0; i < key_words; i += 2)
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
      mma<Plan::dtype>(chain[i / 2 % 2][n], key[0][i], key[1][i], key[0][i + 1], key[1][i + 1], query[n][i],
                       query[n][i + 1]);
#pragma unroll
  for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Column column(a, kv_head, first_column, n * 8 + query_of(2 * t + c));
      const int near = tokens.near(a, column.query), limit = tokens.limit(a, column.query);
      const char* const mask = mask_of(a, row, column);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first + g + half * 8, at = i + (sinks ? tokens.start : 0);
        const bool there = sinks ? i < a.sinks && at >= 0 && at < min(near, limit) : at >= near && at < limit;
        const bool seen = there && (!SwizzleColumns::some || SwizzleColumns::meet(g, 2 * t + c));
        any |= seen;
        float logit = (chain[0][n][2 * half + c] + chain[1][n][2 * half + c]) * a.scaling;
        if (Plan::softcapped) logit = capped(logit, a.softcap);
        s[n][2 * half + c] = seen ? masked(logit, mask, at) : minus_infinity;
      }
    }
  if (!__any_sync(0xffffffff, any)) return;
  if (!early) load_values();
  State::Weights weights[1];
  const OfValue floats[1][2] = {{of_floats, of_floats}};
  state.weigh<Plan::dtype>(both, floats, weights);
#pragma unroll
  for (int i = 0; i < value_words; ++i)
    state.add<Plan::dtype>(i, value[0] + i, value[1] + i, value[2] + i, value[3] + i, weights[0]);
}
