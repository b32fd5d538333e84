// SPDX-License-Identifier: Apache-2.0
// O = R^-1 sum_w sum_w O_w / total: reduction of the warps of a block, then of the blocks of a KV head.
//
//     warps of a block     add in shared memory, [warps][tiles][words][32 lanes] float4, those of a warp 16 bytes further
//                          into the banks than those of the warp before: the lanes of an item read different banks
//     blocks of a group    write partial results to global memory; the last block to arrive adds them in block order:
//                          the result does not depend on timing
//
// The sum of rotated values is rotated back once, when the result is written.
#pragma once
#include "kv/attention/attention_floats.cuh"

constexpr int warps = Plan::threads / 32;
constexpr int fragments = Plan::query_tiles * value_words * 32;  // float4 of a warp, or of a block
constexpr int pairs_of_block = columns_of_block / 2;
// Lanes that add up an item together: as many as leave one item for each, of up to four queries in 128 channels; and
// whole warps have items, since they exchange numbers.
constexpr int sharers = warps >= 16 || (warps >= 8 && value_words % 2) ? 4 : warps >= 8 ? 2 : 1;
static_assert(warps % sharers == 0, "lanes that share an item have as many warps each");
static_assert(sharers == 1 || value_words * 8 * sharers % 32 == 0, "whole warps have items");

// Sums of two columns, from places that have them, by the `sharers` lanes of an item: m, the same in all of them, and
// totals and sums of what each has seen.
struct Merged {
  float most[2] = {lowest, lowest}, total[2] = {};
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  // `N` places for each lane. One that has nothing has m = lowest and, as sums, zeros.
  template <int N> __device__ void add(const float4 (&of)[N], const float4 (&part)[N]) {
    float highest[2] = {most[0], most[1]};
#pragma unroll
    for (int i = 0; i < N; ++i) highest[0] = fmaxf(highest[0], of[i].x), highest[1] = fmaxf(highest[1], of[i].z);
#pragma unroll
    for (int step = 1; step < sharers; step *= 2)
#pragma unroll
      for (int c = 0; c < 2; ++c) highest[c] = fmaxf(highest[c], other(highest[c], step));
    const float factor[2] = {exp2_of(most[0] - highest[0]), exp2_of(most[1] - highest[1])};
    most[0] = highest[0], most[1] = highest[1];
    sum.x *= factor[0], sum.y *= factor[1], sum.z *= factor[0], sum.w *= factor[1];
    total[0] *= factor[0], total[1] *= factor[1];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float even = exp2_of(of[i].x - most[0]), odd = exp2_of(of[i].z - most[1]);
      total[0] += of[i].y * even, total[1] += of[i].w * odd;
      sum.x += part[i].x * even, sum.y += part[i].y * odd, sum.z += part[i].z * even, sum.w += part[i].w * odd;
    }
  }

  // All lanes of an item have all of it.
  __device__ void gather() {
#pragma unroll
    for (int step = 1; step < sharers; step *= 2) {
      total[0] += other(total[0], step), total[1] += other(total[1], step);
      sum.x += other(sum.x, step), sum.y += other(sum.y, step);
      sum.z += other(sum.z, step), sum.w += other(sum.w, step);
    }
  }

 private:
  __device__ static float other(float x, int step) { return __shfl_xor_sync(0xffffffff, x, step); }
};

// Layout of the warps' results in shared memory and of a block's results in global memory.
struct Meeting {
  static constexpr int row = Values::dim + Values::dim / 16 + 4;  // floats of a column; padded, lanes write apart
  static constexpr int fragments_apart = fragments + 1, pairs_apart = pairs_of_block + 1;  // float4 from warp to warp
  static constexpr int most_at = warps * fragments_apart * 16;
  static constexpr int sums_at = most_at + warps * pairs_apart * 16;
  static constexpr int bytes = sums_at + columns_of_block * row * 4 + 16;
  static constexpr int left = pairs_of_block + fragments;  // float4 in global memory

  float4* fragment;  // [warps][fragments_apart]
  float4* most;      // [warps][pairs_apart]: m and total of two columns
  float* sums;       // [columns][row]: number d of a column at d + d / 16
  uint32_t* last;

