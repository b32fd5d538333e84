// SPDX-License-Identifier: Apache-2.0
// y = W x + bias for up to 16 tokens, from published VPTQ codes; no dense weight is ever stored.
//
//     y[m, i v + r] = sum_c (book[main(i, c)] + rest[residual(i, c)])[r] x'[m, c] + outliers + <b, x> + bias
//
// vptq_inputs.cu makes x'. Tile of a block: `row_vectors` vectors of v rows; its warps split the columns. A lane looks up
// one of 32 columns per iteration, which gives v adjacent rows, and writes them to shared memory of its warp. A line of
// 16 bytes is a row of an 8 x 8 matrix there, which ldmatrix turns into an MMA operand:
//
//     lookup      lane = column, 8 rows       |c0: r0 .. r7|c1: r0 .. r7|..        16 bytes each
//     ldmatrix    lane = row, 2 columns       transposed
//     mma         [16 tokens x 16 columns] [16 columns x 8 rows]
//
// Sums are float32; warps add theirs in order. If registers suffice, lanes beyond the last column look up as well:
// without a branch, the lookups of several steps are in flight. They multiply zeros by arbitrary entries, so all entries
// have to be finite.
//
// Bytes: codes once, x' once per block (from L2).
// Bottleneck: with 65536 entries the codebook is 1 MB in L2, one sector of 32 bytes per code. Smaller codebooks are
// copied to shared memory.
#include "primitives/mma.cuh"
#include "primitives/pdl.cuh"
#include "vptq/vptq.cuh"

struct Arguments {
  const uint32_t* codes;            // int32 [groups, vectors, words]
  const char* book;                 // [groups, entries, v] of Plan::dtype
  const char* rest;                 // [groups, rest_entries, v]; not read without residuals
  const uint16_t* outlier_codes;    // [vectors of outliers, outliers]
  const char* outlier_book;         // [outlier_entries, outlier_vector]
  const uint32_t* x;                // of vptq_inputs.cu, and the next two
  const float* outlier_x;
  const float* factors;
  const char* bias;                 // [rows] of Plan::out, or null
  char* y;                          // [tokens, rows] of Plan::out
  int rows;
  int columns;                      // of a group
  int groups;
  int outliers;
  int tokens;
};

constexpr int unit = Plan::unit, chunk = 32 * unit, warps = Plan::threads / 32, R = Plan::row_vectors;
constexpr int octets = (v + 7) / 8, fragments = R * octets;
constexpr int words = Plan::wide ? 4 : 2;  // of a lane, of x' in a fragment
constexpr int book_bytes = Plan::book_in_shared ? (Plan::entries * entry_bytes + 15) / 16 * 16 : 0;
constexpr int rest_bytes = Plan::rest_in_shared ? (Plan::rest_entries * entry_bytes + 15) / 16 * 16 : 0;
constexpr int tile_bytes = fragments * 512;  // entries of a warp, then its sums

constexpr bool ahead = octets == 1 && R * Codes<code_bits, unit>::words <= 24;

static_assert(size_of<Plan::dtype> == 2 && v % 2 == 0, "entries are whole words of two factors");

// The words of an entry in its octets; rows that fill up the last one are zeros.
struct Entry {
  uint32_t word[octets * 4];

  template <bool Shared> __device__ void load(const char* book, uint32_t code) {
#pragma unroll
    for (int i = v / 2; i < octets * 4; ++i) word[i] = 0;
#pragma unroll
    for (int at = 0; at < entry_bytes; at += piece) {
      const char* from = book + code * entry_bytes + at;
      if constexpr (Shared) load_words<piece>(from, word + at / 4);
      else if constexpr (piece == 16) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
        word[at / 4] = four.x, word[at / 4 + 1] = four.y, word[at / 4 + 2] = four.z, word[at / 4 + 3] = four.w;
      } else if constexpr (piece == 8) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
        word[at / 4] = two.x, word[at / 4 + 1] = two.y;
      } else {
        word[at / 4] = __ldg(reinterpret_cast<const uint32_t*>(from));
      }
    }
  }
  __device__ void add(const Entry& other) {
#pragma unroll
    for (int i = 0; i < v / 2; ++i) word[i] = add_pair<Plan::dtype>(word[i], other.word[i]);
  }
};

// Four 8 x 8 matrices of 16-bit numbers, transposed: lane l has the address of line l of the 32.
__device__ inline void load_transposed(uint32_t from, uint32_t (&word)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from)
               : "memory");
}

