// SPDX-License-Identifier: Apache-2.0
// Codes to a dense 16-bit matrix in the original basis (rotated back):
//
//     out[o, :] = scale[o, g] (W'[o, :] H) * d      W' = entries of the codebook, H = Hadamard matrices, of 1 .. 128
//
// Tile of a warp: 16 rows of 128 columns per iteration, always the same columns. A lane looks up 32 adjacent columns of
// two rows, like linear_wgmma.cu. A Hadamard matrix is a product of one 2 x 2 matrix per bit of the column number, and
// each bit is transformed where the data is:
//
//     column   6 5 | 4 | 3 | 2 1 | 0
//     lookup   lane  .   .   .  .  .            bits 4, 2, 1   sums and differences of a lane's registers (fp16)
//     mma k    2 1   -   3   -  -  0            bits 6, 5, 3, 0   tensor cores: k is mixed, n is the result (float32)
//     mma n    3 2   -   1   -  -  0            bits of k and n that a block does not mix must be equal
//     store    .  lane  lane   .  .  .          16 bytes, of two lanes 32
//
// The random sign of a column, or its number d, is applied to a column of the Hadamard matrix, which fp16 holds exactly.
// Without a rotation, the matrix is a
// permutation that moves numbers to the place where they are stored.
//
// Bytes: the output once, codes and scales once, tables once per block. Bottleneck: writing the output.
// Precision: entries, their sums over codebooks and the sums over bits 4, 2, 1 have 11 bits; the result is rounded once.
#include "linear/table.cuh"
#include "plan.cuh"
#include "primitives/codes.cuh"
#include "primitives/mma.cuh"

struct Arguments : SecondCodes<Table::nested> {
  const uint32_t* codes;     // uint8 [rows, stages * stream_bytes]
  const uint16_t* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale;     // fp16 [rows, columns / group]
  const void* diagonal;      // fp16 [columns], or signs, bit 1 = negative [columns / 8]; not read without
  uint16_t* out;             // [rows, columns] of Plan::out
  int rows;
  int columns;
};

constexpr int chunk = 128, unit = Plan::unit, warps = Plan::threads / 32, tile_rows = 16;
constexpr int group = Plan::group ? Plan::group : chunk;
constexpr int unit_bytes = unit / Plan::vector_size * Plan::entry_bits / 8;
constexpr int second_unit_bytes = unit * Plan::second_bits / 8;
constexpr int mixed = Plan::block - 1;  // bits of a column
static_assert(4 * unit == chunk && group % chunk == 0 && Plan::block <= chunk, "a lane's rows have one scale");
static_assert(Plan::dtype == Dtype::FLOAT16, "what entries are");

// Codes and scales that a lane has of two rows.
struct Tile {
  Table::RowCodes codes[2][Plan::num_codebooks];
  uint32_t scale[2];

  __device__ void load(const Arguments& a, int first, int at, int lane) {
    const int64_t stream = (int64_t(a.columns / Plan::vector_size) * Plan::entry_bits + 7) / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = min(first + lane / 4 + 8 * half, a.rows - 1);
      const char* from = reinterpret_cast<const char*>(a.codes) + row * (Plan::num_codebooks * stream);
#pragma unroll
      for (int stage = 0; stage < Plan::num_codebooks; ++stage)
        codes[half][stage].template load_aligned<Plan::load_bytes>(from + stage * stream +
                                                                   (at * 4 + lane % 4) * unit_bytes);
      load_second(codes[half][0], a, row, at * 4 + lane % 4);
      scale[half] = __ldg(a.scale + (Plan::group ? int64_t(row) * (a.columns / group) + at * chunk / group : row));
    }
  }

  template <class RowCodes> __device__ static void load_second(RowCodes& codes, const Arguments& a, int row, int at) {
    if constexpr (Table::nested)
      codes.second.template load_aligned<Plan::second_load_bytes>(
          a.second_codes() + row * Table::second_stream(a.columns) + at * second_unit_bytes);
  }
};

// Bits 6, 5, 3, 0 of the column that k or n stands for.
__device__ inline int column_of_k(int k) { return (k & 1) | (k >> 3) << 3 | (k >> 1 & 3) << 5; }
__device__ inline int column_of_n(int n) { return (n & 1) | (n >> 1 & 1) << 3 | (n >> 2) << 5; }

