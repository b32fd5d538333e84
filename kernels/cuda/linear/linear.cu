// SPDX-License-Identifier: Apache-2.0
// y = W x + b for few tokens, directly from the codes of W; no dense weight is ever stored.
//
//     y[m, o] = bias[o] + sum_g scale[o, g] sum_{k in g} W'[o, k] x[m, k]        W' = entries of the codebook
//
// Tile of a warp: row_tiles x 16 rows of W' times token_tiles x 8 tokens, on tensor cores (mma m16n8k16), one chunk of
// 4 * unit columns per iteration. Lane 4 g + t decodes columns t * unit .. of rows g and g + 8. Every eight decoded
// weights are two A fragments: the columns are numbered in fragment order, so lanes exchange nothing. (VQ-LLM, section
// VI.B, exchanges by shuffles or through shared memory.) x is stored in the same numbering.
//
// One token would fill one of the eight MMA columns. Instead, the eight columns hold eight pieces of the same x:
//
//                          x of piece 0 .. 7                    After the product with piece p of W', lanes that own
//     W' of piece p  .     [ | | | | | | | ]                    column p keep their sum. x is loaded, and rotated in
//                          column p counts                      registers, once for all rows of a warp.
//
//     team of `split_k_warps`   +---------+---------+---------+---------+
//     row_tiles x 16 rows       | warp 0  | warp 1  | warp 2  | warp 3  |     whole chunks of 4 * unit columns each
//                               +---------+---------+---------+---------+
//     partial sums are added in shared memory in warp order: the result does not depend on timing
//
// A block holds several teams. They share its tables; each synchronizes only with itself. With several tokens and
// `cluster_size` > 1, a block is one team and the blocks of a cluster split the columns: each block sends its sums to
// the block that adds them. A warp has the codes of `pipeline_depth` chunks in flight.
//
// Bytes: codes and scales once; x once per row_tiles x 16 rows (from L2).
// Bottleneck: the load pipe shared by L1 and shared memory. With all codes in L2 the kernel is hardly faster.
#include "linear/table.cuh"
#include "plan.cuh"
#include "primitives/codes.cuh"
#include "primitives/hadamard.cuh"
#include "primitives/mma.cuh"
#include "primitives/pdl.cuh"
#include "primitives/wgmma.cuh"

struct Arguments : SecondCodes<Table::nested> {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const void* diagonal;      // fp16 [columns], or signs, bit 1 = negative [ceil(columns / 8)]; read where x is rotated here
  const uint16_t* x;         // of Plan::dtype: one token, or in the order of `Inputs`
  const uint16_t* bias;      // [rows] of Plan::dtype, or null
  uint16_t* y;               // [tokens, rows] of Plan::dtype
  int rows;
  int columns;
  int tokens;
  int blocks;  // of the launch, for this matrix
};

// Matrices with the same x; the blocks of a launch are divided among them. Blocks of different matrices share nothing:
// codebooks and diagonals may differ.
struct AllArguments {
  Arguments of[Plan::matrices];
};

