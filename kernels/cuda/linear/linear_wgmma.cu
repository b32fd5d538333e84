// SPDX-License-Identifier: Apache-2.0
// y = W x + b for many tokens, directly from the codes of W with wgmma; no dense weight is ever stored.
//
//     y[m, o] = bias[o] + sum_g sum_{k in g} (scale[o, g] W'[o, k]) x[m, k]        W' = entries of the codebook
//
// With Plan::activations_bits = 8, x and W are int8, with a scale for each token and each row (rotate_int8.cu):
//
//     y[m, o] = bias[o] + row_scale[o] token_scale[m] sum_k round(scale[o, g] W'[o, k] / row_scale[o]) numbers[m, k]
//
// Tile of a consumer warpgroup: 64 rows of W times `token_tile` tokens. W comes from registers: like linear.cu, a lane
// decodes eight adjacent columns of two rows, and they are two A fragments (int8: one). x comes from shared memory: a
// producer warp loads 128 bytes of each token per buffer, in fragment order and swizzled as rotate.cu wrote them:
//
//     producer (one lane)   [x 64 columns][x next 64]..        ring of `x_stages` buffers, token_tile x 128 bytes each
//     warpgroup 0           |64 columns|64 columns| ..         while tensor cores multiply 64 columns, a warp looks up the
//     warpgroup 1             |64 columns|64 columns| ..       next 64, 16 in each lane (two buffers of registers); of
//                                                              int8 128 columns, 32 in each lane (four fragments)
//
// The `cluster_size` blocks of a cluster have the same rows and split the columns. Each block adds the sums of some
// tokens; the others send it theirs in shared memory, and it adds them in block order: the result does not depend on
// timing. Codes and scales of a block's next tile are on their way while it stores the sums of this one.
//
// Bytes: codes once per token_tile tokens, x once per 64 x warpgroups rows, both mostly from L2.
// Bottleneck: lookups with few tokens, else tensor cores. A product of 64 x token_tile x 16 (int8: 32) takes
// token_tile / 2 cycles of tensor cores and token_tile / 4 of shared memory; the lookups of 1024 weights take 16 more per
// codebook.
#include "linear/table.cuh"
#include "plan.cuh"
#include "primitives/codes.cuh"
#include "primitives/pdl.cuh"

constexpr bool bytes = Plan::activations_bits == 8;
constexpr int unit = Plan::unit, chunk = 4 * unit, columns_of_slot = bytes ? 128 : 64;
constexpr int split = Plan::cluster_size, teams = 1;
// Two warpgroups of 16-bit inputs need the rest; three and four would get no more.
constexpr int producer_registers = !bytes && Plan::threads <= 384 ? 24 : 32;
constexpr uint32_t origin = Table::first, first_byte = origin + (Table::bytes + 1023) / 1024 * 1024;

#include "primitives/wgmma_ring.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const void* diagonal;      // not read: x is rotated
  const uint16_t* x;         // of Plan::dtype, [columns / 64][8 * ceil(tokens / 8)][64] (rotate.cu, `swizzled`), or
                             // int8, with scales of tokens and rows behind it (rotate_int8.cu)
  const uint16_t* bias;      // [rows] of Plan::out, or null
  uint16_t* y;               // [tokens, rows] of Plan::out
  int rows;
  int columns;
  int tokens;

  // Of int8 x and W. [8 * ceil(tokens / 8)], [rows]
  __device__ const float* token_scale() const {
    return reinterpret_cast<const float*>(x) + int64_t((tokens + 7) / 8) * 2 * columns;
  }
  __device__ const float* row_scale() const { return token_scale() + (tokens + 7) / 8 * 8; }
};

constexpr int group = Plan::group ? Plan::group : 1;
// Of each warpgroup: what sums are multiplied by, and biases (`Factors`).
constexpr uint32_t factors = sums_barrier + 16;
constexpr int factors_of_warpgroup = 512 + (bytes ? tile_tokens * 4 : 0);
constexpr int unit_bytes = unit / Plan::vector_size * Plan::entry_bits / 8;

