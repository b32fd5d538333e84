// SPDX-License-Identifier: Apache-2.0
// y = W x for up to 16 tokens as VQ-LLM (arXiv 2503.02236) generates it: the template of its Algorithm 2.
//
//     y[m, o] = sum_g scale[o, g] sum_{k in g} W[o, k] x[m, k]        W = sums of codebook entries, fp16
//
// A baseline: what layers run is kernels/cuda/linear/linear.cu, and docs/design/vq_llm.md compares the two, mechanism by mechanism.
//
//     blocks          part 0        part 1       .. split        a block: row_tiles x 16 rows, and of the columns
//     band 0       +------------+------------+                   (tiles of GPTVQ) or of the stages (AQLM) one part;
//     band 1       +------------+------------+                   its warps take chunks of 4 * unit columns in turn
//
// 1. Codebook cache (section V): entries [0, registers) lie in the registers of a warp's lanes, [registers, shared) in
//    shared memory, the others where they are stored. Entries are in the order of their frequency.
// 2. A lane decodes eight weights of a row together, an octet, the tensor core wants two of them: fusion (section
//    VI.B), by shuffles within mini-warps, through shared memory, or by columns numbered so that nothing moves.
// 3. Sums of warps meet in shared memory; sums of parts are reduced globally by the block of a band that is last, in
//    the order of parts (section VI.A).
//
// Bytes: codes and scales once; codebooks once for every block; split x tokens x rows sums.
#include "primitives/codes.cuh"
#include "primitives/mma.cuh"
#include "primitives/pdl.cuh"

enum class Fusion { SHUFFLE, SHARED, RENUMBERED };  // how decoded weights come to the lanes that multiply them
#include "plan.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 [stages or tiles, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const uint16_t* x;         // fp16 [tokens, columns], rotated
  uint16_t* y;               // fp16 [tokens, rows]
  float* partial;            // [split, tokens, rows]; null without a split
  uint32_t* arrived;         // [bands], 0 before and after
  int rows;
  int columns;
  int tokens;
};

constexpr int unit = Plan::unit, chunk = 4 * unit, octets = unit / 4, warps = Plan::threads / 32;
constexpr int band_rows = 16 * Plan::row_tiles;
constexpr bool tiled = Plan::scope == Scope::TILE;
constexpr int stages = tiled ? Plan::num_codebooks : Plan::num_codebooks / Plan::split;  // of a block
constexpr int group = Plan::group ? Plan::group : 1;
// Nothing is exchanged: a lane has `unit` columns of two rows. Else it has 2 * unit columns of one row.
constexpr bool direct = Plan::fusion == Fusion::RENUMBERED || (Plan::fusion == Fusion::SHUFFLE && Plan::vector_size == 2);
constexpr int runs = direct ? 2 : 1, run = 2 * unit / runs;
constexpr int batch = direct ? 2 : 4;  // octets of a run that a lane keeps
// Of a warp: decoded weights of a batch, where they are exchanged, and its x.
constexpr int weight_bytes = Plan::fusion == Fusion::SHARED ? batch * 512 : 0;
constexpr int input_bytes = direct ? 0 : Plan::token_tiles * 1024;
constexpr bool pairs = Plan::fusion == Fusion::SHUFFLE && Plan::vector_size == 4;  // of lanes, for half a run each
constexpr int bytes_of(int weights) { return weights / Plan::vector_size * Plan::entry_bits / 8; }
using Run = Codes<Plan::entry_bits, run / Plan::vector_size>;
constexpr int load_bytes = Run::words % 4 == 0 ? 16 : Run::words % 2 == 0 ? 8 : 4;

static_assert(unit % 16 == 0, "whole batches");
static_assert(Plan::vector_size == 2 || Plan::vector_size == 4 || Plan::vector_size == 8, "an octet is whole vectors");

// The codebook cache with its three calls: Load, Access, Switch.
struct CodebookCache {
  static constexpr int entries = 1 << Plan::entry_bits, bytes = 2 * Plan::vector_size, words = bytes / 4;
  static constexpr int slots = Plan::registers / 32, kept = Plan::shared > Plan::registers ? Plan::shared - Plan::registers : 0;
  static constexpr int shared_bytes = stages * kept * bytes;