constexpr int unit = Plan::unit, octets = unit / 8, chunk = 4 * unit;
constexpr int tile_rows = 16 * Plan::row_tiles;
constexpr int warps = Plan::threads / 32, teams = warps / Plan::split_k_warps;
constexpr int group = Plan::group ? Plan::group : 1;
constexpr int unit_bytes = unit / Plan::vector_size * Plan::entry_bits / 8;
constexpr int second_unit_bytes = unit * Plan::second_bits / 8;
// Several tokens: partial sums are fragments, each sent to the block of the cluster that adds it.
constexpr int fragments = Plan::row_tiles * Plan::token_tiles, parts = Plan::cluster_size * Plan::split_k_warps;
constexpr int owned = (fragments + Plan::cluster_size - 1) / Plan::cluster_size;
constexpr int partial_sum_bytes = Plan::single ? warps * Plan::row_tiles * 64 : teams * owned * parts * 512;
constexpr int sums_barrier = Table::bytes + (Plan::single ? 2 : 1) * partial_sum_bytes;  // a barrier
// One token: four lanes read half a line of a row, and the other half with the next chunk.
template <int Bytes> constexpr bool whole_lines = Plan::single && Bytes == 16;
static_assert(Plan::cluster_size == 1 || (!Plan::single && teams == 1), "warps of a cluster have the same rows");
// One token: octets of a lane in a piece, pieces of a chunk. `held`: chunks whose scales (and x of one token) a warp
// keeps in one register set.
constexpr int piece = octets < 4 ? octets : 4, pieces = octets / piece, held = Plan::single ? 8 / pieces : 8;
static_assert(held % Plan::pipeline_depth == 0, "scales and x are those of whole steps");
static_assert(!Plan::rotate || unit == 32, "four lanes have a piece of 128 columns");

// Position of a row. One token: an address. Several tokens: a byte offset from the first row, in one register.
template <bool Single> struct Place {
  const char* at;
  __device__ void set(const char* first, int64_t bytes) { at = first + bytes; }
  __device__ const char* of(const char*) const { return at; }
};
template <> struct Place<false> {
  uint32_t at;
  __device__ void set(const char*, int64_t bytes) { at = uint32_t(bytes); }
  __device__ const char* of(const char* first) const { return first + at; }
};

// Positions of the two rows of a lane in every tile, at the lane's columns of the first chunk.
struct Rows {
  Place<Plan::single> codes[Plan::row_tiles][2], second[Plan::row_tiles][2];
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
        codes[tile][half].set(reinterpret_cast<const char*>(a.codes),
                              row(a, first_row, tile, half) * Plan::num_codebooks * stream + lane % 4 * unit_bytes);
        if constexpr (Table::nested)
          second[tile][half].set(a.second_codes(), row(a, first_row, tile, half) * Table::second_stream(a.columns) +
                                                  lane % 4 * second_unit_bytes);
      }
  }

  __device__ const uint16_t* scale(const Arguments& a, int tile, int half) const {
    return a.scale + int64_t(row(a, first_row, tile, half)) * (a.columns / group);
  }
};

// Codes of a lane in one chunk, for all of its rows.
struct Step {
  Table::RowCodes codes[Plan::row_tiles][2][Plan::num_codebooks];

  __device__ void load(const Arguments& a, const Rows& rows, int tile, int at, int64_t stream) {
    const char* const first = reinterpret_cast<const char*>(a.codes);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int stage = 0; stage < Plan::num_codebooks; ++stage)
        codes[tile][half][stage].template load_aligned<Plan::load_bytes, whole_lines<Plan::load_bytes>>(
            rows.codes[tile][half].of(first) + stage * stream + int64_t(at) * (4 * unit_bytes));
    load_second(codes[tile], a, rows, tile, at);
  }

  template <class RowCodes>
  __device__ static void load_second(RowCodes (&codes)[2][Plan::num_codebooks], const Arguments& a, const Rows& rows,
                                     int tile, int at) {
    if constexpr (Table::nested)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        codes[half][0].second.template load_aligned<Plan::second_load_bytes, whole_lines<Plan::second_load_bytes>>(
            rows.second[tile][half].of(a.second_codes()) + int64_t(at) * (4 * second_unit_bytes));
  }

  __device__ void load(const Arguments& a, const Rows& rows, int at, int64_t stream) {
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile) load(a, rows, tile, at, stream);
  }
};

// Scales of its rows in eight pieces: lane 4 g + t keeps those of pieces 2 t and 2 t + 1. For several tokens a chunk is
// one piece.
struct Scales {
  static constexpr int chunks = !Plan::single || pieces == 1 ? 2 : 1;
  uint32_t word[Plan::row_tiles][2];

