// SPDX-License-Identifier: Apache-2.0
// Merge of attention over disjoint parts of the tokens, each with its own softmax (log-sum-exp merge):
//
//     out[r, :] = R^-1( sum_coded w_p o_p[r, :] ) + sum_others w_p o_p[r, :]      w_p = exp(lse_p[r] - lse[r])
//
// with lse = log sum_p exp(lse_p), including the sink logit of models that have one (s_aux). Rows r are the queries of
// all heads. R^-1 is a Hadamard matrix per Plan::block numbers, for parts that are codes. A query without any visible
// token gets zeros.
//
// A lane has 8 numbers of a row; a warp has as many rows as fit:
//
//     dim 128    lanes 0 .. 15  row 0    lanes 16 .. 31  row 1      bits 0, 1, 2 of a number: registers, others: shuffles
//
// Bytes: all parts once, the output once. Bottleneck: DRAM. Sums are float32.
#include "plan.cuh"
#include "primitives/numbers.cuh"

constexpr int most = 16;

struct Arguments {
  const char* out[most];   // of each part [B, Hq, Q, dim] of Plan::dtype
  const float* lse[most];  // [B, Hq, Q]
  const float* s_aux;      // [Hq], or null
  char* result;            // [B, Q, Hq, dim] of Plan::dtype
  int coded;               // the first parts
  int parts;
  int heads;
  int queries;
  int rows;  // B Hq Q
};

constexpr int dim = Plan::dim, unit = 8, lanes = dim / unit, warp_rows = 32 / lanes;
static_assert(dim % unit == 0 && lanes <= 32 && Plan::block <= dim, "a row fits a warp");
static_assert(Plan::block == 1 || Plan::block >= unit, "a block is of whole lanes");

__device__ inline void add(float (&sum)[unit], const Arguments& a, int part, int row, int at, float lse) {
  float value[unit];
  load_floats<Plan::dtype>(a.out[part] + (int64_t(row) * dim + at) * size_of<Plan::dtype>, value);
  const float weight = __expf(__ldg(a.lse[part] + row) - lse);
  if (weight == 0) return;
#pragma unroll
  for (int i = 0; i < unit; ++i) sum[i] += weight * value[i];
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) softmax_merge(const Arguments a) {
  const int lane = threadIdx.x % 32, warp = blockIdx.x * (Plan::threads / 32) + threadIdx.x / 32;
  const int own = warp * warp_rows + lane / lanes, at = lane % lanes * unit;
  const bool exists = lane < warp_rows * lanes && own < a.rows;
  const int row = min(own, a.rows - 1), query = row % a.queries, head = row / a.queries % a.heads;

  float highest = -3.4028234663852886e38f, sum = 0;
  if (a.s_aux) highest = fmaxf(highest, __ldg(a.s_aux + head));
  for (int part = 0; part < a.parts; ++part) highest = fmaxf(highest, __ldg(a.lse[part] + row));
  if (a.s_aux) sum = __expf(__ldg(a.s_aux + head) - highest);
  for (int part = 0; part < a.parts; ++part) sum += __expf(__ldg(a.lse[part] + row) - highest);
  const float lse = sum > 0 ? highest + __logf(sum) : highest;

  float value[unit] = {};
  for (int part = 0; part < a.coded; ++part) add(value, a, part, row, at, lse);
  if constexpr (Plan::block > 1) {
#pragma unroll
    for (int half = 1; half < unit; half *= 2)
#pragma unroll
      for (int i = 0; i < unit; ++i)
        if (!(i & half)) {
          const float low = value[i], high = value[i + half];
          value[i] = low + high, value[i + half] = low - high;
        }
#pragma unroll
    for (int half = 1; half < Plan::block / unit; half *= 2) {
      const float sign = lane % lanes & half ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < unit; ++i) value[i] = sign * value[i] + __shfl_xor_sync(0xffffffffu, value[i], half);
    }
#pragma unroll
    for (int i = 0; i < unit; ++i) value[i] *= inverse_root(Plan::block);
  }
  for (int part = a.coded; part < a.parts; ++part) add(value, a, part, row, at, lse);
  if (!exists) return;
#pragma unroll
  for (float& each : value) each = in_range<Plan::dtype>(each);
  const int64_t to = (int64_t(row / (a.heads * a.queries)) * a.queries + query) * a.heads + head;
  store_floats<Plan::dtype>(a.result + (to * dim + at) * size_of<Plan::dtype>, value);
}
