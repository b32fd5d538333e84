// SPDX-License-Identifier: Apache-2.0
// Attention of a few queries over coded keys and values: softmax(q K^T) V, and K and V exist nowhere as floats.
//
//     columns     queries that share a kv head: its query heads times the new tokens, in tiles of 8
//     group       up to `query_tiles` tiles of one kv head and row; its tokens are split among blocks
//     warp        tiles of 16 tokens, one after the other
//
// Tensor cores multiply twice, and every code is decoded once for all columns, where it is needed:
//
//     S^T = K q^T         a lane has pieces of tokens g and g + 8: entries of the codebook are fragments as they are
//     O^T = V^T P^T       a lane has the same channels of four tokens: of two entries, one byte permutation makes a
//                         fragment; S^T becomes P^T by movmatrix
//
// (VQ-LLM exchanges what it decoded through shared memory or shuffles, section VI.B). Queries are rotated as keys were,
// and the result is rotated back; what is stored as floats (sinks, the newest tokens) comes first, a few tiles among all
// warps, and what a warp adds up of it is rotated to where entries of the codebook are added.
//
// Bytes: codes and scales once for every 8 query_tiles columns, which bounds it for long contexts. For short ones: a
// launch, one trip to memory for codes and codebook, and one for what blocks have to tell each other.
#include "attention_alone.cuh"
#include "attention_combine.cuh"
#include "attention_learned.cuh"
#include "grids.cuh"

using KeyTable = TableOf<Keys>;
using ValueTable = TableOf<Values>;

constexpr int tokens_of_step = 16 * Plan::steps;
constexpr int columns_of_lane = Plan::turns == 8 ? 1 : 2;  // whose logits it makes to weights

template <class T> struct Referred;
template <class T> struct Referred<T&> { using Type = T; };

// Codes and scales of `steps` tiles of 16 tokens, which a warp takes together: on their way to its slots in shared
// memory, `depth` steps at a time.
struct Step {
  static constexpr int key_bytes = TokenCodes<Keys>::bytes, value_bytes = TokenCodes<Values>::bytes;
  static constexpr int values_at = Plan::steps * 2 * key_bytes, scales_at = values_at + Plan::steps * 4 * value_bytes;
  static constexpr int scale_words = tokens_of_step / 2 + 1;  // wherever they begin
  static constexpr int bytes = (scales_at + 2 * scale_words * 4 + 15) / 16 * 16;

  // Where a lane begins to read.
  struct Tapes {
    const char *keys, *values;
    const uint16_t *key_scale, *value_scale;  // of the first token
    int lane, end;                            // of the tokens that may be read

    __device__ Tapes(const Arguments& a, int row, int kv_head, int lane) : lane(lane) {
      const Coded &k = a.keys, &v = a.values;
      keys = k.codes + row * k.row + kv_head * k.head + (k.first + lane / 4) * Index<Keys>::row_bytes;
      values = v.codes + row * v.row + kv_head * v.head + (v.first + lane % 4 * 2) * Index<Values>::row_bytes;
      key_scale = k.scale + row * k.scale_row + kv_head * k.scale_head + k.first;
      value_scale = v.scale + row * v.scale_row + kv_head * v.scale_head + v.first;
    }

    // The key `ahead` tokens after the lane's first of a step that begins at token `first`; or the last one.
    __device__ const char* key(int first, int ahead, bool whole) const {
      const int at = whole ? first + ahead : min(first + ahead + lane / 4, end - 1) - lane / 4;
      return keys + int64_t(at) * Index<Keys>::row_bytes;
    }
    __device__ const char* value(int first, int ahead, bool whole) const {
      const int at = whole ? first + ahead : min(first + ahead + lane % 4 * 2, end - 1) - lane % 4 * 2;
      return values + int64_t(at) * Index<Values>::row_bytes;
    }
    __device__ bool whole(int first) const { return first + tokens_of_step <= end; }
  };

  // The tokens from `first` on, to the slots of a warp.
  __device__ static void copy(const Tapes& from, int first, uint32_t to) {
    const auto all = [&](bool whole) {
#pragma unroll
      for (int i = 0; i < 2 * Plan::steps; ++i)
        TokenCodes<Keys>::copy(to + i * key_bytes, from.key(first, i * 8, whole), from.lane);
#pragma unroll
      for (int i = 0; i < 4 * Plan::steps; ++i)
        TokenCodes<Values>::copy(to + values_at + i * value_bytes, from.value(first, i / 4 * 16 + ahead(i), whole), from.lane);
    };
    if (from.whole(first)) all(true);
    else all(false);
    // Words that hold scales, with at least one that may be read.
    const auto scales = [&](const uint16_t* scale, uint32_t slot) {
      const int64_t at = reinterpret_cast<int64_t>(scale + first), word = at & ~int64_t(3);
      const int odd = at & 2 ? 1 : 0, needed = (min(tokens_of_step, from.end - first) + odd + 1) / 2;
      if (from.lane < scale_words) {
        const bool read = from.lane < needed;
        copy_async(slot + from.lane * 4, reinterpret_cast<const char*>(word) + (read ? from.lane * 4 : 0), read ? 4 : 0);
      }
    };
    if constexpr (!Keys::learned) scales(from.key_scale, to + scales_at);
    if constexpr (!Values::learned) scales(from.value_scale, to + scales_at + scale_words * 4);
  }