// Positions of the two rows of a lane, at its columns of the first chunk. The rows are adjacent in W, the two halves of
// a word of y; they are rows g and g + 8 of the product.
struct Rows {
  const char* codes[2];
  const uint16_t* scale[2];

  __device__ void set(const Arguments& a, const Work& work, int64_t stream) {
    const int lane = threadIdx.x % 32, first = work.row + threadIdx.x / 32 * 16 + lane / 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + half, a.rows - 1);
      codes[half] = reinterpret_cast<const char*>(a.codes) + row * Plan::num_codebooks * stream + lane % 4 * unit_bytes;
      scale[half] = a.scale + int64_t(row) * (Plan::group ? a.columns / group : 1);
    }
  }

  // What entries are multiplied by to become int8, before their scales if groups have some.
  __device__ void load_factors(const Arguments& a, const Work& work, float (&factor)[2]) const {
    const int first = work.row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float size = __ldcg(a.row_scale() + min(first + half, a.rows - 1));
      factor[half] = size != 0.0f ? __frcp_rn(size) : 0.0f;
      if constexpr (Plan::group == 0) factor[half] *= half_to_float(__ldg(scale[half]));
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

// In int8: four fragments, of columns 8 k .. 8 k + 7 of a lane each.
struct Int8Weights {
  uint32_t fragment[4][4], found[2][4];
  float factor[2];  // of rows

  __device__ void look_up(const Table& table, const Step& step, int k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) table.eight(step.codes[half], k, found[half]);
  }

  // What was found, as fragment k. 1536 in fp16 leaves no place for a fraction, and its low byte is zero.
  __device__ void round(const Step& step, int k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float ratio = factor[half] * (Plan::group ? half_to_float(step.scale[half]) : 1.0f);
      const uint32_t twice = pack_pair<Dtype::FLOAT16>(ratio, ratio);
#pragma unroll
      for (int i = 0; i < 4; ++i) found[half][i] = multiply_add<Dtype::FLOAT16>(found[half][i], twice, 0x66006600);
      fragment[k][half] = __byte_perm(found[half][0], found[half][1], 0x6420);
      fragment[k][2 + half] = __byte_perm(found[half][2], found[half][3], 0x6420);
    }
    made(fragment[k]);
  }
};

template <bool Bytes> struct SumOf { using Type = float; };
template <> struct SumOf<true> { using Type = int; };
using Sum = SumOf<bytes>::Type;
using Sums = Sum[tile_tokens / 2];

template <int N> __device__ inline void product(float (&sums)[N], const uint32_t (&a)[4], uint64_t b) {
  wgmma<Plan::dtype, 2 * N>(sums, a, b);
}
template <int N> __device__ inline void product(int (&sums)[N], const uint32_t (&a)[4], uint64_t b) {
  wgmma_bytes<true, 2 * N>(sums, a, b);
}

// Sums as words of shared memory.
__device__ inline float as_float(float sum) { return sum; }
__device__ inline float as_float(int sum) { return __int_as_float(sum); }
__device__ inline void add(float& sum, uint32_t word) { sum += __uint_as_float(word); }
__device__ inline void add(int& sum, uint32_t word) { sum += int(word); }

