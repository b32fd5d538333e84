// SPDX-License-Identifier: Apache-2.0
// Scales and codes of rotated rows, for each group v of a row:
//
//     s = argmin_f |v - s_f e_f|^2,  s_f = f rms(v)              e_f: the entries nearest to v / s_f
//     if the plan refits, twice:  s = <v, e> / |e|^2             e: the entries nearest to v / s
//
// Specification: hf_vq/ops/reference/encode_weight.py. A warp owns groups; vector i of its stream is in slot i / 32 of
// lane i % 32:
//
//     32 lanes   | v0  v1  v2  .. v31 |  slot 0      up to 32 vectors a group: a slot has 32 / lanes groups
//                | v32 v33 v34 .. v63 |  slot 1      more: all slots are one group, in `chunks` iterations
//
// 32 codes are Plan::entry_bits whole words, which shuffles assemble.
//
// Bytes: rows once from DRAM (and from L1 once per step), codes and scales once.
// Bottleneck: instructions. Every vector is compared with all entries, for eight scales in one pass and then twice more
// (nearest.cuh).
#include "encode/nearest.cuh"
#include "encode/nearest_e8p.cuh"

struct Arguments {
  const float* rows;         // [groups * group]
  const uint16_t* codebook;  // fp16 [stages, entries, x]; E8P [stages, 257, 8]
  const float* factors;      // [Plan::candidates]
  uint32_t* codes;           // per row: the packed streams of all stages; then up to a multiple of 4 bytes
  uint16_t* scale;           // fp16 [groups]
  int64_t groups;            // of all rows
  int columns;
};

constexpr int slots = Plan::slots, lanes = Plan::lanes, candidates = Plan::candidates;
constexpr int sets = Plan::one_group ? 1 : slots;  // groups of a lane
constexpr int groups_of_slot = 32 / lanes;
constexpr bool lattice = Plan::scope == Scope::E8P;

struct Groups {
  const Arguments& a;
  int64_t first, vector;  // group of this lane in slot 0, and vector
  int chunks;

  __device__ Groups(const Arguments& a, int64_t turn) : a(a) {
    const int lane = threadIdx.x % 32;
    const int vectors = Plan::group ? Plan::group / x : a.columns / x;
    chunks = Plan::one_group && lanes == 32 ? vectors / (32 * slots) : 1;
    first = turn * sets * groups_of_slot + lane / lanes;
    vector = turn * chunks * slots * 32 + lane;
  }

  __device__ bool exists(int set) const { return first + set * groups_of_slot < a.groups; }

  __device__ int64_t at(int chunk, int slot) const { return vector + (chunk * slots + slot) * 32; }

  __device__ void load(int chunk, float (&v)[slots][x]) const {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
#pragma unroll
      for (int c = 0; c < x; ++c) v[slot][c] = 0.0f;
      if (exists(slot % sets)) load_floats<Dtype::FLOAT32>(a.rows + at(chunk, slot) * x, v[slot]);
    }
  }
};

// The sum over the lanes of a group.
__device__ inline float together(float value) {
#pragma unroll
  for (int half = lanes / 2; half > 0; half /= 2) value += __shfl_xor_sync(0xffffffffu, value, half);
  return value;
}

// Scale rounded to fp16, the stored type.
__device__ inline float rounded(float scale) { return half_to_float(pack_pair<Dtype::FLOAT16>(scale, 0.0f)); }

// The candidate with the least error; the first of equals.
template <typename Books> __device__ inline void search(const Books& book, const Groups& groups, float (&scale)[sets]) {
  if constexpr (Books::scales_at_once) {
    float candidate[sets][candidates], gain[sets][candidates] = {};
#pragma unroll
    for (int i = 0; i < sets * candidates; ++i)
      candidate[i / candidates][i % candidates] = scale[i / candidates] * __ldg(groups.a.factors + i % candidates);
    for (int chunk = 0; chunk < groups.chunks; ++chunk) {
      float v[slots][x];
      groups.load(chunk, v);
      book.add_scores(v, candidate, gain);
    }
#pragma unroll
    for (int set = 0; set < sets; ++set) {
      float best = -infinity();  // |v|^2 - |v - s e|^2 = 2 s (<v, e> - s |e|^2 / 2)
#pragma unroll
      for (int f = 0; f < candidates; ++f) {
        const float won = candidate[set][f] * together(gain[set][f]);
        if (won > best) best = won, scale[set] = candidate[set][f];
      }
    }
  } else {
    float rms[sets], least[sets];
#pragma unroll
    for (int set = 0; set < sets; ++set) rms[set] = scale[set], least[set] = infinity();
#pragma unroll 1
    for (int f = 0; f < candidates; ++f) {
      float candidate[sets], error[sets] = {};
#pragma unroll
      for (int set = 0; set < sets; ++set) candidate[set] = rms[set] * __ldg(groups.a.factors + f);
      for (int chunk = 0; chunk < groups.chunks; ++chunk) {
        float v[slots][x], chosen[slots][x];
        uint32_t code[slots][Plan::num_codebooks];
        groups.load(chunk, v);
        book.nearest(v, candidate, code, chosen);
#pragma unroll
        for (int i = 0; i < slots * x; ++i) {
          const float rest = v[i / x][i % x] - candidate[i / x % sets] * chosen[i / x][i % x];
          error[i / x % sets] += rest * rest;
        }
      }
#pragma unroll
      for (int set = 0; set < sets; ++set) {
        error[set] = together(error[set]);
        if (error[set] < least[set]) least[set] = error[set], scale[set] = candidate[set];
      }
    }
  }
}

