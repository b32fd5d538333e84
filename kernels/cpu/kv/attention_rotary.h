// SPDX-License-Identifier: Apache-2.0
// q . R_n m of the tokens of a block, for keys with a rotary mean:
//
//   q . R_n m = sum_p A_p cos(n f_p) + B_p sin(n f_p)      A_p = q_a m_a + q_b m_b      B_p = q_b m_a - q_a m_b
//
// Once per block, (A, B) turn to the middle c of the block. There, cosines are even and sines are odd:
//
//   E(u) = sum_p A_p cos(u f_p)     O(u) = sum_p B_p sin(u f_p)     token c + u: E + O     token c - u: E - O
//
// so that a pair takes one product for a token, not two. Pairs that turn slowly share Chebyshev's series: all of
// them together take as many products as half of its terms, after one product per block, pair and 16 terms.
//
// Bytes: the functions of the pairs, 1 KB each, from the second cache at most. Bottleneck: fused multiply-adds. With a
// base of 10^6 and every pair turning, 15 sums for a token instead of 64 (dim 64), 22 instead of 128 (dim 128).
#pragma once
#include "attention_keys.h"
#include "rotary.h"

namespace hf_vq {
namespace {
namespace kv {

// Which functions of the table a head sums.
struct Turning {
  int functions, slow;  // how many of each; no functions: nothing turns
  int terms;            // of the series
  uint8_t function[kMostPairs + kSeries / 2];
  uint8_t slow_pair[kMostPairs];
};

// The pairs where m [dim] is not zero, and the number of terms for which a token takes the fewest products.
inline void choose_functions(const RotaryTable& table, const float* m, Turning& turning) {
  int active[kMostPairs], count = 0, needed[kSeries + 1] = {};
  for (int p = 0; p < table.pairs; ++p) {
    if (m[table.first(p)] == 0.0f && m[table.second(p)] == 0.0f) continue;
    active[count++] = p;
    ++needed[int(table.data[table.terms + p])];
  }
  int best = 16 * count, slow = 0;
  turning.terms = 0;
  for (int terms = 2; terms <= kSeries; terms += 2) {
    slow += needed[terms];
    const int cost = 16 * (count - slow + terms / 2) + slow;
    if (cost >= best) continue;
    best = cost;
    turning.terms = terms;
  }
  turning.functions = turning.slow = 0;
  for (int i = 0; i < count; ++i) {
    const int terms = int(table.data[table.terms + active[i]]);
    if (terms > 0 && terms <= turning.terms) turning.slow_pair[turning.slow++] = uint8_t(active[i]);
    else turning.function[turning.functions++] = uint8_t(active[i]);
  }
  for (int k = 0; k < turning.terms / 2; ++k) turning.function[turning.functions++] = uint8_t(table.lanes / 2 + k);
}

// (A, B) of each pair, and (B, A), turned from token 0 to the middle of a block whose first token is n = `start`, but
// for the digits of n that differ from block to block. pairs [2][lanes].
inline void open_pairs(const RotaryTable& table, const float* m, int64_t start, const float* query, float scaling,
                       float* pairs) {
  static_assert(kBlock % kDigitValues == 0);  // the lowest digit is that of `start` in all blocks
  float* swapped = pairs + table.lanes;
  memset(pairs, 0, size_t(table.lanes) * 8);
  for (int p = 0; p < table.pairs; ++p) {
    const int a = table.first(p), b = table.second(p);
    pairs[2 * p] = swapped[2 * p + 1] = (query[a] * m[a] + query[b] * m[b]) * scaling;
    pairs[2 * p + 1] = swapped[2 * p] = (query[b] * m[a] - query[a] * m[b]) * scaling;
  }
  const int64_t lowest = table.digit(0, int((start - kFirstToken) & (kDigitValues - 1)));
  const float* const turns[] = {table.data + lowest, table.data + table.middle};
  for (const float* by : turns) {
    for (int i = 0; i < table.lanes; i += kFloats) {
      const Floats here = load(pairs + i), other = load(swapped + i), c = load(by + i), s = load(by + table.lanes + i);
      store(pairs + i, fma(here, c, other * s));
      store(swapped + i, other * c - here * s);
    }
  }
}

// The factors of all functions in a block: (A, B) turned, then those of the series.
inline void turn_pairs(const RotaryTable& table, const Turning& turning, const Turn& turn, const float* pairs,
                       float* factors) {
  for (int i = 0; i < table.lanes; i += kFloats)
    store(factors + i,
          fma(load(pairs + i), load(turn.cosine + i), load(pairs + table.lanes + i) * load(turn.sine + i)));
  Floats sums[kSeries / kFloats];
  for (Floats& each : sums) each = splat(0.0f);
  for (int i = 0; i < turning.slow; ++i) {
    const int p = turning.slow_pair[i];
    const Floats both = splat_2(factors + 2 * p);
    const float* series = table.data + table.series + p * kSeries;
    for (int k = 0; k < kSeries / kFloats; ++k) sums[k] = fma(both, load(series + k * kFloats), sums[k]);
  }
  for (int k = 0; k < kSeries / kFloats; ++k) store(factors + table.lanes + k * kFloats, sums[k]);
}

// out[g][t] = constant[g] + sum of the functions at token t, of the tokens at least `from` away from the middle.
// factors: rows `stride` apart.
template <int G>
void sum_functions(const RotaryTable& table, const Turning& turning, const float* factors, int stride,
                   const float* constant, int from, float* out) {
  constexpr int kCount = kRegisters / (G <= 2 ? 8 : 16);  // vectors whose sums stay in registers
  static_assert(kReach % (kCount * kFloats) == 0);
  for (int i = from / (kCount * kFloats) * (kCount * kFloats); i < kHalf; i += kCount * kFloats) {
    Floats even[G][kCount], odd[G][kCount];
    for (int g = 0; g < G; ++g)
      for (int v = 0; v < kCount; ++v) {
        even[g][v] = splat(constant[g]);
        odd[g][v] = splat(0.0f);
      }
    const float* functions = table.functions(i);
    for (int j = 0; j < turning.functions; ++j) {
      const int p = turning.function[j];
      const float *cosine = functions + 2 * p * kReach, *sine = cosine + kReach, *factor = factors + 2 * p;
      for (int v = 0; v < kCount; ++v) {
        const Floats c = load(cosine + v * kFloats), s = load(sine + v * kFloats);
        for (int g = 0; g < G; ++g) {
          even[g][v] = fma(c, splat(factor[g * stride]), even[g][v]);
          odd[g][v] = fma(s, splat(factor[g * stride + 1]), odd[g][v]);
        }
      }
    }
    for (int g = 0; g < G; ++g)
      for (int v = 0; v < kCount; ++v) {
        const int at = i + v * kFloats;
        store(out + g * kBlock + kHalf + at, even[g][v] + odd[g][v]);
        store(out + g * kBlock + kHalf - kFloats - at, reverse(even[g][v] - odd[g][v]));
      }
  }
}

using SumFunctions = void (*)(const RotaryTable&, const Turning&, const float*, int, const float*, int, float*);
constexpr SumFunctions kSumFunctions[kSharing] = {sum_functions<1>, sum_functions<2>, sum_functions<3>,
                                                  sum_functions<4>};

// out[r][t] = constant[r] + q_r . R_n m of tokens low .. high - 1 of a block whose first token has n = `first`, for
// `rows` rows of pairs [rows][2][lanes].
inline void turn_block(const RotaryTable& table, const Turning& turning, int64_t first, int low, int high, int rows,
                       const float* pairs, const float* constant, float* factors, float* out) {
  Turn turn;
  turn_by(table, first, 1, turn);
  const int stride = table.lanes + kSeries;
  for (int r = 0; r < rows; ++r)
    turn_pairs(table, turning, turn, pairs + r * 2 * table.lanes, factors + r * stride);
  const int from = high <= kHalf ? kHalf - high : low >= kHalf ? low - kHalf : 0;
  for (int r = 0; r < rows; r += kSharing) {
    const int count = int(smaller(rows - r, kSharing));
    kSumFunctions[count - 1](table, turning, factors + r * stride, stride, constant + r, from, out + r * kBlock);
  }
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
