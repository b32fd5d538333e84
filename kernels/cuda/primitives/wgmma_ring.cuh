// SPDX-License-Identifier: Apache-2.0
// Ring of shared memory buffers for x, and tiles of blocks, of linear_wgmma.cu and w4a8_wgmma.cu.
//
// The including file defines first:
//
//     columns_of_slot   columns of x in a buffer, 128 bytes for each token
//     chunk             columns of W that a warp loads in one iteration, whole buffers
//     first_byte        address of the ring within the memory of the block, a multiple of 1024
//     origin            address of the dynamic shared memory within the memory of the block
//     split             blocks of a cluster that split the columns
//     teams             warpgroups that share rows and take chunks round-robin
//     producer_registers   of a thread of the producer warpgroup
#pragma once
#include "plan.cuh"
#include "primitives/numbers.cuh"
#include "primitives/pdl.cuh"
#include "primitives/wgmma.cuh"

constexpr int slots = chunk / columns_of_slot;
constexpr int warpgroups = Plan::threads / 128 - 1, math_threads = 128 * warpgroups;  // plus one producer
constexpr int tile_rows = 64 * warpgroups / teams, tile_tokens = Plan::token_tile;
constexpr int slot_bytes = tile_tokens * 128;
// Split columns: block i % split receives the sums of tokens 8 i .. from all blocks and adds them.
constexpr int added = (tile_tokens / 8 + split - 1) / split;
constexpr uint32_t partial_sums = first_byte + Plan::x_stages * slot_bytes;
constexpr uint32_t barriers = partial_sums + (split > 1 ? added * split * math_threads * 16 : 0);  // full and empty
constexpr uint32_t sums_barrier = barriers + Plan::x_stages * 16;

// Registers of a block move from the producer to the consumer warpgroups, in multiples of 8.
constexpr int at_launch = 65536 / (Plan::blocks_per_sm * Plan::threads) / 8 * 8;
constexpr int spared = (at_launch * (warpgroups + 1) - producer_registers) / warpgroups / 8 * 8;
constexpr int math_registers = spared < 240 ? spared : 240;

static_assert(Plan::pipeline_depth * slots % 2 == 0, "two buffers of registers take turns, around the loop too");
static_assert(warpgroups % teams == 0, "teams of one size");

// Work item of a block: first row, first token, and its range of chunks.
struct Work {
  int row, token, begin, end;

  __device__ Work(int tokens, int chunks, int item, int rank) {
    const int across = (tokens + tile_tokens - 1) / tile_tokens;  // adjacent items share codes
    const int part = (chunks + split - 1) / split;
    row = item / across * tile_rows;
    token = item % across * tile_tokens;
    begin = min(rank * part, chunks), end = min(begin + part, chunks);
  }

  __device__ static int items(int rows, int tokens) {
    return (rows + tile_rows - 1) / tile_rows * ((tokens + tile_tokens - 1) / tile_tokens);
  }
};

// Round-robin over the buffers, with the parity of their phases.
struct Turn {
  uint32_t block;  // the highest byte of addresses in its memory
  int slot = 0;
  uint32_t parity = 0;

  __device__ explicit Turn(const char* shared) : block(uint32_t(__cvta_generic_to_shared(shared)) - origin) {}
  __device__ uint32_t full() const { return block + barriers + slot * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ uint32_t address() const { return block + first_byte + slot * slot_bytes; }
  __device__ void next() {
    if (++slot == Plan::x_stages) slot = 0, parity ^= 1;
  }
  // At most as many as there are.
  __device__ void pass(int count) {
    slot += count;
    if (slot >= Plan::x_stages) slot -= Plan::x_stages, parity ^= 1;
  }
  // Any number.
  __device__ void skip(int count) {
    slot += count;
    parity ^= slot / Plan::x_stages & 1, slot %= Plan::x_stages;
  }
};

// Called by one thread, before the cluster barrier.
__device__ inline void set_barriers(const char* shared, int rank) {
#pragma unroll 1
  for (Turn turn(shared); turn.parity == 0; turn.next()) {
    barrier_init(turn.full(), 1);
    barrier_init(turn.empty(), 4 * warpgroups / teams);
  }
  if constexpr (split > 1) {
    const uint32_t met = Turn(shared).block + sums_barrier;
    const int mine = (tile_tokens / 8 - rank + split - 1) / split;
    barrier_init(met, 1);
    barrier_expect(met, mine * split * math_threads * 16);
  }
  barriers_are_set();
}

// x, [columns / columns_of_slot][8 * ceil(tokens / 8)][128 bytes], -> ring, by one lane. Of a tile that it does not fill,
// the rest keeps what was there: it is multiplied for tokens that nobody stores.
__device__ inline void produce(const void* x, int tokens, const Work& work, Turn& turn) {
  const int padded = (tokens + 7) / 8 * 8;
  const uint32_t bytes = min(tile_tokens, tokens - work.token) * 128;
  const char* from = static_cast<const char*>(x) + int64_t(work.token) * 128;
  for (int at = work.begin * slots; at < work.end * slots; ++at, turn.next()) {
    barrier_wait(turn.empty(), turn.parity ^ 1);
#if WITHOUT_X
    barrier_arrive(turn.full());
    if (at < 0)  // never
      copy_bulk(turn.address(), from + int64_t(at) * padded * 128, bytes, turn.full());
#else
    barrier_expect(turn.full(), bytes);
    copy_bulk(turn.address(), from + int64_t(at) * padded * 128, bytes, turn.full());
#endif
  }
}
