// SPDX-License-Identifier: Apache-2.0
// One SIMD set (HF_VQ_SIMD, compiled with the flags of its target) against plain arithmetic written
// here: every function, random bytes and extremes, from and to buffers between guards.
#include HF_VQ_SIMD

#include <cmath>

#include "../primitives/floats.h"
#include "../primitives/hadamard.h"
#include "check.h"

namespace hf_vq {
namespace {

using namespace check;

// A vector as numbers, and back.
struct ByteLanes { uint8_t v[kBytes]; };
struct IntLanes { int32_t v[kFloats]; };
struct FloatLanes { float v[kFloats]; };

ByteLanes lanes(Bytes a) { ByteLanes r; store(r.v, a); return r; }
IntLanes lanes(Ints a) { IntLanes r; store(r.v, a); return r; }
FloatLanes lanes(Floats a) { FloatLanes r; store(r.v, a); return r; }
Bytes vector(const ByteLanes& a) { return load_bytes(a.v); }
Ints vector(const IntLanes& a) { return load_ints(a.v); }
Floats vector(const FloatLanes& a) { return load(a.v); }

ByteLanes random_bytes(int64_t first = 0, int64_t last = 255) {
  ByteLanes r;
  for (auto& x : r.v) x = uint8_t(random_int(first, last));
  return r;
}
// In every one of 256 rounds each lane holds another value, its neighbours the ones next to it.
ByteLanes counted_bytes(int round) {
  ByteLanes r;
  for (int i = 0; i < kBytes; ++i) r.v[i] = uint8_t(round + i);
  return r;
}
IntLanes random_ints(int64_t limit) {
  IntLanes r;
  for (auto& x : r.v) x = int32_t(random_int(-limit, limit));
  return r;
}
FloatLanes random_floats(float size) {
  FloatLanes r;
  for (auto& x : r.v) x = random_float() * size;
  return r;
}

uint32_t bits_of(float x) { uint32_t r; memcpy(&r, &x, 4); return r; }
// The same number: NaN equals NaN, 0 is not -0.
bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

template <typename Want> void expect(const ByteLanes& got, const char* what, Want want) {
  for (int i = 0; i < kBytes; ++i)
    that(got.v[i] == uint8_t(want(i)), "%s, byte %d: %d, not %d", what, i, got.v[i], uint8_t(want(i)));
}
template <typename Want> void expect(const IntLanes& got, const char* what, Want want) {
  for (int i = 0; i < kFloats; ++i)
    that(got.v[i] == want(i), "%s, lane %d: %d, not %d", what, i, got.v[i], int(want(i)));
}
template <typename Want> void expect(const FloatLanes& got, const char* what, Want want) {
  for (int i = 0; i < kFloats; ++i)
    that(same(got.v[i], want(i)), "%s, lane %d: %.9g, not %.9g", what, i, double(got.v[i]), double(want(i)));
}

// -- bytes ---------------------------------------------------------------------------------------

void test_bytes() {
  for (int shift = 0; shift < 5; ++shift) {
    Guarded<uint8_t> from(kBytes + size_t(shift)), to(kBytes + size_t(shift));
    fill_random(from.get(), from.bytes());
    store(to.get() + shift, load_bytes(from.get() + shift));
    that(memcmp(from.get() + shift, to.get() + shift, kBytes) == 0, "load_bytes, store");
    Guarded<uint8_t> four(4);
    fill_random(four.get(), 4);
    expect(lanes(splat_4(four.get())), "splat_4", [&](int i) { return four[size_t(i % 4)]; });
  }
  for (int round = 0; round < 512; ++round) {
    const ByteLanes a = round < 256 ? counted_bytes(round) : random_bytes(), b = random_bytes();
    const Bytes v = vector(a), w = vector(b);
    expect(lanes(as_floats(v)), "as_floats", [&](int i) { float x; memcpy(&x, a.v + 4 * i, 4); return x; });
    expect(lanes(splat_byte(round)), "splat_byte", [&](int) { return round; });
    expect(lanes(splat_byte(-round)), "splat_byte", [&](int) { return -round; });
    expect(lanes(low_nibbles(v)), "low_nibbles", [&](int i) { return a.v[i] % 16; });
    expect(lanes(high_nibbles(v)), "high_nibbles", [&](int i) { return a.v[i] / 16; });
    expect(lanes(upper_crumbs<0>(v)), "upper_crumbs<0>", [&](int i) { return a.v[i] % 4 * 16; });
    expect(lanes(upper_crumbs<1>(v)), "upper_crumbs<1>", [&](int i) { return a.v[i] / 4 % 4 * 16; });
    expect(lanes(upper_crumbs<2>(v)), "upper_crumbs<2>", [&](int i) { return a.v[i] / 16 % 4 * 16; });
    expect(lanes(upper_crumbs<3>(v)), "upper_crumbs<3>", [&](int i) { return a.v[i] / 64 * 16; });
    expect(lanes(v | w), "operator|", [&](int i) { return a.v[i] | b.v[i]; });
    expect(lanes(v & w), "operator&", [&](int i) { return a.v[i] & b.v[i]; });
    expect(lanes(v ^ w), "operator^", [&](int i) { return a.v[i] ^ b.v[i]; });
    const auto both = [&](int i) { return i < kBytes ? a.v[i] : b.v[i - kBytes]; };
    expect(lanes(even_bytes(v, w)), "even_bytes", [&](int i) { return both(2 * i); });
    expect(lanes(odd_bytes(v, w)), "odd_bytes", [&](int i) { return both(2 * i + 1); });
    for (int bit = 0; bit < 8; ++bit)
      expect(lanes(negate_where(v, w, bit)), "negate_where",
             [&](int i) { return b.v[i] & (1 << bit) ? 256 - a.v[i] : a.v[i]; });
    for (int bits = 0; bits <= 6; ++bits) {  // no bit leaves its byte
      ByteLanes c = a;
      for (auto& x : c.v) x = uint8_t(x & 255 >> bits);
      expect(lanes(shift_left(vector(c), bits)), "shift_left", [&](int i) { return c.v[i] << bits; });
    }
  }
  for (int64_t stride : {kColumns, 64, 1000}) {
    Guarded<uint8_t> rows(size_t((kBytes - 1) * stride + kColumns));
    fill_random(rows.get(), rows.bytes());
    Bytes column[kColumns];
    load_columns(rows.get(), stride, column);
    for (int c = 0; c < kColumns; ++c)
      expect(lanes(column[c]), "load_columns", [&](int i) { return rows[size_t(i * stride + c)]; });
  }
}

void test_packed_codes() {
  for (int bits = 1; bits <= 8; ++bits)
    for (int round = 0; round < 64; ++round) {
      Guarded<uint8_t> packed(size_t(kBytes * bits / 8));
      memset(packed.get(), 0, packed.bytes());
      ByteLanes code;
      for (int i = 0; i < kBytes; ++i) {
        code.v[i] = uint8_t(random_bits() & ((1u << bits) - 1));
        for (int bit = bits * i; bit < bits * (i + 1); ++bit)
          packed[size_t(bit / 8)] = uint8_t(packed[size_t(bit / 8)] | (code.v[i] >> (bit - bits * i) & 1) << bit % 8);
      }
      const int mask = (1 << bits) - 1;
      for (int lift = 0; lift <= 8 - bits; ++lift) {
        const ByteLanes found = lanes(load_codes(packed.get(), packing(bits, lift)));
        ByteLanes within;
        for (int i = 0; i < kBytes; ++i) within.v[i] = uint8_t(found.v[i] >> lift & mask);
        expect(within, "load_codes", [&](int i) { return code.v[i]; });
      }
      for (int above = 1; above <= 8 - bits; ++above) {
        Guarded<uint8_t> upper(size_t(kBytes * above / 8));
        fill_random(upper.get(), upper.bytes());
        const Packing low = packing(bits), high = packing(above, bits);
        const ByteLanes found = lanes(merge(load_codes(upper.get(), high), load_codes(packed.get(), low), low));
        ByteLanes within;
        for (int i = 0; i < kBytes; ++i) within.v[i] = uint8_t(found.v[i] & ((1 << (bits + above)) - 1));
        const ByteLanes first = lanes(load_codes(upper.get(), packing(above)));
        expect(within, "merge", [&](int i) { return (first.v[i] & ((1 << above) - 1)) << bits | code.v[i]; });
      }
    }
}

// -- tables --------------------------------------------------------------------------------------

// Entries of X bytes, found as parts of words.
template <int E, int X, class Code> void test_words() {
  Guarded<uint64_t> tables(E * (8 / X));
  Guarded<uint8_t> entries(E * X);
  fill_random(entries.get(), entries.bytes());
  for (size_t place = 0; place < 8 / X; ++place)
    for (size_t e = 0; e < E; ++e) {
      uint64_t word = 0;
      memcpy(&word, entries.get() + e * X, X);
      tables[place * E + e] = word << (8 * X * place);
    }
  for (int round = 0; round < 300; ++round) {
    Guarded<Code> code(kBytes / X);
    for (size_t i = 0; i < code.size(); ++i)
      code[i] = Code(round < 4 ? (round % 2 ? E - 1 : 0) : random_int(0, E - 1));
    const Bytes found = load_words<E, X>(tables.get(), code.get());
    expect(lanes(found), "load_words", [&](int i) { return entries[size_t(code[size_t(i / X)]) * X + size_t(i % X)]; });
  }
}

void test_words_of_12_bits() {
  Guarded<uint64_t> table(4096);
  fill_random(table.get(), table.bytes());
  for (int round = 0; round < 300; ++round) {
    Guarded<uint8_t> packed(kBytes * 3 / 16);
    if (round < 2) memset(packed.get(), round * 255, packed.bytes());
    else fill_random(packed.get(), packed.bytes());
    uint8_t want[kBytes];
    for (int i = 0; i < kBytes / 8; ++i) {
      int code = 0;
      for (int bit = 0; bit < 12; ++bit) code |= (packed[size_t((12 * i + bit) / 8)] >> (12 * i + bit) % 8 & 1) << bit;
      memcpy(want + 8 * i, &table[size_t(code)], 8);
    }
    expect(lanes(load_words_12_bits(table.get(), packed.get())), "load_words_12_bits", [&](int i) { return want[i]; });
  }
}

template <int E, int X> void test_codebook() {
  for (int repeat = 0; repeat < 3; ++repeat) {
    Guarded<uint8_t> table(E * X);
    fill_random(table.get(), table.bytes());
    const Codebook<E, X> book = load_codebook<E, X>(table.get());
    for (int round = 0; round < E + 64; ++round) {
      ByteLanes code = round < E ? counted_bytes(round) : random_bytes();
      for (auto& c : code.v) c %= E;
      Bytes entry[X];
      lookup(book, vector(code), entry);
      for (int c = 0; c < X; ++c)
        expect(lanes(entry[c]), "lookup", [&](int i) { return table[size_t(c * E + code.v[i])]; });
      if constexpr (E == 16) {
        const ByteLanes any = random_bytes();
        Bytes low[X], high[X];
        lookup(book, low_codes(vector(any)), low);
        lookup(book, high_codes(vector(any)), high);
        for (int c = 0; c < X; ++c) {
          expect(lanes(low[c]), "lookup of low_codes", [&](int i) { return table[size_t(c * E + any.v[i] % 16)]; });
          expect(lanes(high[c]), "lookup of high_codes", [&](int i) { return table[size_t(c * E + any.v[i] / 16)]; });
        }
      }
    }
  }
}

void test_codebooks() {
  test_codebook<16, 1>();
  test_codebook<32, 1>();
  test_codebook<32, 2>();
  test_codebook<128, 1>();
  test_codebook<128, 2>();
  test_codebook<16, 2>();
  test_codebook<16, 4>();
  test_codebook<16, 8>();
  test_codebook<64, 1>();
  test_codebook<64, 2>();
  test_codebook<64, 4>();
  test_codebook<64, 8>();
  test_codebook<256, 1>();
  test_codebook<256, 2>();
  test_codebook<256, 4>();
  test_codebook<256, 8>();
  test_words<256, 2, uint8_t>();
  test_words<256, 4, uint8_t>();
  test_words<256, 8, uint8_t>();
  test_words<4096, 8, uint16_t>();
  test_words_of_12_bits();
}

// -- sums of bytes -------------------------------------------------------------------------------

void test_dot() {
  for (int round = 0; round < 600; ++round) {
    // The first rounds are extremes: all products have the same sign and the largest size.
    int value[kBytes], number[kBytes], weight[kBytes], entry[kBytes];
    for (int i = 0; i < kBytes; ++i) {
      const int sign = round & 1 ? 1 : -1, other = round & 2 ? 1 : -1;
      const bool mixed = round >= 4 && round < 100, extreme = round < 100;
      value[i] = extreme ? 127 * (mixed && random_bits() % 2 ? -sign : sign) : int(random_int(-127, 127));
      number[i] = extreme ? 127 * (mixed && random_bits() % 2 ? -other : other) : int(random_int(-127, 127));
      weight[i] = extreme && !(mixed && random_bits() % 2) ? (1 << kWeightBits) - 1
                                                           : int(random_int(0, (1 << kWeightBits) - 1));
      entry[i] = number[i];
    }
    const IntLanes acc = random_ints(1 << 30);
    ByteLanes level, numbers, weights, entries;
    for (int i = 0; i < kBytes; ++i) {
      level.v[i] = uint8_t(value[i] + kLevelBias);
      numbers.v[i] = uint8_t(number[i]);
      weights.v[i] = uint8_t(weight[i]);
      entries.v[i] = uint8_t(entry[i]);
    }
    expect(lanes(dot(vector(acc), vector(level), vector(numbers))), "dot", [&](int i) {
      int32_t total = acc.v[i];
      for (int j = 4 * i; j < 4 * i + 4; ++j) total += (value[j] + kLevelBias) * number[j];
      return total;
    });
    expect(lanes(dot_weights(vector(acc), vector(weights), vector(entries))), "dot_weights", [&](int i) {
      int32_t total = acc.v[i];
      for (int j = 4 * i; j < 4 * i + 4; ++j) total += weight[j] * entry[j];
      return total;
    });
  }
}

void test_add_product() {
  for (int round = 0; round < 200; ++round) {
    IntLanes acc{}, a{}, b{};
    for (int i = 0; i < kFloats; ++i) {
      acc.v[i] = int32_t(random_int(-1 << 20, 1 << 20));
      a.v[i] = int32_t(round % 2 ? random_int(-32767, 32767) : random_int(0, 1) ? 32767 : -32767);
      b.v[i] = int32_t(round % 2 ? random_int(0, 32767) : 32767);
    }
    expect(lanes(add_product(vector(acc), vector(a), vector(b))), "add_product",
           [&](int i) { return acc.v[i] + a.v[i] * b.v[i]; });
  }
}

void test_sums16() {
  for (int kind = 0; kind < 4; ++kind) {
    int32_t want[kBytes] = {};
    Sums16 sums = zero_sums();
    for (int n = 0; n < 257; ++n) {
      // All 255; 255 in one byte of two; random.
      ByteLanes a = random_bytes();
      if (kind < 3)
        for (int i = 0; i < kBytes; ++i) a.v[i] = kind == 0 || i % 2 == kind - 1 ? 255 : 0;
      add(sums, vector(a));
      for (int i = 0; i < kBytes; ++i) want[i] += a.v[i];
    }
    Guarded<uint16_t> got(kBytes);
    store(got.get(), sums);
    for (int i = 0; i < kBytes; ++i)
      that(got[size_t(i)] == want[i], "Sums16, byte %d: %d, not %d", i, got[size_t(i)], want[i]);
  }
}

void test_ints() {
  expect(lanes(zero_ints()), "zero_ints", [](int) { return 0; });
  for (int round = 0; round < 200; ++round) {
    const IntLanes a = random_ints(1 << 28), b = random_ints(1 << 28);
    const Ints v = vector(a), w = vector(b);
    expect(lanes(v + w), "Ints +", [&](int i) { return a.v[i] + b.v[i]; });
    expect(lanes(v - w), "Ints -", [&](int i) { return a.v[i] - b.v[i]; });
    expect(lanes(splat_int(a.v[0])), "splat_int", [&](int) { return a.v[0]; });
    const IntLanes small = random_ints((int64_t(1) << 31) / kFloats - 1);
    int32_t total = 0;
    for (int32_t x : small.v) total += x;
    that(sum(vector(small)) == total, "sum of Ints: %d, not %d", sum(vector(small)), total);
    Guarded<int32_t> from(kFloats), to(kFloats);
    fill_random(from.get(), from.bytes());
    store(to.get(), load_ints(from.get()));
    that(memcmp(from.get(), to.get(), sizeof a) == 0, "load_ints, store");
    Guarded<uint8_t> low(kFloats);
    store_low_bytes(low.get(), load_ints(from.get()));
    for (size_t i = 0; i < size_t(kFloats); ++i) that(low[i] == uint8_t(from[i] & 255), "store_low_bytes");
    IntLanes whole = random_ints(1 << 30), four[4];
    const IntLanes some = random_ints(1 << 20);
    expect(lanes(shift_left<8>(vector(some))), "shift_left of ints", [&](int i) { return some.v[i] * 256; });
    for (auto& n : whole.v) n = n < 0 ? -n : n;
    expect(lanes(high_bits<7>(vector(whole))), "high_bits", [&](int i) { return whole.v[i] / 128; });
    expect(lanes(low_bits<7>(vector(whole))), "low_bits", [&](int i) { return whole.v[i] % 128; });
    for (auto& each : four)
      for (auto& n : each.v) n = int32_t(random_int(0, 255));
    expect(lanes(join(vector(four[0]), vector(four[1]), vector(four[2]), vector(four[3]))), "join",
           [&](int i) { return four[i % 4].v[i / 4]; });
  }
}

// -- floats --------------------------------------------------------------------------------------

// The numbers for which comparisons differ most.
float special(int64_t i) {
  const float values[] = {0.0f, -0.0f, 1.0f, -1.0f, INFINITY, -INFINITY, NAN, 3.4e38f, -3.4e38f, 1e-45f, 2e-38f};
  return values[i % 11];
}

void test_arithmetic() {
  for (int round = 0; round < 400; ++round) {
    FloatLanes a = random_floats(100), b = random_floats(100), c = random_floats(1000);
    for (int i = 0; i < kFloats && round < 121; ++i) {
      a.v[i] = special(round + i);
      b.v[i] = special(round / 11 + i);
    }
    const Floats v = vector(a), w = vector(b), u = vector(c);
    if (round >= 121) {
      expect(lanes(v + w), "Floats +", [&](int i) { return a.v[i] + b.v[i]; });
      expect(lanes(v - w), "Floats -", [&](int i) { return a.v[i] - b.v[i]; });
      expect(lanes(v * w), "Floats *", [&](int i) { return a.v[i] * b.v[i]; });
      expect(lanes(v / w), "Floats /", [&](int i) { return a.v[i] / b.v[i]; });
      // Rounded once or twice: at most an ulp of each of the two terms away.
      const FloatLanes got = lanes(fma(v, w, u));
      double total = 0, size = 0;
      for (int i = 0; i < kFloats; ++i) {
        const double product = double(a.v[i]) * b.v[i], want = product + c.v[i];
        const double most = (std::fabs(product) + std::fabs(want)) * 6e-8;
        that(std::fabs(got.v[i] - want) <= most, "fma: %.9g, not %.9g", double(got.v[i]), want);
        total += a.v[i];
        size += std::fabs(a.v[i]);
      }
      that(std::fabs(sum(v) - total) <= size * kFloats * 6e-8, "sum of Floats: %.9g, not %.9g", double(sum(v)), total);
      float most = a.v[0];
      for (float x : a.v) most = std::fmax(most, x);
      that(largest(v) == most, "largest: %.9g, not %.9g", double(largest(v)), double(most));
    }
    expect(lanes(splat(a.v[0])), "splat", [&](int) { return a.v[0]; });
    // With a NaN, and of +0 and -0, the second one.
    expect(lanes(max(v, w)), "max", [&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    expect(lanes(min(v, w)), "min", [&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
    expect(lanes(where_less(v, w, u, v)), "where_less", [&](int i) { return a.v[i] < b.v[i] ? c.v[i] : a.v[i]; });
    const IntLanes x = random_ints(1 << 30), y = random_ints(1 << 30);
    expect(lanes(where_less(v, w, vector(x), vector(y))), "where_less of Ints",
           [&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
    expect(lanes(count_less(vector(x), v, w)), "count_less", [&](int i) { return x.v[i] + (a.v[i] < b.v[i]); });
    expect(lanes(sqrt(v)), "sqrt", [&](int i) { return std::sqrt(a.v[i]); });
    Guarded<uint16_t> halves(kFloats);
    store_half(halves.get(), v);
    for (int i = 0; i < kFloats; ++i)  // a NaN may have any payload
      that(same(half_to_float(halves[size_t(i)]), half_to_float(float_to_half(a.v[i]))), "store_half");
    expect(lanes(round_bfloat(v)), "round_bfloat", [&](int i) { return bfloat_to_float(float_to_bfloat(a.v[i])); });
    int lane = 0;
    while (lane < kFloats && !(a.v[lane] >= b.v[lane])) ++lane;
    that(first_at_least(v, w) == lane, "first_at_least: %d, not %d", first_at_least(v, w), lane);
    Floats even, odd;
    unzip(v, w, even, odd);
    const auto both = [&](int i) { return i < kFloats ? a.v[i] : b.v[i - kFloats]; };
    expect(lanes(even), "unzip, even", [&](int i) { return both(2 * i); });
    expect(lanes(reverse(v)), "reverse", [&](int i) { return a.v[kFloats - 1 - i]; });
    expect(lanes(splat_2(b.v)), "splat_2", [&](int i) { return b.v[i % 2]; });
    expect(lanes(odd), "unzip, odd", [&](int i) { return both(2 * i + 1); });
    Guarded<float> from(kFloats), to(kFloats);
    fill_random(from.get(), from.bytes());
    store(to.get(), load(from.get()));
    that(memcmp(from.get(), to.get(), sizeof a) == 0, "load, store");
    for (int count = 1; count <= kFloats; count *= 2) {
      expect(lanes(load(from.get(), spread(count))), "load, spread",
             [&](int i) { return from[size_t(i / (kFloats / count))]; });
      for (int first = 0; first + count <= kFloats; ++first)
        expect(lanes(take(load(from.get()), spread(count), first)), "take",
               [&](int i) { return from[size_t(first + i / (kFloats / count))]; });
    }
  }
}

template <int N> void test_pick() {
  for (int round = 0; round < 100; ++round) {
    Guarded<float> table(N);
    for (size_t i = 0; i < N; ++i) table[i] = random_float();
    IntLanes index;
    for (int i = 0; i < kFloats; ++i) index.v[i] = round < N ? (round + i) % N : int(random_int(0, N - 1));
    expect(lanes(pick<N>(table.get(), vector(index))), "pick", [&](int i) { return table[size_t(index.v[i])]; });
  }
  // Less in every lane but one.
  for (int at = 0; at <= kFloats; ++at) {
    FloatLanes a = random_floats(1), b;
    for (int i = 0; i < kFloats; ++i) b.v[i] = i == at ? a.v[i] : a.v[i] + 1;
    that(first_at_least(vector(a), vector(b)) == at, "first_at_least: not %d", at);
  }
}

void test_rounding() {
  for (int round = 0; round < 2000; ++round) {
    FloatLanes a;
    for (int i = 0; i < kFloats; ++i) {
      const int64_t whole = round < 600 ? (round - 300) * 5 + i : random_int(-(1 << 22) + 2, (1 << 22) - 2);
      a.v[i] = float(whole) + (round % 2 ? 0.5f : random_float());
    }
    expect(lanes(to_ints(vector(a))), "to_ints", [&](int i) { return int32_t(std::nearbyint(double(a.v[i]))); });
    const IntLanes n = random_ints(round % 2 ? 1 << 24 : 0x7fffffff);
    expect(lanes(to_floats(vector(n))), "to_floats", [&](int i) { return float(n.v[i]); });
  }
  for (int power = -126; power <= 127; ++power) {
    IntLanes n;
    for (int i = 0; i < kFloats; ++i) n.v[i] = (power + 126 + i) % 254 - 126;
    expect(lanes(exp2_of(vector(n))), "exp2_of", [&](int i) { return std::ldexp(1.0f, n.v[i]); });
  }
}

// -- float16, bfloat16 ---------------------------------------------------------------------------

float half_value(int h) {
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(float(mantissa), -24);
  return sign * std::ldexp(float(1024 + mantissa), exponent - 25);
}

float bfloat_value(int b) {
  const float sign = b & 0x8000 ? -1.0f : 1.0f;
  const int exponent = b >> 7 & 255, mantissa = b & 127;
  if (exponent == 255) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(float(mantissa), -133);
  return sign * std::ldexp(float(128 + mantissa), exponent - 134);
}

// `narrow` rounds every float between two neighbours below and above their midpoint as it must.
void test_narrowing(const char* what, uint16_t (*narrow)(float), float (*value)(int), int infinity) {
  for (int code = 0; code <= 0xffff; ++code) {
    const float x = value(code);
    if (std::isnan(x)) {
      that(std::isnan(value(narrow(x))), "%s of NaN", what);
      continue;
    }
    that(narrow(x) == code, "%s: %04x came back as %04x", what, code, narrow(x));
    if ((code & 0x7fff) >= infinity) continue;
    // The next one away from zero; beyond the largest it is where one more exponent would have it.
    const int next = code + 1;
    const double upper = (next & 0x7fff) < infinity ? double(value(next)) : 2.0 * double(x) - double(value(code - 1));
    const double middle = (double(x) + upper) / 2;
    const float tie = float(middle);
    if (std::isinf(tie) || double(tie) != middle) continue;  // no such float
    that(narrow(tie) == (code & 1 ? next : code), "%s: tie above %04x became %04x", what, code, narrow(tie));
    const float inner = std::nextafter(tie, 0.0f), outer = std::nextafter(tie, tie > 0 ? INFINITY : -INFINITY);
    that(narrow(inner) == code, "%s: below the tie above %04x became %04x", what, code, narrow(inner));
    that(narrow(outer) == next, "%s: beyond the tie above %04x became %04x", what, code, narrow(outer));
  }
  that(narrow(3.4028235e38f) == infinity, "%s of the largest float", what);
  that(narrow(INFINITY) == infinity && narrow(-INFINITY) == (infinity | 0x8000), "%s of infinity", what);
  that(narrow(1e-45f) == 0 && narrow(-1e-45f) == 0x8000, "%s of the smallest float", what);
  // NaNs whose mantissa lies only in the bits that are cut off.
  for (uint32_t mantissa = 1; mantissa < 0x800000; mantissa = mantissa * 2 + uint32_t(random_bits() % 2)) {
    const uint32_t bits = 0x7f800000u | mantissa;
    float x;
    memcpy(&x, &bits, 4);
    that(std::isnan(value(narrow(x))), "%s of NaN %08x", what, bits);
  }
}

void test_halves() {
  that(same(half_value(0x3c00), 1) && same(half_value(1), 5.9604645e-8f) && same(bfloat_value(0x3f80), 1), "1");
  Guarded<uint16_t> row(kFloats);
  for (int first = 0; first <= 0x10000 - kFloats; first += kFloats) {
    for (int i = 0; i < kFloats; ++i) row[size_t(i)] = uint16_t(first + i);
    expect(lanes(load_half(row.get())), "load_half", [&](int i) { return half_value(first + i); });
    expect(lanes(load_bfloat(row.get())), "load_bfloat", [&](int i) { return bfloat_value(first + i); });
    Guarded<uint16_t> near(8), far(8);
    for (size_t i = 0; i < 8; ++i) near[i] = uint16_t(first + int(i)), far[i] = uint16_t(first - int(i));
    const auto two = [&](int i) { return i < 8 ? near[size_t(i)] : far[size_t(i - 8)]; };
    expect(lanes(load_halves(near.get(), far.get())), "load_halves", [&](int i) { return half_value(two(i)); });
    expect(lanes(load_bfloats(near.get(), far.get())), "load_bfloats", [&](int i) { return bfloat_value(two(i)); });
    expect(lanes(load_unsigned(row.get())), "load_unsigned", [&](int i) { return float(first + i); });
  }
  for (int code = 0; code <= 0xffff; ++code) {
    that(same(half_to_float(uint16_t(code)), half_value(code)), "half_to_float of %04x", code);
    that(same(bfloat_to_float(uint16_t(code)), bfloat_value(code)), "bfloat_to_float of %04x", code);
  }
  test_narrowing("float_to_half", float_to_half, half_value, 0x7c00);
  test_narrowing("float_to_bfloat", float_to_bfloat, bfloat_value, 0x7f80);
}

// -- rows (floats.h, hadamard.h) -----------------------------------------------------------------

void test_rows() {
  for (int dtype : {HF_VQ_FLOAT32, HF_VQ_FLOAT16, HF_VQ_BFLOAT16}) {
    const int64_t bytes = dtype == HF_VQ_FLOAT32 ? 4 : 2;
    for (int64_t n = 0; n <= 67; ++n) {
      const int64_t first = random_int(0, 3);
      Guarded<uint8_t> stored(size_t((first + n) * bytes)), back(stored.size());
      Guarded<float> floats{size_t(n)}, expected{size_t(n)};
      for (int64_t i = 0; i < n; ++i) {
        float x = random_normal();
        if (dtype == HF_VQ_FLOAT16) x = half_value(float_to_half(x));
        if (dtype == HF_VQ_BFLOAT16) x = bfloat_value(float_to_bfloat(x));
        expected[size_t(i)] = x;
      }
      write_floats(stored.get(), dtype, first, n, expected.get());
      read_floats(stored.get(), dtype, first, n, floats.get());
      for (int64_t i = 0; i < n; ++i) {
        that(floats[size_t(i)] == expected[size_t(i)], "write_floats, read_floats of %d", int(n));
        that(read_float(stored.get(), dtype, first + i) == expected[size_t(i)], "read_float");
      }
    }
  }
}

void test_hadamard() {
  for (int64_t block = 1; block <= 512; block *= 2) {
    const int64_t n = block * random_int(1, 3);
    Guarded<float> x{size_t(n)};
    for (int64_t i = 0; i < n; ++i) x[size_t(i)] = random_normal();
    const Guarded<float> before = x.copy();
    hadamard_blocks(x.get(), n, block);
    for (int64_t i = 0; i < n; ++i) {
      double want = 0, size = 0;
      for (int64_t j = 0; j < block; ++j) {
        const double term = double(before[size_t(i / block * block + j)]) / std::sqrt(double(block));
        want += __builtin_popcountll(uint64_t(i % block & j)) % 2 ? -term : term;
        size += std::fabs(term);
      }
      const double got = double(x[size_t(i)]);
      that(std::fabs(got - want) <= size * 1e-6, "hadamard of %d: %.9g, not %.9g", int(block), got, want);
    }
  }
}

}  // namespace
}  // namespace hf_vq

int run_simd_tests() {
  using namespace hf_vq;
  start("simd_test");
  test_bytes();
  test_packed_codes();
  test_codebooks();
  test_dot();
  test_add_product();
  test_sums16();
  test_ints();
  test_arithmetic();
  test_pick<8>();
  test_pick<16>();
  test_rounding();
  test_halves();
  test_rows();
  test_hadamard();
  return finish("simd_test", HF_VQ_ISA);
}
