// SPDX-License-Identifier: Apache-2.0
// By what each channel of keys [batch, heads, tokens, dim] is multiplied before they are coded, given the queries
// [batch, heads * groups, tokens, dim] (hf_vq/transforms/key_smoothing.py: `key_smoothing`).
//
//     blocks of a head     sums of squares over some of its tokens, of keys and of queries
//     its last block       adds them, in order; a thread for each channel
//
// Bytes: queries and keys once. Bottleneck: memory. Sums are float32.
#include "kv/last_block.cuh"
#include "plan.cuh"
#include "primitives/numbers.cuh"

struct Arguments {
  const char* queries;   // of Plan::dtype, rows of multiples of 16 bytes
  const char* keys;
  const float* mean;     // [rows, dim]: of keys, not coded
  const float* turning;  // [rows, dim]: another mean; or null
  const int* shown;      // whether pairs are channels (2 p, 2 p + 1), not (p, p + pairs); null: `interleaved`
  float* sums;           // [rows, parts, 2, dim]
  int* counters;         // zeros [rows]
  float* factors;        // [rows, dim]
  int64_t query_batch, query_head, query_token;  // bytes from one to the next
  int64_t key_batch, key_head, key_token;
  int heads, groups, dim, pairs, tokens;
  int parts, tokens_of_part;  // blocks of a head
  int interleaved;
};

// WORTH, MOST and _LEAST of hf_vq/transforms/key_smoothing.py
constexpr float worth = 1.1f, highest = 16.0f, least = 0.0001f;
constexpr float largest = 3.4028234663852886e38f;
constexpr int unit = 8, warps = Plan::threads / 32;  // channels of a thread

__device__ inline void add_squares(const char* from, float (&sum)[unit]) {
  float x[unit];
  load_floats<Plan::dtype>(from, x);
#pragma unroll
  for (int i = 0; i < unit; ++i) sum[i] += x[i] * x[i];
}

__device__ inline void add_tokens(const Arguments& a, int row, int part) {
  __shared__ float shared[2][Plan::threads * unit];
  const int lanes = a.dim / unit, teams = Plan::threads / lanes;
  const int lane = threadIdx.x % lanes, team = threadIdx.x / lanes;
  const int batch = row / a.heads, head = row % a.heads, from = lane * unit * size_of<Plan::dtype>;
  const char* keys = a.keys + batch * a.key_batch + head * a.key_head + from;
  const char* queries = a.queries + batch * a.query_batch + int64_t(head) * a.groups * a.query_head + from;
  const int begin = part * a.tokens_of_part, end = min(begin + a.tokens_of_part, a.tokens);
  float sum[2][unit] = {};
  for (int token = begin + team; team < teams && token < end; token += teams) {
    add_squares(keys + token * a.key_token, sum[1]);
#pragma unroll 4
    for (int group = 0; group < a.groups; ++group)
      add_squares(queries + token * a.query_token + group * a.query_head, sum[0]);
  }
  if (team < teams)
#pragma unroll
    for (int i = 0; i < unit; ++i) {
      const int at = team * a.dim + lane * unit + i;
      shared[0][at] = sum[0][i], shared[1][at] = sum[1][i];
    }
  __syncthreads();
  if (threadIdx.x >= a.dim) return;
  float* to = a.sums + (int64_t(row) * a.parts + part) * 2 * a.dim;
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {
    float all = 0.0f;
    for (int other = 0; other < teams; ++other) all += shared[kind][other * a.dim + threadIdx.x];
    to[kind * a.dim + threadIdx.x] = all;
  }
}

__device__ inline float of_block(float x) {
  __shared__ float shared[warps];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.0f;
#pragma unroll
  for (int i = 0; i < warps; ++i) x += shared[i];
  __syncthreads();
  return x;
}

// A thread for each channel; threads beyond the last hold 0.
__device__ inline void decide(const Arguments& a, int row) {
  __shared__ float shared[3][Plan::threads];
  const int channel = threadIdx.x, at = row * a.dim + channel;
  const bool exists = channel < a.dim;
  float of[3] = {};  // mean squares: of queries, of keys, of the keys' means
  if (exists) {
    const float* sums = a.sums + int64_t(row) * a.parts * 2 * a.dim + channel;
#pragma unroll 4
    for (int part = 0; part < a.parts; ++part)
      of[0] += __ldcg(sums + part * 2 * a.dim), of[1] += __ldcg(sums + (part * 2 + 1) * a.dim);
    of[0] /= float(a.tokens) * a.groups, of[1] /= a.tokens;
    const float x = a.mean[at], y = a.turning ? a.turning[at] : 0.0f;
    of[2] = x * x + y * y;
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) shared[i][channel] = of[i];
  __syncthreads();
  if (exists) {  // later tokens turn one channel of a pair into the other: they share their factor
    const bool neighbours = a.shown ? *a.shown : a.interleaved;
    const int half = channel < a.pairs ? channel + a.pairs : channel - a.pairs;
    const int partner = channel >= 2 * a.pairs ? channel : neighbours ? channel ^ 1 : half;
#pragma unroll
    for (int i = 0; i < 3; ++i) of[i] += shared[i][partner];
  }
  float both[2] = {of[0], fmaxf(of[1] - of[2], least * of[1])};
  const float all[2] = {of_block(both[0]), of_block(both[1])};
  if (exists)
#pragma unroll
    for (int i = 0; i < 2; ++i) both[i] = fmaxf(both[i] / (all[i] / a.dim), least);
  const float quarter = exists ? (logf(both[0]) - logf(both[1])) / 4 : 0.0f;
  const float factor = expf(quarter - of_block(quarter) / a.dim);
  const float before = of_block(both[0]) * of_block(both[1]), root = of_block(sqrtf(both[0] * both[1]));
  const bool numbers = all[0] > 0.0f && all[0] <= largest && all[1] > 0.0f && all[1] <= largest;  // NaN is not
  const bool pays = numbers && before >= worth * root * root;
  if (exists) a.factors[at] = pays ? fminf(fmaxf(factor, 1 / highest), highest) : 1.0f;
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) key_smoothing(const Arguments a) {
  const int row = blockIdx.x / a.parts;
  add_tokens(a, row, blockIdx.x % a.parts);
  if (arrives_last(a.counters + row, a.parts)) decide(a, row);
}
