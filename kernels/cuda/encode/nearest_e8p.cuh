// SPDX-License-Identifier: Apache-2.0
// The E8P entry nearest to v / s, from the structure of the lattice (proof in hf_vq/formats/lattice.py):
//
//     y = u -/+ shift;  a = |y| in descending order;  k of the levels 1/2 rise to 3/2, or one to 5/2, where a is largest;
//     a pattern whose parity is not that of the signs of y flips the sign of the smallest a
//
// The 29 patterns with five 3/2 are tried one by one only if a bound says that one of them may win. The entry of a
// codebook is subtracted before the next code is searched. Float32; the last three bits of a sorted |y| hold its
// coordinate, which changes a score by at most 2^-20 of |y|.
#pragma once
#include "encode/nearest.cuh"
#include "primitives/lattice.cuh"

template <> struct Book<Scope::E8P> {
  static constexpr bool scales_at_once = false;
  static constexpr int half_words = kE8PRows * 8, extra = 227, five = 37;  // rows: first of the 29, one with 5/2
  static constexpr int stage_bytes = half_words * 2, bytes = Plan::num_codebooks * stage_bytes + 256 + 64;
  const uint16_t* patterns;   // fp16 [stages][257, 8], parities folded
  const uint8_t* row_of;      // [256] by the mask of 3/2, then [8][8] by the places of 5/2 and of 3/2 (none: the same)

  // All threads of a block.
  __device__ Book(const uint16_t* stored, void* shared)
      : patterns(static_cast<uint16_t*>(shared)),
        row_of(static_cast<uint8_t*>(shared) + Plan::num_codebooks * stage_bytes) {
    uint16_t* halves = static_cast<uint16_t*>(shared);
    uint8_t* rows = static_cast<uint8_t*>(shared) + Plan::num_codebooks * stage_bytes;
    for (int i = threadIdx.x; i < Plan::num_codebooks * half_words; i += Plan::threads) halves[i] = stored[i];
    __syncthreads();
    for (int row = threadIdx.x; row < 256; row += Plan::threads) {
      int threes = 0, fives = -1;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const uint16_t level = halves[row * 8 + c];
        if (level == halves[8 + 7]) threes |= 1 << c;
        if (level == halves[five * 8 + 7]) fives = c;
      }
      rows[fives < 0 ? threes : 256 + fives * 8 + (threes ? __ffs(threes) - 1 : fives)] = row;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Plan::num_codebooks * 256; i += Plan::threads) {
      uint16_t* book = halves + i / 256 * half_words;
      fold_parity(book + i % 256 * 8, half_to_float(book[256 * 8]));
    }
    __syncthreads();
  }

  struct Best {
    float score;
    int kind;        // 0-4: that many 3/2; 5, 6: one 5/2 and none, one 3/2
    uint32_t order;  // coordinates of the four largest and of the smallest |y|, three bits each
  };

  static __device__ float coordinate_y(float u, float shift, bool minus) { return minus ? u + shift : u - shift; }

  // Best pattern around one shift; `bound`: upper bound of the score of all patterns with five 3/2.
  static __device__ Best around(const float (&u)[8], float low, float middle, float high, float shift, bool minus,
                                float skew, float& bound) {
    uint32_t key[8];
    float sum = 0.0f;
    int negative = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float y = coordinate_y(u[c], shift, minus), size = fabsf(y);
      key[c] = (__float_as_uint(size) & ~7u) | (7 - c);
      sum += size, negative ^= y < 0.0f;
    }
    constexpr int sort[19][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {0, 2}, {1, 3}, {4, 6}, {5, 7}, {1, 2}, {5, 6},
                                 {0, 4}, {1, 5}, {2, 6}, {3, 7}, {2, 4}, {3, 5}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
    for (int i = 0; i < 19; ++i) {
      const uint32_t first = key[sort[i][0]], second = key[sort[i][1]];
      key[sort[i][0]] = max(first, second), key[sort[i][1]] = min(first, second);
    }
    float top[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) top[i] = __uint_as_float(key[i]);
    const float natural = low * sum + (minus ? -skew : skew);
    const float flipped = natural - 2.0f * low * __uint_as_float(key[7]);
    const float even = negative ? flipped : natural, uneven = negative ? natural : flipped;
    const float step = middle - low, norm_low = low * low / 2, norm_step = middle * middle / 2 - norm_low;
    Best best = {even - 8 * norm_low, 0, 0};
    float total = -8 * norm_low;
#pragma unroll
    for (int k = 1; k <= 5; ++k) {
      total += step * top[k - 1] - norm_step;
      const float score = total + (k % 2 ? uneven : even);
      if (k == 5) bound = score;
      else if (score > best.score) best.score = score, best.kind = k;
    }
    const float largest = (high - low) * top[0] - (7 * norm_low + high * high / 2);
    if (largest + even > best.score) best.score = largest + even, best.kind = 5;
    const float both = largest + step * top[1] - norm_step + uneven;
    if (both > best.score) best.score = both, best.kind = 6;
#pragma unroll
    for (int i = 0; i < 5; ++i) best.order |= (7 - (key[i == 4 ? 7 : i] & 7)) << 3 * i;
    return best;
  }

  // The code of the entry nearest to u in the codebook of `stage`.
  __device__ uint32_t code_of(const float (&u)[8], int stage) const {
    const uint16_t* book = patterns + stage * half_words;
    const float low = level(book, 0), middle = level(book, 1), high = level(book, five), shift = level(book, 256);
    float skew = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) skew += u[c];
    skew *= shift;
    float bound[2];
    Best best = around(u, low, middle, high, shift, false, skew, bound[0]);
    const Best other = around(u, low, middle, high, shift, true, skew, bound[1]);
    bool minus = other.score > best.score;
    if (minus) best = other;

    const int largest = best.order & 7, second = best.order >> 3 & 7, third = best.order >> 6 & 7;
    int flip = best.order >> 12 & 7, threes = 0, row;
    if (best.kind > 0) threes = 1 << largest;
    if (best.kind > 1) threes |= 1 << second;
    if (best.kind > 2) threes |= 1 << third;
    if (best.kind > 3) threes |= 1 << (best.order >> 9 & 7);
    row = row_of[best.kind < 5 ? threes : 256 + largest * 8 + (best.kind == 5 ? largest : second)];
    bool odd = best.kind == 1 || best.kind == 3 || best.kind == 6;

    if (fmaxf(bound[0], bound[1]) > best.score) {
#pragma unroll 1
      for (int i = 0; i < 2 * (256 - extra); ++i) {
        const bool around_minus = i % 2;
        const int at = extra + i / 2;
        float score = around_minus ? -skew : skew, least = infinity();
        int negative = 0, smallest = 0;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float y = coordinate_y(u[c], shift, around_minus);
          const float product = fabsf(y) * fabsf(half_to_float(book[at * 8 + c]));
          score += product, negative ^= y < 0.0f;
          if (product < least) least = product, smallest = c;
        }
        score -= (3 * low * low + 5 * middle * middle) / 2 + (negative ? 0.0f : 2 * least);
        if (score > best.score) best.score = score, row = at, minus = around_minus, flip = smallest, odd = true;
      }
    }

    uint32_t signs = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) signs |= uint32_t(coordinate_y(u[c], shift, minus) < 0.0f) << c;
    if (bool(__popc(signs) & 1) != odd) signs ^= 1u << flip;
    return row | (signs & 127) << 8 | uint32_t(minus) << 15;
  }

  // Codes of each slot's vector under scale[set], one for each stage, and the sum of their entries.
  template <int Lanes = 1, int Slots, int Sets>
  __device__ void nearest(const float (&v)[Slots][8], const float (&scale)[Sets],
                          uint32_t (&code)[Slots][Plan::num_codebooks], float (&chosen)[Slots][8]) const {
#pragma unroll
    for (int slot = 0; slot < Slots; ++slot) {
      const float one = scale[slot % Sets];
      float rest[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) rest[c] = v[slot][c] / fmaxf(one, 1e-30f), chosen[slot][c] = 0.0f;
#pragma unroll
      for (int stage = 0; stage < Plan::num_codebooks; ++stage) {
        code[slot][stage] = code_of(rest, stage);
        float entry[8] = {};
        add_e8p(patterns + stage * half_words, code[slot][stage], entry);
#pragma unroll
        for (int c = 0; c < 8; ++c) rest[c] -= entry[c], chosen[slot][c] += entry[c];
      }
    }
  }

 private:
  // The last number of a row, without its folded parity.
  static __device__ float level(const uint16_t* book, int row) { return half_to_float(book[row * 8 + 7] & 0x7fff); }
};