__device__ inline void copy_book(char* to, const char* from, int bytes) {
  for (int at = threadIdx.x * 4; at < bytes; at += Plan::threads * 4)
    *reinterpret_cast<uint32_t*>(to + at) = __ldg(reinterpret_cast<const uint32_t*>(from + at));
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) vptq(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int vectors = (a.rows + v - 1) / v, first = blockIdx.x * R;
  const int chunks = (a.columns + chunk - 1) / chunk, end = a.groups * chunks;
  const int64_t stream_words = (int64_t(a.columns) * code_bits + 31) / 32;

  Codes<code_bits, unit> next[R] = {};
  const auto load = [&](int at) {
    const int group = at / chunks, column = at % chunks * chunk + lane * unit;
    if (column < a.columns) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int64_t row = int64_t(group) * vectors + min(first + r, vectors - 1);
        next[r].load(a.codes, row * stream_words * 32 + int64_t(column) * code_bits);
      }
    }
  };
  if (warp < end) load(warp);
  if constexpr (Plan::book_in_shared) copy_book(shared, a.book, Plan::entries * entry_bytes);
  if constexpr (Plan::rest_in_shared) copy_book(shared + book_bytes, a.rest, Plan::rest_entries * entry_bytes);
  if constexpr (Plan::book_in_shared || Plan::rest_in_shared) __syncthreads();

  float sums[R][octets][4] = {};
  char* tile = shared + book_bytes + rest_bytes + warp * tile_bytes;
  const uint32_t tile_address = uint32_t(__cvta_generic_to_shared(tile)) + lane * 16;
  const int own = min(g, a.tokens - 1) * 4 + t;  // lanes without a token multiply the last one for nobody
  wait_for_grids();

  if constexpr (Plan::outlier_vector > 0) {
    for (int c = warp; c < a.outliers; c += warps) {
      const float low = g < a.tokens ? a.outlier_x[g * a.outliers + c] : 0.0f;
      const float high = Plan::wide && g + 8 < a.tokens ? a.outlier_x[(g + 8) * a.outliers + c] : 0.0f;
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int o = 0; o < octets; ++o)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int place = o * 8 + t * 2 + i, row = (first + r) * v + place;
            if (place < v && row < a.rows) {
              const float weight = outlier(a.outlier_codes, a.outlier_book, a.outliers, row, c);
              sums[r][o][i] += weight * low;
              sums[r][o][2 + i] += weight * high;
            }
          }
    }
  }

  for (int at = warp; at < end; at += warps) {
    const int group = at / chunks;
    const char* book = Plan::book_in_shared ? shared : a.book + int64_t(group) * Plan::entries * entry_bytes;
    const char* rest = Plan::rest_in_shared ? shared + book_bytes : a.rest + int64_t(group) * Plan::rest_entries * entry_bytes;
    Codes<code_bits, unit> codes[R];
#pragma unroll
    for (int r = 0; r < R; ++r) codes[r] = next[r];
    if (at + warps < end) load(at + warps);
#pragma unroll
    for (int step = 0; step < unit; ++step) {
      const uint32_t* from = a.x + ((int64_t(at) * unit + step) * 2 * 32 + own) * words;
      uint32_t x[2][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t word[words];
        load_words<4 * words>(from + half * 32 * words, word);
        if constexpr (Plan::wide) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[half][i] = word[i];
        } else {
          x[half][0] = word[0], x[half][2] = word[1];
        }
      }
      Entry entry[R] = {};
      if (ahead || at % chunks * chunk + lane * unit < a.columns) {
#pragma unroll
        for (int r = 0; r < R; ++r) entry[r].template load<Plan::book_in_shared>(book, main_code(codes[r], step));
        if constexpr (Plan::rest_bits > 0) {
#pragma unroll
          for (int r = 0; r < R; ++r) {
            Entry more;
            more.template load<Plan::rest_in_shared>(rest, rest_code(codes[r], step));
            entry[r].add(more);
          }
        }
      }
      __syncwarp();  // what was left here has been read
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int o = 0; o < octets; ++o)
          store_words<16>(tile + (r * octets + o) * 512 + lane * 16, entry[r].word + 4 * o);
      __syncwarp();
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int o = 0; o < octets; ++o) {
          uint32_t b[4];
          load_transposed(tile_address + (r * octets + o) * 512, b);
          mma<Plan::dtype>(sums[r][o], x[0][0], x[0][1], x[0][2], x[0][3], b[0], b[1]);
          mma<Plan::dtype>(sums[r][o], x[1][0], x[1][1], x[1][2], x[1][3], b[2], b[3]);
        }
    }
  }

  __syncwarp();
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int o = 0; o < octets; ++o) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = __float_as_uint(sums[r][o][i]);
      store_words<16>(tile + (r * octets + o) * 512 + lane * 16, word);
    }
  __syncthreads();
  for (int piece_of = threadIdx.x; piece_of < fragments * 32; piece_of += Plan::threads) {
    float total[4] = {};
    for (int other = 0; other < warps; ++other) {
      uint32_t word[4];
      load_words<16>(shared + book_bytes + rest_bytes + other * tile_bytes + piece_of * 16, word);
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += __uint_as_float(word[i]);
    }
    const int fragment = piece_of / 32, token = piece_of % 32 / 4, pair = piece_of % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = fragment % octets * 8 + pair + i % 2, row = (first + fragment / octets) * v + place;
      const int m = token + i / 2 * 8;
      if (place >= v || row >= a.rows || m >= a.tokens) continue;
      float bias[1] = {};
      if (a.bias) load_floats<Plan::out>(a.bias + int64_t(row) * 2, bias);
      const float value[1] = {total[i] * a.factors[2 * m] + a.factors[2 * m + 1] + bias[0]};
      store_floats<Plan::out>(a.y + (int64_t(m) * a.rows + row) * 2, value);
    }
  }
}
