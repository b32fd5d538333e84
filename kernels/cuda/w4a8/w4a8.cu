// SPDX-License-Identifier: Apache-2.0
// y = W x + b with 4-bit W and 8-bit x, as an integer product for few tokens (QServe, section 5.2).
//
//     y[m, o] = (sum_k w[o, k] numbers[m, k]) scale[o] size[m] + bias[o]         w and the epilogue: w4a8.cuh
//
// Tile of a warp: row_tiles x 16 rows times token_tiles x 8 tokens, 128 columns per iteration. A lane loads 16 bytes of
// codes of each of its rows, which become fragments in registers, and 16 bytes of x for two products. The rows of a lane
// are adjacent, the two halves of a word of y.
//
//     team of `split_k_warps`   +---------+---------+---------+---------+
//     row_tiles x 16 rows       | warp 0  | warp 1  | warp 2  | warp 3  |     whole chunks of 128 columns each
//                               +---------+---------+---------+---------+
//     partial sums are added in shared memory; integer sums do not depend on the order
//
// A warp has codes of `pipeline_depth` chunks in flight. Steps and zeros of the block's rows are in shared memory. x is
// read through L1, in the order of w4a8_inputs.cu. A single token (`single`) is in shared memory: the block copies it, or
// quantizes it itself (`rounds`) while its codes are in flight.
//
// Bytes: codes once per token_tiles x 8 tokens; x once per row (from L1, or from L2 per block).
// Bottleneck: DRAM for few tokens; tensor cores and loads of x for many.
#include "plan.cuh"
#include "primitives/mma.cuh"
#include "primitives/pdl.cuh"
#include "w4a8/w4a8.cuh"
#include "w4a8/w4a8_round.cuh"

struct Arguments {
  const char* codes;      // uint8 [rows, columns / 2]
  const uint16_t* scale;  // fp16 [rows]
  const char* zero;       // uint8 [rows, columns / group], without groups float [rows]
  const char* step;       // uint8 [rows, columns / group], or null
  const char* x;          // numbers in the order of fragments, of whole tiles of tokens, or [columns] of Plan::dtype that are rounded here
  const Token* token;     // [tokens]; not read where x is rounded here
  const char* bias;       // [rows] of Plan::bias, or null
  uint16_t* y;            // [tokens, rows] of Plan::dtype
  int rows;
  int tokens;
};

constexpr int columns = Plan::columns, warps = Plan::threads / 32, teams = warps / Plan::split_k_warps;
constexpr int tile_rows = 16 * Plan::row_tiles * teams, tile_tokens = 8 * Plan::token_tiles;
constexpr int fragments = teams * Plan::row_tiles * Plan::token_tiles;
constexpr int groups = grouped ? columns / Plan::group : 0;  // of a row

// Offsets in shared memory.
constexpr int tokens_at = tile_rows * int(sizeof(Row));
constexpr int grids_at = tokens_at + tile_tokens * int(sizeof(Token));
constexpr int inputs_at = grids_at + 2 * tile_rows * groups;
constexpr int rounding_at = inputs_at + (Plan::single ? chunks * chunk : 0);
constexpr int meeting_at = rounding_at + (Plan::rounds ? Rounding::shared_bytes : 0);

static_assert(columns % 32 == 0 && warps % Plan::split_k_warps == 0, "a lane has 32 columns");
static_assert(Plan::single ? Plan::token_tiles == 1 : !Plan::rounds, "one token has a place in every tile");

// Codes of a lane in one chunk.
struct Step {
  uint32_t word[Plan::row_tiles][2][4];
};

// Columns of a lane in a chunk. Lanes beyond the last column load the last ones again: x is zero there.
__device__ inline int column_of(int at) {
  const int column = at * chunk + threadIdx.x % 4 * 32;
  return columns % chunk == 0 ? column : min(column, columns - 32);
}

// Positions of the rows of a lane.
struct Rows {
  const char* from[Plan::row_tiles][2];

  __device__ Rows(const Arguments& a, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        from[tile][half] =
            a.codes + int64_t(min(first + tile * 16 + lane / 4 * 2 + half, a.rows - 1)) * (columns / 2);
  }

  __device__ void load(int at, Step& step) const {
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        stream_words<16>(from[tile][half] + column_of(at) / 2, step.word[tile][half]);
  }
};

// `bytes` from global to shared memory, by all threads; both addresses are multiples of 16.
__device__ inline void copy_bytes(char* to, const char* from, int bytes) {
  for (int at = threadIdx.x * 16; at < bytes; at += Plan::threads * 16)
    if (at + 16 <= bytes)
      copy_piece<16>(uint32_t(__cvta_generic_to_shared(to + at)), from + at);
    else
      for (int i = at; i < bytes; ++i) to[i] = from[i];
}

using Sums = int[Plan::row_tiles][Plan::token_tiles][4];

// The rows of a warp times x, in one chunk. `grids`: steps of its first row. `x`: where the lane begins.
__device__ inline void multiply(const Step& step, int at, const char* grids, const char* x, Sums& sums) {
  const int lane = threadIdx.x % 32;
  Grid grid[Plan::row_tiles][2];
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if constexpr (grouped) {
        const char* own = grids + (tile * 16 + lane / 4 * 2 + half) * groups + column_of(at) / Plan::group;
        grid[tile][half].set(uint8_t(own[0]), uint8_t(own[tile_rows * groups]));
      }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t weight[Plan::row_tiles][2][4];
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          grid[tile][half].decode(step.word[tile][half][2 * h + j], weight[tile][j][half], weight[tile][j][2 + half]);
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n) {
      uint32_t word[4];
      load_words<16>(x + ((n * chunks + at) * 2 + h) * (Plan::single ? 64 : 512), word);
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int tile = 0; tile < Plan::row_tiles; ++tile) {
          const auto& w = weight[tile][j];
          mma_bytes(sums[tile][n], w[0], w[1], w[2], w[3], word[2 * j], word[2 * j + 1]);
        }
    }
  }
}

