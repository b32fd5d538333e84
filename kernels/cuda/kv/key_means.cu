// SPDX-License-Identifier: Apache-2.0
// The means of keys [batch, heads, tokens, dim], and which pairs of channels turn (hf_vq/ops/rotary_mean.py:
// `KeyMoments.means`, of pairs as they show).
//
//     blocks of a head     sums over some of its tokens: keys, their squares, keys turned back in pairs of either layout
//     its last block       adds them, in order, and decides what turns in pairs of either layout: a warp for each
//     the last of all      the layout that leaves less to the codes, and which rows of the batch turn at all
//
// Bytes: keys once. Bottleneck: instructions, two of the special function unit per pair and token. Sums are float32.
#include "kv/last_block.cuh"
#include "kv/turning_pairs.cuh"
#include "plan.cuh"
#include "primitives/numbers.cuh"

struct Arguments {
  const char* keys;           // of Plan::dtype
  const float* inv_freq;      // [pairs] radians per token
  float* sums;                // [rows, parts, 4, dim]
  float* decided;             // [rows, 2, 2, dim]: mean and rotary mean in pairs of either layout
  float* found;               // [rows, 2, 3]: see Found
  int* counters;              // zeros [rows + 1]: blocks that arrived, of a head and of all
  float* mean;                // [rows, dim]
  float* turning;             // [rows, dim]
  int* shown;                 // [2]: pairs are channels (2 p, 2 p + 1), not (p, p + pairs); some pair turns
  int64_t batch, head, token;  // bytes from one to the next
  int64_t position;            // of the first token
  int heads, rows;             // rows: batch * heads
  int dim, pairs, tokens;
  int parts, tokens_of_part;  // blocks of a head
  int layout;                 // 0: (p, p + pairs), 1: (2 p, 2 p + 1), 2: as they show
  int together;               // pairs of a product of tensor cores
  float strength;
};

constexpr int warps = Plan::threads / 32, most = 4;  // pairs of a lane: up to 256 channels
constexpr int fewest = 16;                           // tokens that tell one layout from the other
enum { standing, squares, turned };                  // sums; of two layouts

__device__ inline int channel_of(int pairs, int pair, int neighbours, int second) {
  return neighbours ? 2 * pair + second : pair + second * pairs;
}

__device__ inline float number(const char* row, int channel) {
  float value[1];
  load_floats<Plan::dtype>(row + channel * size_of<Plan::dtype>, value);
  return value[0];
}

// Sums over the tokens of a block. A thread has a pair (of both layouts: their frequency is the same), or a channel that
// never turns, of every few tokens.
__device__ inline void add_tokens(const Arguments& a, int row, int part) {
  __shared__ float shared[8][Plan::threads];
  const int units = a.dim - a.pairs, groups = Plan::threads / units;
  const int unit = threadIdx.x % units, group = threadIdx.x / units;
  const bool pair = unit < a.pairs;
  const char* keys = a.keys + row / a.heads * a.batch + row % a.heads * a.head;
  const uint64_t turns = pair ? turns_of(a.inv_freq[unit]) : 0;
  const int begin = part * a.tokens_of_part, end = min(begin + a.tokens_of_part, a.tokens);
  float sum[8] = {};
  for (int token = begin + group; group < groups && token < end; token += groups) {
    const char* key = keys + token * a.token;
    if (pair) {
      float cosine, sine;
      cos_sin(2 * (a.position + token), turns, cosine, sine);
#pragma unroll
      for (int neighbours = 0; neighbours < 2; ++neighbours) {
        if (neighbours && a.layout == 0) continue;
        const float x = number(key, channel_of(a.pairs, unit, neighbours, 0));
        const float y = number(key, channel_of(a.pairs, unit, neighbours, 1));
        sum[4 + 2 * neighbours] += in_mean(x * cosine + y * sine);
        sum[5 + 2 * neighbours] += in_mean(y * cosine - x * sine);
        if (neighbours) continue;
        sum[0] += in_mean(x), sum[1] += in_mean(y), sum[2] += in_mean(x * x), sum[3] += in_mean(y * y);
      }
    } else {
      const float x = number(key, a.pairs + unit);
      sum[0] += in_mean(x), sum[2] += in_mean(x * x);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) shared[i][threadIdx.x] = sum[i];
  __syncthreads();
  if (threadIdx.x >= units) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    sum[i] = 0.0f;
    for (int other = 0; other < groups; ++other) sum[i] += shared[i][other * units + unit];
  }
  float* to = a.sums + (int64_t(row) * a.parts + part) * 4 * a.dim;
  if (!pair) {
    const int channel = a.pairs + unit;
    to[standing * a.dim + channel] = sum[0], to[squares * a.dim + channel] = sum[2];
    to[turned * a.dim + channel] = to[(turned + 1) * a.dim + channel] = 0.0f;
    return;
  }
#pragma unroll
  for (int second = 0; second < 2; ++second) {
    const int channel = channel_of(a.pairs, unit, 0, second);
    to[standing * a.dim + channel] = sum[second], to[squares * a.dim + channel] = sum[2 + second];
#pragma unroll
    for (int neighbours = 0; neighbours < 2; ++neighbours)
      to[(turned + neighbours) * a.dim + channel_of(a.pairs, unit, neighbours, second)] = sum[4 + 2 * neighbours + second];
  }
}