  const char* stored;
  const uint32_t shared;
  uint32_t hot[stages][slots ? slots : 1][words];  // entry 32 * slot + lane

  __device__ explicit CodebookCache(const char* to) : shared(uint32_t(__cvta_generic_to_shared(to))) {}

  // All threads of a block; `books` are those of its stages.
  __device__ void load(const uint16_t* books, char* to) {
    stored = reinterpret_cast<const char*>(books);
#pragma unroll
    for (int stage = 0; stage < stages; ++stage) {
      const char* book = stored + stage * entries * bytes;
      for (int i = threadIdx.x * 16; i < kept * bytes; i += Plan::threads * 16)
        *reinterpret_cast<uint4*>(to + stage * kept * bytes + i) =
            __ldg(reinterpret_cast<const uint4*>(book + Plan::registers * bytes + i));
#pragma unroll
      for (int slot = 0; slot < slots; ++slot)
        load_words<bytes>(book + (slot * 32 + threadIdx.x % 32) * bytes, hot[stage][slot]);
    }
    __syncthreads();
  }

  __device__ void switch_to(const uint16_t* books, char* to) {
    __syncthreads();  // until nobody reads the old ones
    load(books, to);
  }

  // All lanes of a warp together: those of hot entries are read across it.
  __device__ void access(int stage, uint32_t code, uint32_t (&entry)[words]) const {
    if constexpr (slots > 0) {
#pragma unroll
      for (int slot = 0; slot < slots; ++slot)
#pragma unroll
        for (int w = 0; w < words; ++w) {
          const uint32_t word = __shfl_sync(0xffffffffu, hot[stage][slot][w], code % 32);
          if (slot == 0 || code / 32 == slot) entry[w] = word;
        }
      if (code < Plan::registers) return;
    }
    if (kept > 0 && (Plan::shared == entries || code < Plan::shared))
      load_shared<bytes>(shared + (stage * kept + code - Plan::registers) * bytes, entry);
    else
      load_words<bytes>(stored + (stage * entries + code) * bytes, entry);
  }
};

// Codes and scales that a lane has of one chunk.
struct Step {
  Run codes[Plan::row_tiles][runs][stages];
  uint16_t scale[Plan::row_tiles][2];

  __device__ void load(const Arguments& a, int first_row, int first_stage, int64_t stream, int at, int row, int column) {
#pragma unroll
    for (int tile = 0; tile < Plan::row_tiles; ++tile) {
#pragma unroll
      for (int i = 0; i < runs; ++i) {
        const int64_t from = min(first_row + tile * 16 + i * 8 + row, a.rows - 1);
        const char* codes_of_row = reinterpret_cast<const char*>(a.codes) + (from * Plan::num_codebooks + first_stage) * stream;
#pragma unroll
        for (int stage = 0; stage < stages; ++stage)
          codes[tile][i][stage].template load_aligned<load_bytes>(
              codes_of_row + stage * stream + int64_t(at) * bytes_of(chunk) + bytes_of(column));
      }
#pragma unroll
      for (int half = 0; half < 2 && Plan::group; ++half) {
        const int64_t from = min(first_row + tile * 16 + half * 8 + int(threadIdx.x % 32 / 4), a.rows - 1);
        scale[tile][half] = __ldg(a.scale + from * (a.columns / group) + at * chunk / group);
      }
    }
  }
};

// Octet `j` of what is left of a run: the entries of all stages, added.
__device__ inline void decode(const CodebookCache& cache, const Run (&codes)[stages], int j, uint32_t (&octet)[4]) {
#pragma unroll
  for (int stage = 0; stage < stages; ++stage)
#pragma unroll
    for (int v = 0; v < 8 / Plan::vector_size; ++v) {
      uint32_t entry[CodebookCache::words];
      cache.access(stage, codes[stage][j * (8 / Plan::vector_size) + v], entry);
#pragma unroll
      for (int w = 0; w < CodebookCache::words; ++w) {
        uint32_t& to = octet[v * CodebookCache::words + w];
        to = stage ? add_pair<Dtype::FLOAT16>(to, entry[w]) : entry[w];
      }
    }
}

