// SPDX-License-Identifier: Apache-2.0
// y = W x + b for few tokens, from the codes of W: no dense weight exists anywhere.
//
//     y[m, o] = bias[o] + sum_g scale[o, g] sum_{k in g} W'[o, k] x[m, k]        W' = entries of the codebook
//
// Tensor cores multiply 16 rows of W' with 8 tokens. A warp has a chunk of 4 * unit neighbouring columns; lane 4 g + t
// decodes columns t * unit .. of rows g and g + 8, eight at a time, and those eight are two fragments of W' as they
// are: the columns are numbered so that nothing has to be exchanged between lanes (VQ-LLM fuses by shuffles or through
// shared memory, section VI.B). x comes in the same numbering.
//
// One token would use one column of eight. Instead a warp has x of eight pieces of its columns, one in each:
//
//                          x of piece 0 .. 7                    Of the product with piece p, lanes whose column is p
//     W' of piece p  .     [ | | | | | | | ]                    keep their sum. x is read, and rotated in registers,
//                          column p counts                      once for all rows of a warp.
//
//     team of `split` warps     +---------+---------+---------+---------+
//     row_tiles x 16 rows       | warp 0  | warp 1  | warp 2  | warp 3  |     whole chunks of 4 * unit columns each
//                               +---------+---------+---------+---------+
//     their sums meet in shared memory, in the order of warps: the result does not depend on timing
//
// A block has several teams, which share its tables and wait only for their own. Codes of `steps` chunks are on their
// way at a time. Bytes: codes and scales once, x once for every row_tiles x 16 rows (from L2). Bound by the pipe that
// loads from L1 and shared memory take together: with all codes in L2 it is hardly faster.
#include "codes.cuh"
#include "grids.cuh"
#include "hadamard.cuh"
#include "mma.cuh"
#include "plan.cuh"
#include "table.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const uint8_t* signs;      // bit 1 = negative [ceil(columns / 8)]; read where x is rotated here
  const uint16_t* x;         // of Plan::dtype: one token, or in the order of `Inputs`
  const uint16_t* bias;      // [rows] of Plan::dtype, or null
  uint16_t* y;               // [tokens, rows] of Plan::dtype
  int rows;
  int columns;
  int tokens;
  int blocks;  // of the launch, for this matrix
};

// Matrices that are multiplied with the same x, one after the other among the blocks. What blocks of one need is not
// shared with those of another: codebooks and signs may differ.
struct Together {
  Arguments of[Plan::matrices];
};

constexpr int unit = Plan::unit, octets = unit / 8, chunk = 4 * unit;
constexpr int tile_rows = 16 * Plan::row_tiles;
constexpr int warps = Plan::threads / 32, teams = warps / Plan::split;
constexpr int group = Plan::group ? Plan::group : 1;
constexpr int unit_bytes = unit / Plan::vector_size * Plan::entry_bits / 8;
constexpr int meeting_bytes = warps * Plan::row_tiles * (Plan::single ? 64 : Plan::token_tiles * 512);
// One token: octets of a lane in a piece, pieces of a chunk, chunks of which a warp has x at a time.
constexpr int piece = octets < 4 ? octets : 4, pieces = octets / piece, held = 8 / pieces;
static_assert(!Plan::single || held % Plan::steps == 0, "scales and x are those of whole steps");
static_assert(!Plan::rotate || unit == 32, "four lanes have a piece of 128 columns");

// Where the two rows of a lane begin, in every tile, at the lane's place in the first chunk.
struct Rows {
  const char* codes[Plan::row_tiles][2];
  int first_row;

  __device__ static int row(const Arguments& a, int first_row, int tile, int half) {
    return min(first_row + tile * 16 + half * 8 + threadIdx.x % 32 / 4, a.rows - 1);
  }

  __device__ void set(const Arguments& a, int first, int64_t stream, int lane) {
    first_row = first;
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[tile][half] = reinterpret_cast<const char*>(a.codes) +
                            row(a, first_row, tile, half) * Plan::stages * stream + lane % 4 * unit_bytes;
      }
  }

  __device__ const uint16_t* scale(const Arguments& a, int tile, int half) const {
    return a.scale + int64_t(row(a, first_row, tile, half)) * (a.columns / group);
  }
};

// Codes that a lane has of its rows in one chunk.
struct Step {
  Table::RowCodes codes[Plan::row_tiles][2][Plan::stages];