  __device__ void load(const Arguments& a, const Rows& rows, int at, int end) {
    at += threadIdx.x % 4 * 2 / (Plan::single ? pieces : 1);
#if !WITHOUT_SCALES
    if constexpr (Plan::group > 0)
#pragma unroll
      for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint16_t* from = rows.scale(a, tile, half);
          if constexpr (Plan::scales_together) {
            if (at < end) load_words<2 * chunks>(from + at, &word[tile][half]);
          } else {
#pragma unroll
            for (int i = 0; i < chunks; ++i) {
              const uint32_t scale = at + i < end ? __ldg(from + (at + i) * chunk / group) : 0;
              word[tile][half] = i ? word[tile][half] | scale << 16 : scale;
            }
          }
        }
#endif
  }

  // Scale of the first or second piece of this lane.
  __device__ float own(int tile, int half, int i) const {
#if WITHOUT_SCALES
    return 1.0f;
#else
    return Plan::group ? half_to_float(word[tile][half] >> i * 16) : 1.0f;
#endif
  }

  // Scale of any of the eight pieces.
  __device__ float of(int tile, int half, int piece) const {
#if WITHOUT_SCALES
    return 1.0f;
#else
    if constexpr (!Plan::group) return 1.0f;
    return half_to_float(__shfl_sync(0xffffffff, word[tile][half], piece / 2, 4) >> piece % 2 * 16);
#endif
  }
};

// x of one chunk in the columns' numbering, for 8 tokens a tile, in the order in which lanes hold it:
//
//     [chunks][token_tiles][octets][32 lanes][8]
//
// Lanes without a token keep stale values: their products belong to a token that is not stored.
struct Inputs {
  static constexpr int kept = octets > 1 && Plan::token_tiles > 4 ? 2 : octets;
  uint32_t word[Plan::token_tiles][kept][4] = {};

  __device__ void load(const char* x, int at, int j, int lane, int tokens) {
    const char* from = x + ((int64_t(at) * Plan::token_tiles * octets + j) * 32 + lane) * 16;
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n)
#if WITHOUT_X
      word[n][j % kept][0] = 8 * at + n;
#else
      if (n * 8 + lane / 4 < tokens) load_words<16>(from + n * octets * 512, word[n][j % kept]);
#endif
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
#if !WITHOUT_X
    if (at < end && (!Plan::ragged || from < a.columns)) load_words<16 * piece>(a.x + from, word);
#endif
  }

  // The diagonal comes to L2 while tables are filled.
  __device__ static void prefetch_diagonal(const Arguments& a, int first, int end, int lane) {
    const int at = first + lane / 4;
    if (at < end) prefetch_line(static_cast<const uint16_t*>(a.diagonal) + column(at, lane));
  }

  __device__ void rotate(const Arguments& a, int first, int end, int lane) {
    const int at = first + lane / 4;
    uint32_t rotated[4 * piece];
    if constexpr (Plan::scaled) {
      if (at < end) {
        uint32_t diagonal[4 * piece];
        load_words<16 * piece>(static_cast<const uint16_t*>(a.diagonal) + column(at, lane), diagonal);
#pragma unroll
        for (int i = 0; i < 4 * piece; ++i) word[i] = times_halves<Plan::dtype>(word[i], diagonal[i]);
      }
    } else {
      uint32_t negative = 0;
      if (a.diagonal && at < end)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          negative |= uint32_t(__ldg(static_cast<const uint8_t*>(a.diagonal) + column(at, lane) / 8 + i)) << 8 * i;
      flip_signs(word, negative);
    }
    rotate_blocks<Plan::dtype>(word, rotated, lane);
#pragma unroll
    for (int i = 0; i < 4 * piece; ++i) word[i] = rotated[i];
  }

 private:
  __device__ static int column(int at, int lane) {
    return at / pieces * chunk + lane % 4 * unit + at % pieces * 8 * piece;
  }
};

using Sums = float[Plan::row_tiles][Plan::token_tiles][4];