// What all blocks of a head found, into the place of the first.
__device__ inline void add_parts(const Arguments& a, int row) {
  float* sums = a.sums + int64_t(row) * a.parts * 4 * a.dim;
  for (int i = threadIdx.x; i < 4 * a.dim; i += Plan::threads) {
    float sum = 0.0f;
    for (int part = 0; part < a.parts; ++part) sum += __ldcg(sums + int64_t(part) * 4 * a.dim + i);
    sums[i] = sum;
  }
}

// The moments of a head, for a warp.
struct Moments {
  const Arguments& a;
  const float* sums;

  __device__ Moments(const Arguments& a, int row) : a(a), sums(a.sums + int64_t(row) * a.parts * 4 * a.dim) {}
  __device__ float at(int kind, int channel) const { return __ldcg(sums + kind * a.dim + channel) / a.tokens; }

  __device__ void find_energies(int neighbours, Energies<most>& of) const {
#pragma unroll
    for (int i = 0; i < most; ++i) {
      const int pair = 32 * i + threadIdx.x % 32;
      of.turned[i] = of.stood[i] = 0.0f, of.tell[i] = false;
      if (pair >= a.pairs) continue;
      of.tell[i] = a.inv_freq[pair] * a.tokens >= 1.0f;
      for (int second = 0; second < 2; ++second) {
        const int channel = channel_of(a.pairs, pair, neighbours, second);
        const float x = at(turned + neighbours, channel), y = at(standing, channel);
        of.turned[i] += x * x, of.stood[i] += y * y;
      }
    }
  }

  // Mean squared norm of what is left to the codes.
  __device__ float left(const Energies<most>& of) const {
    float all = 0.0f, best = 0.0f;
    for (int channel = threadIdx.x % 32; channel < a.dim; channel += 32) {
      all += at(squares, channel);
      const float x = channel < 2 * a.pairs ? 0.0f : at(standing, channel);
      best += x * x;
    }
#pragma unroll
    for (int i = 0; i < most; ++i) best += fmaxf(of.turned[i], of.stood[i]);
    return fmaxf(of_warp(all) - of_warp(best), 0.0f);
  }
};

// What a head says of pairs of a layout.
struct Found {
  float left;    // mean squared norm of what is left to the codes
  float strong;  // 1: its rotary mean has `strength` times that
  float some;    // 1: some pair turns, if the row of the batch does
};
static_assert(sizeof(Found) == 12, "three numbers");

// What a pair that stands gives the codes, at most, in units of its mean's squared norm.
__device__ inline float given_by_standing(float inv_freq, int tokens) {
  const float half = __sinf(fminf(inv_freq * far, 3.14159274f) / 2);  // 2 - 2 cos of the angle
  return inv_freq * tokens >= 1.0f ? 1.0f : 4 * half * half;
}

