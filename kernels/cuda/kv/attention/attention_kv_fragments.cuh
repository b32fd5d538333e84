// SPDX-License-Identifier: Apache-2.0
// Keys and values as MMA fragments: channels of each lane, and the codes that it holds of a token.
//
// `fused` adjacent codes form one index, whose entry has `width` numbers. The D channels of a token are a power of two,
// or a sum of two (80 = 64 + 16): its parts. In each part every sharer has adjacent channels, so a contiguous piece of
// the canonical code stream:
//
//     keys      4 sharers, lane % 4      tokens g, g + 8 of a tile of 16                   (g = lane / 4, t = lane % 4)
//     values    8 sharers, lane / 4      tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
//
// This is the fragment order of mma.cuh: lanes exchange nothing.
#pragma once
#include "plan.cuh"
#include "primitives/codes.cuh"

constexpr int highest_power(int n) { return n < 2 ? n : 2 * highest_power(n / 2); }
constexpr int lowest_power(int n) { return n & -n; }
constexpr int at_least(int a, int b) { return a < b ? b : a; }
constexpr int at_most(int a, int b) { return a < b ? a : b; }

struct Keys {
  static constexpr int dim = Plan::key_dim, x = Plan::key_vector_size, entry_bits = Plan::key_entry_bits;
  static constexpr int fused = Plan::key_fused, block = Plan::key_block, sharers = 4;
  static constexpr bool learned = Plan::key_learned, integers = Plan::key_integers;
  static constexpr int numbers = learned ? 0 : 1 + integers;  // fp16 of a token: a scale, and a zero
};

struct Values {
  static constexpr int dim = Plan::value_dim, x = Plan::value_vector_size, entry_bits = Plan::value_entry_bits;
  static constexpr int fused = Plan::value_fused, block = Plan::value_block, sharers = 8;
  static constexpr bool learned = Plan::value_learned, integers = Plan::value_integers;
  static constexpr int numbers = learned ? 0 : 1 + integers;
};

template <class Side> struct Index {
  static constexpr int width = Side::x * Side::fused, bits = Side::entry_bits * Side::fused;
  static constexpr int words = width / 2;  // registers of an entry
  static constexpr int row_bytes = (Side::dim / Side::x * Side::entry_bits + 7) / 8;
  static_assert((width == 2 || width == 4) && bits <= 8, "entries are one or two registers");
};

// Channels and codes of a lane in part 0 or 1 of a token.
template <class Side, int Part> struct Share {
  static constexpr int high = highest_power(Side::dim);
  static constexpr int size = Part ? Side::dim - high : high;  // channels of the part, or none
  static constexpr int first = Part ? high : 0;                // its first channel
  // A part that has fewer indexes than there are sharers belongs to the first ones; what others compute is not used.
  static constexpr int channels = size ? at_least(size / Side::sharers, Index<Side>::width) : 0;
  static constexpr int owners = size ? size / channels : 1;
  static constexpr int indexes = channels / Index<Side>::width;
  static constexpr int bits = indexes * Index<Side>::bits;
  static constexpr int first_bit = first / Side::x * Side::entry_bits;
  static constexpr int first_word = Part ? Share<Side, 0>::channels / 2 : 0;  // of a lane's registers of a token
  static_assert(size == 0 || lowest_power(size) == size, "D is a power of two, or the sum of two");

  __device__ static int owner(int lane) { return (Side::sharers == 4 ? lane % 4 : lane / 4) % owners; }
};

template <int Value> struct Constant { static constexpr int value = Value; };

// `body` for each part: of its type, `decltype(part)::value` is the number.
template <class Side, class Body> __device__ inline void each_part(const Body& body) {
  body(Constant<0>());
  if constexpr (Share<Side, 1>::size > 0) body(Constant<1>());
}