// Multiply-accumulate for one token; `at` counts chunks from the first one of the current set of x.
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
      // A constant if possible.
      const int odd = (Plan::pipeline_depth * pieces % 2 ? column : i * pieces + p) % 2;
      const int which = pieces == 1 ? odd : 0;
      if (threadIdx.x % 4 == column / 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          sums[tile][0][2 * half] +=
              scales.own(tile, half, which) * (odd ? part[0][2 * half + 1] + part[1][2 * half + 1]
                                               : part[0][2 * half] + part[1][2 * half]);
    }
}

// Multiply-accumulate for several tokens. Chunk `ahead` is loaded into the registers that become free; -1: none.
__device__ inline void multiply(const Arguments& a, const Table& table, const Rows& rows, Step& step,
                                const Scales& scales, int piece, Inputs& x, const char* inputs, int at, int end,
                                int ahead, int64_t stream, Sums& sums) {
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
        const uint32_t(&of)[4] = x.word[n][j % Inputs::kept];
        mma<Plan::dtype>(part[0][n], low[0], high[0], low[1], high[1], of[0], of[1]);
        mma<Plan::dtype>(part[chains - 1][n], low[2], high[2], low[3], high[3], of[2], of[3]);
      }
      // Load the next inputs into the registers of the octet that was just multiplied.
      const int later = j + Inputs::kept;
      if (tile == Plan::row_tiles - 1 && at + later / octets < end)
        x.load(inputs, at + later / octets, later % octets, lane, a.tokens);
    }
    if (ahead >= 0) step.load(a, rows, tile, ahead, stream);
    const float factor[2] = {scales.of(tile, 0, piece), scales.of(tile, 1, piece)};
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float sum = part[0][n][c] + (chains == 2 ? part[chains - 1][n][c] : 0.0f);
        sums[tile][n][c] += factor[c / 2] * sum;
      }
  }
}

__device__ inline void store(const Arguments& a, const Table& table, int token, int row, float sum) {
  float factor = table.factor;
  if (!Plan::group) factor *= half_to_float(__ldg(a.scale + row));
  sum *= factor;
  if (a.bias) sum += to_float<Plan::dtype>(a.bias[row]);
  a.y[int64_t(token) * a.rows + row] = uint16_t(pack_pair<Plan::dtype>(sum, 0.0f));
}

__device__ inline void wait_for_team(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * Plan::split_k_warps) : "memory");
}

// Sums of one token of a team -> y. `partial_sums`: partial sums [split_k_warps][row_tiles][16].
__device__ inline void finish_one(const Arguments& a, const Table& table, const Sums& sums, float* partial_sums,
                                  int first_row, int warp) {
  const int lane = threadIdx.x % 32, team = threadIdx.x / 32 / Plan::split_k_warps;
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile) {
    const bool upper = lane % 2;  // an even lane adds row g, an odd one row g + 8
    const float low = sums[tile][0][0], high = sums[tile][0][2];
    float sum = (upper ? high : low) + __shfl_xor_sync(0xffffffff, upper ? low : high, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    if (lane % 4 < 2) partial_sums[warp * tile_rows + tile * 16 + lane % 2 * 8 + lane / 4] = sum;
  }
  wait_for_team(team);
  for (int i = warp * 32 + lane; i < tile_rows; i += 32 * Plan::split_k_warps) {
    const int row = i % tile_rows, token = i / tile_rows;  // token 0: the compiler makes faster code of it
    const float* from = partial_sums + row / 16 * 16 + row % 16;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Plan::split_k_warps; ++w) sum += from[w * tile_rows];
    const int out = first_row + row;
    if (out < a.rows) store(a, table, token, out, sum);
  }
}

