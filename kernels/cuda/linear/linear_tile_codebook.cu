// SPDX-License-Identifier: Apache-2.0
// y = W x + b for few tokens, from codes with one codebook per tile of W; no dense weight is ever stored.
//
//     y[m, o] = bias[o] + scale[o] sum_tiles sum_{k in tile} W'[o, k] x[m, k]        W' = entries of the tile's codebook
//
// Tile of a block: a band of rows, multiplied codebook tile by codebook tile. While the block multiplies one tile, it
// fills the table of the next tile (table.cuh) and copies the inputs of the one after it; one barrier per tile:
//
//     table 0   [fill 0]         [fill 2]--------[fill 4]
//     table 1           [fill 1]         [fill 3]
//     warps             |multiply 0      |multiply 1     |multiply 2 ..           | = barrier
//
// The two tables are interleaved: one address bit selects the table. The warps of a block split the rows of the band,
// and `column_warps` warps split the columns of a tile. Each warp multiplies as drawn in linear.cu; its columns are one
// chunk. A fill costs as much as the lookups of 64 rows, so bands are high. To have enough blocks, the `cluster_size`
// blocks of a cluster split the tiles of a band. Each block adds a part of the rows; the others send it their sums in
// shared memory, and it adds them in block order: the result does not depend on timing.
//
// Lanes beyond the last column multiply zeros by arbitrary entries, so all entries have to be finite.
//
// Bytes: codes once; codebooks and x once per band (from L2).
// Bottleneck: the shared memory pipe. 256 columns of 16 rows take 64 wavefronts of lookups, a share of 256 for the
// fill, and 32 of x for 8 tokens.
#include "linear/table.cuh"
#include "plan.cuh"
#include "primitives/codes.cuh"
#include "primitives/mma.cuh"
#include "primitives/pdl.cuh"
#include "primitives/wgmma.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [rows, stream_bytes]
  const uint16_t* codebook;  // fp16 [tile rows, tile columns, entries, x]
  const uint16_t* scale;     // fp16 [rows]
  const void* diagonal;      // not read: x is rotated
  const uint16_t* x;         // [tokens, columns] of Plan::dtype
  const uint16_t* bias;      // [rows] of Plan::dtype, or null
  uint16_t* y;               // [tokens, rows] of Plan::dtype
  int rows;
  int columns;
  int tokens;
};

constexpr int unit = Plan::unit, octets = unit / 8, chunk = 4 * unit;  // chunk: columns of a warp in a tile
constexpr int warps = Plan::threads / 32, row_warps = warps / Plan::column_warps;
constexpr int band = 16 * Plan::row_tiles * row_warps;
constexpr int tile_columns = chunk * Plan::column_warps;
constexpr int tile_bytes = tile_columns / Plan::vector_size * Plan::entry_bits / 8;  // of codes, in a row
constexpr int parts = Plan::cluster_size * Plan::column_warps;
constexpr int fragments = row_warps * Plan::row_tiles * Plan::token_tiles;  // of 16 rows and 8 tokens
constexpr int added = (fragments + Plan::cluster_size - 1) / Plan::cluster_size;          // by a block

// Tensor cores multiply 16 rows with 8 tokens, or 16 tokens with 8 rows where there are so many: then an entry is half a
// fragment of rows as it comes from the table.
constexpr bool rows_first = Plan::token_tiles == 1;
constexpr int token_pairs = (Plan::token_tiles + 1) / 2;
constexpr int pieces = rows_first ? octets : 2 * octets;  // fragments of tokens in a chunk

// Bytes of a fragment in a buffer, padded so that lanes that write adjacent columns hit different banks.
constexpr int pitch = Plan::single ? 64 : 512 + 16;
constexpr int slot_bytes = token_pairs * Plan::column_warps * pieces * pitch;

// Offsets in shared memory, after both tables.
constexpr int ring = Table::bytes;
constexpr int factors = ring + Plan::x_stages * slot_bytes;
constexpr int partial_sums = (factors + band * 4 + 15) / 16 * 16;
constexpr int sums_barrier = partial_sums + (parts > 1 ? added * parts * 512 : 0);

static_assert(Table::interleaved && Plan::interleaved == 2 && Plan::num_codebooks == 1,
              "two tables, one for each tile");

// Registers of a table fill: entries between their load and their store. If there are more threads than entries,
// several threads store the copies of one entry.
struct Entries {
  static constexpr int sharers = Plan::threads > Table::entries ? Plan::threads / Table::entries : 1;
  static constexpr int each = (Table::entries + Plan::threads - 1) / Plan::threads;
  static constexpr int piece = Table::entry_bytes > 16 ? Table::entry_bytes : 16;
  static constexpr int pieces = Table::book_stride / piece;
  uint32_t word[each][Table::entry_bytes / 4];