// The codes of 32 lanes, number `first` and on of all that are stored: lane w writes word w.
__device__ inline void store_words(uint32_t* codes, int64_t first, uint32_t code) {
  constexpr int bits = Plan::entry_bits, pieces = 32 % bits ? 31 / bits + 2 : 32 / bits;
  const int lane = threadIdx.x % 32, begin = lane * 32 / bits;
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < pieces; ++k) {
    const int from = begin + k, shift = from * bits - lane * 32;
    const uint32_t other = __shfl_sync(0xffffffffu, code, from % 32);
    if (shift < 32) word |= shift < 0 ? other >> -shift : other << shift;
  }
  if (lane < bits) codes[first / 32 * bits + lane] = word;
}

__device__ inline void store_codes(const Groups& groups, int chunk, const uint32_t (&code)[slots][Plan::num_codebooks]) {
  const int across = groups.a.columns / x;
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    const bool exists = groups.exists(slot % sets);
    const int64_t at = groups.at(chunk, slot), first = at - threadIdx.x % 32;
#pragma unroll
    for (int stage = 0; stage < Plan::num_codebooks; ++stage) {
      // Number of a code among all: a row's streams follow each other, as rows do.
      const auto number = [&](int64_t vector) {
        return Plan::num_codebooks == 1 ? vector : vector + (vector / across * (Plan::num_codebooks - 1) + stage) * across;
      };
      if constexpr (lattice) {
        if (exists) reinterpret_cast<uint16_t*>(groups.a.codes)[number(at)] = uint16_t(code[slot][stage]);
      } else if (__any_sync(0xffffffffu, exists)) {
        store_words(groups.a.codes, number(first), exists ? code[slot][stage] : 0);
      }
    }
  }
}

// Codes of the entries nearest to v / scale, written where `last`, and the scale that suits them best.
template <typename Books>
__device__ inline void assign(const Books& book, const Groups& groups, bool last, float (&scale)[sets]) {
  float along[sets] = {}, energy[sets] = {};
  for (int chunk = 0; chunk < groups.chunks; ++chunk) {
    float v[slots][x], chosen[slots][x];
    uint32_t code[slots][Plan::num_codebooks];
    groups.load(chunk, v);
    book.nearest(v, scale, code, chosen);
    if (last) store_codes(groups, chunk, code);
#pragma unroll
    for (int slot = 0; slot < slots; ++slot)
#pragma unroll
      for (int c = 0; c < x; ++c) {
        along[slot % sets] += v[slot][c] * chosen[slot][c];
        energy[slot % sets] += chosen[slot][c] * chosen[slot][c];
      }
  }
  if constexpr (Plan::refit) {
#pragma unroll
    for (int set = 0; set < sets; ++set) {
      const float fitted = together(along[set]) / fmaxf(together(energy[set]), 1e-30f);
      if (fitted > 0.0f && scale[set] < infinity()) scale[set] = rounded(fitted);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) encode(const Arguments a) {
  extern __shared__ uint4 shared[];
  const Book<Plan::scope> book(a.codebook, shared);
  constexpr int warps = Plan::threads / 32;
  const int64_t turns = (a.groups + sets * groups_of_slot - 1) / (sets * groups_of_slot);
  for (int64_t turn = int64_t(blockIdx.x) * warps + threadIdx.x / 32; turn < turns; turn += int64_t(gridDim.x) * warps) {
    const Groups groups(a, turn);
    float scale[sets] = {};
    for (int chunk = 0; chunk < groups.chunks; ++chunk) {
      float v[slots][x];
      groups.load(chunk, v);
#pragma unroll
      for (int slot = 0; slot < slots; ++slot)
#pragma unroll
        for (int c = 0; c < x; ++c) scale[slot % sets] += v[slot][c] * v[slot][c];
    }
    const float count = Plan::group ? Plan::group : a.columns;
#pragma unroll
    for (int set = 0; set < sets; ++set) scale[set] = sqrtf(together(scale[set]) / count);
    if constexpr (candidates > 1) search(book, groups, scale);
#pragma unroll
    for (int set = 0; set < sets; ++set) scale[set] = rounded(candidates > 1 ? scale[set] : scale[set] * __ldg(a.factors));
#pragma unroll 1
    for (int pass = Plan::refit ? 0 : 1; pass < 2; ++pass) assign(book, groups, pass == 1, scale);
#pragma unroll
    for (int set = 0; set < sets; ++set)
      if (groups.exists(set) && threadIdx.x % lanes == 0)
        a.scale[groups.first + set * groups_of_slot] = uint16_t(pack_pair<Dtype::FLOAT16>(scale[set], 0.0f));
  }
}
