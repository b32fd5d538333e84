// SPDX-License-Identifier: Apache-2.0
// Queries as B fragments (mma.cuh), rotated like the keys before these were encoded.
//
//     <q, m + R^-1 k / s> = <q, m> + <R (q / s), k>          R^-1 = R: Hadamard matrices over blocks of the channels
//
// A warp rotates one column per iteration, number 32 i + lane in each lane: butterflies over lanes are shuffles. The
// result is fp16, scaled by a power of two that brings its largest number near 2^13; sums are float32. Columns are in
// shared memory in fragment order, two steps of 16 channels after each other: [tiles][pairs of steps][32 lanes][8].
#pragma once
#include "kv/attention/attention_integers.cuh"
#include "kv/attention/attention_tokens.cuh"

__device__ inline const uint16_t* place(const Floats& x, int64_t row, int64_t head, int64_t token) {
  return x.at + row * x.row + head * x.head + token * x.token;
}

// Loads that are begun where they are written: other loads and copies are asked for before anything waits for them.
__device__ inline uint16_t load_early(const uint16_t* from) {
  uint16_t number;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(number) : "l"(from));
  return number;
}
__device__ inline float load_early(const float* from) {
  float number;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(number) : "l"(from));
  return number;
}

// `value[i]` is number 32 i + lane of rows that are rotated in blocks of `Block`, not yet normalised.
template <int Block, int N> __device__ inline void butterflies(float (&value)[N], int lane) {
#pragma unroll
  for (int stride = 1; stride < Block; stride *= 2)
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (stride < 32) {
        const float other = __shfl_xor_sync(0xffffffff, value[i], stride);
        value[i] = lane & stride ? other - value[i] : value[i] + other;
      } else if (!(i & stride / 32)) {
        const int partner = i + stride / 32 < N ? i + stride / 32 : i;
        const float low = value[i], high = value[partner];
        value[i] = low + high, value[partner] = low - high;
      }
    }
}

// Parameters of a column, in shared memory.
struct Staged {
  const char* mask;  // of its logits
  float factor;      // of its products
  float sum;         // of its numbers, in units of products: what a key of ones gives
  float shift;       // the logit of the mean of the keys
  int end;           // coded tokens that it sees are below
};

struct Query {
  // Channels of a lane in one product: of two keys, or (paired) of one key, split over both columns of a query.
  static constexpr int taken = Plan::paired ? 8 : 4;
  static constexpr int near = Share<Keys, 0>::channels / taken, far = Share<Keys, 1>::channels / taken;
  static constexpr int steps = near + far, pairs = (steps + 1) / 2;
  static constexpr int columns = Plan::paired ? columns_of_block / 2 : columns_of_block;  // that are prepared
  static constexpr int bytes = Plan::query_tiles * pairs * 512;
  static constexpr bool smooths = !Keys::learned && !Keys::integers;  // whether keys may be multiplied before they are coded
  static constexpr int kept = Plan::queries_in_registers ? Plan::query_tiles * pairs : 1;

  uint32_t word[kept][4];
  const char* from;

  // Position of a channel of a lane's share in the words of a key, in fp16 numbers.
  __device__ static int in_words(int at, int part) {
    return part ? Words<Keys, 1>::place(at) : Words<Keys, 0>::place(at);
  }

  // Factor that brings the products of a number with all words of keys to one unit.
  __device__ static float lowered(int channel) {
    if constexpr (!Keys::integers) return 1.0f;
    const int part = channel >= Share<Keys, 0>::size, within = channel - part * Share<Keys, 0>::size;
    const int share = at_least(part ? Share<Keys, 1>::channels : Share<Keys, 0>::channels, 1);
    return Integers::unit / Words<Keys, 0>::unit(in_words(within % share, part) / 2);
  }

  // Position of number `channel` of column `column`, in fp16 numbers.
  __device__ static int place_of(int column, int channel) {
    const int part = channel >= Share<Keys, 0>::size, within = channel - part * Share<Keys, 0>::size;
    const int share = at_least(part ? Share<Keys, 1>::channels : Share<Keys, 0>::channels, 1), t = within / share;
    if constexpr (Plan::paired) {
      const int at = in_words(within % share, part), step = part * near + at / taken, word = at / 2 % 4;
      return (step / 2 * 32 + (2 * column + word % 2) * 4 + t) * 8 + step % 2 * 4 + word / 2 * 2 + at % 2;
    }
    const int seen = column % 8 & SwizzleColumns::known, turn = part ? swizzle_order_of<Keys, 1>(seen) : swizzle_order_of<Keys, 0>(seen);
    const int at = in_words(within % share, part) ^ turn * Index<Keys>::width, step = part * near + at / 4;
    return ((column / 8 * pairs + step / 2) * 32 + column % 8 * 4 + t) * 8 + step % 2 * 4 + at % 4;
  }

  // L2 prefetch of what `stage` loads besides queries.
  __device__ static void prefetch(const Arguments& a, int row, int kv_head, int lane) {
    const int64_t at = row * a.mean_row + kv_head * a.mean_head + 8 * lane;
    if (a.mean && 8 * lane < Keys::dim) prefetch_line(a.mean + at);
    if (smooths && a.smoothing && 8 * lane < Keys::dim) prefetch_line(a.smoothing + at);
  }

  // What a warp loads for its first column, numbers 32 i + lane: addresses are known before the grids that are waited for
  // have ended, and `early` loads begin at once after that, before copies of codes are in their way.
  struct Loads {
    static constexpr int each = (Keys::dim + 31) / 32;
    // Of the usual plans; others have no registers left.
    static constexpr bool early = each <= 4 && Plan::query_tiles == 1 && !Keys::learned && !Values::learned && causal;
    const uint16_t* q;
    const float *mean, *smoothing;
    bool exists;  // the first column; if it does not, none of the warp's later ones does
    float centre[each], inverse[smooths ? each : 1];
    uint16_t number[each];