  static __device__ bool has(int index) { return (sharers > 1 ? threadIdx.x / Table::entries < sharers : index < Table::entries); }
  static __device__ int index(int k) { return (sharers > 1 ? threadIdx.x % Table::entries : threadIdx.x) + k * Plan::threads; }

  __device__ void load(const uint16_t* book) {
#pragma unroll
    for (int k = 0; k < each; ++k)
      if (has(index(k))) load_words<2 * Table::x>(book + index(k) * Table::x, word[k]);
  }

  __device__ void store(char* table) const {
#if WITHOUT_TABLES
    return;
#endif
    static_assert(pieces % sharers == 0, "threads share the copies of an entry");
#pragma unroll
    for (int k = 0; k < each; ++k) {
      if (!has(index(k))) break;
      uint32_t copies[piece / 4];
#pragma unroll
      for (int c = 0; c < piece / 4; ++c) copies[c] = Table::pair(word[k][c % (Table::entry_bytes / 4)]);
      const int first = sharers > 1 ? threadIdx.x / Table::entries * (pieces / sharers) : 0;
#pragma unroll
      for (int c = 0; c < pieces / sharers; ++c)
        store_words<piece>(table + index(k) * Table::entry_stride + (first + c + index(k)) % pieces * piece, copies);
    }
  }
};

// Codes that a lane has of its rows in one tile: of each 16 the rows g / 2 * 4 + g % 2 and + 2, so that
// its sums are those of four neighbours.
struct Step {
  Table::RowCodes codes[Plan::row_tiles][2];
};

// Positions of the codes of a lane's rows in the tile that is loaded next.
struct Rows {
  const char* first;
  uint32_t to[Plan::row_tiles][2];  // bytes from the first row

  __device__ Rows(const Arguments& a, int row, int column) {
    const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
    const int top = min(row, a.rows - 1);
    first = reinterpret_cast<const char*>(a.codes) + top * stream + column / Plan::vector_size * Plan::entry_bits / 8;
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        to[tile][half] = uint32_t((min(row + tile * 16 + half * 2, a.rows - 1) - top) * stream);
  }

  __device__ void load(Step& step) {
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        step.codes[tile][half].template load_aligned<Plan::load_bytes>(first + to[tile][half]);
    first += tile_bytes;
  }
};

// Codes of all tiles of a block -> L2: of a tile a row has few bytes, and neighbours come from memory together.
__device__ inline void prefetch(const Arguments& a, int first_row, int begin, int end) {
#if __CUDA_ARCH__ >= 900
  const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
  const int64_t from = int64_t(begin) * tile_bytes, last = int64_t(end) * tile_bytes;
  const uint32_t bytes = uint32_t((last < stream ? last : stream) - from) / 16 * 16;
  if (stream % 16 != 0 || from % 16 != 0 || begin >= end || bytes == 0) return;
  for (int row = first_row + threadIdx.x; row < first_row + band && row < a.rows; row += Plan::threads)
    prefetch_bulk(reinterpret_cast<const char*>(a.codes) + row * stream + from, bytes);
#endif
}

// x of the columns of a tile -> a slot, in words of two columns, as lane 4 g + t reads them: of column 8 j + 4 k + 2 b of
// the unit of lane t the word
//
//     [token_pairs][column_warps][octets][k][lane][b][token / 8 % 2]        rows first: [..][octets][lane][k][b]
//
// Columns that are not there are zeros.
struct Inputs {
  static constexpr int of_token = tile_columns / 2, at_a_time = Plan::threads / of_token;
  static_assert(at_a_time > 0 && Plan::threads % of_token == 0, "a thread has one place in all tokens");
  const uint16_t* from;
  int column;
  uint32_t to;

  __device__ Inputs(const Arguments& a, int at, uint32_t shared) {
    const int token = threadIdx.x / of_token, word = threadIdx.x % of_token;
    const int t = word * 2 % chunk / unit, j = word * 2 % unit / 8, k = word / 2 % 2, b = word % 2;
    const int piece = word * 2 / chunk * pieces + (rows_first ? j : j * 2 + k);
    column = at * tile_columns + word * 2;
    from = a.x + int64_t(token) * a.columns + column;
    to = shared + ring + piece * pitch + t * 16 + (rows_first ? k * 8 + b * 4 : b * 8) + place(token);
  }

  static __device__ constexpr int place(int token) {
    return token / 16 * (Plan::column_warps * pieces * pitch) + token % 8 * 64 + token % 16 / 8 * 4;
  }