// A lane's sums of 16 rows and 8 tokens -> y.
__device__ inline void store(const Arguments& a, int first_row, int first_token, int fragment, const Row* rows,
                             const Token* token, const int (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  const int in_rows = fragment / Plan::token_tiles * 16 + lane / 4 * 2;
  const int in_tokens = fragment % Plan::token_tiles * 8 + lane % 4 * 2;
  const int row = first_row + in_rows;
  if (row >= a.rows) return;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int m = first_token + in_tokens + c;
    if (m >= a.tokens) continue;
    uint16_t* to = a.y + int64_t(m) * a.rows + row;
    const Row &first = rows[in_rows], &second = rows[in_rows + 1];
    if (are_whole(first, second))
      store_rows<true>(to, row, a.rows, sums[c], sums[2 + c], first, second, token[in_tokens + c]);
    else
      store_rows<false>(to, row, a.rows, sums[c], sums[2 + c], first, second, token[in_tokens + c]);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) w4a8(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % Plan::split_k_warps;
  const int across = (a.tokens + tile_tokens - 1) / tile_tokens;  // neighbours have the same codes
  const int first_row = blockIdx.x / across * tile_rows, begin_token = blockIdx.x % across * tile_tokens;
  // Plans have no larger tiles than there are tokens, rounded up to 8. The last tile ends where they end: what it has of
  // the tile before is multiplied again, and stored again: sums of integers, the same bits.
  const int first_token = Plan::token_tiles == 1 ? begin_token : min(begin_token, (a.tokens + 7) / 8 * 8 - tile_tokens);
  const int in_block = warp / Plan::split_k_warps * Plan::row_tiles * 16;
  const int begin = part * chunks / Plan::split_k_warps, end = (part + 1) * chunks / Plan::split_k_warps;
  const Rows codes(a, first_row + in_block);
  Step next[Plan::pipeline_depth];
#pragma unroll
  for (int i = 0; i < Plan::pipeline_depth; ++i)
    if (begin + i < end) codes.load(begin + i, next[i]);
  Row* rows = reinterpret_cast<Row*>(shared);
  Token* token = reinterpret_cast<Token*>(shared + tokens_at);
  if constexpr (grouped) {
    const int bytes = min(tile_rows, a.rows - first_row) * groups;
    copy_bytes(shared + grids_at, a.step + int64_t(first_row) * groups, bytes);
    copy_bytes(shared + grids_at + tile_rows * groups, a.zero + int64_t(first_row) * groups, bytes);
  }
  wait_for_grids();
  let_next_grid_begin();
  for (int i = threadIdx.x; i < tile_rows; i += Plan::threads)
    rows[i] = row_of(a.scale, a.zero, a.bias, min(first_row + i, a.rows - 1));
  char* inputs = shared + inputs_at;
  const char* x = Plan::single ? inputs + lane % 4 * 16 : a.x + int64_t(first_token / 8) * chunks * 1024 + lane * 16;
  if constexpr (Plan::rounds) {
    Rounding rounding;
    rounding.load(reinterpret_cast<const uint16_t*>(a.x));
    const Token only = rounding.round(shared + rounding_at, [&](int piece, const uint32_t* word) {
      store_words<16>(inputs + (piece / 8 * 2 + piece % 2) * 64 + piece % 8 / 2 * 16, word);
    });
    if (threadIdx.x == 0) token[0] = only;
  } else {
    if constexpr (Plan::single) copy_bytes(inputs, a.x, chunks * chunk);
    for (int i = threadIdx.x; i < tile_tokens; i += Plan::threads)
      token[i] = a.token[min(first_token + i, a.tokens - 1)];
  }
  wait_for_all_copies();
  __syncthreads();

  Sums sums = {};
  const char* grids = shared + grids_at + in_block * groups;
  for (int first = begin; first < end; first += Plan::pipeline_depth) {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth; ++i) {
      const int at = first + i;
      if (at >= end) break;
      multiply(next[i], at, grids, x, sums);
      if (at + Plan::pipeline_depth < end) codes.load(at + Plan::pipeline_depth, next[i]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n) {
      const int fragment = (warp / Plan::split_k_warps * Plan::row_tiles + tile) * Plan::token_tiles + n;
      const int(&sum)[4] = sums[tile][n];
      if constexpr (Plan::split_k_warps == 1)
        store(a, first_row, first_token, fragment, rows, token, sum);
      else
        *reinterpret_cast<int4*>(shared + meeting_at + ((fragment * Plan::split_k_warps + part) * 32 + lane) * 16) =
            make_int4(sum[0], sum[1], sum[2], sum[3]);
    }
  if constexpr (Plan::split_k_warps > 1) {
    __syncthreads();
    for (int fragment = warp; fragment < fragments; fragment += warps) {
      int sum[4] = {};
#pragma unroll
      for (int p = 0; p < Plan::split_k_warps; ++p) {
        const int4 of = *reinterpret_cast<int4*>(shared + meeting_at + ((fragment * Plan::split_k_warps + p) * 32 + lane) * 16);
        sum[0] += of.x, sum[1] += of.y, sum[2] += of.z, sum[3] += of.w;
      }
      store(a, first_row, first_token, fragment, rows, token, sum);
    }
  }
}
