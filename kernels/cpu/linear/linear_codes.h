// SPDX-License-Identifier: Apache-2.0
// Codes of 4, 6 or 8 bits, whose entries are found in registers: VQ<1,4>, <2,4>, <2,6>, <2,8>, <4,8>, <8,8>.
//
// A step is kBytes codes (two times as many of 4 bits). lookup() gives the X components of all of them,
// each as one vector, and dot() multiplies it with the same component of the input. Tables hold 8-bit
// levels: entry ~ unit * level, unit = max |entry| / 127. An 8-vector is found as two halves.
#pragma once
#include "activations.h"

namespace hf_vq {
namespace {

// level = round(fp16 / unit) + kLevelBias of n numbers, n a multiple of 16.
inline void round_halves(const uint16_t* from, int64_t n, float inverse_unit, uint8_t* level) {
  const Floats inverse = splat(inverse_unit);
  for (int64_t i = 0; i < n; i += kFloats)
    store_low_bytes(level + i, to_levels(load_half(from + i) * inverse) + splat_int(kLevelBias));
}

// The unit of n fp16 numbers, n a multiple of 16.
inline float unit_of(const uint16_t* from, int64_t n) {
  Floats most = splat(0.0f);
  for (int64_t i = 0; i < n; i += kFloats) {
    const Floats a = load_half(from + i);
    most = max(most, max(a, splat(0.0f) - a));
  }
  return largest(most) / 127.0f;
}

inline float inverse_of(float unit) { return unit > 0 ? 1 / unit : 0; }

// planar [X, entries] <- levels [entries, X] in their natural order; entries a multiple of kBytes, or 16.
template <int X> inline void transpose_levels(const uint8_t* natural, int entries, uint8_t* planar) {
  if constexpr (X == 1) {
    memcpy(planar, natural, size_t(entries));
  } else if (entries < kBytes) {
    for (int e = 0; e < entries; ++e)
      for (int c = 0; c < X; ++c) planar[c * entries + e] = natural[e * X + c];
  } else {
    for (int e = 0; e < entries; e += kBytes) {
      Bytes v[X];
      for (int c = 0; c < X; ++c) v[c] = load_bytes(natural + e * X + c * kBytes);
      deinterleave<X>(v);
      for (int c = 0; c < X; ++c) store(planar + c * entries + e, v[c]);
    }
  }
}

// `dot` of one of M inputs. Without a bias the factors may change places: on AVX2 `dot` takes the absolute value of the
// first one, which M inputs share if it is the level, and the rows of a stream if it is the number.
template <int M> inline Ints dot_of(Ints acc, Bytes level, Bytes number) {
  return M == 1 && kLevelBias == 0 ? dot(acc, number, level) : dot(acc, level, number);
}

// Where the codes of a step lie: in one stream of a row, or in two.
struct Place { const uint8_t *codes, *second; };

// Steps of kStep bytes of one stream.
template <int kStep> struct FixedSteps {
  static constexpr bool kSecond = false;
  static constexpr int64_t step_bytes(const hf_vq_matrix&) { return kStep; }
  static Place after(Place p, int64_t steps) { return {p.codes + steps * kStep, p.second}; }
};

// E entries of X components per table; `Sets` tables make vectors of Sets * X.
template <int E, int X, int Bits, int Sets = 1>
struct TableCodes : FixedSteps<kBytes * Bits / (Bits == 4 ? 4 : 8)> {
  static constexpr int kParts = Bits == 4 ? 2 : 1;  // vectors of codes per step
  static constexpr int kPlanes = kParts * X;
  static constexpr bool kFine = false;
  static constexpr int kBlock = 8;  // rows for which a pass keeps its tables
  static constexpr bool kStepsFirst = X == 4;  // with several passes: they are short, so a pass covers all rows
  static constexpr bool kStreamed = true;
  static constexpr int kSets = Sets;
  static constexpr int kStepColumns = kBytes * kPlanes * Sets;
  static constexpr int kTableBytes = E * X;  // of one set
  static constexpr int64_t kBookHalves = E * X * Sets;

  Codebook<E, X> book;
  Packing packed;  // of 6 bits
  TableCodes(const uint8_t* table, const hf_vq_matrix&) : book(load_codebook<E, X>(table)), packed(packing(6)) {}

  static constexpr int64_t book_halves(const hf_vq_matrix&) { return kBookHalves; }

  // The tables of one codebook, fp16 [E, X * Sets], and its unit.
  static float make_tables(const hf_vq_matrix&, const uint16_t* entries, uint8_t* tables) {
    uint8_t natural[kBookHalves + kBytes];
    const float unit = unit_of(entries, kBookHalves);
    round_halves(entries, kBookHalves, inverse_of(unit), natural);
    transpose_levels<X * Sets>(natural, E, tables);
    return unit;
  }

  static void arrange(const uint8_t* natural, uint8_t* numbers, int64_t set_bytes) {
    Bytes v[kPlanes * Sets];
    for (int i = 0; i < kPlanes * Sets; ++i) v[i] = load_bytes(natural + i * kBytes);
    deinterleave<kPlanes * Sets>(v);
    for (int i = 0; i < kPlanes * Sets; ++i)
      store(numbers + i / kPlanes * set_bytes + i % kPlanes * kBytes, v[i]);
  }

  // sums[m] += entries of the step's codes * numbers of input m
  template <int M> void dots(Place p, const uint8_t* numbers, int64_t stride, Ints (&sums)[M]) const {
    Bytes code[kParts];
    if constexpr (Bits == 8) code[0] = load_bytes(p.codes);
    if constexpr (Bits == 6) code[0] = load_codes(p.codes, packed);
    if constexpr (Bits == 4) {
      const Bytes both = load_bytes(p.codes);
      code[0] = low_codes(both);
      code[1] = high_codes(both);
    }
    for (int part = 0; part < kParts; ++part) {
      Bytes entry[X];
      lookup(book, code[part], entry);
      for (int c = 0; c < X; ++c)
        for (int m = 0; m < M; ++m)
          sums[m] = dot_of<M>(sums[m], entry[c], load_bytes(numbers + m * stride + (part * X + c) * kBytes));
    }
  }
};

}  // namespace
}  // namespace hf_vq
