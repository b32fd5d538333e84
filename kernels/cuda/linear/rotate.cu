// SPDX-License-Identifier: Apache-2.0
// Rows times block-diagonal Hadamard matrices, behind signs, a diagonal or nothing, or the inverse:
//
//     y = (x * d) H        inverse: y = (x H) * d        H = 1 / sqrt(B) [[1, 1], [1, -1]] (x) .. (x) [[1, 1], [1, -1]]
//
// `lanes` threads of one warp own a block of B numbers, `each` numbers per thread, in chunks of at most 8:
//
//     number of a block = (chunk * lanes + lane) * width + i       butterflies over i and chunk: in registers
//                                                                  butterflies over lane: by shuffles
//
// With Plan::fragment_unit, y is written in the MMA-fragment order of linear.cu or linear_wgmma.cu, else row-major.
//
// Bytes: x and y once. Bottleneck: DRAM. Sums are float32.
#include "plan.cuh"
#include "primitives/numbers.cuh"
#include "primitives/pdl.cuh"

struct Arguments {
  const void* x;         // [rows, columns] of Plan::source, at a multiple of 16
  const void* diagonal;  // fp16 [columns], or signs, bit 1 = negative [ceil(columns / 8)]; not read without
  void* y;               // [rows, columns] of Plan::out; may be x
  uint32_t blocks;       // rows * columns / B
  uint32_t across;       // columns / B
  uint32_t token_tiles;  // ceil(rows / 8); read if y is in fragment order
};

// Without rotation, a group of lanes reorders 8 numbers, or one chunk of linear_wgmma.cu.
constexpr int B = Plan::block > 1 || !Plan::fragment_unit ? Plan::block : Plan::swizzled ? 4 * Plan::fragment_unit : 8;
constexpr bool whole_chunk = Plan::swizzled && B == 4 * Plan::fragment_unit;  // a thread has what its stores need
static_assert(!Plan::swizzled || whole_chunk || (B >= 8 && Plan::fragment_unit <= 64), "octets of one store are in one warp");
constexpr bool fewer_shuffles = whole_chunk || (!Plan::fragment_unit && B == 128);
constexpr int width = B < 8 ? B : 8;
constexpr int lanes = fewer_shuffles ? B / 32 : B / width < 32 ? B / width : 32;
constexpr int chunks = B / (width * lanes);
constexpr int each = width * chunks;

constexpr float size_of_entry = inverse_root(B);

__device__ inline void multiply(float (&value)[each], const Arguments& a, uint32_t block, int lane) {
#pragma unroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const uint32_t column = block % a.across * B + (chunk * lanes + lane) * width;
    if constexpr (Plan::diagonal == Diagonal::SIGNS) {
      const uint32_t bits = __ldg(static_cast<const uint8_t*>(a.diagonal) + column / 8) >> column % 8;
#pragma unroll
      for (int i = 0; i < width; ++i)
        if (bits >> i & 1) value[chunk * width + i] = -value[chunk * width + i];
    } else if constexpr (Plan::diagonal == Diagonal::HALVES) {
      float factor[width];
      load_floats<Dtype::FLOAT16>(static_cast<const uint16_t*>(a.diagonal) + column, factor);
#pragma unroll
      for (int i = 0; i < width; ++i) value[chunk * width + i] *= factor[i];
    }
  }
}

// Offset at which linear.cu reads number `column` of a token (its `Inputs`), for units of Plan::fragment_unit columns.
__device__ inline int64_t fragment_offset(const Arguments& a, uint32_t token, uint32_t column) {
  constexpr uint32_t unit = Plan::fragment_unit ? Plan::fragment_unit : 8;
  const uint32_t tile = column / (4 * unit) * a.token_tiles + token / 8;
  const uint32_t lane = token % 8 * 4 + column / unit % 4;
  return (int64_t(tile) * (unit / 8) + column % unit / 8) * 256 + lane * 8 + column % 8;
}

// Store in the order of linear_wgmma.cu: [columns / 64][8 * token_tiles][64], 16 bytes of a token at place p ^ token % 8
// of eight. The 16 bytes are two columns of each of four octets that are Plan::fragment_unit columns apart; `place`
// counts them within a chunk.
__device__ inline void store_swizzled(const Arguments& a, uint32_t token, uint32_t column, uint32_t place,
                                      const uint32_t (&word)[4]) {
  constexpr uint32_t unit = Plan::fragment_unit ? Plan::fragment_unit : 8;
  const int64_t line = int64_t(column / (4 * unit) * (unit / 16) + place / 8) * (8 * a.token_tiles) + token;
  store_words<16>(static_cast<char*>(a.y) + line * 128 + ((place ^ token) % 8) * 16, word);
}

