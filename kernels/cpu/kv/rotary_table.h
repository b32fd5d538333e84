// SPDX-License-Identifier: Apache-2.0
// Cosines and sines of the frequencies of rotary position embeddings, one array of floats (host/rotary_table.cpp fills
// it). A pair of channels p has two neighbouring lanes, 2 p and 2 p + 1; `lanes` is a multiple of 32, and what lies
// behind the last pair is 0.
//
//   header [16]               pairs r, interleaved
//   digits [4][64][2][lanes]  of token n = d0 + 64 d1 + 4096 d2 + 262144 (d3 - 32): (cos, cos), then (sin, -sin), of
//                             the angle of each digit; the product of the four is that of n, without large angles
//   middle [2][lanes]         of 127.5: from the first token of a block to its middle
//   basis [2][lanes / 2 + 8][2][64]  functions of the distance u = .5, 1.5 .. 127.5 to the middle, the first 64
//                             distances and the others: cos u f_p and sin u f_p, then the Chebyshev polynomials
//                             T_2k and T_2k+1 of u / 128
//   series [lanes / 2][16]    cos u f_p = sum of the even ones times T_k(u / 128), sin u f_p = sum of the odd ones
//   terms [lanes / 2]         terms of the series that are needed for an error of 2^-17; 0 = 16 are too few
#pragma once
#include "../api.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kDigits = 4, kDigitBits = 6, kDigitValues = 1 << kDigitBits;
constexpr int64_t kFirstToken = -(int64_t(1) << (kDigits * kDigitBits - 1));  // the last is -kFirstToken - 1
constexpr int kHalf = 128;   // distances of the tokens of a block to its middle
constexpr int kReach = 64;   // of them, that are read together
constexpr int kSeries = 16;  // terms
constexpr int kMostPairs = 128;

// Places in the array.
struct RotaryTable {
  const float* data;
  int pairs, lanes;
  bool interleaved;
  int64_t middle, basis, series, terms, size;

  RotaryTable(const float* at, int count, bool neighbours)
      : data(at), pairs(count), lanes((count + 15) / 16 * 32), interleaved(neighbours) {
    middle = 16 + int64_t(kDigits) * kDigitValues * 2 * lanes;
    basis = middle + 2 * lanes;
    series = basis + int64_t(lanes / 2 + kSeries / 2) * 2 * kHalf;
    terms = series + lanes / 2 * kSeries;
    size = terms + lanes / 2;
  }
  explicit RotaryTable(const float* at) : RotaryTable(at, int(at[0]), at[1] != 0.0f) {}

  int64_t digit(int level, int value) const { return 16 + int64_t(level * kDigitValues + value) * 2 * lanes; }
  // The functions at distance number i, of pair 0; those of pair p, or of T_2k and T_2k+1 at p = lanes / 2 + k, lie
  // 2 p kReach behind. The second one is kReach behind the first.
  const float* functions(int i) const {
    return data + basis + int64_t(i / kReach) * (lanes / 2 + kSeries / 2) * 2 * kReach + i % kReach;
  }
  // Channels of pair p.
  int first(int p) const { return interleaved ? 2 * p : p; }
  int second(int p) const { return interleaved ? 2 * p + 1 : p + pairs; }
};

}  // namespace kv
}  // namespace
}  // namespace hf_vq