  __device__ void copy(const Arguments& a, int slot) {
    const bool exists = !Plan::ragged || column < a.columns;
    const int token = threadIdx.x / of_token;
#if !WITHOUT_X
#pragma unroll
    for (int i = 0; i < 8 * Plan::token_tiles; i += at_a_time)
      if (token + i < a.tokens)
        copy_async(to + slot * slot_bytes + place(i), exists ? from + int64_t(i) * a.columns : a.x, exists ? 4 : 0);
#endif
    from += tile_columns, column += tile_columns;
  }
};

constexpr int chains = rows_first && Plan::row_tiles == 1 ? 2 : 1;  // a product waits for the one before it
using Sums = float[Plan::row_tiles][token_pairs][rows_first ? chains : 2][4];

// `inputs`: of this lane, in the slot of the tile.
__device__ inline void multiply(const Table& table, const Step& step, uint32_t inputs, Sums& sums) {
#pragma unroll
  for (int j = 0; j < octets; ++j) {
    uint32_t weight[Plan::row_tiles][2][4];
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) table.eight({step.codes[tile][half]}, j, weight[tile][half]);
    if constexpr (rows_first) {
      uint32_t x[4];
#if WITHOUT_X
      x[0] = x[1] = x[2] = x[3] = inputs + j;
#else
      load_shared<16>(inputs + j * pitch, x);
#endif
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int tile = 0; tile < Plan::row_tiles; ++tile) {
          const auto& [low, high] = weight[tile];
          mma<Plan::dtype>(sums[tile][0][k % chains], low[2 * k], high[2 * k], low[2 * k + 1], high[2 * k + 1], x[2 * k],
                           x[2 * k + 1]);
        }
    } else {
#pragma unroll
      for (int n = 0; n < token_pairs; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          uint32_t x[4];
#if WITHOUT_X
          x[0] = x[1] = x[2] = x[3] = inputs + n + j * 2 + k;
#else
          load_shared<16>(inputs + (n * Plan::column_warps * pieces + j * 2 + k) * pitch, x);
#endif
#pragma unroll
          for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              mma<Plan::dtype>(sums[tile][n][half], x[0], x[1], x[2], x[3], weight[tile][half][2 * k],
                               weight[tile][half][2 * k + 1]);
        }
    }
  }
}

// Four sums of a lane in a fragment of 16 rows and 8 tokens -> y: of rows 4 t .. 4 t + 3 for token g, or, rows first, of
// rows r and r + 2 (see `Step`) for tokens 2 t and 2 t + 1.
__device__ inline void store(const Arguments& a, int first_row, int fragment, const float* factor, const float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  const int in_band = fragment / Plan::token_tiles * 16 + (rows_first ? lane / 8 * 4 + lane / 4 % 2 : lane % 4 * 4);
  const int row = first_row + in_band;
  const int token = fragment % Plan::token_tiles * 8 + (rows_first ? lane % 4 * 2 : lane / 4);
  uint16_t value[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int down = rows_first ? c / 2 * 2 : c;
    float sum = sums[c] * factor[in_band + down];
    if (a.bias && row + down < a.rows) sum += to_float<Plan::dtype>(a.bias[row + down]);
    value[c] = uint16_t(pack_pair<Plan::dtype>(sum, 0.0f));
  }
  if (!rows_first && a.rows % 4 == 0) {
    if (token < a.tokens && row < a.rows)
      *reinterpret_cast<uint2*>(a.y + int64_t(token) * a.rows + row) = {value[0] | uint32_t(value[1]) << 16,
                                                                        value[2] | uint32_t(value[3]) << 16};
    return;
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int down = rows_first ? c / 2 * 2 : c, right = rows_first ? c % 2 : 0;
    if (row + down < a.rows && token + right < a.tokens) a.y[int64_t(token + right) * a.rows + row + down] = value[c];
  }
}

