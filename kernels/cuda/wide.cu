// SPDX-License-Identifier: Apache-2.0
// y = W x + b for many tokens, from the codes of W: no dense weight exists anywhere.
//
//     y[m, o] = bias[o] + sum_g sum_{k in g} (scale[o, g] W'[o, k]) x[m, k]        W' = entries of the codebook
//
// A warpgroup multiplies 64 rows of W with `token_tile` tokens on tensor cores. W comes from registers: as in linear.cu
// a lane decodes eight neighbouring columns of two rows at a time, and those are two fragments as they are. x comes from
// shared memory, where a producer puts 64 columns at a time, in the columns' numbering and swizzled as rotate.cu wrote it:
//
//     producer (one lane)   [x 64 columns][x next 64]..        ring of `depth` slots, token_tile x 128 bytes each
//     warpgroup 0           |64 columns|64 columns| ..         while tensor cores multiply 64 columns, a warp looks up the
//     warpgroup 1             |64 columns|64 columns| ..       next 64, 16 in each lane (two buffers of registers)
//
// Blocks of a cluster share the columns (`split` blocks have the same rows): each adds the sums of some tokens, which the
// others send to its shared memory, in the order of blocks, so that the result does not depend on timing.
//
// Bytes: codes once for every token_tile tokens, x once for every 64 x warpgroups rows, both mostly from L2.
// A product of 64 x token_tile x 16 takes token_tile / 2 cycles of tensor cores and token_tile / 4 of shared memory, a
// lookup of its 1024 weights 16 more there, times stages. With few tokens, a warp's lookups take
// longer than the products that they hide behind.
#include "codes.cuh"
#include "grids.cuh"
#include "plan.cuh"
#include "table.cuh"
#include "wgmma.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const uint8_t* signs;      // not read: x is rotated
  const uint16_t* x;         // of Plan::dtype, [columns / 64][8 * ceil(tokens / 8)][64] (rotate.cu, `swizzled`)
  const uint16_t* bias;      // [rows] of Plan::dtype, or null
  uint16_t* y;               // [tokens, rows] of Plan::dtype
  int rows;
  int columns;
  int tokens;
};

constexpr int unit = Plan::unit, chunk = 4 * unit, slots = chunk / 64;
constexpr int warpgroups = Plan::threads / 128 - 1, math_threads = 128 * warpgroups;  // and one that reads x
constexpr int tile_rows = 64 * warpgroups, tile_tokens = Plan::token_tile;
constexpr int group = Plan::group ? Plan::group : 1;
constexpr int unit_bytes = unit / Plan::vector_size * Plan::entry_bits / 8;
constexpr int slot_bytes = tile_tokens * 128;
constexpr uint32_t ring = Table::first + (Table::bytes + 1023) / 1024 * 1024;
// Where columns are split: sums of tokens 8 i .. are added by block i % split, which gets them from all.
constexpr int added = (tile_tokens / 8 + Plan::split - 1) / Plan::split;
constexpr uint32_t meeting = ring + Plan::depth * slot_bytes;
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

  __device__ Work(const Arguments& a, int item, int rank) {
    const int across = (a.tokens + tile_tokens - 1) / tile_tokens;  // neighbours have the same codes
    const int chunks = a.columns / chunk, part = (chunks + Plan::split - 1) / Plan::split;
    row = item / across * tile_rows;
    token = item % across * tile_tokens;
    begin = min(rank * part, chunks), end = min(begin + part, chunks);
  }

  __device__ static int items(const Arguments& a) {
    return (a.rows + tile_rows - 1) / tile_rows * ((a.tokens + tile_tokens - 1) / tile_tokens);
  }
};

// Slots in turn, and the parity of their phases.
struct Turn {
  uint32_t block;  // the highest byte of addresses in its memory
  int slot = 0;
  uint32_t parity = 0;

