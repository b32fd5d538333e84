// SPDX-License-Identifier: Apache-2.0
// y = W x + b for many tokens, directly from the codes of W with wgmma; no dense weight is ever stored.
//
//     y[m, o] = bias[o] + sum_g sum_{k in g} (scale[o, g] W'[o, k]) x[m, k]        W' = entries of the codebook
//
// Tile of a consumer warpgroup: 64 rows of W times `token_tile` tokens. W comes from registers: like linear.cu, a lane
// decodes eight adjacent columns of two rows, and they are two A fragments. x comes from shared memory: a producer warp
// loads 64 columns per buffer, in fragment order and swizzled as rotate.cu wrote them:
//
//     producer (one lane)   [x 64 columns][x next 64]..        ring of `x_stages` buffers, token_tile x 128 bytes each
//     warpgroup 0           |64 columns|64 columns| ..         while tensor cores multiply 64 columns, a warp looks up the
//     warpgroup 1             |64 columns|64 columns| ..       next 64, 16 in each lane (two buffers of registers)
//
// The `cluster_size` blocks of a cluster have the same rows and split the columns. Each block adds the sums of some
// tokens; the others send it theirs in shared memory, and it adds them in block order: the result does not depend on
// timing.
//
// Bytes: codes once per token_tile tokens, x once per 64 x warpgroups rows, both mostly from L2.
// Bottleneck: lookups with few tokens, else tensor cores. A product of 64 x token_tile x 16 takes token_tile / 2 cycles
// of tensor cores and token_tile / 4 of shared memory; the lookups of its 1024 weights take 16 more per codebook.
#include "linear/table.cuh"
#include "plan.cuh"
#include "primitives/codes.cuh"
#include "primitives/pdl.cuh"

constexpr int unit = Plan::unit, chunk = 4 * unit, columns_of_slot = 64;
constexpr int split = Plan::cluster_size, teams = 1;
constexpr uint32_t origin = Table::first, first_byte = origin + (Table::bytes + 1023) / 1024 * 1024;

#include "primitives/wgmma_ring.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const void* diagonal;      // not read: x is rotated
  const uint16_t* x;         // of Plan::dtype, [columns / 64][8 * ceil(tokens / 8)][64] (rotate.cu, `swizzled`)
  const uint16_t* bias;      // [rows] of Plan::dtype, or null
  uint16_t* y;               // [tokens, rows] of Plan::dtype
  int rows;
  int columns;
  int tokens;
};

constexpr int group = Plan::group ? Plan::group : 1;
constexpr int unit_bytes = unit / Plan::vector_size * Plan::entry_bits / 8;

// Positions of the two rows of a lane, at its columns of the first chunk. The rows are adjacent in W, the two halves of
// a word of y; they are rows g and g + 8 of the product.
struct Rows {
  const char* codes[2];
  const uint16_t* scale[2];

  __device__ Rows(const Arguments& a, int first, int64_t stream, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + lane / 4 * 2 + half, a.rows - 1);
      codes[half] = reinterpret_cast<const char*>(a.codes) + row * Plan::num_codebooks * stream + lane % 4 * unit_bytes;
      scale[half] = a.scale + int64_t(row) * (a.columns / group);
    }
  }
};

// Codes and scales that a lane has of its rows in one chunk.
struct Step {
  Table::RowCodes codes[2][Plan::num_codebooks];
  uint32_t scale[2];

  __device__ void load(const Rows& rows, int at, int64_t stream) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int stage = 0; stage < Plan::num_codebooks; ++stage)
        codes[half][stage].template load_aligned<Plan::load_bytes>(rows.codes[half] + stage * stream +
                                                                   int64_t(at) * (4 * unit_bytes));
#if !WITHOUT_SCALES
      if constexpr (Plan::group > 0) scale[half] = __ldg(rows.scale[half] + at * chunk / group);
#endif
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
#if !WITHOUT_SCALES
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
#endif
#pragma unroll
      for (int i = 0; i < 8; ++i) fragment[i / 2][i % 2 * 2 + half] = word[i / 4][i % 4];
    }
  }
};

using Sums = float[tile_tokens / 2];