// Sums of all warps and blocks that have columns of the same rows -> y.
__device__ inline void finish(const Arguments& a, int first_row, int rank, const Sums& sums, char* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* factor = reinterpret_cast<const float*>(shared + factors);
  const uint32_t base = __cvta_generic_to_shared(shared);
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n) {
      const int fragment = (warp % row_warps * Plan::row_tiles + tile) * Plan::token_tiles + n;
      float sum[4];
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (rows_first)
          sum[c] = sums[tile][0][0][c] + (chains == 2 ? sums[tile][0][chains - 1][c] : 0.0f);
        else
          sum[c] = sums[tile][n / 2][c / 2][n % 2 * 2 + c % 2];
      const int place = fragment / Plan::cluster_size * parts + rank * Plan::column_warps + warp / row_warps;
      if constexpr (Plan::cluster_size > 1)
        send(base + partial_sums + (place * 32 + lane) * 16, sum, base + sums_barrier, fragment % Plan::cluster_size);
      else if constexpr (parts > 1)
        *reinterpret_cast<float4*>(shared + partial_sums + (place * 32 + lane) * 16) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      else
        store(a, first_row, fragment, factor, sum);
    }
  if constexpr (parts > 1) {
    if constexpr (Plan::cluster_size > 1)
      barrier_wait(base + sums_barrier, 0);
    else
      __syncthreads();
    for (int i = warp; i * Plan::cluster_size + rank < fragments; i += warps) {
      float sum[4] = {};
#pragma unroll
      for (int part = 0; part < parts; ++part) {
        uint32_t word[4];
        load_shared<16>(base + partial_sums + ((i * parts + part) * 32 + lane) * 16, word);
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[c] += __uint_as_float(word[c]);
      }
      store(a, first_row, i * Plan::cluster_size + rank, factor, sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm)
#if __CUDA_ARCH__ >= 900
    __cluster_dims__(Plan::cluster_size)
#endif
        linear_tile_codebook(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const uint32_t base = __cvta_generic_to_shared(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % Plan::cluster_size, first_row = blockIdx.x / Plan::cluster_size * band;
  const int across = (a.columns + tile_columns - 1) / tile_columns;
  const int begin = rank * across / Plan::cluster_size, end = (rank + 1) * across / Plan::cluster_size;
  const int own = warp / row_warps * chunk + lane % 4 * unit;  // first column of this lane in a tile

  Rows rows(a, first_row + warp % row_warps * Plan::row_tiles * 16 + lane / 8 * 4 + lane / 4 % 2, begin * tile_columns + own);
  constexpr int book = Table::stored_numbers;
  const uint16_t* books = a.codebook + (int64_t(first_row / Plan::tile_rows) * across + begin) * book;
  Entries entries;
  if (begin < end) entries.load(books);
  const auto exists = [&](int at) { return at < end && (!Plan::ragged || at * tile_columns + own < a.columns); };
  Step next[Plan::pipeline_depth];
#pragma unroll
  for (int i = 0; i < Plan::pipeline_depth; ++i)
    if (exists(begin + i)) rows.load(next[i]);
  if constexpr (Plan::prefetch) prefetch(a, first_row, begin, end);
  for (int i = threadIdx.x; i < band; i += Plan::threads)
    reinterpret_cast<float*>(shared + factors)[i] = half_to_float(__ldg(a.scale + min(first_row + i, a.rows - 1)));
  if constexpr (Plan::cluster_size > 1) {
    if (threadIdx.x == 0) {
      barrier_init(base + sums_barrier, 1);
      barrier_expect(base + sums_barrier, (fragments - rank + Plan::cluster_size - 1) / Plan::cluster_size * parts * 512);
      barriers_are_set();
    }
  }
  Table table(a.codebook, shared, lane);
  if (begin < end) entries.store(shared);
  if (begin + 1 < end) entries.load(books += book);
  if constexpr (Plan::cluster_size > 1) wait_for_cluster();
  wait_for_grids();
  let_next_grid_begin();
  Inputs inputs(a, begin, base);
#pragma unroll
  for (int i = 0; i < Plan::x_stages - 1; ++i) {
    if (begin + i < end) inputs.copy(a, i);
    commit_copies();
  }

  Sums sums = {};
  const uint32_t mine = warp / row_warps * pieces * pitch + (Plan::single ? lane % 4 : lane) * 16;
  int slot = 0;
  for (int first = begin; first < end; first += Plan::pipeline_depth) {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth; ++i) {
      const int at = first + i, odd = (at - begin) % 2;
      if (at >= end) break;
      wait_for_copies<Plan::x_stages - 2>();
      __syncthreads();  // this tile's table and inputs are there, and those before it are free
      const int ahead = at + Plan::x_stages - 1;
      if (ahead < end) inputs.copy(a, slot == 0 ? Plan::x_stages - 1 : slot - 1);
      commit_copies();
      if (at + 1 < end) entries.store(shared + (1 - odd) * Table::book_stride);
      if (at + 2 < end) entries.load(books += book);
      multiply(table, next[i], base + ring + slot * slot_bytes + mine, sums);
      table.copy ^= Table::book_stride;
      if (exists(at + Plan::pipeline_depth)) rows.load(next[i]);
      slot = slot + 1 == Plan::x_stages ? 0 : slot + 1;
    }
  }
  finish(a, first_row, rank, sums, shared);
}