// The first `batch` octets of a run are done. Not by index: a loop over a whole run, unrolled, takes all registers.
__device__ inline void advance(Run (&codes)[stages]) {
  constexpr int bits = 8 * bytes_of(8 * batch), whole = bits / 32;
#pragma unroll
  for (int stage = 0; stage < stages; ++stage)
#pragma unroll
    for (int i = 0; i < Run::words; ++i) {
      uint32_t(&word)[Run::words] = codes[stage].word;
      const uint32_t low = i + whole < Run::words ? word[i + whole] : 0, high = i + whole + 1 < Run::words ? word[i + whole + 1] : 0;
      word[i] = __funnelshift_r(low, high, bits % 32);
    }
}

__device__ inline uint32_t exchange(uint32_t word, int offset) { return __shfl_xor_sync(0xffffffffu, word, offset); }

__device__ inline void swap_if(bool condition, uint32_t& a, uint32_t& b) {
  const uint32_t first = condition ? b : a;
  b = condition ? a : b, a = first;
}

// Register fusion (Algorithm 1): lane t of a mini-warp gives word t ^ i of its vector to lane t ^ i, for i = 1 ..; it
// has then word t of every lane's. Any even number of exchanges beyond those is done and undone, to be timed.
__device__ inline void fuse(uint32_t (&octet)[4], int lane) {
  constexpr int mini_warp = Plan::vector_size / 2, extra = Plan::exchanges - (mini_warp - 1);
  static_assert(Plan::fusion != Fusion::SHUFFLE || direct || (extra >= 0 && extra % 2 == 0), "exchanges undo each other");
  const bool odd = lane % 2, upper = lane % 4 / 2;
  const auto arrange = [&] {  // word i <-> word t ^ i
    swap_if(odd, octet[0], octet[1]), swap_if(odd, octet[2], octet[3]);
    if (mini_warp == 4) swap_if(upper, octet[0], octet[2]), swap_if(upper, octet[1], octet[3]);
  };
  arrange();
#pragma unroll
  for (int i = 0; i <= extra; ++i) {
    octet[1] = exchange(octet[1], 1);
    if (mini_warp == 2) octet[3] = exchange(octet[3], 1);
  }
  if (mini_warp == 4) octet[2] = exchange(octet[2], 2), octet[3] = exchange(octet[3], 3);
  arrange();
  if (mini_warp == 4) swap_if(true, octet[1], octet[2]);  // lanes: row g, its other half, row g + 8, its other half
}

// Shared-memory fusion: lane 2 r + h brings half h of row r of a 16 x 16 tile, the tensor core's layout comes back.
__device__ inline uint32_t place(uint32_t tile, int row, int half) { return tile + half * 256 + (row ^ half * 4) * 16; }

__device__ inline void bring(uint32_t tile, const uint32_t (&octet)[4], int lane) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(tile, lane / 2, lane % 2)), "r"(octet[0]),
               "r"(octet[1]), "r"(octet[2]), "r"(octet[3]) : "memory");
}

__device__ inline void fetch(uint32_t tile, uint32_t (&octet)[4], int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(octet[0]), "=r"(octet[1]), "=r"(octet[2]), "=r"(octet[3])
               : "r"(place(tile, lane % 16, lane / 16)) : "memory");
}

// x of a batch, through shared memory in every fusion but RENUMBERED: [tokens][batch][2][8], where the last two are the
// columns that fragments b0 and b1 multiply; pieces of 16 bytes are swizzled by the token.
struct Inputs {
  uint4 piece[2 * Plan::token_tiles];

  __device__ static uint32_t place(uint32_t tile, int token, int octet, int b) {
    return tile + token * 128 + ((octet * 2 + b) ^ token % 8) * 16;
  }

