// SPDX-License-Identifier: Apache-2.0
// y = W x + b with W of 4 bits and x of 8, as one product of integers, for many tokens on Hopper.
//
//     y[m, o] = (sum_k w[o, k] numbers[m, k]) scale[o] size[m] + bias[o]         w, and what follows a sum: w4a8.cuh
//
// As wide.cu, with bytes in the place of floats. A warpgroup multiplies 64 rows of W with `token_tile` tokens on tensor
// cores. Codes become fragments in registers; numbers of x come through shared memory, where a producer puts 128 columns at
// a time, swizzled as w4a8_inputs.cu wrote them:
//
//     producer (one lane)   [x 128 columns][x next 128]..      ring of `depth` slots, token_tile x 128 bytes each
//     warpgroup 0           |128 columns|128 columns| ..       while tensor cores multiply a slot, codes of the next one
//     warpgroup 1             |128 columns|128 columns| ..     become bytes (two buffers of registers)
//
// Bytes: codes once for every token_tile tokens, x once for every 64 x warpgroups rows, both mostly from L2. A product of
// 64 x token_tile x 32 takes token_tile / 2 cycles of tensor cores and token_tile / 4 of shared memory; making its weights
// takes 20 cycles of integers. L2 gives about 24 bytes a cycle, and a tile of 128 x 256 asks for 40.
#include "grids.cuh"
#include "plan.cuh"
#include "w4a8.cuh"

constexpr int columns_of_slot = chunk;
constexpr uint32_t origin = 0, first_byte = 0;

#include "wide.cuh"

struct Arguments {
  const char* codes;      // uint8 [rows, columns / 2]
  const uint16_t* scale;  // fp16 [rows]
  const char* zero;       // uint8 [rows, columns / group], without groups float [rows]
  const char* step;       // uint8 [rows, columns / group], or null
  const char* x;          // numbers, swizzled
  const Token* token;     // [tokens]
  const char* bias;       // [rows] of Plan::bias, or null
  uint16_t* y;            // [tokens, rows] of Plan::dtype
  int rows;
  int tokens;
  int columns;            // a multiple of 32
};

constexpr int group = grouped ? Plan::group : 1;

// Where the two rows of a lane begin. They are neighbours: the two halves of a word of y, and rows g and g + 8 of the
// product.
struct Rows {
  const char* codes[2];
  const char* step[2];
  const char* zero[2];
  int last;  // columns of a lane
  int end;   // of the chunks of the block

  __device__ Rows(const Arguments& a, int first, int end) : last(a.columns - 32), end(end) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = min(first + lane / 4 * 2 + half, a.rows - 1), groups = a.columns / group;
      codes[half] = a.codes + row * (a.columns / 2);
      if constexpr (grouped) step[half] = a.step + row * groups, zero[half] = a.zero + row * groups;
    }
  }
};

// Codes of a lane in one chunk -> L2, before they are loaded: what it has on their way to registers does not hide the latency
// of DRAM.
__device__ inline void prefetch(const Rows& rows, int at) {
  if (at >= rows.end) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    prefetch_line(rows.codes[half] + min(at * chunk + int(threadIdx.x) % 4 * 32, rows.last) / 2);
}

// What a lane has of its rows in one chunk; beyond the last columns it takes them again: x is zero there.
struct Step {
  uint32_t word[2][4];
  uint32_t step[2], zero[2];

  __device__ void load(const Rows& rows, int at) {
    if constexpr (Plan::ahead > 0) prefetch(rows, at + Plan::ahead);
    const int column = min(at * chunk + threadIdx.x % 4 * 32, rows.last);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_words<16>(rows.codes[half] + column / 2, word[half]);
      if constexpr (grouped) {
        step[half] = uint8_t(rows.step[half][column / group]);
        zero[half] = uint8_t(rows.zero[half][column / group]);
      }
    }
  }
};

// Four fragments: the columns of a lane in one chunk, eight in each.
struct Weights {
  uint32_t fragment[4][4];

  __device__ void decode(const Step& step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Grid grid;
      if constexpr (grouped) grid.set(step.step[half], step.zero[half]);
#pragma unroll
      for (int k = 0; k < 4; ++k) grid.decode(step.word[half][k], fragment[k][half], fragment[k][2 + half]);
    }
  }
};

using Sums = int[tile_tokens / 2];

// Sums of tokens 8 i .. 8 i + 7 -> y.
template <bool Whole>
__device__ inline void store(const Arguments& a, const Work& work, int i, const int* sums, const Row (&rows)[2]) {
  const int lane = threadIdx.x % 32;
  const int row = work.row + threadIdx.x / 32 * 16 + lane / 4 * 2, first = work.token + i * 8 + lane % 4 * 2;
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (first + c < a.tokens && row < a.rows)
      store_rows<Whole>(a.y + int64_t(first + c) * a.rows + row, row, a.rows, sums[c], sums[2 + c], rows[0], rows[1],
                        a.token[first + c]);
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::resident) __cluster_dims__(Plan::split)
    w4a8_wide(const Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % Plan::split;
  if (threadIdx.x == math_threads) set_barriers(shared, rank);
  if constexpr (Plan::split > 1) wait_for_cluster();
  __syncthreads();
  Turn turn(shared);
  const int items = Work::items(a.rows, a.tokens), first = blockIdx.x / Plan::split, step = gridDim.x / Plan::split;
  const int chunks = (a.columns + chunk - 1) / chunk;
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
      const Rows codes(a, work.row + warp * 16, work.end);
      for (int at = work.begin + Plan::steps; at < work.begin + Plan::ahead; ++at) prefetch(codes, at);
      Step next[Plan::steps];
      Weights weights[2];
      Sums sums = {};
      multiply_slots(
          work, turn, [&](int i, int at) { next[i].load(codes, at); },
          [&](int now, int i, int) { weights[now].decode(next[i]); },
          [&](int now, int k, uint64_t b) { wgmma_bytes<tile_tokens>(sums, weights[now].fragment[k], b); });
      Row rows[2];
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rows[half] = row_of(a.scale, a.zero, a.bias, min(work.row + warp * 16 + lane / 4 * 2 + half, a.rows - 1));
      const bool whole = grouped || __all_sync(0xffffffffu, are_whole(rows[0], rows[1]));
      meet(rank, turn.block, sums, [&](int i, const int* of) {
        if (whole)
          store<true>(a, work, i, of, rows);
        else
          store<false>(a, work, i, of, rows);
      });
    }
  }
}