  __device__ explicit Turn(const char* shared) : block(uint32_t(__cvta_generic_to_shared(shared)) - Table::first) {}
  __device__ uint32_t full() const { return block + barriers + slot * 16; }
  __device__ uint32_t empty() const { return full() + 8; }
  __device__ uint32_t address() const { return block + ring + slot * slot_bytes; }
  __device__ void next() {
    if (++slot == Plan::depth) slot = 0, parity ^= 1;
  }
};

// x -> ring, by one lane.
__device__ inline void produce(const Arguments& a, const Work& work, Turn& turn) {
  const int padded = (a.tokens + 7) / 8 * 8;
  const uint32_t bytes = min(tile_tokens, padded - work.token) * 128;
  const char* from = reinterpret_cast<const char*>(a.x) + work.token * 128;
  for (int at = work.begin * slots; at < work.end * slots; ++at, turn.next()) {
    barrier_wait(turn.empty(), turn.parity ^ 1);
    barrier_expect(turn.full(), bytes);
    copy_bulk(turn.address(), from + int64_t(at) * padded * 128, bytes, turn.full());
  }
}

// Where the two rows of a lane begin, at the lane's place in the first chunk. Neighbours: they are the two halves of a
// word of y, and rows g and g + 8 of the product.
struct Rows {
  const char* codes[2];
  const uint16_t* scale[2];

  __device__ Rows(const Arguments& a, int first, int64_t stream, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + lane / 4 * 2 + half, a.rows - 1);
      codes[half] = reinterpret_cast<const char*>(a.codes) + row * Plan::stages * stream + lane % 4 * unit_bytes;
      scale[half] = a.scale + int64_t(row) * (a.columns / group);
    }
  }
};

// Codes and scales that a lane has of its rows in one chunk.
struct Step {
  Table::RowCodes codes[2][Plan::stages];
  uint32_t scale[2];

  __device__ void load(const Rows& rows, int at, int64_t stream) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int stage = 0; stage < Plan::stages; ++stage)
        codes[half][stage].template load_aligned<Plan::load_bytes>(rows.codes[half] + stage * stream +
                                                                   int64_t(at) * (4 * unit_bytes));
      if constexpr (Plan::group > 0) scale[half] = __ldg(rows.scale[half] + at * chunk / group);
    }
  }
};

// Four fragments: columns 16 j .. 16 j + 15 of a lane, times their scales. A bfloat16 has too few bits for a scale, so
// that it is split in two.
struct Weights {
  uint32_t fragment[4][4];

  __device__ void decode(const Table& table, const Step& step, int j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[2][4];
      table.eight(step.codes[half], 2 * j, word[0]);
      table.eight(step.codes[half], 2 * j + 1, word[1]);
      if constexpr (Plan::group > 0) {
        const float exact = half_to_float(step.scale[half]);
        const uint32_t high = pack_pair<Plan::dtype>(exact, exact);
        uint32_t low = 0;
        if constexpr (Plan::dtype == Dtype::BFLOAT16) {
          const float rest = exact - __uint_as_float(high << 16);
          low = pack_pair<Plan::dtype>(rest, rest);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t& pair = word[i / 4][i % 4];
          if constexpr (Plan::dtype == Dtype::FLOAT16)
            pair = multiply_pair<Plan::dtype>(pair, high);
          else
            pair = multiply_add<Plan::dtype>(pair, high, multiply_pair<Plan::dtype>(pair, low));
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) fragment[i / 2][i % 2 * 2 + half] = word[i / 4][i % 4];
    }
  }
};

using Sums = float[tile_tokens / 2];