__device__ inline void release(uint32_t barrier) {
  if (barrier && threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// Main loop: rows of a warpgroup times x. While tensor cores multiply one buffer, lanes decode the next one. Codes of the
// first `pipeline_depth` chunks are there, or on their way.
//
//     load(i, at)         codes of chunk `at` -> place i of `pipeline_depth`
//     decode(now, i, j)   slot j of them -> the four fragments of buffer `now`
//     product(now, k, b)  fragment k times b
template <class Load, class Decode, class Product>
__device__ inline void multiply_slots(const Work& work, Turn& turn, Load load, Decode decode, Product product) {
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
        release(last);
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
  release(last);
}

// Main loop of int8. A warp that issues a product waits until those before have read their registers: behind each product
// one fragment is made, for the one after the next, of entries that were looked up behind the product before.
//
//     look_up(i, k)       entries of fragment k of place i
//     round(i, k)         what was looked up -> fragment k
//     product(k, b)       fragment k times b
template <class Load, class LookUp, class Round, class Product>
__device__ inline void multiply_int8(const Work& work, Turn& turn, Load load, LookUp look_up, Round round,
                                     Product product) {
  if (work.begin < work.end) {
    look_up(0, 0);
    round(0, 0);
    look_up(0, 1);
    round(0, 1);
    look_up(0, 2);
  }
  uint32_t last = 0;  // barrier of the slot before this one
  for (int first = work.begin; first < work.end; first += Plan::pipeline_depth) {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth; ++i) {
      const int at = first + i, after = (i + 1) % Plan::pipeline_depth;
      if (at >= work.end) break;
      barrier_wait(turn.full(), turn.parity);
      const uint64_t b = wgmma_descriptor(turn.address());
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma_fence();
        product(k, b + 2 * k);
        wgmma_commit();
        wgmma_wait<2>();  // the one two before: its fragment is free, after two of a slot the slot before
        if (k == 1) release(last);
        round(k < 2 ? i : after, (k + 2) % 4);  // after the last chunk nobody reads it
        look_up(k < 1 ? i : after, (k + 3) % 4);
      }
      last = turn.empty();
      turn.next();
      if (at + Plan::pipeline_depth < work.end) load(i, at + Plan::pipeline_depth);
    }
  }
  wgmma_wait<0>();
  release(last);
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
    for (int i = 0; i < tile_tokens / 8; ++i) {
      const float four[4] = {as_float(sums[4 * i]), as_float(sums[4 * i + 1]), as_float(sums[4 * i + 2]),
                             as_float(sums[4 * i + 3])};
      send(mine + (i / split * split + rank) * (math_threads * 16), four, block + sums_barrier, i % split);
    }
    barrier_wait(block + sums_barrier, 0);
#pragma unroll
    for (int q = 0; q < added; ++q) {
      const int i = q * split + rank;
      if (i >= tile_tokens / 8) break;
      Sum sum[4] = {};
#pragma unroll
      for (int s = 0; s < split; ++s) {
        uint32_t word[4];
        load_shared<16>(mine + (q * split + s) * (math_threads * 16), word);
#pragma unroll
        for (int c = 0; c < 4; ++c) add(sum[c], word[c]);
      }
      store(i, sum);
    }
  }
}

// What the sums of a tile are multiplied by, and biases, in shared memory of each warpgroup: (factor, bias) of its 64
// rows, scales of tokens. A thread loads some of them.
struct Factors {
  static constexpr int tokens = bytes ? (tile_tokens + 127) / 128 : 0;
  float factor, bias, token[tokens ? tokens : 1];

  __device__ void load(const Arguments& a, const Work& work) {
    const int thread = threadIdx.x % 128;
    const int row = min(work.row + int(threadIdx.x / 128 * 64) + thread % 64, a.rows - 1);
    factor = bytes ? __ldcg(a.row_scale() + row) : Plan::group ? 1.0f : half_to_float(__ldg(a.scale + row));
    bias = a.bias ? to_float<Plan::out>(a.bias[row]) : 0.0f;
#pragma unroll
    for (int e = 0; e < tokens; ++e)
      token[e] = __ldcg(a.token_scale() + min(work.token + thread + e * 128, a.tokens - 1));
  }

  __device__ static uint32_t place(uint32_t block) { return block + factors + threadIdx.x / 128 * factors_of_warpgroup; }

  __device__ void share(const Table& table, uint32_t block) const {
    const int thread = threadIdx.x % 128, name = 1 + threadIdx.x / 128;
    const uint32_t to = place(block);
    wait_for_warps(name, 128);  // all have read those of the tile before
    if (thread < 64) store_pair(to + thread * 8, __float_as_int(factor * table.factor), __float_as_int(bias));
#pragma unroll
    for (int e = 0; e < tokens; ++e)
      if (thread + e * 128 < tile_tokens) store_word(to + 512 + (thread + e * 128) * 4, __float_as_uint(token[e]));
    wait_for_warps(name, 128);
  }
};