// Sums of a team, or of the blocks of a cluster, -> y. `partial_sums`: partial sums in shared memory, float [owned][parts][32][4].
__device__ inline void finish(const Arguments& a, const Table& table, const Sums& sums, uint32_t partial_sums, uint32_t met,
                              int first_row, int rank, int warp, int team) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n) {
      const int fragment = tile * Plan::token_tiles + n;
      const int part = fragment / Plan::cluster_size * parts + rank * Plan::split_k_warps + warp;
      const uint32_t to = partial_sums + (part * 32 + lane) * 16;
      if constexpr (Plan::cluster_size > 1)
        send(to, sums[tile][n], met, fragment % Plan::cluster_size);
      else
        store_shared(to, sums[tile][n]);
    }
  if constexpr (Plan::cluster_size > 1)
    barrier_wait(met, 0);
  else
    wait_for_team(team);
  for (int i = warp; i * Plan::cluster_size + rank < fragments; i += Plan::split_k_warps) {
    float sum[4] = {};
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      uint32_t word[4];
      load_shared<16>(partial_sums + ((i * parts + part) * 32 + lane) * 16, word);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += __uint_as_float(word[c]);
    }
    const int fragment = i * Plan::cluster_size + rank;
    const int row = first_row + fragment / Plan::token_tiles * 16 + lane / 4;
    const int token = fragment % Plan::token_tiles * 8 + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (row + c / 2 * 8 < a.rows && token + c % 2 < a.tokens) store(a, table, token + c % 2, row + c / 2 * 8, sum[c]);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(Plan::cluster_size)
#endif
        linear(const AllArguments all) {
  int matrix = 0, block = blockIdx.x;
#pragma unroll
  for (int i = 0; i + 1 < Plan::matrices; ++i)
    if (matrix == i && block >= all.of[i].blocks) block -= all.of[i].blocks, ++matrix;
  const Arguments& a = all.of[matrix];
  const int blocks = Plan::matrices > 1 ? a.blocks : gridDim.x;
  extern __shared__ __align__(16) char shared[];
  char* const partial_sums = shared + Table::bytes;
  const int lane = threadIdx.x % 32, index = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // the same for all lanes
  const int warp = index % Plan::split_k_warps, team = index / Plan::split_k_warps, rank = block % Plan::cluster_size;
  const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
  const int chunks = (a.columns + chunk - 1) / chunk, tiles = (a.rows + tile_rows - 1) / tile_rows;
  // Whole groups of `pipeline_depth` chunks: [begin, end) of this warp.
  const int each = (chunks + parts * Plan::pipeline_depth - 1) / (parts * Plan::pipeline_depth) * Plan::pipeline_depth;
#if WITHOUT_CHUNKS
  const int begin = (rank * Plan::split_k_warps + warp) * each, end = begin;
#else
  const int begin = (rank * Plan::split_k_warps + warp) * each, end = min(begin + each, chunks);
#endif

  Rows rows;
  Step next[Plan::pipeline_depth];
  Scales next_scales;
  const auto exists = [&](int at) { return !Plan::ragged || at * chunk + lane % 4 * unit < a.columns; };
  const auto ask = [&](int first, int last) {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth; ++i)
      if (i >= first && i < last && begin + i < end && exists(begin + i)) next[i].load(a, rows, begin + i, stream);
  };
  const auto enter = [&](int tile, int asked) {
    rows.set(a, tile * tile_rows, stream, lane);
    if (begin < end) next_scales.load(a, rows, begin, end);
    ask(0, asked);
  };
  Pieces x_of[Plan::x_sets];
  const auto piece_of = [&](int set) { return (begin + set * held) * pieces; };
  const auto take_input = [&] {
    wait_for_grids();
    if constexpr (Plan::single)
#pragma unroll
      for (int set = 0; set < Plan::x_sets; ++set) x_of[set].load(a, piece_of(set), end * pieces, lane);
  };
  // Loads return in order, so they are issued in this order: tables, the first codes, x, more codes; after them, the
  // loads of the next kernel.
  const uint32_t base = __cvta_generic_to_shared(shared), met = base + sums_barrier;
  if constexpr (Plan::cluster_size > 1)
    if (threadIdx.x == 0) {
      barrier_init(met, 1);
      barrier_expect(met, (fragments - rank + Plan::cluster_size - 1) / Plan::cluster_size * parts * 512);
      barriers_are_set();
    }
  const Table table(a.codebook, shared, lane);
  Table::Batch batch;