// Indexes that a lane has of one token, and the slots of shared memory in which they wait: pieces as large as a row's
// alignment allows, those of 32 lanes side by side.
template <class Side> struct TokenCodes {
  template <int Part> using Of = Codes<Index<Side>::bits, at_least(Share<Side, Part>::indexes, 1)>;
  Of<0> near;
  Of<1> far;

  template <int Part> __device__ Of<Part>& part() {
    if constexpr (Part) return far;
    else return near;
  }
  template <int Part> __device__ const Of<Part>& part() const {
    if constexpr (Part) return far;
    else return near;
  }

  template <int Part> struct Slot {
    using S = Share<Side, Part>;
    static constexpr int each = S::bits / 8, begin = S::first_bit / 8;
    // Rows begin at a multiple of what divides a row, up to 16 bytes.
    static constexpr int aligned = at_most(16, lowest_power(each | begin | Index<Side>::row_bytes | 16));
    static constexpr bool whole = S::bits % 32 == 0 && S::first_bit % 8 == 0 && aligned >= 4;
    // Else a lane has the words that hold its bits.
    static constexpr int piece = whole ? aligned : 4, words = Of<Part>::words + !whole;
    static constexpr int bytes = S::size ? words * 4 : 0;  // of a lane
  };
  static constexpr int bytes = 32 * (Slot<0>::bytes + Slot<1>::bytes);  // of a warp

  // `row`: the codes of the token, at any byte; `to`: the slots of the warp.
  __device__ static void copy(uint32_t to, const char* row, int lane) {
    each_part<Side>([&](auto number) {
      constexpr int p = decltype(number)::value;
      using S = Share<Side, p>;
      using At = Slot<p>;
      const uint32_t slot = to + p * 32 * Slot<0>::bytes + lane * At::piece;
      if constexpr (At::whole) {
        const char* const from = row + At::begin + S::owner(lane) * At::each;
#pragma unroll
        for (int i = 0; i < At::bytes / At::piece; ++i)
          copy_piece<At::piece>(slot + i * 32 * At::piece, from + i * At::piece);
      } else {
        const int bit = S::first_bit + S::owner(lane) * S::bits;
        const int64_t at = reinterpret_cast<int64_t>(row) + bit / 8, word = at & ~int64_t(3);
        const int end = int(at & 3) * 8 + bit % 8 + S::bits;  // bits from the first word on
#pragma unroll
        for (int i = 0; i < At::words; ++i)
          copy_async(slot + i * 128, reinterpret_cast<const char*>(word) + (32 * i < end ? 4 * i : 0), 32 * i < end ? 4 : 0);
      }
    });
  }

  // Load the codes that were copied to `from`.
  __device__ void load(uint32_t from, const char* row, int lane) {
    each_part<Side>([&](auto number) {
      constexpr int p = decltype(number)::value;
      using S = Share<Side, p>;
      using At = Slot<p>;
      uint32_t (&word)[Of<p>::words] = part<p>().word;
      const uint32_t slot = from + p * 32 * Slot<0>::bytes + lane * At::piece;
      if constexpr (At::whole) {
#pragma unroll
        for (int i = 0; i < At::bytes / At::piece; ++i)
          load_shared<At::piece>(slot + i * 32 * At::piece, word + i * At::piece / 4);
      } else {
        const int bit = S::first_bit + S::owner(lane) * S::bits;
        const int shift = int((reinterpret_cast<int64_t>(row) + bit / 8) & 3) * 8 + bit % 8;
        uint32_t all[At::words];
#pragma unroll
        for (int i = 0; i < At::words; ++i) load_shared<4>(slot + i * 128, all + i);
#pragma unroll
        for (int i = 0; i + 1 < At::words; ++i) word[i] = __funnelshift_r(all[i], all[i + 1], shift);
      }
    });
  }

  // `row`: the codes of the token in shared memory, in stored layout.
  __device__ void load_row(uint32_t row, int lane) {
    each_part<Side>([&](auto number) {
      constexpr int p = decltype(number)::value;
      using S = Share<Side, p>;
      using At = Slot<p>;
      uint32_t(&word)[Of<p>::words] = part<p>().word;
      if constexpr (At::whole) {
        const uint32_t from = row + At::begin + S::owner(lane) * At::each;
#pragma unroll
        for (int i = 0; i < At::bytes / At::piece; ++i)
          load_shared<At::piece>(from + i * At::piece, word + i * At::piece / 4);
      } else {
        const uint32_t at = row * 8 + S::first_bit + S::owner(lane) * S::bits;
        uint32_t all[At::words];
#pragma unroll
        for (int i = 0; i < At::words; ++i) load_shared<4>((at / 32 + i) * 4, all + i);
#pragma unroll
        for (int i = 0; i + 1 < At::words; ++i) word[i] = __funnelshift_r(all[i], all[i + 1], at % 32);
      }
    });
  }
};