  // From a lane's first token of a tile to its k-th.
  __device__ static constexpr int ahead(int k) { return k % 2 + k % 4 / 2 * 8; }

  // The scale of token `i` of a step.
  __device__ static float key_scale(const Tapes& from, uint32_t slot, int i) {
    return scale(slot + scales_at + (reinterpret_cast<int64_t>(from.key_scale) & 2), i);
  }
  __device__ static float value_scale(const Tapes& from, uint32_t slot, int i) {
    return scale(slot + scales_at + scale_words * 4 + (reinterpret_cast<int64_t>(from.value_scale) & 2), i);
  }

 private:
  __device__ static float scale(uint32_t slot, int i) {
    uint16_t half;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(slot + 2 * i));
    return half_to_float(half);
  }
};

// Products of keys with the queries, before scales.
__device__ inline void multiply(const KeyTable& table, const TokenCodes<Keys> (&keys)[Plan::steps][2],
                                const Query& query, Logits (&s)[Plan::steps]) {
  constexpr int chains = Plan::query_tiles == 1 ? 2 : 1;  // a product waits for the one before it in its chain
  float part[chains][Plan::steps][Plan::query_tiles][4] = {};
  each_part<Keys>([&](auto number) {
    constexpr int p = decltype(number)::value, together = KeyTable::together<p>();
    constexpr int words = together * Index<Keys>::words;
#pragma unroll
    for (int i = 0; i < Share<Keys, p>::indexes; i += together)
#pragma unroll
      for (int tile = 0; tile < Plan::steps; ++tile) {
        uint32_t low[words], high[words];
        table.look_up<p>(keys[tile][0].part<p>(), i, low);
        table.look_up<p>(keys[tile][1].part<p>(), i, high);
#pragma unroll
        for (int j = 0; j < words; j += 2) {
          const int at = p * Query::near + (i * Index<Keys>::words + j) / 2;
#pragma unroll
          for (int n = 0; n < Plan::query_tiles; ++n) {
            uint32_t b[2];
            query.fragment(n, at, b);
            mma<Dtype::FLOAT16>(part[at % chains][tile][n], low[j], high[j], low[j + 1], high[j + 1], b[0], b[1]);
          }
        }
      }
  });
#pragma unroll
  for (int tile = 0; tile < Plan::steps; ++tile)
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[tile][n][c] = part[0][tile][n][c] + (chains == 2 ? part[chains - 1][tile][n][c] : 0.0f);
}

// Weights times values, before scales.
template <class Sums>
__device__ inline void add_values(const ValueTable& table, const TokenCodes<Values> (&values)[Plan::steps][4],
                                  const typename Sums::Weights (&weights)[Plan::steps], Sums& sums) {
  each_part<Values>([&](auto number) {
    constexpr int p = decltype(number)::value, together = ValueTable::together<p>();
    constexpr int words = together * Index<Values>::words;
    using S = Share<Values, p>;
#pragma unroll
    for (int i = 0; i < S::indexes; i += together)
#pragma unroll
      for (int tile = 0; tile < Plan::steps; ++tile) {
        uint32_t entry[4][words];
#pragma unroll
        for (int k = 0; k < 4; ++k) table.look_up<p>(values[tile][k].part<p>(), i, entry[k]);
#pragma unroll
        for (int j = 0; j < words; j += Sums::words_at_a_time)
          sums.template add<Dtype::FLOAT16>(S::first_word + i * Index<Values>::words + j, entry[0] + j, entry[1] + j,
                                            entry[2] + j, entry[3] + j, weights[tile]);
      }
  });
}

// Logits of coded tokens, in units of log2 and with log2 of the scales of their values added.
struct Scores {
  uint32_t staged;             // of the lane's first column
  int plain_begin, plain_end;  // tokens that all columns see as codes, and no mask hides