  __device__ explicit Meeting(char* shared)
      : fragment(reinterpret_cast<float4*>(shared)),
        most(reinterpret_cast<float4*>(shared + most_at)),
        sums(reinterpret_cast<float*>(shared + sums_at)),
        last(reinterpret_cast<uint32_t*>(shared + bytes - 16)) {}

  // Write the accumulators of a warp; a warp without tokens writes only that it has none.
  __device__ void leave(State& state, bool busy, int count, int lane, int warp) const {
#pragma unroll
    for (int n = 0; n < Plan::query_tiles; ++n) {
      if (busy) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
          for (int step = 4; step < 32; step *= 2)
            state.total[n][c] += __shfl_xor_sync(0xffffffff, state.total[n][c], step);
        if (n * 8 + lane % 4 * 2 < count)
#pragma unroll
          for (int i = 0; i < value_words; ++i) {
            const float(&d)[4] = state.sums[n][i];
            fragment[warp * fragments_apart + (n * value_words + i) * 32 + lane] = make_float4(d[0], d[1], d[2], d[3]);
          }
      }
      if (lane < 4)
        most[warp * pairs_apart + n * 4 + lane] =
            make_float4(state.most[n][0], state.total[n][0], state.most[n][1], state.total[n][1]);
    }
  }
};

// Count this block as done and acquire the results of earlier blocks. Returns the number of earlier blocks.
__device__ inline uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Two columns and two channels: a fragment. Items of the first pair of columns come first.
struct Item {
  static constexpr int of_pair = value_words * 8;
  int at, pair, channel;  // number of its fragment, of its pair of columns; its first channel
  bool exists;            // it may be the share of a lane without a share

  __device__ explicit Item(int number) : pair(number / of_pair) {
    const int word = number / 8 % value_words, g = number % 8, part = word >= Share<Values, 0>::channels / 2;
    at = (pair / 4 * value_words + word) * 32 + g * 4 + pair % 4;
    channel = part * Share<Values, 0>::size + g * (part ? Share<Values, 1>::channels : Share<Values, 0>::channels) +
              2 * (word - part * Share<Values, 0>::channels / 2);
    exists = g < (part ? Share<Values, 1>::owners : Share<Values, 0>::owners);
  }
};

// A sum to the result, or to where the others of its columns are.
__device__ inline void give(const Arguments& a, const Meeting& partial_sums, const Item& item, Merged& merged, int row,
                            int kv_head, int first, int count, bool rotated) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = 2 * item.pair + c;
    if (column >= count) break;
    const Column at(a, kv_head, first, column);
    float total = merged.total[c], low = c ? merged.sum.y : merged.sum.x, high = c ? merged.sum.w : merged.sum.z;
    if (a.nothing) {
      const float logit = __ldg(a.nothing + at.head) * log2_e, highest = fmaxf(merged.most[c], logit);
      const float factor = exp2_of(merged.most[c] - highest);
      total = total * factor + exp2_of(logit - highest), low *= factor, high *= factor;
    }
    const float norm = total > 0.0f ? reciprocal(total) : 0.0f;
    if (rotated) {
      float* const to = partial_sums.sums + column * Meeting::row + item.channel + item.channel / 16;
      to[0] = low * norm, to[1] = high * norm;
    } else {
      const int64_t heads = int64_t(a.kv_heads) * a.groups;
      uint16_t* const to = a.out + ((row * heads + at.head) * a.queries + at.query) * Values::dim + item.channel;
      *reinterpret_cast<uint32_t*>(to) =
          pack_pair<Plan::dtype>(in_range<Plan::dtype>(low * norm), in_range<Plan::dtype>(high * norm));
    }
  }
}