  __device__ void load(const Rows& rows, int at, int64_t stream) {
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int stage = 0; stage < Plan::stages; ++stage)
          codes[tile][half][stage].template load_aligned<Plan::load_bytes>(rows.codes[tile][half] + stage * stream +
                                                                           int64_t(at) * (4 * unit_bytes));
  }
};

// Scales of its rows in `steps` neighbouring chunks; one token: in those of pieces 2 t and 2 t + 1, which lane 4 g + t
// keeps.
struct Scales {
  static constexpr int chunks = !Plan::single ? Plan::steps : pieces == 1 ? 2 : 1;
  static constexpr int words = (chunks + 1) / 2;
  uint32_t word[Plan::row_tiles][2][words];

  __device__ void load(const Arguments& a, const Rows& rows, int at, int end) {
    if constexpr (Plan::single) at += threadIdx.x % 4 * 2 / pieces;
    if constexpr (Plan::group > 0)
#pragma unroll
      for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint16_t* from = rows.scale(a, tile, half);
          if constexpr (Plan::scales_together) {
            if (at < end) load_words<2 * chunks>(from + at, word[tile][half]);
          } else {
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
              const uint32_t scale = at + i < end ? __ldg(from + (at + i) * chunk / group) : 0;
              word[tile][half][i / 2] = i % 2 ? word[tile][half][i / 2] | scale << 16 : scale;
            }
          }
        }
  }

  __device__ float operator()(int tile, int half, int i) const {
    return Plan::group ? half_to_float(word[tile][half][i / 2] >> i % 2 * 16) : 1.0f;
  }
};

// x of one chunk in the columns' numbering, for 8 tokens a tile, in the order in which lanes hold it:
//
//     [chunks][token_tiles][octets][32 lanes][8]
// Lanes without a token keep what they have: it is multiplied for a token that nobody stores.
struct Inputs {
  static constexpr int kept = octets > 1 && Plan::token_tiles > 4 ? 2 : octets;
  uint32_t word[Plan::token_tiles][kept][4] = {};

  __device__ void load(const char* x, int at, int j, int lane, int tokens) {
    const char* from = x + ((int64_t(at) * Plan::token_tiles * octets + j) * 32 + lane) * 16;
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n)
      if (n * 8 + lane / 4 < tokens) load_words<16>(from + n * octets * 512, word[n][j % kept]);
  }

  // The first octets of a chunk, as many as are kept.
  __device__ void begin(const char* x, int at, int lane, int tokens) {
#pragma unroll
    for (int j = 0; j < kept; ++j) load(x, at, j, lane, tokens);
  }
};

// x of one token in eight pieces: lane 4 g + t has its columns of piece `first` + g.
struct Pieces {
  uint32_t word[4 * piece];

  __device__ void load(const Arguments& a, int first, int end, int lane) {
    const int at = first + lane / 4, from = column(at, lane);
#pragma unroll
    for (int i = 0; i < 4 * piece; ++i) word[i] = 0;
    if (at < end && (!Plan::ragged || from < a.columns)) load_words<16 * piece>(a.x + from, word);
  }

  __device__ void rotate(const Arguments& a, int first, int end, int lane) {
    const int at = first + lane / 4;
    uint32_t negative = 0, rotated[4 * piece];
    if (a.signs && at < end)
#pragma unroll
      for (int i = 0; i < 4; ++i) negative |= uint32_t(__ldg(a.signs + column(at, lane) / 8 + i)) << 8 * i;
    rotate_blocks<Plan::dtype>(word, negative, rotated, lane);
#pragma unroll
    for (int i = 0; i < 4 * piece; ++i) word[i] = rotated[i];
  }

 private:
  __device__ static int column(int at, int lane) {
    return at / pieces * chunk + lane % 4 * unit + at % pieces * 8 * piece;
  }
};

using Sums = float[Plan::row_tiles][Plan::token_tiles][4];

// Of one token; `at` counts chunks from the first of which it has x.
__device__ inline void multiply_one(const Table& table, const Step& step, const Scales& scales, int i, int at,
                                    const Pieces& x, Sums& sums) {
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      float part[2][4] = {};  // a product waits for the one before it in its chain
#pragma unroll
      for (int j = 0; j < piece; ++j) {
        uint32_t low[4], high[4];
        table.eight(step.codes[tile][0], p * piece + j, low);
        table.eight(step.codes[tile][1], p * piece + j, high);
#pragma unroll
        for (int k = 0; k < 2; ++k)
          mma<Plan::dtype>(part[k], low[2 * k], high[2 * k], low[2 * k + 1], high[2 * k + 1], x.word[4 * j + 2 * k],
                           x.word[4 * j + 2 * k + 1]);
      }
      const int column = at * pieces + p;
      const int odd = (Plan::steps * pieces % 2 ? column : i * pieces + p) % 2;  // known to the compiler, if it can be
      const int which = pieces == 1 ? odd : 0;
      if (threadIdx.x % 4 == column / 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          sums[tile][0][2 * half] +=
              scales(tile, half, which) * (odd ? part[0][2 * half + 1] + part[1][2 * half + 1]
                                               : part[0][2 * half] + part[1][2 * half]);
    }
}

