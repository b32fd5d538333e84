// SPDX-License-Identifier: Apache-2.0
// The codebook entry nearest to a vector v: argmax_e 2 <e, v> - |e|^2, with w = 2 v. Three searches, one result:
//
//     Table     every thread tries all entries for its own vectors
//     Spread    the lanes of a warp split the entries, for one vector
//     Grid      a table over the plane lists the few candidates of a cell (x = 2)
//
// A score is the same sum in every search, and the first of equal scores wins.
#pragma once
#include "plan.cuh"
#include "primitives/numbers.cuh"

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// 2 <e, v> - |e|^2, of w = 2 v.
template <int x> __device__ inline float score_of(const float (&entry)[x], float norm, const float (&w)[x]) {
  float sum = -norm;
#pragma unroll
  for (int c = 0; c < x; ++c) sum = fmaf(entry[c], w[c], sum);
  return sum;
}

template <int x> __device__ inline float norm_of(const float (&entry)[x]) {
  float sum = __fmul_rn(entry[0], entry[0]);
#pragma unroll
  for (int c = 1; c < x; ++c) sum = fmaf(entry[c], entry[c], sum);
  return sum;
}

template <int x> __device__ inline void load_entry(const uint16_t* from, float (&entry)[x]) {
  uint32_t word[words_of(2 * x)];
  load_words<2 * x>(from, word);
#pragma unroll
  for (int c = 0; c < x; ++c) entry[c] = half_to_float(word[c / 2] >> c % 2 * 16);
}

// Exhaustive search, each thread for its own vectors: four entries of shared memory per iteration, the same
// for all lanes.
template <int x, int bits> struct Table {
  static constexpr int entries = 1 << bits, fours = entries < 4 ? 1 : entries / 4;
  static constexpr int floats = fours * (4 * x + 4);
  const float* table;  // [fours][4 x entries, 4 norms]

  // Number `i` and on, in steps of `of`; an entry that only fills up the four is infinitely far.
  template <int of> struct Part {
    static constexpr int each = (4 * fours + of - 1) / of;
    float entry[each][x];
    int i;

    __device__ Part(const uint16_t* stored, int i) : i(i) {
#pragma unroll
      for (int k = 0; k < each; ++k) load_entry(stored + min(i + k * of, entries - 1) * x, entry[k]);
    }

    __device__ void put(float* to) const {
#pragma unroll
      for (int k = 0; k < each; ++k) {
        const int at = i + k * of;
        if (at >= 4 * fours) break;
        float* four = to + at / 4 * (4 * x + 4);
#pragma unroll
        for (int c = 0; c < x; ++c) four[at % 4 * x + c] = entry[k][c];
        four[4 * x + at % 4] = at < entries ? norm_of(entry[k]) : infinity();
      }
    }
  };

  struct Four {
    float entry[4][x], norm[4];

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
      for (int j = 0; j < 4; ++j) norm[j] = all[4 * x + j];
    }

    __device__ float score(int j, const float (&w)[x]) const { return score_of(entry[j], norm[j], w); }
  };

  __device__ Four four(int i) const { return Four(table + i * (4 * x + 4)); }

  __device__ float number(int code, int c) const { return table[code / 4 * (4 * x + 4) + code % 4 * x + c]; }

  // The largest score of each slot among fours `first` .. `last`, and the four that has it; 0 for what is not a number.
  template <int Slots>
  __device__ void search(const float (&w)[Slots][x], int first, int last, float (&best)[Slots],
                         int (&where)[Slots]) const {
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) best[slot] = -infinity(), where[slot] = 0;
#pragma unroll(Slots * x < 8 ? 4 : 1)
    for (int i = first; i < last; ++i) {
      const Four some = four(i);
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) {
        const float top = fmaxf(fmaxf(some.score(0, w[slot]), some.score(1, w[slot])),
                                fmaxf(some.score(2, w[slot]), some.score(3, w[slot])));
        if (top > best[slot]) best[slot] = top, where[slot] = i;
      }
    }
  }

  // The entries of fours that have these scores: the same sums again.
  template <int Slots>
  __device__ void pick(const float (&w)[Slots][x], const float (&best)[Slots], int (&where)[Slots]) const {
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
      const Four some = four(where[slot]);
      int index = 0;
#pragma unroll
      for (int j = 3; j >= 0; --j)
        if (some.score(j, w[slot]) == best[slot]) index = j;
      where[slot] = where[slot] * 4 + index;
    }
  }
};

