// SPDX-License-Identifier: Apache-2.0
// Attention of few queries over a quantized KV cache: O = softmax(q K^T) V. Dense K and V are never stored.
//
//     column      one query: a query head of the KV head times a new token; MMA tiles have 8
//     block       up to `query_tiles` tiles of one KV head and row; the tokens are split over blocks
//     warp        tiles of 16 tokens, in order
//
// Two products on tensor cores. Each code is decoded once for all columns, in the lane that needs it:
//
//     S^T = K q^T         a lane has pieces of the keys in rows g and g + 8: table entries are A fragments
//     O^T = V^T P^T       a lane has the same channels of four tokens: one byte permutation of two entries makes a
//                         fragment; movmatrix turns S^T into P^T
//
// VQ-LLM (section VI.B) exchanges decoded values through shared memory or shuffles; nothing is exchanged here.
// With few queries, spare columns save more work: two columns per query (attention_gqa_small.cuh), or one for each
// swizzle order of learned codebooks (attention_swizzle.cuh). Integers have no codebook but a zero
// (attention_integers.cuh).
//
// Queries are rotated like the keys; the result is rotated back. Unquantized tokens (sinks, recent tokens) come first,
// spread over all warps; their sums are rotated and added to the sums of codebook entries.
//
// Bytes: codes and scales once per 8 query_tiles columns.
// Bottleneck: DRAM for long contexts. For short contexts latency: the launch, one load of codes and codebook, and one
// exchange of partial results between blocks.
#include "kv/attention/attention_combine.cuh"
#include "kv/attention/attention_gqa_small.cuh"
#include "kv/attention/attention_learned.cuh"
#include "kv/attention/attention_mainloop.cuh"
#include "kv/attention/attention_mha.cuh"
#include "kv/attention/attention_rotary.cuh"
#include "primitives/pdl.cuh"

using KeyTable = TableOf<Keys>;
using ValueTable = TableOf<Values>;

template <class T> struct Referred;
template <class T> struct Referred<T&> { using Type = T; };