__device__ inline void multiply(const Arguments& a, const Table& table, const Step& step, const Scales& scales, int i,
                                Inputs& x, const char* inputs, int at, int end, Sums& sums) {
  const int lane = threadIdx.x % 32;
  constexpr int chains = Plan::token_tiles == 1 ? 2 : 1;  // a product waits for the one before it in its chain
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile) {
    float part[chains][Plan::token_tiles][4] = {};
#pragma unroll
    for (int j = 0; j < octets; ++j) {
      uint32_t low[4], high[4];
      table.eight(step.codes[tile][0], j, low);
      table.eight(step.codes[tile][1], j, high);
#pragma unroll
      for (int n = 0; n < Plan::token_tiles; ++n) {
        mma<Plan::dtype>(part[0][n], low[0], high[0], low[1], high[1], x.word[n][j % Inputs::kept][0], x.word[n][j % Inputs::kept][1]);
        mma<Plan::dtype>(part[chains - 1][n], low[2], high[2], low[3], high[3], x.word[n][j % Inputs::kept][2], x.word[n][j % Inputs::kept][3]);
      }
      // In place of what was just multiplied.
      const int ahead = j + Inputs::kept;
      if (tile == Plan::row_tiles - 1 && at + ahead / octets < end)
        x.load(inputs, at + ahead / octets, ahead % octets, lane, a.tokens);
    }
    const float factor[2] = {scales(tile, 0, i), scales(tile, 1, i)};
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float sum = part[0][n][c] + (chains == 2 ? part[chains - 1][n][c] : 0.0f);
        sums[tile][n][c] += factor[c / 2] * sum;
      }
  }
}

