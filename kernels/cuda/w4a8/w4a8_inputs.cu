// SPDX-License-Identifier: Apache-2.0
// Tokens to int8 in the order in which w4a8.cu or w4a8_wgmma.cu reads them:
//
//     numbers[m, k] = round(x[m, k] / size[m])        size[m] = max |x[m]| / 127
//
//     x of Source     TOKENS    tokens in memory
//                     NORM      h / sqrt(mean(h^2) + eps) * weight          RMSNorm of h (Llama)
//                     GATED     h / (1 + exp(-h)) * up                      SiLU gate of an MLP
//
// A block owns one token, or zeros that pad the tokens to eight. Columns are numbered as w4a8.cuh draws. Piece 2 t + h of
// a chunk is 16 columns of lane t, of which words 0 .. 3 are the even and odd columns of two octets:
//
//     fragments   [tokens / 8][chunks][h][lane 4 (m % 8) + t][16 bytes]          a lane loads its 16 bytes directly
//                 [chunks][h][t][16 bytes] of a single token                     all lanes of t read them
//     swizzled    [chunks][tokens, padded to 8][128 bytes], in 8 pieces:         drawn in wgmma.cuh
//                 word i of piece 2 t + h is word t of piece (4 h + i) ^ m % 8
//
// Bytes: the source once, one byte per number written; x stays in registers. Bottleneck: DRAM.
#include "primitives/pdl.cuh"
#include "w4a8/w4a8_round.cuh"

struct Arguments {
  const uint16_t* x;      // [tokens, columns] of Plan::dtype; h
  const uint16_t* other;  // weight [columns] or up [tokens, columns] of Plan::dtype, or null
  char* numbers;
  Token* token;           // [tokens]
  int tokens;
  float eps;
  int early;              // whether what follows is a product of weights that nobody wrote, which may begin at once
};

// Two numbers, each by `map(a, b)` of one of `a` and one of `b`, rounded.
template <class Map> __device__ inline uint32_t map_pair(uint32_t a, uint32_t b, Map map) {
  float first, second, with_first, with_second;
  unpack_pair<Plan::dtype>(a, first, second);
  unpack_pair<Plan::dtype>(b, with_first, with_second);
  return pack_pair<Plan::dtype>(map(first, with_first), map(second, with_second));
}

// Rounded where torch rounds: h / rms(h), and that times the weight. The order of the sum of squares is not that of torch.
__device__ inline void normalize(Rounding& h, const uint16_t* weight, float eps) {
  __shared__ float part[Rounding::warps];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Rounding::each; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float first, second;
      unpack_pair<Plan::dtype>(h.word[i][j], first, second);
      sum += first * first + second * second;
    }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int w = 0; w < Rounding::warps; ++w) sum += part[w];
  const float inverse = rsqrtf(sum * (1.0f / Plan::columns) + eps);
  h.combine(weight, [&](uint32_t word, uint32_t by) {
    const uint32_t unit = map_pair(word, word, [&](float x, float) { return __fmul_rn(x, inverse); });
    return map_pair(unit, by, [](float x, float w) { return __fmul_rn(x, w); });
  });
}

// Rounded where torch rounds: SiLU, and that times up.
__device__ inline void gate(Rounding& h, const uint16_t* up) {
  h.combine(up, [](uint32_t word, uint32_t by) {
    const uint32_t open = map_pair(word, word, [](float x, float) { return __fdiv_rn(x, 1.0f + expf(-x)); });
    return map_pair(open, by, [](float x, float u) { return __fmul_rn(x, u); });
  });
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) w4a8_inputs(const Arguments a) {
  __shared__ __align__(16) char shared[Rounding::shared_bytes];
  const int m = blockIdx.x;
  const int64_t row = int64_t(m) * Plan::columns;
  if (a.early) let_next_grid_begin();
  wait_for_grids();
  if (!a.early) let_next_grid_begin();
  const int padded = (a.tokens + 7) / 8 * 8;
  const auto put = [&](int piece, const uint32_t* word) {
    const int c = piece / 8, t = piece % 8 / 2, h = piece % 2;
    if constexpr (Plan::swizzled) {
      char* to = a.numbers + (int64_t(c) * padded + m) * chunk + t * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + ((4 * h + i) ^ m % 8) * 16) = word[i];
    } else {
      const int64_t at = (int64_t(m / 8) * chunks + c) * 2 + h, lanes = a.tokens == 1 ? 4 : 32;
      store_words<16>(a.numbers + (at * lanes + m % 8 * 4 + t) * 16, word);
    }
  };
  if (!Plan::swizzled && m >= a.tokens) {
    constexpr uint32_t zeros[4] = {};
#pragma unroll 1
    for (int piece = threadIdx.x; piece < Rounding::padded; piece += Plan::threads) put(piece, zeros);
    return;
  }
  Rounding rounding;
  rounding.load(a.x + row);
  if constexpr (Plan::source == Source::NORM) normalize(rounding, a.other, a.eps);
  if constexpr (Plan::source == Source::GATED) gate(rounding, a.other + row);
  const Token token = rounding.round(shared, put);
  if (threadIdx.x == 0) a.token[m] = token;
}