    __device__ Loads(const Arguments& a, int row, int kv_head, int first, int lane, int column) {
      const Column at(a, kv_head, first, column);
      const int64_t of_head = row * a.mean_row + kv_head * a.mean_head + lane;
      exists = at.exists && column < columns;
      q = place(a.query, row, at.head, at.query) + lane;
      mean = a.mean ? a.mean + of_head : nullptr, smoothing = smooths && a.smoothing ? a.smoothing + of_head : nullptr;
    }

    __device__ void begin(int lane) {
      load(q, exists, lane);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const bool some = exists && 32 * i + lane < Keys::dim;
        centre[i] = mean && some ? load_early(mean + 32 * i) : 0.0f;
        if constexpr (smooths) inverse[i] = smoothing && some ? load_early(smoothing + 32 * i) : 1.0f;
      }
    }

    // `from`: number `lane` of a column.
    __device__ void load(const uint16_t* from, bool some, int lane) {
#pragma unroll
      for (int i = 0; i < each; ++i) number[i] = some && 32 * i + lane < Keys::dim ? load_early(from + 32 * i) : 0;
    }
  };

  // Rotates the columns from `first` on of one kv head, by the first `warps` warps; `staged` holds `bytes` and `Staged`
  // of each column. `loads` were begun; what is done before they are waited for is `meanwhile`.
  template <class Body>
  __device__ static void stage(const Arguments& a, const Tokens& tokens, int row, int kv_head, int first, char* staged,
                               int warps, Loads& loads, const Body& meanwhile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr int each = Loads::each;
    const float(&centre)[each] = loads.centre;
    auto& inverse = loads.inverse;
    if constexpr (!Loads::early) loads = Loads(a, row, kv_head, first, lane, warp), loads.begin(lane);
    meanwhile();
#pragma unroll
    for (int i = 0; smooths && i < each; ++i) inverse[i] = __frcp_rn(inverse[i]);
    for (int column = warp; column < columns; column += warps) {
      const Column at(a, kv_head, first, column);
      if (!at.exists) {
        // Zeros, since its logits take part in whether maxima are raised: not what happened to be there before.
#pragma unroll
        for (int i = 0; i < each; ++i)
          if (32 * i + lane < Keys::dim) reinterpret_cast<uint16_t*>(staged)[place_of(column, 32 * i + lane)] = 0;
        if (lane == 0)
          reinterpret_cast<Staged*>(staged + bytes)[column] = {mask_of(a, row, at), 0.0f, 0.0f, 0.0f, 0};
        continue;
      }
      if (column != warp) loads.load(place(a.query, row, at.head, at.query) + lane, true, lane);
      float value[each], most = 0.0f, shift = 0.0f, sum = 0.0f;
#pragma unroll
      for (int i = 0; i < each; ++i) value[i] = to_float<Plan::dtype>(loads.number[i]);
#pragma unroll
      for (int i = 0; i < each; ++i) shift += value[i] * centre[i];
#pragma unroll
      for (int i = 0; smooths && i < each; ++i) value[i] *= inverse[i];
      butterflies<Keys::block>(value, lane);
#pragma unroll
      for (int i = 0; i < each; ++i) most = fmaxf(most, fabsf(value[i]));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
        shift += __shfl_xor_sync(0xffffffff, shift, step);
      }
      // 2^(13 - e) where most is in [2^e, 2^(e + 1)); of a column of zeros, or beyond all reason, some power of two.
      const int exponent = min(max(int(__float_as_uint(most) >> 23), 30), 240);
      const float up = __uint_as_float((267 - exponent) << 23), down = __uint_as_float((exponent - 13) << 23);
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (32 * i + lane < Keys::dim) {
          const int channel = 32 * i + lane;
          const float lower = lowered(channel);
          const uint16_t number = uint16_t(pack_pair<Dtype::FLOAT16>(value[i] * (up * lower), 0.0f));
          reinterpret_cast<uint16_t*>(staged)[place_of(column, channel)] = number;
          if constexpr (Keys::integers) sum += half_to_float(number) * (Integers::unit / lower);
        }
      if constexpr (Keys::integers)
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      if (lane == 0) {
        Staged& found = reinterpret_cast<Staged*>(staged + bytes)[column];
        found.factor = down * inverse_root(Keys::block) * a.scaling * (Keys::integers ? 1.0f / Integers::unit : 1.0f);
        found.sum = sum;
        found.shift = shift * a.scaling;
        found.end = tokens.end(a, at.query);
        found.mask = mask_of(a, row, at);
      }
    }
  }

  // The results of columns that were not staged are not used.
  __device__ Query(const char* staged, int lane) : from(staged + lane * 16) {
    if constexpr (Plan::queries_in_registers)
#pragma unroll
      for (int i = 0; i < kept; ++i) load_words<16>(from + i * 512, word[i]);
  }

  // Fragments of column tile n at a step: the next `taken` channels of the lane's share.
  __device__ void fragment(int n, int step, uint32_t (&b)[2]) const {
    if constexpr (Plan::queries_in_registers) {
      b[0] = word[n * pairs + step / 2][step % 2 * 2], b[1] = word[n * pairs + step / 2][step % 2 * 2 + 1];
    } else {
      load_words<8>(from + (n * pairs + step / 2) * 512 + step % 2 * 8, b);
    }
  }
};