// Exhaustive search of one vector by a warp: the entries are spread over its lanes.
template <int x, int bits> struct Spread {
  static constexpr int entries = 1 << bits, each = entries < 32 ? 1 : entries / 32;
  float entry[each][x], norm[each];

  __device__ void load(const uint16_t* stored) {
    const int first = threadIdx.x % 32 * each;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const bool exists = first + j < entries;
      load_entry(stored + (exists ? first + j : 0) * x, entry[j]);
      norm[j] = exists ? norm_of(entry[j]) : infinity();
    }
  }

  // The nearest to a vector that all lanes have.
  __device__ int nearest(const float (&w)[x]) const {
    float best = -infinity();
    int code = 0;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const float score = score_of(entry[j], norm[j], w);
      if (score > best) best = score, code = j;
    }
    const int bits_of = __float_as_int(best);
    const uint32_t key = uint32_t(bits_of) ^ (uint32_t(bits_of >> 31) | 0x80000000u);  // ascends as floats do
    const int winner = __ffs(__ballot_sync(0xffffffffu, key == __reduce_max_sync(0xffffffffu, key))) - 1;
    return winner * each + __shfl_sync(0xffffffffu, code, winner);
  }
};

// Entries of a plane that may be nearest in each of its cells, up to four in ascending order, the last one repeated.
// Cells with more candidates, and vectors outside of the grid, try all entries.
template <int bits, int cells> struct Grid {
  static constexpr int entries = 1 << bits, words = cells * cells + entries;
  static constexpr uint32_t more = 1;  // no list: it does not ascend
  const uint32_t* cell;                // [y][x]
  const uint32_t* entry;               // fp16 pairs
  float cells_per_unit;

  // Copies that `wait_for_copies` waits for.
  static __device__ void fill(const uint32_t* lists, const uint16_t* stored, uint32_t* to) {
    constexpr int fours = cells * cells / 4;
    static_assert(cells % 2 == 0 && entries % 4 == 0, "by 16 bytes");
    for (int i = threadIdx.x; i < words / 4; i += Plan::threads)
      copy_four(to + 4 * i, i < fours ? lists + 4 * i : reinterpret_cast<const uint32_t*>(stored) + 4 * (i - fours));
  }

  static __device__ void copy_four(uint32_t* to, const uint32_t* from) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
  }

  __device__ void get(int code, float (&pair)[2]) const { unpack_pair<Dtype::FLOAT16>(entry[code], pair[0], pair[1]); }

  // Candidate list of the cell of w = 2 v. Rounding down uses the low bits of a float. NaN has no cell.
  __device__ uint32_t list(const float (&w)[2]) const {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23
    uint32_t place[2];
#pragma unroll
    for (int c = 0; c < 2; ++c)
      place[c] = __float_as_uint(__fmaf_rd(w[c], cells_per_unit / 2, magic + cells / 2)) - __float_as_uint(magic);
    return place[0] < cells && place[1] < cells ? cell[place[1] * cells + place[0]] : more;
  }

  __device__ float score(int code, const float (&w)[2]) const {
    float pair[2];
    get(code, pair);
    return score_of(pair, norm_of(pair), w);
  }

  template <int Slots> __device__ void search(const float (&w)[Slots][2], int (&code)[Slots]) const {
    uint32_t some[Slots], open = 0;  // bits of slots without a list
    float best[Slots];
    bool fourth = false;
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
      some[slot] = list(w[slot]);
      open |= uint32_t(some[slot] == more) << slot;
      fourth |= some[slot] >> 24 != (some[slot] >> 16 & 255);
    }
    const auto consider = [&](int slot, int k) {
      const int candidate = __byte_perm(some[slot], 0, 0x4440 + k);
      const float its = score(candidate, w[slot]);
      if (k == 0 || its > best[slot]) best[slot] = its, code[slot] = candidate;
    };
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot)
#pragma unroll
      for (int k = 0; k < 3; ++k) consider(slot, k);
    if (__any_sync(0xffffffffu, fourth)) {
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot) consider(slot, 3);
    }
    while (const uint32_t waiting = __ballot_sync(0xffffffffu, open)) {  // one slot of one lane per iteration
      const int lane = __ffs(waiting) - 1, mine = __ffs(open) - 1;
      float one[2] = {};
#pragma unroll
      for (int i = 0; i < 2 * Slots; ++i)
        if (i / 2 == mine) one[i % 2] = w[i / 2][i % 2];
#pragma unroll
      for (int c = 0; c < 2; ++c) one[c] = __shfl_sync(0xffffffffu, one[c], lane);
      Spread<2, bits> all;
      all.load(reinterpret_cast<const uint16_t*>(entry));
      const int found = all.nearest(one);
      if (threadIdx.x % 32 != lane) continue;
      open &= open - 1;
#pragma unroll
      for (int slot = 0; slot < Slots; ++slot)
        if (slot == mine) code[slot] = found;
    }
  }
};