// Decides for a head, by the first two warps, and writes the mean of a row that stands.
__device__ inline void decide(const Arguments& a, int row) {
  const int neighbours = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Moments moments(a, row);
  for (int channel = threadIdx.x; channel < a.dim; channel += Plan::threads)
    a.mean[row * a.dim + channel] = moments.at(standing, channel), a.turning[row * a.dim + channel] = 0.0f;
  if (neighbours >= 2) return;
  Energies<most> energies;
  moments.find_energies(neighbours, energies);
  const float left = moments.left(energies);
  bool turns[most];
  const float held = find_turning(energies, a.pairs, left, a.tokens, turns);
  if (a.together > 1) {
    float given[most];
#pragma unroll
    for (int i = 0; i < most; ++i)
      given[i] = turns[i] ? energies.turned[i] * given_by_standing(a.inv_freq[32 * i + lane], a.tokens) : 0.0f;
    leave_strongest(given, a.pairs, left, a.together, turns);
  }
  float* const mean = a.decided + (int64_t(row) * 2 + neighbours) * 2 * a.dim;
  float* const turning = mean + a.dim;
  bool some = false;
#pragma unroll
  for (int i = 0; i < most; ++i) {
    const int pair = 32 * i + lane;
    if (pair >= a.pairs) continue;
    some |= turns[i];
    for (int second = 0; second < 2; ++second) {
      const int channel = channel_of(a.pairs, pair, neighbours, second);
      mean[channel] = turns[i] ? 0.0f : moments.at(standing, channel);
      turning[channel] = turns[i] ? moments.at(turned + neighbours, channel) : 0.0f;
    }
  }
  for (int channel = 2 * a.pairs + lane; channel < a.dim; channel += 32)
    mean[channel] = moments.at(standing, channel), turning[channel] = 0.0f;
  some = __any_sync(0xffffffff, some);
  if (lane == 0)
    reinterpret_cast<Found*>(a.found)[row * 2 + neighbours] = {left, held >= a.strength * left ? 1.0f : 0.0f,
                                                               some ? 1.0f : 0.0f};
}

// Number `part` of what a head says.
__device__ inline float said(const Arguments& a, int row, int neighbours, int part) {
  return __ldcg(a.found + (row * 2 + neighbours) * 3 + part);
}

// Whether pairs are channels (2 p, 2 p + 1), for all threads.
__device__ inline int neighbours_show(const Arguments& a) {
  __shared__ float lefts[2][warps];
  float left[2] = {};
  for (int row = threadIdx.x; row < a.rows; row += Plan::threads) left[0] += said(a, row, 0, 0), left[1] += said(a, row, 1, 0);
#pragma unroll
  for (int neighbours = 0; neighbours < 2; ++neighbours) {
    left[neighbours] = of_warp(left[neighbours]);
    if (threadIdx.x % 32 == 0) lefts[neighbours][threadIdx.x / 32] = left[neighbours];
  }
  __syncthreads();
  left[0] = left[1] = 0.0f;
  for (int other = 0; other < warps; ++other) left[0] += lefts[0][other], left[1] += lefts[1][other];
  return left[1] < different * left[0];
}

// Lets the rows of the batch turn that have a head with a strong rotary mean; a warp for each.
__device__ inline void publish(const Arguments& a) {
  const int neighbours = a.layout == 2 && a.tokens >= fewest ? neighbours_show(a) : a.layout == 1;
  bool some = false;
  for (int batch = threadIdx.x / 32; batch < a.rows / a.heads; batch += warps) {
    bool strong = false;
    for (int head = threadIdx.x % 32; head < a.heads; head += 32)
      strong |= said(a, batch * a.heads + head, neighbours, 1) != 0.0f;
    if (!__any_sync(0xffffffff, strong)) continue;
    for (int row = batch * a.heads; row < (batch + 1) * a.heads; ++row) {
      if (said(a, row, neighbours, 2) == 0.0f) continue;
      some = true;
      const float* const decided = a.decided + (int64_t(row) * 2 + neighbours) * 2 * a.dim;
      for (int channel = threadIdx.x % 32; channel < a.dim; channel += 32) {
        a.mean[row * a.dim + channel] = __ldcg(decided + channel);
        a.turning[row * a.dim + channel] = __ldcg(decided + a.dim + channel);
      }
    }
  }
  some = __syncthreads_or(some);
  if (threadIdx.x == 0) a.shown[0] = neighbours, a.shown[1] = some;
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) key_means(const Arguments a) {
  const int row = blockIdx.x / a.parts;
  add_tokens(a, row, blockIdx.x % a.parts);
  if (!arrives_last(a.counters + row, a.parts)) return;
  add_parts(a, row);
  __syncthreads();
  decide(a, row);
  if (arrives_last(a.counters + a.rows, a.rows)) publish(a);
}
