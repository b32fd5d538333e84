// SPDX-License-Identifier: Apache-2.0
// Products with the entries of large codebooks, directly after the lookup; no dense weight is ever stored.
//
//     sums[m][r] += sum_c (book[code(c)][r] + rest[code'(c)][r]) * x[m][c]           r < 8      (Down)
//     sums[m][r] += sum_c (book[code(c)][r] + rest[code'(c)][r]) * x[m][8 c + r]                (Along)
//
// A codebook of 65536 entries of 8 halves is 1 MB: it fits neither into registers nor into L1, so entries come from L2.
// A lookup is one load of 16 bytes. Bottleneck: the number of lookups in flight. A vector of more than 8 floats holds
// the entries of two codes, a vector of fewer floats a part of one. Sums are float32, in an order that does not depend
// on the other inputs.
#pragma once
#include "../primitives/floats.h"

namespace hf_vq {
namespace {
namespace entries {

constexpr int kEight = 8;                                     // rows of an entry that are multiplied together
constexpr int kTogether = kFloats > kEight ? kFloats / kEight : 1;  // codes in a vector
constexpr int kParts = kFloats > kEight ? 1 : kEight / kFloats;     // vectors of a code
constexpr int kRun = 256;                                     // codes unpacked per iteration
constexpr int kStep = 8;                                      // what their number is a multiple of
constexpr int kInputs = 4;                                    // inputs that are multiplied together
constexpr int kChains = 2;                                    // sums of an input that do not wait for each other
constexpr int kSums = kParts * kFloats;                       // floats of an input's sums

// kEight numbers at each of two addresses, or a part of those at the first.
template <bool Bfloat> inline Floats load_entry(const uint16_t* first, const uint16_t* second) {
  return Bfloat ? load_bfloats(first, second) : load_halves(first, second);
}

static_assert(kStep % (kChains * kTogether) == 0, "whole steps");

struct Books {
  const uint16_t *book, *rest;  // rest is not read without residuals
  int size;                     // halves of an entry
};

// x of code c and its neighbour, for part `part` of the rows.
template <bool Along> inline Floats input_of(const float* x, int c, int part, Spread spread) {
  if constexpr (Along) return load(x + c * kEight + part * kFloats);
  else if constexpr (kTogether > 1) return load(x + c, spread);
  else return splat(x[c]);
}

// n codes, a multiple of kStep; x of input m begins at x + m * stride, and kFloats numbers behind its last can be read.
template <int M, bool Rest, bool Bfloat, bool Along>
inline void add_run(const Books& books, const uint16_t* code, const uint16_t* rest_code, int n, const float* x,
                    int64_t stride, float* sums) {
  const Spread across = spread(kTogether);
  Floats total[kChains][M][kParts];
  for (int chain = 0; chain < kChains; ++chain)
    for (int m = 0; m < M; ++m)
      for (int part = 0; part < kParts; ++part)
        total[chain][m][part] = chain ? splat(0.0f) : load(sums + m * kSums + part * kFloats);
  for (int at = 0; at < n; at += kChains * kTogether) {
    for (int chain = 0; chain < kChains; ++chain) {
      const int c = at + chain * kTogether, next = c + kTogether - 1;
      for (int part = 0; part < kParts; ++part) {
        Floats entry = load_entry<Bfloat>(books.book + code[c] * books.size + part * kFloats,
                                          books.book + code[next] * books.size);
        if constexpr (Rest)
          entry = entry + load_entry<Bfloat>(books.rest + rest_code[c] * books.size + part * kFloats,
                                             books.rest + rest_code[next] * books.size);
        for (int m = 0; m < M; ++m)
          total[chain][m][part] =
              fma(entry, input_of<Along>(x + m * stride, c, part, across), total[chain][m][part]);
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int part = 0; part < kParts; ++part) {
      Floats sum = total[0][m][part];
      for (int chain = 1; chain < kChains; ++chain) sum = sum + total[chain][m][part];
      store(sums + m * kSums + part * kFloats, sum);
    }
}

// The same for any number of inputs; their sums lie one behind the other.
template <bool Rest, bool Bfloat, bool Along>
inline void add_inputs(const Books& books, const uint16_t* code, const uint16_t* rest_code, int n, const float* x,
                       int64_t stride, int64_t inputs, float* sums) {
  int64_t m = 0;
  for (; m + kInputs <= inputs; m += kInputs)
    add_run<kInputs, Rest, Bfloat, Along>(books, code, rest_code, n, x + m * stride, stride, sums + m * kSums);
  if (m + 2 <= inputs) {
    add_run<2, Rest, Bfloat, Along>(books, code, rest_code, n, x + m * stride, stride, sums + m * kSums);
    m += 2;
  }
  if (m < inputs) add_run<1, Rest, Bfloat, Along>(books, code, rest_code, n, x + m * stride, stride, sums + m * kSums);
}

// The sum of row r < kEight.
inline float row_sum(const float* sums, int r) { return kTogether > 1 ? sums[r] + sums[r + kEight] : sums[r]; }

}  // namespace entries
}  // namespace
}  // namespace hf_vq