// Store the four octets of a thread. Two lanes exchange every other place, so that they store 32 contiguous bytes, a
// sector of L2. (Templates: compiled only if used.)
template <Dtype D, int N>
__device__ inline void store_chunk(const Arguments& a, uint32_t token, uint32_t column, int lane, bool exists,
                                   const float (&value)[N]) {
  const bool odd = lane % 2;
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    uint32_t of_even[4], of_odd[4];  // what this lane stores of the places of either
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t first = pack_pair<D>(value[8 * t + 2 * k], value[8 * t + 2 * k + 1]);
      const uint32_t second = pack_pair<D>(value[8 * t + 2 * k + 2], value[8 * t + 2 * k + 3]);
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
      of_even[t] = odd ? other : first;
      of_odd[t] = odd ? second : other;
    }
    if (!exists) continue;
    const uint32_t place = lane / 2 * 8 + k + odd;
    store_swizzled(a, token, column, place, of_even);
    store_swizzled(a, token, column, place + 4, of_odd);
  }
}

// Store one octet of each of four lanes, after a 4 x 4 transpose by shuffles.
template <Dtype D, int N>
__device__ inline void store_octet(const Arguments& a, uint32_t token, uint32_t column, bool exists,
                                   const float (&value)[N]) {
  constexpr uint32_t unit = Plan::fragment_unit ? Plan::fragment_unit : 8, octets = unit / 8;
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = pack_pair<D>(value[2 * i], value[2 * i + 1]);
  const uint32_t t = column / unit % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & bit)) {
        const bool upper = t & bit;
        const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i | bit], octets * bit);
        word[upper ? i : i | bit] = other;
      }
  if (exists) store_swizzled(a, token, column, column % unit / 8 * 4 + t, word);
}

__device__ inline void transform(float (&value)[each], int lane) {
#pragma unroll
  for (int half = 1; half < each; half *= 2)
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (!(i & half)) {
        const float low = value[i], high = value[i + half];
        value[i] = low + high, value[i + half] = low - high;
      }
#pragma unroll
  for (int half = 1; half < lanes; half *= 2) {
    const float sign = lane & half ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < each; ++i) value[i] = sign * value[i] + __shfl_xor_sync(0xffffffffu, value[i], half);
  }
#pragma unroll
  for (int i = 0; i < each; ++i) value[i] *= size_of_entry;
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) rotate(const Arguments a) {
  // Before it waits, the next kernel reads only codes that no kernel wrote.
  if constexpr (Plan::fragment_unit > 0) let_next_grid_begin();
  wait_for_grids();
  if constexpr (Plan::fragment_unit == 0) let_next_grid_begin();
  const uint32_t block = blockIdx.x * (Plan::threads / lanes) + threadIdx.x / lanes;
  const bool exists = block < a.blocks;  // all lanes of a warp take part in its shuffles
  const int lane = threadIdx.x % lanes;
  float value[each] = {};
  if (exists) {
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int64_t at = int64_t(block) * B + (chunk * lanes + lane) * width;
      float part[width];
      load_floats<Plan::source>(static_cast<const char*>(a.x) + at * size_of<Plan::source>, part);
#pragma unroll
      for (int i = 0; i < width; ++i) value[chunk * width + i] = part[i];
    }
    if constexpr (!Plan::inverse) multiply(value, a, block, lane);
  }
  if constexpr (Plan::block > 1) transform(value, lane);
  if (!exists && !Plan::swizzled) return;
  if constexpr (Plan::inverse) multiply(value, a, block, lane);
  if constexpr (whole_chunk) {
    store_chunk<Plan::out>(a, block / a.across, block % a.across * B, lane, exists, value);
    return;
  }
#pragma unroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int64_t at = int64_t(block) * B + (chunk * lanes + lane) * width;
    float part[width];
#pragma unroll
    for (int i = 0; i < width; ++i) part[i] = value[chunk * width + i];
    if constexpr (Plan::swizzled) {
      store_octet<Plan::out>(a, block / a.across, block % a.across * B + at % B, exists, part);
      continue;
    }
    const int64_t to = Plan::fragment_unit ? fragment_offset(a, block / a.across, block % a.across * B + at % B) : at;
    store_floats<Plan::out>(static_cast<char*>(a.y) + to * size_of<Plan::out>, part);
  }
}
