// SPDX-License-Identifier: Apache-2.0
// Codes to a dense matrix, still rotated:
//
//     out[o, :] = scale[o, g] * concat_j( sum_z codebook[z][ code[o, j, z] ] )
//
// Tile of a block: a panel of Plan::panel_rows rows of one codebook tile, or of the whole width without tiles. The block
// loads the codebooks of the panel once. A thread decodes units of Plan::unit weights; adjacent threads have adjacent
// units, so that a warp stores contiguous memory. A thread has codes of Plan::pipeline_depth units in flight.
//
//     block = panel   +---------------------------+
//                     | t0 t1 t2 t3 ... t255 t0 ..|  unit of thread t: 8 weights of fp16 = one store of 16 bytes
//     panel_rows      | ..                        |
//                     +---------------------------+
//
// Bytes: the output, its codes and scales once, the codebooks once per block (from L2).
// Bottleneck: writing the output; shared memory is close if a unit has many codes. Sums are float32 in the order of the
// reference: a float32 output is bitwise equal to it.
#include "linear/codebook.cuh"
#include "plan.cuh"
#include "primitives/codes.cuh"

struct Arguments {
  const uint32_t* codes;     // uint8 [.., stages * stream_bytes], then zeros up to a multiple of 4 bytes
  const char* codebook;      // fp16 or int8 [stages, entries, x]; per tile fp16 [tile rows, columns, entries, x]
  const uint16_t* scale;     // fp16 [.., columns / group]
  void* out;                 // [rows, columns] of Plan::out
  int64_t first_row;         // of the stored matrix; a multiple of panel_rows
  int64_t rows;
  int columns;
};

constexpr int x = Plan::vector_size, unit = Plan::unit;
constexpr int group = Plan::group ? Plan::group : 1;
constexpr bool tiled = Plan::scope == Scope::TILE;

// Neighbouring weights of one row.
struct Unit {
  Codes<Plan::entry_bits, unit / x> codes[Plan::num_codebooks];
  uint16_t scale;

  __device__ void load(const Arguments& a, int64_t row, int column) {
    const int vectors = a.columns / x;
    const int64_t stream_bits = (int64_t(vectors) * Plan::entry_bits + 7) / 8 * 8;
    const int64_t at = int64_t(column / x) * Plan::entry_bits;
#pragma unroll
    for (int stage = 0; stage < Plan::num_codebooks; ++stage)
      codes[stage].load(a.codes, (row * Plan::num_codebooks + stage) * stream_bits + at);
    scale = __ldg(a.scale + (Plan::group ? row * (a.columns / group) + column / group : row));
  }

  __device__ void store(const Codebook& codebook, void* out) const {
    float weight[unit];
    const float factor = half_to_float(scale);
#pragma unroll
    for (int j = 0; j < unit / x; ++j) {
      float value[x] = {};
#pragma unroll
      for (int stage = 0; stage < Plan::num_codebooks; ++stage) codebook.add(stage, codes[stage][j], value);
#pragma unroll
      for (int c = 0; c < x; ++c) weight[j * x + c] = value[c] * factor;
    }
    store_floats<Plan::out>(out, weight);
  }
};

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) dequantize(const Arguments a) {
  extern __shared__ __align__(16) char shared[];
  const int tile_columns = tiled ? Plan::tile_columns : a.columns;
  const int tiles_across = (a.columns + tile_columns - 1) / tile_columns;
  const int tile_column = blockIdx.x % tiles_across;
  const int64_t panel = int64_t(blockIdx.x / tiles_across) * Plan::panel_rows;  // its first row in `out`
  const int64_t tile = tiled ? (a.first_row + panel) / Plan::tile_rows * tiles_across + tile_column : 0;
  const Codebook codebook(a.codebook + tile * Codebook::stage_bytes, shared);

  const int rows = int(min(int64_t(Plan::panel_rows), a.rows - panel));
  const int left = tile_column * tile_columns, units = (min(left + tile_columns, a.columns) - left) / unit;
  // Thread t begins at unit t of the panel and goes on by the number of threads, without a division for each.
  const int down = Plan::threads / units, across = Plan::threads % units;
  int row = threadIdx.x / units, at = threadIdx.x % units;
  while (row < rows) {
    Unit next[Plan::pipeline_depth];
    int64_t to[Plan::pipeline_depth];
#pragma unroll
    for (int step = 0; step < Plan::pipeline_depth; ++step) {
      to[step] = -1;
      if (row < rows) {
        const int column = left + at * unit;
        next[step].load(a, a.first_row + panel + row, column);
        to[step] = (panel + row) * a.columns + column;
      }
      row += down, at += across;
      if (at >= units) at -= units, ++row;
    }
#pragma unroll
    for (int step = 0; step < Plan::pipeline_depth; ++step)
      if (to[step] >= 0) next[step].store(codebook, static_cast<char*>(a.out) + to[step] * size_of<Plan::out>);
  }
}
