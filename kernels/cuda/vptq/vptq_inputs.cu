// SPDX-License-Identifier: Apache-2.0
// Inputs of vptq.cu. With W[:, p[c]] = S[:, c] s[p[c]] + b[p[c]], only S depends on the codes:
//
//     y = S x' + <b, x>        x'[c] = s[p[c]] x[p[c]]
//
// A block owns one token. x' is rounded to the dtype of the codebooks; for float16 it is first scaled by a power of two
// that brings its largest number to 2^9, so that neither large nor small columns leave the range. x' is in fragment
// order: for column c of a group, with `unit` columns per lane,
//
//     chunk = c / (32 unit)   lane l = c / unit % 32   step = c % unit   half = l / 16   k = l % 16
//     x' -> [groups][chunks][unit][2 halves][32 lanes (token % 8, k % 8 / 2)][k / 8][token / 8][k % 2]
//
// The padding columns of the last chunk are zeros, and so is the place of token m + 8 if that token does not exist.
//
// Bytes: x, scales and offsets once, x' once. Bottleneck: latency.
#include "plan.cuh"
#include "primitives/numbers.cuh"
#include "primitives/pdl.cuh"

struct Arguments {
  const char* x;           // [tokens, columns of the matrix] of Plan::source
  const uint16_t* order;   // p [columns of the matrix]; not read without one
  const char* scale;       // s [columns of the matrix] of Plan::dtype; not read without norm
  const char* offset;      // b, the same
  uint16_t* arranged;      // x' of Plan::dtype
  float* outlier_x;        // [tokens, outliers]: x' of the first columns of S, times the power of two
  float* factors;          // [tokens, 2]: what undoes the power of two, and <b, x>
  int in;                  // columns of the matrix
  int outliers;
  int columns;             // of a group
  int groups;
};

constexpr int warps = Plan::threads / 32, chunk = 32 * Plan::unit;
constexpr int words = Plan::wide ? 4 : 2;  // of a lane in a fragment

template <Dtype D> __device__ inline float number(const char* from, int i) {
  float value[1];
  load_floats<D>(from + int64_t(i) * size_of<D>, value);
  return value[0];
}

__device__ inline float power_of_two(int exponent) { return __uint_as_float(uint32_t(127 + exponent) << 23); }

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) vptq_inputs(const Arguments a) {
  __shared__ float most_of[warps], sum_of[warps];
  let_next_grid_begin();
  const int token = blockIdx.x;
  const char* x = a.x + int64_t(token) * a.in * size_of<Plan::source>;
  float most = 0, sum = 0;
  for (int j = threadIdx.x; j < a.in; j += Plan::threads) {
    float value = number<Plan::source>(x, j);
    if constexpr (Plan::norm) {
      sum += value * number<Plan::dtype>(a.offset, j);
      value *= number<Plan::dtype>(a.scale, j);
    }
    most = fmaxf(most, fabsf(value));
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, half));
    sum += __shfl_xor_sync(0xffffffffu, sum, half);
  }
  if (threadIdx.x % 32 == 0) most_of[threadIdx.x / 32] = most, sum_of[threadIdx.x / 32] = sum;
  __syncthreads();
  most = sum = 0;
  for (int warp = 0; warp < warps; ++warp) most = fmaxf(most, most_of[warp]), sum += sum_of[warp];
  int up = 0;
  if constexpr (Plan::dtype == Dtype::FLOAT16) up = most > 0 ? 9 - max(int(__float_as_uint(most) >> 23) - 127, -100) : 0;
  const float factor = power_of_two(up);
  if (threadIdx.x == 0) a.factors[2 * token] = power_of_two(-up), a.factors[2 * token + 1] = sum;

  const int chunks = (a.columns + chunk - 1) / chunk, padded = chunks * chunk;
  for (int at = int(threadIdx.x) - a.outliers; at < a.groups * padded; at += Plan::threads) {
    const int group = at < 0 ? 0 : at / padded, c = at < 0 ? 0 : at % padded;
    float value = 0;
    if (c < a.columns) {
      int j = at < 0 ? at + a.outliers : a.outliers + group * a.columns + c;
      if constexpr (Plan::order) j = min(int(__ldg(a.order + j)), a.in - 1);
      value = number<Plan::source>(x, j) * factor;
      if constexpr (Plan::norm) value *= number<Plan::dtype>(a.scale, j);
    }
    if (at < 0) {
      a.outlier_x[token * a.outliers + at + a.outliers] = value;
      continue;
    }
    const int lane = c / Plan::unit % 32, k = lane % 16;
    int64_t to = ((int64_t(group) * chunks + c / chunk) * Plan::unit + c % Plan::unit) * 2 + lane / 16;
    to = (to * 32 + token % 8 * 4 + k % 8 / 2) * words + k / 8 * (words / 2) + token / 8;
    a.arranged[to * 2 + k % 2] = uint16_t(pack_pair<Plan::dtype>(value, 0.0f));
    if (Plan::wide && token < 8 && token + 8 >= int(gridDim.x)) a.arranged[(to + 1) * 2 + k % 2] = 0;
  }
}
