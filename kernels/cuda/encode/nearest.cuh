// SPDX-License-Identifier: Apache-2.0
// The codebook entry nearest to v / s, by exhaustive search:
//
//     argmin_e |v - s e|^2 = argmax_e  <v, e> - s |e|^2 / 2
//
// Entries are float32 in shared memory, in groups of four followed by their |e|^2 / 2. All lanes read the same four
// entries (a broadcast) and score them for all their vectors.
#pragma once
#include "plan.cuh"
#include "primitives/numbers.cuh"

constexpr int x = Plan::vector_size;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

template <Scope> struct Book;  // where the codes of vectors are found

// The entries of one codebook.
struct Entries {
  static constexpr int entries = 1 << Plan::entry_bits, fours = entries < 4 ? 1 : entries / 4;
  static constexpr int floats = fours * (4 * x + 4);
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

    __device__ float score(int j, const float (&v)[x], float scale) const {
      return fmaf(-scale, half_norm[j], product(j, v));
    }
  };

  // All threads of a block fill `to`. An entry that only fills up the four is infinitely far.
  static __device__ void fill(const uint16_t* stored, float* to) {
    for (int i = threadIdx.x; i < 4 * fours; i += Plan::threads) {
      float* four = to + i / 4 * (4 * x + 4);
      float sum = 0.0f;
#pragma unroll
      for (int c = 0; c < x; ++c) {
        const float value = i < entries ? half_to_float(stored[i * x + c]) : 0.0f;
        four[i % 4 * x + c] = value, sum += value * value;
      }
      four[4 * x + i % 4] = i < entries ? sum / 2 : infinity();
    }
  }

  __device__ Four four(int i) const { return Four(table + i * (4 * x + 4)); }

  __device__ float number(uint32_t code, int c) const { return table[code / 4 * (4 * x + 4) + code % 4 * x + c]; }

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

  // The index of the entry nearest to each slot's vector under scale[set]; 0 for what is not a number. Lanes of a warp
  // that hold the same vectors share the entries.
  template <int Lanes, int Slots, int Sets>
  __device__ void nearest(const float (&v)[Slots][x], const float (&scale)[Sets], uint32_t (&code)[Slots]) const {
    float best[Slots];
    int where[Slots] = {};
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) best[slot] = -infinity();
#pragma unroll 1
    for (int i = threadIdx.x % Lanes; i < fours; i += Lanes) {
      const Four some = four(i);
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) {
        float score[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) score[j] = some.score(j, v[slot], scale[slot % Sets]);
        const float top = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
        if (top > best[slot]) best[slot] = top, where[slot] = i;
      }
    }
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
#pragma unroll
      for (int half = Lanes / 2; half > 0; half /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best[slot], half);
        const int its_place = __shfl_xor_sync(0xffffffffu, where[slot], half);
        if (other > best[slot] || (other == best[slot] && its_place < where[slot]))
          best[slot] = other, where[slot] = its_place;
      }
      const Four some = four(where[slot]);  // the same sums again
      int index = 0;
#pragma unroll
      for (int j = 3; j >= 0; --j)
        if (some.score(j, v[slot], scale[slot % Sets]) == best[slot]) index = j;
      code[slot] = where[slot] * 4 + index;
    }
  }

  // Indices of the nearest entries, any order; entry 0 fills up.
  template <int Count> __device__ void nearest_few(const float (&v)[x], float scale, uint32_t (&code)[Count]) const {
    float best[Count];  // descending
#pragma unroll
    for (int k = 0; k < Count; ++k) best[k] = -infinity(), code[k] = 0;
#pragma unroll 1
    for (int i = 0; i < fours; ++i) {
      const Four some = four(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float score = some.score(j, v, scale);
        if (!(score > best[Count - 1])) continue;
        best[Count - 1] = score, code[Count - 1] = i * 4 + j;
#pragma unroll
        for (int k = Count - 1; k > 0; --k)
          if (best[k] > best[k - 1]) {
            const float higher = best[k];
            const uint32_t its_code = code[k];
            best[k] = best[k - 1], code[k] = code[k - 1];
            best[k - 1] = higher, code[k - 1] = its_code;
          }
      }
    }
  }
};

