// SPDX-License-Identifier: Apache-2.0
// The entry of a codebook nearest to v / s, by trying all of them:
//
//     argmin_e |v - s e|^2 = argmax_e  <v, e> - s |e|^2 / 2
//
// Entries lie in shared memory as float32, four by four with their |e|^2 / 2 behind them; all lanes read the same four
// at a time (a broadcast), for all their vectors.
#pragma once
#include "numbers.cuh"
#include "plan.cuh"

constexpr int x = Plan::vector_size;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

template <Scope> struct Book;  // where the codes of vectors are found

template <> struct Book<Scope::SHARED> {
  static constexpr bool scales_at_once = true;
  static constexpr int entries = 1 << Plan::entry_bits, fours = entries < 4 ? 1 : entries / 4;
  const float* table;  // [fours][4 x entries, 4 half norms]

  struct Four {
    float entry[4][x], half_norm[4];

    __device__ Four(const float* from) {
      float all[4 * x + 4];
#pragma unroll
      for (int i = 0; i < x + 1; ++i) {
        const float4 part = reinterpret_cast<const float4*>(from)[i];
        all[4 * i] = part.x, all[4 * i + 1] = part.y, all[4 * i + 2] = part.z, all[4 * i + 3] = part.w;
      }
#pragma unroll
      for (int i = 0; i < 4 * x; ++i) entry[i / x][i % x] = all[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) half_norm[j] = all[4 * x + j];
    }

    __device__ float product(int j, const float (&v)[x]) const {
      float sum = entry[j][0] * v[0];
#pragma unroll
      for (int c = 1; c < x; ++c) sum = fmaf(entry[j][c], v[c], sum);
      return sum;
    }
  };

  // All threads of a block. An entry that only fills up the four is infinitely far.
  __device__ Book(const uint16_t* stored, void* shared) : table(static_cast<float*>(shared)) {
    for (int i = threadIdx.x; i < 4 * fours; i += Plan::threads) {
      float* four = static_cast<float*>(shared) + i / 4 * (4 * x + 4);
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < x; ++c) {
        const float value = i < entries ? half_to_float(stored[i * x + c]) : 0.0f;
        four[i % 4 * x + c] = value, sum += value * value;
      }
      four[4 * x + i % 4] = i < entries ? sum / 2 : infinity();
    }
    __syncthreads();
  }

  __device__ Four four(int i) const { return Four(table + i * (4 * x + 4)); }

  // gain[set][f] += the largest score of each slot's vector under scale[set][f].
  template <int Slots, int Sets, int Scales>
  __device__ void add_scores(const float (&v)[Slots][x], const float (&scale)[Sets][Scales],
                             float (&gain)[Sets][Scales]) const {
    float best[Slots][Scales];
#pragma unroll
    for (int i = 0; i < Slots * Scales; ++i) best[i / Scales][i % Scales] = -infinity();
#pragma unroll 1
    for (int i = 0; i < fours; ++i) {
      const Four some = four(i);
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float product = some.product(j, v[slot]);
#pragma unroll
          for (int f = 0; f < Scales; ++f)
            best[slot][f] = fmaxf(best[slot][f], fmaf(-scale[slot % Sets][f], some.half_norm[j], product));
        }
    }
#pragma unroll
    for (int i = 0; i < Slots * Scales; ++i) gain[i / Scales % Sets][i % Scales] += best[i / Scales][i % Scales];
  }

  // The nearest entry of each slot's vector under scale[set], and its index; 0 for what is not a number.
  template <int Slots, int Sets>
  __device__ void nearest(const float (&v)[Slots][x], const float (&scale)[Sets], uint32_t (&code)[Slots][1],
                          float (&chosen)[Slots][x]) const {
    float best[Slots];
    int where[Slots] = {};
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) best[slot] = -infinity();
#pragma unroll 1
    for (int i = 0; i < fours; ++i) {
      const Four some = four(i);
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) {
        float score[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          score[j] = fmaf(-scale[slot % Sets], some.half_norm[j], some.product(j, v[slot]));
        const float top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
        if (top > best[slot]) best[slot] = top, where[slot] = i;
      }
    }
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
      const Four some = four(where[slot]);  // the same sums again
      int index = 0;
#pragma unroll
      for (int j = 3; j >= 0; --j)
        if (fmaf(-scale[slot % Sets], some.half_norm[j], some.product(j, v[slot])) == best[slot]) index = j;
      code[slot][0] = where[slot] * 4 + index;
#pragma unroll
      for (int c = 0; c < x; ++c) chosen[slot][c] = table[where[slot] * (4 * x + 4) + index * x + c];
    }
  }
};
