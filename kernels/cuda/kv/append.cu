// SPDX-License-Identifier: Apache-2.0
// Keys or values, [batch, heads, tokens, dim], to codes of the cache (formulas in append.cuh).
//
// A contiguous cache appends at the next position. A paged cache (`Plan::page` tokens a page) gives every token a slot:
// page * Plan::page + its place in the page.
//
// With few tokens, threads split the search of one row or channel group; with many, every warp has its own rows.
//
// Bytes: x once. Bottleneck: instructions. Every vector is compared with all entries, except with a grid.
#include "kv/append.cuh"
#include "kv/append_groups.cuh"
#include "kv/append_integers.cuh"
#include "primitives/pdl.cuh"

struct Arguments {
  const char* x;             // of Plan::dtype
  const float* mean;         // [batch, heads, dim]; not read unless Plan::centred
  const float* smoothing;    // [batch, heads, dim], strides of `mean`; or null
  const uint16_t* codebook;  // fp16 [entries, x], or [heads, vectors, entries, x]; not read for integers
  const uint32_t* lists;     // of the grid
  uint8_t* codes;            // of the first token that is written; with pages, of the first page
  uint16_t* scale;           // and zero, of integers
  const int64_t* slots;              // [tokens]; not read without pages
  int64_t x_batch, x_head, x_token;  // bytes from one to the next
  int64_t mean_batch, mean_head;     // numbers
  int64_t codes_batch, codes_head;   // bytes; with pages, from one page to the next instead of batches
  int64_t scale_batch, scale_head;   // numbers
  int batch, heads, tokens;
  int parts;             // blocks that share the tokens of a row and head; of few with learned codebooks, of a head
  float cells_per_unit;  // of the grid
};

constexpr int warps = Plan::threads / 32, page_tokens = Plan::page ? Plan::page : 1;

// Addresses of the head of a block.
struct Place {
  const char* x;
  const float* mean;
  uint8_t* codes;
  uint16_t* scale;
  const Arguments& a;
  int batch, head;

  __device__ Place(const Arguments& a, int pair) : a(a), batch(pair / a.heads), head(pair % a.heads) {
    x = a.x + batch * a.x_batch + head * a.x_head;
    mean = Plan::centred ? a.mean + batch * a.mean_batch + head * a.mean_head : nullptr;
    codes = a.codes + batch * a.codes_batch + head * a.codes_head;
    scale = a.scale + batch * a.scale_batch + head * a.scale_head;
  }

  __device__ const float* smoothing() const {
    return a.smoothing ? a.smoothing + batch * a.mean_batch + head * a.mean_head : nullptr;
  }

  // m of the rotary mean, or null.
  __device__ const float* turning() const {
    if constexpr (Plan::rotary) return rotary_of(a).mean + batch * rotary_of(a).row + head * rotary_of(a).head;
    return nullptr;
  }
  // Position that angles count, of the token at index `token`.
  __device__ int64_t position(int token) const {
    if constexpr (Plan::rotary) return rotary_of(a).start + token;
    return 0;
  }
};

// Rows of a head.
__device__ inline void universal(const Arguments& a, uint32_t* shared) {
  using Mine = Row<Plan>;
  const Encoder<Plan> search(a.codebook, a.lists, a.cells_per_unit, shared);
  constexpr bool together = search.split > 1;  // all warps have the same rows
  constexpr int teams = 32 / Plan::lanes, at_a_time = teams * (together ? 1 : warps);
  const Place place(a, blockIdx.x / a.parts);
  const int own = (together ? threadIdx.x % 32 : threadIdx.x) / Plan::lanes;  // row, of those of the block
  int base = blockIdx.x % a.parts * at_a_time;  // token of the block's first row
  Turner<Plan::rotary, Plan::few, Plan::threads, Mine::dim, at_a_time> turner(rotary_or_null<Plan::rotary>(a), 0, shared + Encoder<Plan>::words);
  Mine row;
  const auto load = [&] {
    row.template load<Plan::dtype, Plan::aligned, Plan::centred>(
        place.x + (base + own) * a.x_token, place.mean, [&] { return place.smoothing(); },
        [&] { return turner(place.turning(), place.position(base), min(a.tokens - base, at_a_time), own); },
        base + own < a.tokens);
  };
  Mine::prefetch(place.mean, place.smoothing(), place.turning());
  wait_for_grids();
  let_next_grid_begin();
  load();
  search.prepare();
  while (base < a.tokens) {
    const int token = base + own;
    bool exists = token < a.tokens;
    int64_t at = token, page = 0;
    if constexpr (Plan::page > 0) {
      const int slot = exists ? int(a.slots[token]) : -1;
      exists = slot >= 0;  // below 0: of no request, as servers fill up batches
      page = max(slot, 0) / page_tokens, at = max(slot, 0) % page_tokens;
    }
    if (base + own / teams * teams < a.tokens)  // any row of the warp
      search.encode(row, exists, place.codes + page * a.codes_batch + at * Mine::bytes,
                    place.scale + page * a.scale_batch + at * Mine::numbers);
    if constexpr (together) __syncthreads();
    base += a.parts * at_a_time;
    if (base < a.tokens) load();
  }
}

// Groups of a head that a warp has: few tokens of all rows, or many of one.
__device__ inline void learned(const Arguments& a, uint32_t* shared) {
  using Mine = Groups<Plan>;
  const int part = blockIdx.x % a.parts, block = blockIdx.x / a.parts % Mine::across;
  const int pair = blockIdx.x / (a.parts * Mine::across);
  const Mine groups(a.codebook, pair % a.heads, block, shared);
  Turner<Plan::rotary, Plan::few, 32, Mine::unit * Mine::x, 1> turner(rotary_or_null<Plan::rotary>(a), groups.first_channel(), shared);
  wait_for_grids();
  let_next_grid_begin();
  if (!groups.exists) return;
  if constexpr (Plan::few) {
    for (int i = part; i < a.batch * a.tokens; i += a.parts) {
      const Place place(a, i / a.tokens * a.heads + pair);
      const int token = i % a.tokens;
      groups.encode(place.x + token * a.x_token, place.mean,
                    [&] { return turner(place.turning(), place.position(token), 1, 0); }, place.codes + int64_t(token) * Mine::row_bytes);
    }
  } else {
    const Place place(a, pair);
    for (int base = part * Mine::tokens; base < a.tokens; base += a.parts * Mine::tokens)
      groups.encode_many(place.x, a.x_token, place.mean,
                         [&](int token) { return turner(place.turning(), place.position(token), 1, 0); }, place.codes, base,
                         a.tokens);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) append(const WithRotaryMean<Arguments, Plan::rotary> a) {
  extern __shared__ uint4 shared[];
  if constexpr (Plan::learned) learned(a, reinterpret_cast<uint32_t*>(shared));
  else universal(a, reinterpret_cast<uint32_t*>(shared));
}