// Where a lane stores its sums.
struct Place {
  uint32_t factors;  // of its tokens
  float factor[2], bias[2];
  uint16_t* y;       // of its first row and token
  int row, left;     // its first row; tokens from its first one on
  bool whole;        // all rows of the warp are there, the first of each lane at an even number: a word of y

  __device__ Place(const Arguments& a, const Work& work, uint32_t block) {
    const int lane = threadIdx.x % 32, of_block = threadIdx.x / 32 * 16, token = work.token + lane % 4 * 2;
    row = work.row + of_block + lane / 4 * 2, left = a.tokens - token;
    whole = a.rows % 2 == 0 && work.row + of_block + 16 <= a.rows;
    y = a.y + int64_t(token) * a.rows + row;
    const uint32_t from = Factors::place(block);
    uint32_t word[4];
    load_shared<16>(from + (of_block % 64 + lane / 4 * 2) * 8, word);
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factor[half] = __uint_as_float(word[2 * half]), bias[half] = __uint_as_float(word[2 * half + 1]);
    factors = from + 512 + lane % 4 * 8;
  }

  // Both rows of tokens 8 i + 2 t and 8 i + 2 t + 1.
  __device__ void words(int i, const Sum* sums, uint32_t (&word)[2]) const {
    uint32_t of_token[2] = {0x3f800000, 0x3f800000};
    if constexpr (bytes) load_shared<8>(factors + i * 32, of_token);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float size = __uint_as_float(of_token[c]);
      word[c] = pack_pair<Plan::out>(float(sums[c]) * (factor[0] * size) + bias[0],
                                     float(sums[2 + c]) * (factor[1] * size) + bias[1]);
    }
  }

  __device__ void store_whole(int i, const Sum* sums, int rows) const {
    uint32_t word[2];
    words(i, sums, word);
    uint16_t* const to = y + int64_t(i) * (8 * rows);
    if (i * 8 < left) *reinterpret_cast<uint32_t*>(to) = word[0];
    if (i * 8 + 1 < left) *reinterpret_cast<uint32_t*>(to + rows) = word[1];
  }

  __device__ void store_some(int i, const Sum* sums, int rows) const {
    uint32_t word[2];
    words(i, sums, word);
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (i * 8 + c < left && row + half < rows) y[int64_t(i * 8 + c) * rows + half] = uint16_t(word[c] >> half * 16);
  }
};

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
    const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
    Rows rows;
    Step next[Plan::pipeline_depth];
    Factors factors;
    const auto load = [&](int i, int at) { next[i].load(rows, at, stream); };
    const auto begin = [&](const Work& work) {
      rows.set(a, work, stream);
#pragma unroll
      for (int i = 0; i < Plan::pipeline_depth; ++i)
        if (work.begin + i < work.end) load(i, work.begin + i);
    };
    if (first < items) begin(Work(a.tokens, chunks, first, rank));
    for (int item = first; item < items; item += step) {  // only one where columns are split
      const Work work(a.tokens, chunks, item, rank);
      Sums sums = {};
      if constexpr (bytes) {
        wait_for_grids();
        factors.load(a, work);
        Int8Weights weights;
        rows.load_factors(a, work, weights.factor);
        multiply_int8(
            work, turn, load, [&](int i, int k) { weights.look_up(table, next[i], k); },
            [&](int i, int k) { weights.round(next[i], k); },
            [&](int k, uint64_t b) { product(sums, weights.fragment[k], b); });
      } else {
        Weights weights[2];
        multiply_slots(
            work, turn, load, [&](int now, int i, int j) { weights[now].decode(table, next[i], j); },
            [&](int now, int k, uint64_t b) { product(sums, weights[now].fragment[k], b); });
        factors.load(a, work);  // four warpgroups have no registers for them before
      }
      factors.share(table, turn.block);
      if (split == 1 && item + step < items) begin(Work(a.tokens, chunks, item + step, rank));
      const Place place(a, work, turn.block);
      if (place.whole)
        meet(rank, turn.block, sums, [&](int i, const Sum* of) { place.store_whole(i, of, a.rows); });
      else
        meet(rank, turn.block, sums, [&](int i, const Sum* of) { place.store_some(i, of, a.rows); });
    }
  }
}
