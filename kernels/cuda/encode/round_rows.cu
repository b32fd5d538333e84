// SPDX-License-Identifier: Apache-2.0
// Codes of rotated rows, vector by vector inside of blocks of columns; later columns get what errors pass on:
//
//     e_i = v_i - s q_i                q_i: the entry nearest to v_i / s
//     v_j += feedback[j, i] e_i        for all columns j behind the vector
//
// Specification: hf_vq/ops/reference/round_weight.py. The lanes of a row share the entries of a search (of one codebook;
// E8P and two codebooks are searched by every lane), then the columns:
//
//     row 0 | 0 1 2 .. 7 | 0 1 2 .. 7 | ..       v in shared memory; the number is the lane that updates a column
//     row 1 | 0 1 2 .. 7 | 0 1 2 .. 7 | ..       lanes of one warp read the same feedback for all their rows
//
// Bytes: rows and codes once; feedback from L1, which it fits in for blocks of 128 columns.
// Bottleneck: instructions, as of encode.cu; the vectors of a row follow each other.
#include "encode/nearest.cuh"
#include "encode/nearest_e8p.cuh"

struct Arguments {
  const float* rows;         // [n, columns]
  const float* scale;        // [n, columns / group]
  const uint16_t* codebook;  // fp16 [stages, entries, x]; E8P [stages, 257, 8]
  const float* feedback;     // [columns / size, size, size]: row i is what column i passes on
  uint32_t* codes;           // [n, columns / x, stages]
  int64_t n;
  int columns;
  int group;
};

constexpr int size = Plan::size, lanes = Plan::lanes, rows_of_tile = Plan::threads / lanes;
constexpr int pitch = size + lanes;  // rows of a warp are in different banks

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) round_rows(const Arguments a) {
  extern __shared__ uint4 shared[];
  const Book<Plan::scope> book(a.codebook, shared);
  float* v = reinterpret_cast<float*>(shared) + Book<Plan::scope>::bytes / 4 + threadIdx.x / lanes * pitch;
  const int lane = threadIdx.x % lanes;
  const int64_t tiles = (a.n + rows_of_tile - 1) / rows_of_tile;
  for (int64_t tile = blockIdx.x; tile < tiles * (a.columns / size); tile += gridDim.x) {
    const int64_t row = tile % tiles * rows_of_tile + threadIdx.x / lanes;
    const bool exists = row < a.n;
    const int64_t read = exists ? row : a.n - 1;  // no lane may be absent from the shuffles of a search
    const int begin = int(tile / tiles) * size;
    const float scale[1] = {a.scale[read * (a.columns / a.group) + begin / a.group]};
    for (int j = lane; j < size; j += lanes) v[j] = a.rows[read * a.columns + begin + j];
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < size; first += x) {
      float own[1][x], chosen[1][x];
      uint32_t code[1][Plan::num_codebooks];
#pragma unroll
      for (int c = 0; c < x; ++c) own[0][c] = v[first + c];
      book.template nearest<lanes>(own, scale, code, chosen);
      if (exists && lane == 0) {
        uint32_t* to = a.codes + (row * a.columns + begin + first) / x * Plan::num_codebooks;
#pragma unroll
        for (int stage = 0; stage < Plan::num_codebooks; ++stage) to[stage] = code[0][stage];
      }
#pragma unroll
      for (int c = 0; c < x; ++c) own[0][c] -= scale[0] * chosen[0][c];
      const float* passed_on = a.feedback + (begin + first) * int64_t(size);
      for (int j = first + x + lane; j < size; j += lanes) {
        float sum = v[j];
#pragma unroll
        for (int c = 0; c < x; ++c) sum = fmaf(__ldg(passed_on + c * size + j), own[0][c], sum);
        v[j] = sum;
      }
      __syncwarp();
    }
  }
}