// The matrix that mixes those bits: b[f][tile] are factors of mma, f = bits 4, 2, 1 of the column.
struct Matrix {
  uint32_t b[8][2][2];

  __device__ Matrix(const Arguments& a, int at, int lane) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int to = column_of_n(tile * 8 + lane / 4);
      uint32_t plain[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from = column_of_k(lane % 4 * 2 + 8 * half);
        plain[half] = entry(from, to) | entry(from + 1, to) << 16;
      }
      if constexpr (Plan::diagonal == Diagonal::HALVES) {
        // Bits 2 and 1 choose a word of 16 bytes, bit 0 its half.
        const uint16_t* first = static_cast<const uint16_t*>(a.diagonal) + at * chunk + (to & ~7);
#pragma unroll
        for (int f = 0; f < 8; f += 4) {
          uint32_t word[4];
          load_words<16>(first + f * 4, word);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t both = __byte_perm(word[i], 0, to & 1 ? 0x3232 : 0x1010);
#pragma unroll
            for (int half = 0; half < 2; ++half)
              b[f + i][tile][half] = multiply_pair<Plan::dtype>(plain[half], both);
          }
        }
      } else {
        uint32_t signs = 0;
        if constexpr (Plan::diagonal == Diagonal::SIGNS)
          signs = __ldg(static_cast<const uint32_t*>(a.diagonal) + at * 4 + to / 32) >> to % 32;
#pragma unroll
        for (int f = 0; f < 8; ++f) {
          const uint32_t flip = (signs >> ((f & 3) * 2 + (f & 4) * 4) & 1) * 0x80008000u;
#pragma unroll
          for (int half = 0; half < 2; ++half) b[f][tile][half] = plain[half] ^ flip;
        }
      }
    }
  }

  __device__ static uint32_t entry(int from, int to) {
    if ((from ^ to) & ~mixed) return 0;
    return 0x3c00 | (__popc(from & to & mixed) & 1) << 15;
  }
};

// Sums and differences over one bit of a lane's pairs of columns.
template <int Bit> __device__ inline void mix(uint32_t (&pair)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i)
    if (!(i & Bit)) {
      const uint32_t low = pair[i], high = pair[i | Bit];
      pair[i] = add_pair<Plan::dtype>(low, high);
      pair[i | Bit] = multiply_add<Plan::dtype>(high, 0xbc00bc00u, low);
    }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) dequantize_rotated(const Arguments a) {
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32;
  const Table table(a.codebook, shared, lane);
  const int across = a.columns / chunk, worker = blockIdx.x * warps + threadIdx.x / 32;
  const int at = worker % across, begin = worker / across, step = gridDim.x * warps / across;
  int row = begin < step ? begin * tile_rows : a.rows;
  Tile next;
  if (row < a.rows) next.load(a, row, at, lane);
  table.fill();
  const Matrix matrix(a, at, lane);
  __syncthreads();
  for (; row < a.rows; row += step * tile_rows) {
    uint32_t pair[2][16];  // columns 2 i, 2 i + 1 of the lane's 32
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t word[4];
        table.eight(next.codes[half], j, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) pair[half][4 * j + i] = word[i];
      }
      factor[half] = half_to_float(next.scale[half]) * table.factor * inverse_root(Plan::block);
    }
    if (row + step * tile_rows < a.rows) next.load(a, row + step * tile_rows, at, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (mixed & 2) mix<1>(pair[half]);
      if constexpr (mixed & 4) mix<2>(pair[half]);
      if constexpr (mixed & 16) mix<8>(pair[half]);
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float d[4][4] = {};
#pragma unroll
        for (int f = 0; f < 4; ++f) {
          const int i = 8 * upper + f;
          const uint32_t(&b)[2] = matrix.b[4 * upper + f][tile];
          mma<Plan::dtype>(d[f], pair[0][i], pair[1][i], pair[0][i + 4], pair[1][i + 4], b[0], b[1]);
        }
        const int column = at * chunk + tile * 64 + lane % 4 / 2 * 32 + upper * 16 + lane % 2 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int to = row + lane / 4 + 8 * half;
          uint32_t word[4];
#pragma unroll
          for (int f = 0; f < 4; ++f)
            word[f] = pack_pair<Plan::out>(d[f][2 * half] * factor[half], d[f][2 * half + 1] * factor[half]);
          if (to < a.rows) store_words<16>(a.out + int64_t(to) * a.columns + column, word);
        }
      }
    }
  }
}