// Rows of a warpgroup times x, over the columns of this block.
__device__ inline void multiply(const Arguments& a, const Table& table, const Work& work, Turn& turn, Sums& sums) {
  const int lane = threadIdx.x % 32;
  const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
  const Rows rows(a, work.row + threadIdx.x / 32 * 16, stream, lane);
  Step next[Plan::steps];
#pragma unroll
  for (int i = 0; i < Plan::steps; ++i)
    if (work.begin + i < work.end) next[i].load(rows, work.begin + i, stream);
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  Weights weights[2];
  if (work.begin < work.end) weights[0].decode(table, next[0], 0);
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
        for (int k = 0; k < 4; ++k) wgmma<Plan::dtype, tile_tokens>(sums, weights[now].fragment[k], b + 2 * k);
        wgmma_commit();
        wgmma_wait<1>();  // the products before these: their weights and their slot are free
        if (last) release(last);
        last = turn.empty();
        turn.next();
        if (j + 1 < slots)
          weights[1 - now].decode(table, next[i], j + 1);
        else if (at + 1 < work.end)
          weights[1 - now].decode(table, next[(i + 1) % Plan::steps], 0);
        if (j == (slots > 1 ? slots - 2 : 0) && at + Plan::steps < work.end)
          next[i].load(rows, at + Plan::steps, stream);
      }
    }
  }
  wgmma_wait<0>();
  if (last) release(last);
}

// Sums of tokens 8 i .. 8 i + 7 -> y.
__device__ inline void store(const Arguments& a, const Work& work, int i, const float* sums, const float (&factor)[2],
                             const float (&bias)[2]) {
  const int lane = threadIdx.x % 32;
  const int row = work.row + threadIdx.x / 32 * 16 + lane / 4 * 2, token = work.token + i * 8 + lane % 4 * 2;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (token + c >= a.tokens || row >= a.rows) continue;
    const uint32_t word = pack_pair<Plan::dtype>(sums[c] * factor[0] + bias[0], sums[2 + c] * factor[1] + bias[1]);
    uint16_t* to = a.y + int64_t(token + c) * a.rows + row;
    if (a.rows % 2 == 0) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      to[0] = uint16_t(word);
      if (row + 1 < a.rows) to[1] = uint16_t(word >> 16);
    }
  }
}

// `block`: the highest byte of addresses in this block's memory.
__device__ inline void finish(const Arguments& a, const Table& table, const Work& work, int rank, uint32_t block,
                              const Sums& sums) {
  const int lane = threadIdx.x % 32;
  float factor[2], bias[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(work.row + int(threadIdx.x) / 32 * 16 + lane / 4 * 2 + half, a.rows - 1);
    factor[half] = table.factor * (Plan::group ? 1.0f : half_to_float(__ldg(a.scale + row)));
    bias[half] = a.bias ? to_float<Plan::dtype>(a.bias[row]) : 0.0f;
  }
  if constexpr (Plan::split == 1) {
#pragma unroll
    for (int i = 0; i < tile_tokens / 8; ++i) store(a, work, i, sums + 4 * i, factor, bias);
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
      float sum[4] = {};
#pragma unroll
      for (int s = 0; s < Plan::split; ++s) {
        uint32_t word[4];
        load_shared<16>(mine + (q * Plan::split + s) * (math_threads * 16), word);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += __uint_as_float(word[c]);
      }
      store(a, work, i, sum, factor, bias);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::resident) __cluster_dims__(Plan::split)
    wide(const Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % Plan::split;
  const Table table(a.codebook, shared, lane);
  if (threadIdx.x == math_threads) {
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
  table.fill();
  if constexpr (Plan::split > 1) wait_for_cluster();
  __syncthreads();
  Turn turn(shared);
  const int items = Work::items(a), first = blockIdx.x / Plan::split, step = gridDim.x / Plan::split;
  if (warp >= 4 * warpgroups) {
    leave_registers<producer_registers>();
    wait_for_grids();
    let_next_grid_begin();
    if (threadIdx.x == math_threads)
      for (int item = first; item < items; item += step) produce(a, Work(a, item, rank), turn);
  } else {
    take_registers<math_registers>();
    for (int item = first; item < items; item += step) {  // only one where columns are split
      const Work work(a, item, rank);
      Sums sums = {};
      multiply(a, table, work, turn, sums);
      finish(a, table, work, rank, turn.block, sums);
    }
  }
}