  // From columns `first` and `first` + 2 * unit on.
  __device__ void load(const Arguments& a, int first, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * Plan::token_tiles; ++i) {
      const int token = i * 4 + lane / 8;
      const uint16_t* from = a.x + int64_t(token) * a.columns + first + lane % 8 / 4 * 2 * unit + lane % 4 * 8;
      if (token < a.tokens) piece[i] = __ldg(reinterpret_cast<const uint4*>(from));
    }
  }

  __device__ void bring(uint32_t tile, int tokens, int lane) const {
    const int half = lane % 8 / 4, octet = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * Plan::token_tiles; ++i) {
      const int token = i * 4 + lane / 8;
      if (token >= tokens) break;
      const uint4& p = piece[i];
      if constexpr (pairs) {
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place(tile, token, octet, 0) + half * 8), "r"(p.x), "r"(p.y) : "memory");
        asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(place(tile, token, octet, 1) + half * 8), "r"(p.z), "r"(p.w) : "memory");
      } else {
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(tile, token, octet, half)), "r"(p.x), "r"(p.y), "r"(p.z), "r"(p.w) : "memory");
      }
    }
  }

  __device__ static void fetch(uint32_t tile, int n, int octet, int lane, uint32_t (&word)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(word[0]), "=r"(word[1])
                 : "r"(place(tile, n * 8 + lane % 8, octet, lane % 16 / 8)) : "memory");
  }
};

using Sums = float[Plan::row_tiles][Plan::token_tiles][4];

__device__ inline void multiply(const Arguments& a, const CodebookCache& cache, Step& step, int at, uint32_t weights, uint32_t inputs,
                                Sums& sums) {
  const int lane = threadIdx.x % 32, t = lane % 4, first = at * chunk;
  constexpr Dtype half = Dtype::FLOAT16;
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile) {
    float scaled[Plan::token_tiles][4] = {};
    auto& part = Plan::group ? scaled : sums[tile];
    if constexpr (direct) {
#pragma unroll 1
      for (int j = 0; j < octets / 2; j += batch) {
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          uint32_t low[4], high[4];
          decode(cache, step.codes[tile][0], i, low);
          decode(cache, step.codes[tile][1], i, high);
#pragma unroll
          for (int n = 0; n < Plan::token_tiles; ++n) {
            uint32_t x[4] = {};
            const int token = n * 8 + lane / 4;
            if (token < a.tokens) load_words<16>(a.x + int64_t(token) * a.columns + first + t * unit + 8 * (j + i), x);
            mma<half>(part[n], low[0], high[0], low[1], high[1], x[0], x[1]);
            mma<half>(part[n], low[2], high[2], low[3], high[3], x[2], x[3]);
          }
        }
        advance(step.codes[tile][0]), advance(step.codes[tile][1]);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < octets; j += batch) {
        uint32_t octet[batch][4];
        Inputs x;
        x.load(a, first + 8 * j, lane);
#pragma unroll
        for (int i = 0; i < batch; ++i) decode(cache, step.codes[tile][0], i, octet[i]);
        __syncwarp();
        x.bring(inputs, a.tokens, lane);
        if constexpr (Plan::fusion == Fusion::SHARED)
#pragma unroll
          for (int i = 0; i < batch; ++i) bring(weights + i * 512, octet[i], lane);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < batch; ++i) {
          if constexpr (Plan::fusion == Fusion::SHARED) fetch(weights + i * 512, octet[i], lane);
          else fuse(octet[i], lane);
#pragma unroll
          for (int n = 0; n < Plan::token_tiles; ++n) {
            uint32_t b[2];
            Inputs::fetch(inputs, n, i, lane, b);
            mma<half>(part[n], octet[i][0], octet[i][1], octet[i][2], octet[i][3], b[0], b[1]);
          }
        }
        advance(step.codes[tile][0]);
      }
    }
#pragma unroll
    for (int n = 0; n < Plan::token_tiles && Plan::group; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) sums[tile][n][c] += scaled[n][c] * half_to_float(step.scale[tile][c / 2]);
  }
}