// Main loop: rows of a warpgroup times x. While tensor cores multiply one buffer, lanes decode the next one.
//
//     load(i, at)         codes of chunk `at` -> place i of `pipeline_depth`
//     decode(now, i, j)   slot j of them -> the four fragments of buffer `now`
//     product(now, k, b)  fragment k times b
template <class Load, class Decode, class Product>
__device__ inline void multiply_slots(const Work& work, Turn& turn, Load load, Decode decode, Product product) {
#pragma unroll
  for (int i = 0; i < Plan::pipeline_depth; ++i)
    if (work.begin + i < work.end) load(i, work.begin + i);
  const auto release = [&](uint32_t barrier) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
  };
  if (work.begin < work.end) decode(0, 0, 0);
  wait_for_grids();
  uint32_t last = 0;  // barrier of the slot before this one
  for (int first = work.begin; first < work.end; first += Plan::pipeline_depth) {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth; ++i) {
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
          decode(1 - now, (i + 1) % Plan::pipeline_depth, 0);
        if (j == (slots > 1 ? slots - 2 : 0) && at + Plan::pipeline_depth < work.end) load(i, at + Plan::pipeline_depth);
      }
    }
  }
  wgmma_wait<0>();
  if (last) release(last);
}

// `store(i, sums)` gets a lane's four sums of tokens 8 i .. 8 i + 7; where columns are split, those of the tokens that this
// block adds, from all blocks, in their order. `block`: the highest byte of addresses in its memory.
template <class Store>
__device__ inline void meet(int rank, uint32_t block, const Sums& sums, Store store) {
  if constexpr (split == 1) {
#pragma unroll
    for (int i = 0; i < tile_tokens / 8; ++i) store(i, sums + 4 * i);
  } else {
    const uint32_t mine = block + partial_sums + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < tile_tokens / 8; ++i)
      send(mine + (i / split * split + rank) * (math_threads * 16), sums + 4 * i, block + sums_barrier,
           i % split);
    barrier_wait(block + sums_barrier, 0);
#pragma unroll
    for (int q = 0; q < added; ++q) {
      const int i = q * split + rank;
      if (i >= tile_tokens / 8) break;
      float sum[4] = {};
#pragma unroll
      for (int s = 0; s < split; ++s) {
        uint32_t word[4];
        load_shared<16>(mine + (q * split + s) * (math_threads * 16), word);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += __uint_as_float(word[c]);
      }
      store(i, sum);
    }
  }
}

// Rows of a warpgroup times x, over the columns of this block.
__device__ inline void multiply(const Arguments& a, const Table& table, const Work& work, Turn& turn, Sums& sums) {
  const int lane = threadIdx.x % 32;
  const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
  const Rows rows(a, work.row + threadIdx.x / 32 * 16, stream, lane);
  Step next[Plan::pipeline_depth];
  Weights weights[2];
  multiply_slots(
      work, turn, [&](int i, int at) { next[i].load(rows, at, stream); },
      [&](int now, int i, int j) { weights[now].decode(table, next[i], j); },
      [&](int now, int k, uint64_t b) { wgmma<Plan::dtype, tile_tokens>(sums, weights[now].fragment[k], b); });
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
  meet(rank, block, sums, [&](int i, const float* of) { store(a, work, i, of, factor, bias); });
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) __cluster_dims__(split)
    linear_wgmma(const Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % split;
  const Table table(a.codebook, shared, lane);
  if (threadIdx.x == math_threads) set_barriers(shared, rank);
  table.fill();
  if constexpr (split > 1) wait_for_cluster();
  __syncthreads();
  Turn turn(shared);
  const int items = Work::items(a.rows, a.tokens), first = blockIdx.x / split, step = gridDim.x / split;
  const int chunks = a.columns / chunk;
  if (warp >= 4 * warpgroups) {
    leave_registers<producer_registers>();
    wait_for_grids();
    let_next_grid_begin();
    if (threadIdx.x == math_threads)
      for (int item = first; item < items; item += step)
        produce(a.x, a.tokens, Work(a.tokens, chunks, item, rank), turn);
  } else {
    take_registers<math_registers>();
    for (int item = first; item < items; item += step) {  // only one where columns are split
      const Work work(a.tokens, chunks, item, rank);
      Sums sums = {};
      multiply(a, table, work, turn, sums);
      finish(a, table, work, rank, turn.block, sums);
    }
  }
}
