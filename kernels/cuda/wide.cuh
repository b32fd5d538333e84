// SPDX-License-Identifier: Apache-2.0
// What blocks of wide.cu and of w4a8_wide.cu have in common: their tiles, the ring through which x comes, and where sums of
// a cluster meet. The including file says first
//
//     columns_of_slot   columns of x in a slot, 128 bytes for each token
//     chunk             columns that a warp takes of W at a time, whole slots
//     first_byte        where the ring begins, as an address within the block's memory, a multiple of 1024
//     origin            such an address of the memory that is asked for at the launch
#pragma once
#include "grids.cuh"
#include "numbers.cuh"
#include "plan.cuh"
#include "wgmma.cuh"

constexpr int slots = chunk / columns_of_slot;
constexpr int warpgroups = Plan::threads / 128 - 1, math_threads = 128 * warpgroups;  // and one that reads x
constexpr int tile_rows = 64 * warpgroups, tile_tokens = Plan::token_tile;
constexpr int slot_bytes = tile_tokens * 128;
// Where columns are split: sums of tokens 8 i .. are added by block i % split, which gets them from all.
constexpr int added = (tile_tokens / 8 + Plan::split - 1) / Plan::split;
constexpr uint32_t meeting = first_byte + Plan::depth * slot_bytes;
constexpr uint32_t barriers = meeting + (Plan::split > 1 ? added * Plan::split * math_threads * 16 : 0);  // full and empty
constexpr uint32_t all_met = barriers + Plan::depth * 16;

// A block's registers go to those that multiply, in eights.
constexpr int at_launch = 65536 / (Plan::resident * Plan::threads) / 8 * 8, producer_registers = 24;
constexpr int spared = (at_launch * (warpgroups + 1) - producer_registers) / warpgroups / 8 * 8;
constexpr int math_registers = spared < 240 ? spared : 240;

static_assert(Plan::steps * slots % 2 == 0, "two buffers of registers take turns, around the loop too");

// What a block does: rows, tokens, and its share of the columns in chunks.
struct Work {
  int row, token, begin, end;

  __device__ Work(int tokens, int chunks, int item, int rank) {
    const int across = (tokens + tile_tokens - 1) / tile_tokens;  // neighbours have the same codes
    const int part = (chunks + Plan::split - 1) / Plan::split;
    row = item / across * tile_rows;
    token = item % across * tile_tokens;
    begin = min(rank * part, chunks), end = min(begin + part, chunks);
  }

  __device__ static int items(int rows, int tokens) {
    return (rows + tile_rows - 1) / tile_rows * ((tokens + tile_tokens - 1) / tile_tokens);
  }
};

// Slots in turn, and the parity of their phases.
struct Turn {
  uint32_t block;  // the highest byte of addresses in its memory
  int slot = 0;
  uint32_t parity = 0;

  __device__ explicit Turn(const char* shared) : block(uint32_t(__cvta_generic_to_shared(shared)) - origin) {}
  __device__ uint32_t full() const { return block + barriers + slot * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ uint32_t address() const { return block + first_byte + slot * slot_bytes; }
  __device__ void next() {
    if (++slot == Plan::depth) slot = 0, parity ^= 1;
  }
};

// By one thread, before the blocks of the cluster meet.
__device__ inline void set_barriers(const char* shared, int rank) {
#pragma unroll 1
  for (Turn turn(shared); turn.parity == 0; turn.next()) {
    barrier_init(turn.full(), 1);
    barrier_init(turn.empty(), 4 * warpgroups);
  }
  if constexpr (Plan::split > 1) {
    const uint32_t met = Turn(shared).block + all_met;
    const int mine = (tile_tokens / 8 - rank + Plan::split - 1) / Plan::split;
    barrier_init(met, 1);
    barrier_expect(met, mine * Plan::split * math_threads * 16);
  }
  barriers_are_set();
}

// x, [columns / columns_of_slot][8 * ceil(tokens / 8)][128 bytes], -> ring, by one lane.
__device__ inline void produce(const void* x, int tokens, const Work& work, Turn& turn) {
  const int padded = (tokens + 7) / 8 * 8;
  const uint32_t bytes = min(tile_tokens, padded - work.token) * 128;
  const char* from = static_cast<const char*>(x) + work.token * 128;
  for (int at = work.begin * slots; at < work.end * slots; ++at, turn.next()) {
    barrier_wait(turn.empty(), turn.parity ^ 1);
    barrier_expect(turn.full(), bytes);
    copy_bulk(turn.address(), from + int64_t(at) * padded * 128, bytes, turn.full());
  }
}

// Rows of a warpgroup times x, over the columns of a block. While tensor cores multiply a slot, the next one is decoded.
//
//     load(i, at)         codes of chunk `at` -> place i of `steps`
//     decode(now, i, j)   slot j of them -> the four fragments of buffer `now`
//     product(now, k, b)  fragment k times b
template <class Load, class Decode, class Product>
__device__ inline void multiply_slots(const Work& work, Turn& turn, Load load, Decode decode, Product product) {
#pragma unroll
  for (int i = 0; i < Plan::steps; ++i)
    if (work.begin + i < work.end) load(i, work.begin + i);
  const auto release = [&](uint32_t barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  };
  if (work.begin < work.end) decode(0, 0, 0);
  wait_for_grids();
  uint32_t last = 0;  // barrier of the slot before this one
  for (int first = work.begin; first < work.end; first += Plan::steps) {
#pragma unroll
    for (int i = 0; i < Plan::steps; ++i) {
      const int at = first + i;
      if (at >= work.end) break;
#pragma unroll
      for (int j = 0; j < slots; ++j) {
        const int now = (i * slots + j) % 2;
        barrier_wait(turn.full(), turn.parity);
        const uint64_t b = wgmma_descriptor(turn.address());
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) product(now, k, b + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();  // the products before these: their weights and their slot are free
        if (last) release(last);
        last = turn.empty();
        turn.next();
        if (j + 1 < slots)
          decode(1 - now, i, j + 1);
        else if (at + 1 < work.end)
          decode(1 - now, (i + 1) % Plan::steps, 0);
        if (j == (slots > 1 ? slots - 2 : 0) && at + Plan::steps < work.end) load(i, at + Plan::steps);
      }
    }
  }
  wgmma_wait<0>();
  if (last) release(last);
}

// `store(i, sums)` gets a lane's four sums of tokens 8 i .. 8 i + 7; where columns are split, those of the tokens that this
// block adds, from all blocks, in their order. `block`: the highest byte of addresses in its memory.
template <class Number, class Store>
__device__ inline void meet(int rank, uint32_t block, const Number (&sums)[tile_tokens / 2], Store store) {
  if constexpr (Plan::split == 1) {
#pragma unroll
    for (int i = 0; i < tile_tokens / 8; ++i) store(i, sums + 4 * i);
  } else {
    const uint32_t mine = block + meeting + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < tile_tokens / 8; ++i)
      send(mine + (i / Plan::split * Plan::split + rank) * (math_threads * 16), sums + 4 * i, block + all_met,
           i % Plan::split);
    barrier_wait(block + all_met, 0);
#pragma unroll
    for (int q = 0; q < added; ++q) {
      const int i = q * Plan::split + rank;
      if (i >= tile_tokens / 8) break;
      Number sum[4] = {};
#pragma unroll
      for (int s = 0; s < Plan::split; ++s) {
        uint32_t word[4];
        load_shared<16>(mine + (q * Plan::split + s) * (math_threads * 16), word);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += of_bits<Number>(word[c]);
      }
      store(i, sum);
    }
  }
}