// Sums of all warps -> y, or the sums of a part; `meeting` holds [warps][row_tiles][token_tiles][32][4] floats.
__device__ inline void finish(const Arguments& a, const Sums& sums, float* meeting, int band, int part) {
  const int lane = threadIdx.x % 32, first_row = band * band_rows, count = min(band_rows, a.rows - first_row) * a.tokens;
  constexpr int of_warp = Plan::row_tiles * Plan::token_tiles * 128;
  __syncthreads();  // where they meet, weights and x were
#pragma unroll
  for (int tile = 0; tile < Plan::row_tiles; ++tile)
#pragma unroll
    for (int n = 0; n < Plan::token_tiles; ++n)
      *reinterpret_cast<float4*>(meeting + threadIdx.x / 32 * of_warp + ((tile * Plan::token_tiles + n) * 32 + lane) * 4) =
          make_float4(sums[tile][n][0], sums[tile][n][1], sums[tile][n][2], sums[tile][n][3]);
  __syncthreads();
  const auto store = [&](int row, int token, float sum) {
    if (!Plan::group) sum *= half_to_float(__ldg(a.scale + row));
    a.y[int64_t(token) * a.rows + row] = uint16_t(pack_pair<Dtype::FLOAT16>(sum, 0.0f));
  };
  const int rows = count / a.tokens;
  for (int i = threadIdx.x; i < count; i += Plan::threads) {
    const int row = i % rows, token = i / rows;
    const int holder = row % 8 * 4 + token % 8 / 2, which = token % 2 + row % 16 / 8 * 2;
    const float* from = meeting + ((row / 16 * Plan::token_tiles + token / 8) * 32 + holder) * 4 + which;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < warps; ++w) sum += from[w * of_warp];
    if (Plan::split == 1) store(first_row + row, token, sum);
    else a.partial[(int64_t(part) * a.tokens + token) * a.rows + first_row + row] = sum;
  }
  if constexpr (Plan::split > 1) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(a.arrived + band, 1) == Plan::split - 1;
      if (last) a.arrived[band] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int i = threadIdx.x; i < count; i += Plan::threads) {
      const int row = first_row + i % rows, token = i / rows;
      float sum = 0.0f;
      for (int p = 0; p < Plan::split; ++p) sum += __ldcg(a.partial + (int64_t(p) * a.tokens + token) * a.rows + row);
      store(row, token, sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) vq_llm(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  char* const meeting = shared + CodebookCache::shared_bytes;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int band = blockIdx.x / Plan::split, part = blockIdx.x % Plan::split;
  const int64_t stream = int64_t(a.columns / Plan::vector_size) * Plan::entry_bits / 8;
  constexpr int tile_columns = tiled ? Plan::tile_columns : 1, entries_of_book = CodebookCache::entries * Plan::vector_size;
  const int chunks = a.columns / chunk, across = tiled ? a.columns / tile_columns : 1;
  const int share = tiled ? (across + Plan::split - 1) / Plan::split * (tile_columns / chunk) : chunks;
  const int begin = tiled ? part * share : 0, end = min(begin + share, chunks), first_stage = tiled ? 0 : part * stages;
  const auto book = [&](int at) {
    const int64_t number = tiled ? int64_t(band * band_rows / Plan::tile_rows) * across + at * chunk / tile_columns : first_stage;
    return a.codebook + number * entries_of_book;
  };
  // Thread mapping: what a lane decodes (plan.py).
  const int row_bit = Plan::vector_size == 8 ? t / 2 : t % 2;
  const int row = direct ? g : Plan::fusion == Fusion::SHARED ? lane / 2 : g + 8 * row_bit;
  const int column = direct ? t * unit : (Plan::fusion == Fusion::SHARED ? lane % 2 : Plan::vector_size == 8 ? t % 2 : t / 2) * 2 * unit;
  const uint32_t weights = uint32_t(__cvta_generic_to_shared(meeting)) + warp * (weight_bytes + input_bytes);

  Step next;
  CodebookCache cache(shared);
  if (begin + warp < end) next.load(a, band * band_rows, first_stage, stream, begin + warp, row, column);
  if (begin < end) cache.load(book(begin), shared);
  wait_for_grids();
  let_next_grid_begin();
  Sums sums = {};
  for (int at = begin + warp; at < end; at += warps) {
    if constexpr (tiled)  // all warps are at the same tile
      if (at - warp > begin && (at - warp) * chunk % tile_columns == 0) cache.switch_to(book(at), shared);
    Step step = next;
    if (at + warps < end) next.load(a, band * band_rows, first_stage, stream, at + warps, row, column);
    multiply(a, cache, step, at, weights, weights + weight_bytes, sums);
  }
  finish(a, sums, reinterpret_cast<float*>(meeting), band, part);
}