  // Of tile number `tile` of the step in `slot`; the tokens of the tile begin at `first`.
  __device__ void operator()(const Arguments& a, const Tokens& tokens, const Step::Tapes& tapes, uint32_t slot, int tile,
                             int first, int lane, Logits& s, float (&inverse_scale)[2]) const {
    float of_key[2] = {1.0f, 1.0f}, of_value[2] = {};
    inverse_scale[0] = inverse_scale[1] = 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = lane / 4 + tile * 16 + 8 * half;
      if constexpr (!Keys::learned) of_key[half] = Step::key_scale(tapes, slot, token);
      if constexpr (!Values::learned) {
        // A scale of zero, or of what is not seen, which may be anything: almost nothing.
        const float scale = Step::value_scale(tapes, slot, token);
        of_value[half] = log2_of_float(fmaxf(scale, 1e-12f));
        inverse_scale[half] = reciprocal(fmaxf(scale, 1e-12f));
      }
    }
    const bool plain = causal && first >= plain_begin && first + 16 <= plain_end;
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < columns_of_lane; ++c) {
        uint32_t factor[2];
        load_shared<8>(staged + (n * 8 + c) * sizeof(Staged) + 8, factor);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& logit = s[n][2 * half + c];
          const float product = of_key[half] * __uint_as_float(factor[0]);
          if constexpr (Plan::softcapped)
            logit = capped(logit * product + __uint_as_float(factor[1]), a.softcap) + of_value[half];
          else
            logit = logit * product + of_value[half];
        }
      }
    if (!plain) {
#pragma unroll
      for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
        for (int c = 0; c < columns_of_lane; ++c) {
          const Staged& column = *static_cast<const Staged*>(__cvta_shared_to_generic(staged + (n * 8 + c) * sizeof(Staged)));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = first + lane / 4 + half * 8;
            const bool sink = uint32_t(at - tokens.start) < uint32_t(a.sinks);
            float& logit = s[n][2 * half + c];
            logit = at < column.end && !sink ? masked(logit, column.mask, at) : minus_infinity;
          }
        }
    }
    if constexpr (Turns::some) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (!Turns::meet(lane / 4, lane % 4 * 2 + c % 2)) s[0][c] = minus_infinity;
    }
  }
};

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::resident) attention(const Arguments a) {
  extern __shared__ __align__(128) char shared[];
  constexpr int tables = KeyTable::bytes + ValueTable::bytes;
  constexpr int ring_at = tables + Query::bytes + columns_of_block * int(sizeof(Staged));
  char* const staged = shared + tables;
  if (__cvta_generic_to_shared(shared) != shared_begin) __trap();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Staged* const known = reinterpret_cast<const Staged*>(staged + Query::bytes) + lane % 4 * 2;
  const int group = quotient(blockIdx.x, a.inverse_splits), split = blockIdx.x - group * a.splits;
  const int heads = quotient(group, a.inverse_across), first_column = (group - heads * a.across) * columns_of_block;
  const int row = quotient(heads, a.inverse_heads), kv_head = heads - row * a.kv_heads;
  Step::Tapes tapes(a, row, kv_head, lane);
  const KeyTable key_table(a.keys.codebook, kv_head, lane);
  const ValueTable value_table(a.values.codebook, kv_head, lane);

  // Arguments come by lines of a cache, each as late as its first use: all at once.
  asm volatile("" ::"l"(a.query.token), "l"(a.sink_k.token), "l"(a.sink_v.token), "l"(a.tail_v.at), "l"(a.mean),
               "l"(a.mask_row), "l"(a.out), "r"(a.queries), "r"(a.window), "f"(a.scaling));
  const bool early = a.settled;  // codebooks: what they hold was there before the grids that are waited for
  const auto fill = [&](int threads) {
    key_table.fill(shared, threadIdx.x, threads);
    value_table.fill(shared, threadIdx.x, threads);
  };
  if (early && warp < warps / 2) fill(Plan::threads / 2);

  wait_for_grids();
  let_next_grid_begin();
  const Tokens tokens(a, row);
  const int coded_end = tokens.end(a, a.queries - 1), steps = (coded_end + tokens_of_step - 1) / tokens_of_step;
  // Every block has at least a step for each warp, or there are fewer blocks.
  const bool many = steps >= a.splits * warps;
  const int active = many ? a.splits : at_least((steps + warps - 1) / warps, 1);
  if (split >= active) return;
  const int begin = many ? quotient(steps * split, a.inverse_splits) : split * warps;
  const int end = many ? quotient(steps * (split + 1), a.inverse_splits) : min(begin + warps, steps);
  int at = begin + warp;

  constexpr int own_bytes = Plan::depth * Step::bytes;
  const uint32_t ring = shared_begin + ring_at + warp * own_bytes;
  tapes.end = coded_end;
#pragma unroll
  for (int i = 0; i < Plan::depth - 1; ++i) {
    if (at + i * warps < end) Step::copy(tapes, (at + i * warps) * tokens_of_step, ring + i * Step::bytes);
    commit_copies();
  }

  // Warps of the second half read what is stored as floats, those of the first prepare what codes need, if they can.
  const int near = tokens.near(a, 0), sink_tiles = (a.sinks + 15) / 16;
  const int float_tiles = sink_tiles + (tokens.total - near + 15) / 16;
  const int others = split + active * (warps / 2) < float_tiles ? warps : warps / 2;
  if (steps > 0 && warp < others)
    Query::stage(a, tokens, row, kv_head, first_column, staged, others, [&] {
      if (!early) fill(32 * others);
    });
  State state;
  const int first_float = split + active * (warps - 1 - warp);  // warps of the second half, unless all prepare
  if (first_float < float_tiles) {
    for (int tile = first_float; tile < float_tiles; tile += active * warps)
      add_floats(a, tokens, row, kv_head, first_column, tile < sink_tiles,
                 tile < sink_tiles ? tile * 16 : near + (tile - sink_tiles) * 16, state);
    if (Values::block > 1 && steps > 0) state.rotate(lane);
    in_order_of_turns(state, lane);
  }
  const bool busy = first_float < float_tiles || at < end;
  if (Keys::learned || Values::learned) wait_for_all_copies();
  // Those that have prepared it do not wait for those that read.
  if (steps > 0 && warp < others) {
    asm volatile("bar.sync 1, %0;" ::"r"(32 * others) : "memory");
    if (others < warps) asm volatile("bar.arrive 2, %0;" ::"n"(Plan::threads) : "memory");
  } else if (steps > 0) {
    asm volatile("bar.sync 2, %0;" ::"n"(Plan::threads) : "memory");
  }

  const auto attend = [&](auto& sums) {
    using Sums = typename Referred<decltype(sums)>::Type;
    if (at >= end) return;
    const Query query(staged, lane);
    // The mean of the keys adds the same to all: until the end, it is left out.
    const auto shift = [&](float sign) {
#pragma unroll
      for (int n = 0; n < Plan::query_tiles; ++n)
        if (!Plan::softcapped) sums.shift(n, sign * known[n * 8].shift, sign * known[n * 8 + 1].shift);
    };
    shift(-1.0f);
    const Scores scores = {uint32_t(__cvta_generic_to_shared(known)), a.sinks ? tokens.start + a.sinks : 0,
                           tokens.end(a, 0)};
    uint32_t slot = ring, free = ring + (Plan::depth - 1) * Step::bytes;
    for (; at < end; at += warps) {
      wait_for_copies<Plan::depth - 2>();
      __syncwarp();  // scales are shared; and the slots of the step before are free
      const int first = at * tokens_of_step;
      if (at + (Plan::depth - 1) * warps < end)
        Step::copy(tapes, first + (Plan::depth - 1) * warps * tokens_of_step, free);
      commit_copies();
      Logits s[Plan::steps];
      float inverse_scale[Plan::steps][2];
      typename Sums::Weights weights[Plan::steps];
      TokenCodes<Keys> keys[Plan::steps][2];
#pragma unroll
      for (int i = 0; i < 2 * Plan::steps; ++i)
        keys[i / 2][i % 2].load(slot + i * Step::key_bytes, tapes.key(first, i * 8, tapes.whole(first)), lane);
      multiply(key_table, keys, query, s);
#pragma unroll
      for (int tile = 0; tile < Plan::steps; ++tile) {
        sums.choose(s[tile]);
        scores(a, tokens, tapes, slot, tile, first + tile * 16, lane, s[tile], inverse_scale[tile]);
      }
      TokenCodes<Values> values[Plan::steps][4];
#pragma unroll
      for (int i = 0; i < 4 * Plan::steps; ++i)
        values[i / 4][i % 4].load(slot + Step::values_at + i * Step::value_bytes,
                                  tapes.value(first, i / 4 * 16 + Step::ahead(i), tapes.whole(first)), lane);
      sums.template weigh<Dtype::FLOAT16>(s, inverse_scale, weights);
      add_values(value_table, values, weights, sums);
      free = slot;
      slot = slot == ring + (Plan::depth - 1) * Step::bytes ? ring : slot + Step::bytes;
    }
    shift(1.0f);
  };
  if constexpr (Plan::turns == 8) {
    Alone alone(state, lane);
    attend(alone);
    alone.leave(state, lane);
  } else {
    attend(state);
    in_order_of_turns(state, lane);
    one_column_each(state);
  }
  finish(a, state, shared, row, kv_head, first_column, group, split,
         active, busy, Values::block > 1 && steps > 0);
}