// Columns of the block, rotated back, to the result: warp by warp.
__device__ inline void rotate_back(const Arguments& a, const Meeting& partial_sums, int row, int kv_head, int first,
                                   int count) {
  const int lane = threadIdx.x % 32;
  for (int column = threadIdx.x / 32; column < count; column += warps) {
    const Column at(a, kv_head, first, column);
    constexpr int each = (Values::dim + 31) / 32;
    float value[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int channel = 32 * i + lane;
      value[i] = channel < Values::dim ? partial_sums.sums[column * Meeting::row + channel + channel / 16] : 0.0f;
    }
    butterflies<Values::block>(value, lane);
    const int64_t heads = int64_t(a.kv_heads) * a.groups;
    uint16_t* const to = a.out + ((row * heads + at.head) * a.queries + at.query) * Values::dim;
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (32 * i + lane < Values::dim)
        to[32 * i + lane] =
            uint16_t(pack_pair<Plan::dtype>(in_range<Plan::dtype>(value[i] * inverse_root(Values::block)), 0.0f));
  }
}

// Sums of all warps -> the result. `active` blocks of the group have tokens; `group` is its number; `busy`: whether this
// warp had tokens; `rotated`: whether sums are of rotated values.
__device__ inline void finish(const Arguments& a, State& state, char* shared, int row, int kv_head, int first,
                              int group, int active, bool busy, bool rotated) {
  const Meeting partial_sums(shared);
  const int count = min(a.groups * a.queries - first, queries_of_block);
  __syncthreads();  // tables and codes are not needed any more
  partial_sums.leave(state, busy, count, threadIdx.x % 32, threadIdx.x / 32);
  __syncthreads();
  float4* const all = reinterpret_cast<float4*>(a.partial) + int64_t(group) * a.splits * Meeting::left;
  float4* const own = reinterpret_cast<float4*>(a.partial) + int64_t(blockIdx.x) * Meeting::left;
  const int part = threadIdx.x % sharers, items = (count + 1) / 2 * Item::of_pair;  // times sharers: whole warps
  for (int number = threadIdx.x / sharers; number < items; number += Plan::threads / sharers) {
    const Item item(number);
    Merged merged;
    float4 of[warps / sharers], sums[warps / sharers];
#pragma unroll
    for (int i = 0; i < warps / sharers; ++i) {
      const int w = i * sharers + part;
      of[i] = partial_sums.most[w * Meeting::pairs_apart + item.pair];
      sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (fmaxf(of[i].x, of[i].z) > lowest) sums[i] = partial_sums.fragment[w * Meeting::fragments_apart + item.at];
    }
    merged.add(of, sums);
    merged.gather();
    if (part > 0 || !item.exists) continue;
    if (active == 1) {
      give(a, partial_sums, item, merged, row, kv_head, first, count, rotated);
    } else {
      __stcg(own + pairs_of_block + item.at, merged.sum);
      if (number % Item::of_pair == 0)
        __stcg(own + item.pair, make_float4(merged.most[0], merged.total[0], merged.most[1], merged.total[1]));
    }
  }
  if (active > 1) {
    __syncthreads();
    if (threadIdx.x == 0) *partial_sums.last = arrive(a.arrived + group) == active - 1;
    __syncthreads();
    if (!*partial_sums.last) return;
    if (threadIdx.x == 0) a.arrived[group] = 0;
    for (int number = threadIdx.x / sharers; number < items; number += Plan::threads / sharers) {
      const Item item(number);
      Merged merged;
      constexpr int at_a_time = 8;
      for (int begin = 0; begin < active; begin += at_a_time * sharers) {
        float4 of[at_a_time], sums[at_a_time];
#pragma unroll
        for (int i = 0; i < at_a_time; ++i) {
          const int s = begin + i * sharers + part;
          of[i] = make_float4(lowest, 0.0f, lowest, 0.0f), sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (s < active && item.exists) {
            of[i] = __ldcg(all + int64_t(s) * Meeting::left + item.pair);
            sums[i] = __ldcg(all + int64_t(s) * Meeting::left + pairs_of_block + item.at);
          }
        }
        merged.add(of, sums);
      }
      merged.gather();
      if (part == 0 && item.exists) give(a, partial_sums, item, merged, row, kv_head, first, count, rotated);
    }
  }
  if (rotated) {
    __syncthreads();
    rotate_back(a, partial_sums, row, kv_head, first, count);
  }
}