#if !WITHOUT_TABLES
  table.begin_fill(batch);
#endif
  if constexpr (Plan::scaled)
#pragma unroll
    for (int set = 0; set < Plan::x_sets; ++set) Pieces::prefetch_diagonal(a, piece_of(set), end * pieces, lane);
  // One token: the tiles of the last iteration are spread over all blocks.
  int tile = Plan::single ? team * blocks + block : block / Plan::cluster_size * teams + team;
  if (tile < tiles) enter(tile, Plan::prefetch_x ? 1 : Plan::pipeline_depth);
  if constexpr (Plan::prefetch_x) {
    take_input();
    if (tile < tiles) ask(1, Plan::pipeline_depth);
  }
#if !WITHOUT_TABLES
  table.end_fill(batch);
#endif
  if constexpr (!Plan::prefetch_x) take_input();
  __syncthreads();
  if constexpr (Plan::cluster_size > 1) wait_for_cluster();
#if !WITHOUT_X
  if constexpr (Plan::rotate)
#pragma unroll
    for (int set = 0; set < Plan::x_sets; ++set) x_of[set].rotate(a, piece_of(set), end * pieces, lane);
#endif
  let_next_grid_begin();

  const char* const inputs = reinterpret_cast<const char*>(a.x);
  Inputs x;
  for (int turn = 0; tile < tiles; turn ^= 1) {
    Sums sums = {};
    if (!Plan::single && begin < end) x.begin(inputs, begin, lane, a.tokens);
#pragma unroll(Plan::single ? Plan::x_sets : 1)
    for (int set = 0; set < Plan::x_sets; ++set) {
      const int from = begin + set * held, to = min(from + held, end);
      const Scales scales = next_scales;
      if (set + 1 < Plan::x_sets && from + held < end) next_scales.load(a, rows, from + held, end);
      for (int first = from; first < to; first += Plan::pipeline_depth) {
#pragma unroll
        for (int i = 0; i < Plan::pipeline_depth; ++i) {
          const int at = first + i, ahead = at + Plan::pipeline_depth;
          if (at >= end) break;
          const bool more = ahead < end && exists(ahead);
          if constexpr (Plan::single) {
            multiply_one(table, next[i], scales, i, at - from, x_of[set], sums);
            if (more) next[i].load(a, rows, ahead, stream);
          } else {
            multiply(a, table, rows, next[i], scales, at - from, x, inputs, at, end, more ? ahead : -1, stream, sums);
          }
        }
      }
    }
    const int done = tile * tile_rows;
    tile += blocks / Plan::cluster_size * teams;
    if (tile < tiles) enter(tile, Plan::pipeline_depth);
    if constexpr (Plan::single) {
      // Iterations alternate between two buffers of partial sums, so that one barrier per iteration suffices.
      float* const to = reinterpret_cast<float*>(partial_sums + turn * partial_sum_bytes + team * partial_sum_bytes / teams);
#if WITHOUT_MEETING
      if (sums[0][0][0] == 1.25f) finish_one(a, table, sums, to, done, warp);  // hardly ever
#else
      finish_one(a, table, sums, to, done, warp);
#endif
    } else {
#if WITHOUT_MEETING
      if (sums[0][0][0] == 1.25f)
        finish(a, table, sums, base + Table::bytes + team * partial_sum_bytes / teams, met, done, rank, warp, team);
#else
      finish(a, table, sums, base + Table::bytes + team * partial_sum_bytes / teams, met, done, rank, warp, team);
#endif
      if (tile < tiles) wait_for_team(team);
    }
  }
}