// Sums of a team -> y. `meeting` holds [split][row_tiles][token_tiles][32][4] floats; one token: [split][row_tiles][16].
__device__ inline void finish(const Arguments& a, const Table& table, const Sums& sums, float* meeting, int first_row,
                              int warp) {
  const int lane = threadIdx.x % 32, team = threadIdx.x / 32 / Plan::split, tokens = Plan::single ? 1 : a.tokens;
  constexpr int of_tile = Plan::single ? 16 : Plan::token_tiles * 128, of_warp = Plan::row_tiles * of_tile;
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
    if constexpr (Plan::single) {
      const bool upper = lane % 2;  // an even lane adds row g, an odd one row g + 8
      const float low = sums[tile][0][0], high = sums[tile][0][2];
      float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffff, upper ? low : high, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      if (lane % 4 < 2) meeting[warp * of_warp + tile * 16 + lane % 2 * 8 + lane / 4] = sum;
    } else {
#pragma unroll
      for (int n = 0; n < Plan::token_tiles; ++n)
        if (n * 8 + lane % 4 * 2 < tokens)
          *reinterpret_cast<float4*>(meeting + warp * of_warp + tile * of_tile + (n * 32 + lane) * 4) =
              make_float4(sums[tile][n][0], sums[tile][n][1], sums[tile][n][2], sums[tile][n][3]);
    }
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * Plan::split) : "memory");
  for (int i = warp * 32 + lane; i < tile_rows * tokens; i += 32 * Plan::split) {
    const int row = i % tile_rows, token = i / tile_rows;
    const int holder = row % 8 * 4 + token % 8 / 2, which = token % 2 + row % 16 / 8 * 2;
    const int at = Plan::single ? row % 16 : (token / 8 * 32 + holder) * 4 + which;
    const float* from = meeting + row / 16 * of_tile + at;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Plan::split; ++w) sum += from[w * of_warp];
    const int out = first_row + row;
    if (out >= a.rows) continue;
    float factor = table.factor;
    if (!Plan::group) factor *= half_to_float(__ldg(a.scale + out));
    sum *= factor;
    if (a.bias) sum += to_float<Plan::dtype>(a.bias[out]);
    a.y[int64_t(token) * a.rows + out] = uint16_t(pack_pair<Plan::dtype>(sum, 0.0f));
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::resident) linear(const Together together) {
  int matrix = 0, block = blockIdx.x;
#pragma unroll
  for (int i = 0; i + 1 < Plan::matrices; ++i)
    if (matrix == i && block >= together.of[i].blocks) block -= together.of[i].blocks, ++matrix;
  const Arguments& a = together.of[matrix];
  const int blocks = Plan::matrices > 1 ? a.blocks : gridDim.x;
  extern __shared__ __align__(16) char shared[];
  char* const meeting = shared + Table::bytes;
  const int lane = threadIdx.x % 32, index = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the same for all lanes
  const int warp = index % Plan::split, team = index / Plan::split;
  const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
  const int chunks = (a.columns + chunk - 1) / chunk, tiles = (a.rows + tile_rows - 1) / tile_rows;
  // Whole groups of `steps` chunks: [begin, end) of this warp.
  const int share = (chunks + Plan::split * Plan::steps - 1) / (Plan::split * Plan::steps) * Plan::steps;
  const int begin = warp * share, end = min(begin + share, chunks);

  Rows rows;
  Step next[Plan::steps];
  Scales next_scales;
  const auto exists = [&](int at) { return !Plan::ragged || at * chunk + lane % 4 * unit < a.columns; };
  const auto ask = [&](int first, int last) {
#pragma unroll
    for (int i = 0; i < Plan::steps; ++i)
      if (i >= first && i < last && begin + i < end && exists(begin + i)) next[i].load(rows, begin + i, stream);
  };
  const auto enter = [&](int tile, int asked) {
    rows.set(a, tile * tile_rows, stream, lane);
    if (begin < end) next_scales.load(a, rows, begin, end);
    ask(0, asked);
  };
  Pieces x_of[Plan::sets];
  const auto piece_of = [&](int set) { return (begin + set * held) * pieces; };
  const auto take_input = [&] {
    wait_for_grids();
    if constexpr (Plan::single)
#pragma unroll
      for (int set = 0; set < Plan::sets; ++set) x_of[set].load(a, piece_of(set), end * pieces, lane);
  };
  // What is asked for waits behind what was asked for before it: tables, the first codes, x, more codes, and after all
  // of this what the next kernel asks for.
  const Table table(a.codebook, shared, lane);
  Table::Batch batch;
  table.begin_fill(batch);
  int tile = block * teams + team;
  if (tile < tiles) enter(tile, Plan::early ? 1 : Plan::steps);
  if constexpr (Plan::early) {
    take_input();
    if (tile < tiles) ask(1, Plan::steps);
  }
  table.end_fill(batch);
  if constexpr (!Plan::early) take_input();
  __syncthreads();
  if constexpr (Plan::rotate)
#pragma unroll
    for (int set = 0; set < Plan::sets; ++set) x_of[set].rotate(a, piece_of(set), end * pieces, lane);
  let_next_grid_begin();

  const char* const inputs = reinterpret_cast<const char*>(a.x);
  Inputs x;
  for (int turn = 0; tile < tiles; turn ^= 1) {
    Sums sums = {};
    if (!Plan::single && begin < end) x.begin(inputs, begin, lane, a.tokens);
#pragma unroll
    for (int set = 0; set < Plan::sets; ++set) {
      const int from = Plan::single ? begin + set * held : begin, to = Plan::single ? min(from + held, end) : end;
      Scales scales = next_scales;
      if (set + 1 < Plan::sets && from + held < end) next_scales.load(a, rows, from + held, end);
      for (int first = from; first < to; first += Plan::steps) {
        if constexpr (!Plan::single) {
          scales = next_scales;
          if (first + Plan::steps < end) next_scales.load(a, rows, first + Plan::steps, end);
        }
#pragma unroll
        for (int i = 0; i < Plan::steps; ++i) {
          const int at = first + i, ahead = at + Plan::steps;
          if (at >= end) break;
          if constexpr (Plan::single)
            multiply_one(table, next[i], scales, i, at - from, x_of[set], sums);
          else
            multiply(a, table, next[i], scales, i, x, inputs, at, end, sums);
          if (ahead < end && exists(ahead)) next[i].load(rows, ahead, stream);
        }
      }
    }
    const int done = tile * tile_rows;
    tile += blocks * teams;
    if (tile < tiles) enter(tile, Plan::steps);
    // Turns have different places to meet, so that one barrier a turn is enough.
    finish(a, table, sums, reinterpret_cast<float*>(meeting + turn * meeting_bytes + team * meeting_bytes / teams), done,
           warp);
  }
}