// Products of keys with the queries, before scales.
__device__ inline void multiply(const KeyTable& table, const TokenCodes<Keys> (&keys)[Plan::step_tiles][2],
                                const Query& query, Logits (&s)[Plan::step_tiles]) {
  constexpr int chains = Plan::query_tiles == 1 ? 2 : 1;  // a product waits for the one before it in its chain
  float part[chains][Plan::step_tiles][Plan::query_tiles][4] = {};
  each_part<Keys>([&](auto number) {
    constexpr int p = decltype(number)::value, together = KeyTable::together<p>();
    constexpr int words = together * Index<Keys>::words;
#pragma unroll
    for (int i = 0; i < Share<Keys, p>::indexes; i += together)
#pragma unroll
      for (int tile = 0; tile < Plan::step_tiles; ++tile) {
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
  for (int tile = 0; tile < Plan::step_tiles; ++tile)
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        s[tile][n][c] = part[0][tile][n][c] + (chains == 2 ? part[chains - 1][tile][n][c] : 0.0f);
}

// The same with two columns for each query: logits of keys g and g + 8 of query t.
__device__ inline void multiply_in_pairs(const KeyTable& table, const TokenCodes<Keys> (&keys)[Plan::step_tiles][2],
                                         const Query& query, Logits (&s)[Plan::step_tiles]) {
  float part[Plan::step_tiles][2][4] = {};
  each_part<Keys>([&](auto number) {
    constexpr int p = decltype(number)::value, together = KeyTable::together<p>(), words = Index<Keys>::words;
#pragma unroll
    for (int i = 0; i < Share<Keys, p>::indexes; i += 4 / words) {
      uint32_t b[2];
      query.fragment(0, p * Query::near + i * words / 4, b);
#pragma unroll
      for (int tile = 0; tile < Plan::step_tiles; ++tile)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          uint32_t word[4];
#pragma unroll
          for (int j = 0; j < 4 / words; j += together) {
            uint32_t entry[together * words];
            table.look_up<p>(keys[tile][upper].part<p>(), i + j, entry);
#pragma unroll
            for (int k = 0; k < together * words; ++k) word[j * words + k] = entry[k];
          }
          mma<Dtype::FLOAT16>(part[tile][upper], word[0], word[1], word[2], word[3], b[0], b[1]);
        }
    }
  });
#pragma unroll
  for (int tile = 0; tile < Plan::step_tiles; ++tile)
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) s[tile][0][2 * upper] = part[tile][upper][0] + part[tile][upper][3];
}

// Weights times values, before scales.
template <class Sums>
__device__ inline void add_values(const ValueTable& table, const TokenCodes<Values> (&values)[Plan::step_tiles][4],
                                  const typename Sums::Weights (&weights)[Plan::step_tiles], Sums& sums) {
  each_part<Values>([&](auto number) {
    constexpr int p = decltype(number)::value, together = ValueTable::together<p>();
    constexpr int words = together * Index<Values>::words;
    using S = Share<Values, p>;
#pragma unroll
    for (int i = 0; i < S::indexes; i += together)
#pragma unroll
      for (int tile = 0; tile < Plan::step_tiles; ++tile) {
        uint32_t entry[4][words];
#pragma unroll
        for (int k = 0; k < 4; ++k) table.look_up<p>(values[tile][k].part<p>(), i, entry[k]);
#pragma unroll
        for (int j = 0; j < words; j += Sums::words_per_step)
          sums.template add<Dtype::FLOAT16>(S::first_word + i * Index<Values>::words + j, entry[0] + j, entry[1] + j,
                                            entry[2] + j, entry[3] + j, weights[tile]);
      }
  });
}

// Logits of coded tokens, in units of log2 and with log2 of the scales of their values added.
struct Scores {
  uint32_t staged;             // of the lane's first column
  int plain_begin, plain_end;  // tokens that all columns see as codes, and no mask hides

  // Logits of tile number `tile` of the step in `slot`, whose tokens begin at `first`. `rotary`: those of the rotary mean.
  __device__ void operator()(const Arguments& a, const Tokens& tokens, const Step::CacheRows& cache_rows, uint32_t slot, int tile,
                             int first, int lane, uint32_t rotary, Logits& s, OfValue (&by)[2]) const {
    float of_key[2] = {1.0f, 1.0f}, zero[2] = {}, of_value[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = Step::of_row(lane / 4, half, tile);
      by[half] = of_floats;
      if constexpr (!Keys::learned) {
        const Step::Numbers key = Step::key_numbers(cache_rows, slot, token);
        of_key[half] = key.scale, zero[half] = key.zero;
      }
      if constexpr (!Values::learned) {
        const Step::Numbers value = Step::value_numbers(cache_rows, slot, token);
        // A scale of zero, or of what is not seen, which may be anything: almost nothing. So may the zero.
        const float scale = fmaxf(value.scale, 1e-12f);
        of_value[half] = log2_of_float(scale);
        by[half].inverse_scale = reciprocal(scale);
        if constexpr (Values::integers) by[half].zero = fminf(fmaxf(value.zero, -65504.0f), 65504.0f);
      }
    }
    const bool plain = causal && first >= plain_begin && first + tokens_of_step <= plain_end;
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n)
#pragma unroll
      for (int c = 0; c < columns_of_lane; ++c) {
        const uint32_t column = staged + (n * 8 + c) * sizeof(Staged);
        uint32_t factor[2], shift[1];  // and the sum
        float turned[2] = {};
        load_shared<8>(column + 8, factor);
        if constexpr (Plan::softcapped) load_shared<4>(column + 16, shift);
        if constexpr (Plan::rotary > 0) Rotary::load(rotary, n, c, tile, turned);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& logit = s[n][2 * half + c];
          const float product = of_key[half] * __uint_as_float(factor[0]);
          if constexpr (Keys::integers) logit -= zero[half] * __uint_as_float(factor[1]);
          float added = of_value[half];
          if constexpr (Plan::softcapped) added = __uint_as_float(shift[0]);
          if constexpr (Plan::rotary > 0) added += turned[half];
          logit = logit * product + added;
          if constexpr (Plan::softcapped) logit = capped(logit, a.softcap) + of_value[half];
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
            const int at = first + Step::of_row(lane / 4, half, tile);
            const bool sink = uint32_t(at - tokens.start) < uint32_t(a.sinks);
            float& logit = s[n][2 * half + c];
            logit = at < column.end && !sink ? masked(logit, column.mask, at) : minus_infinity;
          }
        }
    }
    if constexpr (SwizzleColumns::some) {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (!SwizzleColumns::meet(lane / 4, lane % 4 * 2 + c % 2)) s[0][c] = minus_infinity;
    }
  }
};

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) attention(const WithRotaryMean<Arguments, (Plan::rotary > 0)> a) {
  extern __shared__ __align__(128) char shared[];
  constexpr int tables = KeyTable::bytes + ValueTable::bytes;
  constexpr int ring_at = tables + Query::bytes + columns_of_block * int(sizeof(Staged));
  constexpr int own_bytes = Step::ring_bytes, rotary_at = ring_at + warps * own_bytes;
  char* const staged = shared + tables;
  if (__cvta_generic_to_shared(shared) != shared_begin) __trap();
  // The same in all lanes, and known to be: what is copied whole needs uniform addresses.
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffff, int(threadIdx.x) / 32, 0);
  const Staged* const known = reinterpret_cast<const Staged*>(staged + Query::bytes) + lane % 4 * (Plan::paired ? 1 : 2);
  const int group = quotient(blockIdx.x, a.inverse_splits), split = blockIdx.x - group * a.splits;
  const int heads = quotient(group, a.inverse_across), first_column = (group - heads * a.across) * queries_of_block;
  const int row = quotient(heads, a.inverse_heads), kv_head = heads - row * a.kv_heads;
  Step::CacheRows cache_rows(a, row, kv_head);
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
  const uint32_t ring = shared_begin + ring_at + warp * own_bytes;
  Step::begin(cache_rows, ring, lane);

  if (warp == warps - 1) Query::prefetch(a, row, kv_head, lane), Rotary::prefetch(a, row, kv_head, lane);
  if (!a.length) {  // about what this warp will copy first
    const int steps = (a.coded + tokens_of_step - 1) / tokens_of_step;
    const int first = steps >= a.splits * warps ? quotient(steps * split, a.inverse_splits) : split * warps;
    for (int i = 0; i < Plan::pipeline_depth; ++i) Step::prefetch(ring, (first + warp + i * warps) * tokens_of_step, a.coded, lane);
  }
  // Warps of the second half read what is stored as floats, those of the first prepare what codes need, if they can:
  //
  //     0 ..   queries and tables   .. half ..   the rotary mean   .. ready ..   floats   .. warps
  constexpr int half = warps / 2, eighth = at_least(warps / 8, 1);
  Query::Loads loads(a, row, kv_head, first_column, lane, warp);
  wait_for_grids();
  if constexpr (Query::Loads::early) loads.begin(lane);
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

  cache_rows.end = coded_end;
  const auto ask = [&] {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth - 1; ++i) {
      if (at + i * warps < end) Step::copy(cache_rows, (at + i * warps) * tokens_of_step, ring, ring + i * Step::bytes, lane);
      Step::commit();
    }
  };

  const int near = tokens.near(a, 0), sink_tiles = (a.sinks + 15) / 16;
  const int float_tiles = sink_tiles + (tokens.total - near + 15) / 16;
  const auto free = [&](int count) { return split + active * (warps - count) >= float_tiles; };  // of the first `count` warps, none reads any
  const int others = Plan::rotary > 0 || free(half) ? half : warps;
  int ready = others;  // warps below do not wait for floats
  if constexpr (Plan::rotary > 0) {
    ready = warps;
#pragma unroll
    for (int count = half + eighth; count < warps; count += eighth)
      if (free(count)) ready = count;
  }
  if (steps > 0 && warp < others)
    Query::stage(a, tokens, row, kv_head, first_column, staged, others, loads, [&] {
      ask();
      if (!early) fill(32 * others);
    });
  else if (Plan::rotary > 0 && steps > 0 && warp < ready)
    Rotary::stage(a, row, kv_head, first_column, shared + rotary_at, warp - half, ready - half, ask);
  else
    ask();
  State state;
  const int first_float = split + active * (warps - 1 - warp);  // warps of the second half, unless all prepare
  if (first_float < float_tiles) {
    for (int tile = first_float; tile < float_tiles; tile += active * warps)
      add_floats(a, tokens, row, kv_head, first_column, tile < sink_tiles,
                 tile < sink_tiles ? tile * 16 : near + (tile - sink_tiles) * 16, state);
    if (Values::block > 1 && steps > 0) state.rotate(lane);
    unswizzle(state, lane);
    if constexpr (Values::integers) state.to_integers();
  }
  if (Keys::learned || Values::learned) wait_for_all_copies();
  // The warps that prepared the queries do not wait for the warps that read them.
  if (steps > 0 && warp < ready) {
    asm volatile("bar.sync 1, %0;" ::"r"(32 * ready) : "memory");
    if (ready < warps) asm volatile("bar.arrive 2, %0;" ::"n"(Plan::threads) : "memory");
  } else if (steps > 0) {
    asm volatile("bar.sync 2, %0;" ::"n"(Plan::threads) : "memory");
  }

  const bool busy = first_float < float_tiles || begin + warp < end;
  const auto attend = [&](auto& sums) {
    using Sums = typename Referred<decltype(sums)>::Type;
    if (at >= end) return;
    // Made again: the registers were needed.
    int same_head = kv_head;
    asm volatile("" : "+r"(same_head));
    Step::CacheRows cache_rows(a, row, same_head);
    cache_rows.end = coded_end;
    const KeyTable key_table(a.keys.codebook, same_head, lane);
    const ValueTable value_table(a.values.codebook, same_head, lane);
    Query query(staged, lane);
    // The mean of the keys adds the same to all: until the end, it is left out.
    const auto shift = [&](float sign) {
#pragma unroll
      for (int n = 0; n < Plan::query_tiles; ++n)
        if (!Plan::softcapped) sums.shift(n, sign * known[n * 8].shift, sign * known[n * 8 + 1].shift);
    };
    shift(-1.0f);
    const Scores scores = {uint32_t(__cvta_generic_to_shared(known)), a.sinks ? tokens.start + a.sinks : 0,
                           tokens.end(a, 0)};
    const Rotary rotary(shared_begin + rotary_at, warp);
    if constexpr (Plan::rotary > 0) rotary.begin(lane);
    uint32_t slot = ring, free = ring + (Plan::pipeline_depth - 1) * Step::bytes;
    for (uint32_t step = 0; at < end; at += warps, ++step) {
      __syncwarp();  // the slot of the step before is free
      const int first = at * tokens_of_step;
      if (at + (Plan::pipeline_depth - 1) * warps < end)
        Step::copy(cache_rows, first + (Plan::pipeline_depth - 1) * warps * tokens_of_step, ring, free, lane);
      Step::commit();
      if constexpr (Plan::rotary > 0)
        if (step % Rotary::steps == 0 && rotary.find(rotary_of<Arguments>(a), first, lane)) query = Query(staged, lane);
      const uint32_t turning = rotary.logits(step % Rotary::steps, lane);
      Step::wait(slot, step / Plan::pipeline_depth % 2);
      if constexpr (!Plan::bulk) __syncwarp();  // what others copied is there
      Logits s[Plan::step_tiles];
      OfValue by[Plan::step_tiles][2];
      typename Sums::Weights weights[Plan::step_tiles];
      TokenCodes<Keys> keys[Plan::step_tiles][2];
      Step::load(keys, cache_rows, first, slot, lane);
      if constexpr (Plan::paired) multiply_in_pairs(key_table, keys, query, s);
      else multiply(key_table, keys, query, s);
#pragma unroll
      for (int tile = 0; tile < Plan::step_tiles; ++tile) {
        sums.choose(s[tile]);
        scores(a, tokens, cache_rows, slot, tile, first, lane, turning, s[tile], by[tile]);
      }
      TokenCodes<Values> values[Plan::step_tiles][4];
      Step::load(values, cache_rows, first, slot, lane);
      sums.template weigh<Dtype::FLOAT16>(s, by, weights);
      add_values(value_table, values, weights, sums);
      free = slot;
      slot += Step::bytes;
      if (slot == ring + Plan::pipeline_depth * Step::bytes) slot = ring;
    }
    shift(1.0f);
  };
  if constexpr (Plan::paired) {
    if (busy) {
      Paired paired(state, lane);
      attend(paired);
      paired.leave(state, lane);
    }
  } else if constexpr (Plan::swizzle_orders == 8) {
    ReplicatedQuery alone(state, lane);
    attend(alone);
    alone.leave(state, lane);
  } else {
    attend(state);
    unswizzle(state, lane);
    reduce_columns(state);
  }
  if constexpr (Values::integers)
    if (busy) state.from_integers();
  Step::end(ring, lane);  // the results of the warps overwrite their buffers
  finish(a, state, shared, row, kv_head, first_column, group, active, busy, Values::block > 1 && steps > 0);
}
