// SPDX-License-Identifier: Apache-2.0
// Tokens as integers of 8 bits, in the order in which a product of w4a8.cu or w4a8_wide.cu reads them.
//
//     numbers[m, k] = round(x[m, k] / size[m])        size[m] = max |x[m]| / 127
//
// A block has one token. Columns are numbered as w4a8.cuh draws; piece 2 t + h of a chunk is 16 columns of lane t, of
// which words 0 .. 3 are the even and odd columns of two octets:
//
//     fragments   [tokens / 8][chunks][h][lane 4 (m % 8) + t][16 bytes]          a lane reads its 16 bytes as they are
//     swizzled    [chunks][tokens, padded to 8][128 bytes], in 8 pieces:         as wgmma.cuh draws
//                 word i of piece 2 t + h is word t of piece (4 h + i) ^ m % 8
//
// Bytes: x once, half as many written. Bound by memory.
#include "grids.cuh"
#include "w4a8_round.cuh"

struct Arguments {
  const uint16_t* x;  // [tokens, columns] of Plan::dtype
  char* numbers;
  Token* token;       // [tokens]
  int tokens;
};

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::resident) w4a8_inputs(const Arguments a) {
  __shared__ __align__(16) char shared[Rounding::shared_bytes];
  const int m = blockIdx.x;
  wait_for_grids();
  let_next_grid_begin();
  Rounding rounding;
  rounding.load(a.x + int64_t(m) * Plan::columns);
  const int padded = (a.tokens + 7) / 8 * 8;
  const Token token = rounding.round(shared, [&](int piece, const uint32_t* word) {
    const int c = piece / 8, t = piece % 8 / 2, h = piece % 2;
    if constexpr (Plan::swizzled) {
      char* to = a.numbers + (int64_t(c) * padded + m) * chunk + t * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + ((4 * h + i) ^ m % 8) * 16) = word[i];
    } else {
      const int64_t at = (int64_t(m / 8) * chunks + c) * 2 + h;
      store_words<16>(a.numbers + at * 512 + (m % 8 * 4 + t) * 16, word);
    }
  });
  if (threadIdx.x == 0) a.token[m] = token;
}