template <> struct Book<Scope::SHARED> {
  static constexpr bool scales_at_once = true;
  static constexpr int bytes = Plan::num_codebooks * Entries::floats * 4;  // of shared memory
  Entries stage[Plan::num_codebooks];

  // All threads of a block.
  __device__ Book(const uint16_t* stored, void* shared) {
    float* tables = static_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < Plan::num_codebooks; ++i) {
      Entries::fill(stored + i * Entries::entries * x, tables + i * Entries::floats);
      stage[i].table = tables + i * Entries::floats;
    }
    __syncthreads();
  }

  // Score of a scale: with several codebooks, the score of the first one.
  template <int Slots, int Sets, int Scales>
  __device__ void add_scores(const float (&v)[Slots][x], const float (&scale)[Sets][Scales],
                             float (&gain)[Sets][Scales]) const {
    stage[0].add_scores(v, scale, gain);
  }

  // Codes of each slot's vector under scale[set], one per codebook, and the sum of their entries. Lanes that hold the
  // same vectors find the same.
  template <int Lanes = 1, int Slots, int Sets>
  __device__ void nearest(const float (&v)[Slots][x], const float (&scale)[Sets],
                          uint32_t (&code)[Slots][Plan::num_codebooks], float (&chosen)[Slots][x]) const {
    if constexpr (Plan::num_codebooks == 1) {
      uint32_t index[Slots];
      stage[0].template nearest<Lanes>(v, scale, index);
#pragma unroll
      for (int i = 0; i < Slots * x; ++i) chosen[i / x][i % x] = stage[0].number(index[i / x], i % x);
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) code[slot][0] = index[slot];
    } else {
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) follow(v[slot], scale[slot % Sets], code[slot], chosen[slot]);
    }
  }

  // Beam search: the best pair of one of the Plan::beam nearest entries of the first codebook and any of the second.
  __device__ void follow(const float (&v)[x], float scale, uint32_t (&code)[Plan::num_codebooks],
                         float (&chosen)[x]) const {
    constexpr int step = 2;  // beams per iteration: more need too many registers
    static_assert(Plan::num_codebooks <= 2 && Plan::beam % step == 0, "a beam over two stages");
    const float one[1] = {scale};
    uint32_t first[Plan::beam];
    stage[0].nearest_few(v, scale, first);
    float least = infinity();
    code[0] = code[Plan::num_codebooks - 1] = 0;
#pragma unroll
    for (int c = 0; c < x; ++c) chosen[c] = stage[0].number(0, c) + stage[Plan::num_codebooks - 1].number(0, c);
#pragma unroll
    for (int k = 0; k < Plan::beam; k += step) {
      float rest[step][x];
      uint32_t second[step];
#pragma unroll
      for (int i = 0; i < step * x; ++i)
        rest[i / x][i % x] = v[i % x] - scale * stage[0].number(first[k + i / x], i % x);
      stage[Plan::num_codebooks - 1].template nearest<1>(rest, one, second);
#pragma unroll
      for (int i = 0; i < step; ++i) {
        float entry[x], error = 0.0f;
#pragma unroll
        for (int c = 0; c < x; ++c) {
          entry[c] = stage[Plan::num_codebooks - 1].number(second[i], c);
          const float left = rest[i][c] - scale * entry[c];
          error += left * left;
        }
        if (error < least) {
          least = error, code[0] = first[k + i], code[Plan::num_codebooks - 1] = second[i];
#pragma unroll
          for (int c = 0; c < x; ++c) chosen[c] = stage[0].number(first[k + i], c) + entry[c];
        }
      }
    }
  }
};
