// SPDX-License-Identifier: Apache-2.0
// Tokens times block-diagonal Hadamard matrices (rotate.cu), to int8 with a scale for each token, in the order in which
// linear_wgmma.cu reads them; and a scale for each row of W, which becomes int8 there:
//
//     v = (x[m] * d) H        numbers[m, k] = round(v[k] / token_scale[m])        token_scale[m] = max |v| / 127
//     row_scale[o] = max_g |scale[o, g]| * max(max |entries| / 127, 2^-15)        a factor of entries fits into fp16
//
// Blocks 0 .. tokens - 1 own a token each, those after them rows. Four threads own 128 columns of a token; thread l has
// columns 32 t + 8 l .. 32 t + 8 l + 7 for each lane t of a product that reads them. Those are pieces 2 l and 2 l + 1 of
// the 128 bytes of the token, word t of lane t (wgmma.cuh draws the swizzle):
//
//     number of 128 = (t * 4 + l) * 8 + i       butterflies over i and t: in registers; over l: by shuffles
//
// Bytes: x once, one byte per number written. Bottleneck: DRAM. Sums are float32.
#include "plan.cuh"
#include "primitives/numbers.cuh"
#include "primitives/pdl.cuh"

struct Arguments {
  const void* x;         // [tokens, columns] of Plan::source, at a multiple of 16
  const void* diagonal;  // fp16 [columns], or signs, bit 1 = negative [ceil(columns / 8)]; not read without
  char* y;               // int8 [columns / 128][8 * ceil(tokens / 8)][128], token_scale, row_scale
  const void* codebook;  // fp16 or int8 [stages, entries, x]
  const uint16_t* scale; // fp16 [rows, groups]
  int tokens;
  int rows;
};

constexpr float smallest_entry = 1.0f / 32768;
constexpr int columns = Plan::columns, warps = Plan::threads / 32, B = Plan::block;
static_assert(columns <= 32 * Plan::threads, "a thread has 32 columns");

__device__ inline float magnitude(float value) { return __uint_as_float(__float_as_uint(value) & 0x7fffffffu); }

// The larger magnitude; of NaN, NaN.
__device__ inline float larger(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(magnitude(a)), "f"(magnitude(b)));
  return most;
}

// The largest of all threads of the block, of numbers that are not negative: NaN is larger than infinity.
__device__ inline float largest(float value) {
  __shared__ uint32_t of_warp[32];
  uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(value));
  if constexpr (warps > 1) {
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < warps; ++w) bits = max(bits, of_warp[w]);
    __syncthreads();
  }
  return __uint_as_float(bits);
}

struct Piece {
  float value[32];  // [t][i]

  __device__ void load(const char* x, int first) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      float part[8];
      load_floats<Plan::source>(x + int64_t(first + t * 32) * size_of<Plan::source>, part);
#pragma unroll
      for (int i = 0; i < 8; ++i) value[t * 8 + i] = part[i];
    }
  }

  __device__ void multiply(const void* diagonal, int first) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int column = first + t * 32;
      if constexpr (Plan::diagonal == Diagonal::SIGNS) {
        const uint32_t bits = __ldg(static_cast<const uint8_t*>(diagonal) + column / 8);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (bits >> i & 1) value[t * 8 + i] = -value[t * 8 + i];
      } else if constexpr (Plan::diagonal == Diagonal::HALVES) {
        float factor[8];
        load_floats<Dtype::FLOAT16>(static_cast<const uint16_t*>(diagonal) + column, factor);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[t * 8 + i] *= factor[i];
      }
    }
  }

  template <int Half> __device__ void butterflies() {
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (!(i & Half)) {
        const float low = value[i], high = value[i + Half];
        value[i] = low + high, value[i + Half] = low - high;
      }
  }

  template <int Half> __device__ void across(int lane) {
    const float sign = lane & Half ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) value[i] = sign * value[i] + __shfl_xor_sync(0xffffffffu, value[i], Half);
  }

  // Times sqrt(B).
  __device__ void rotate(int lane) {
    if constexpr (B >= 2) butterflies<1>();
    if constexpr (B >= 4) butterflies<2>();
    if constexpr (B >= 8) butterflies<4>();
    if constexpr (B >= 16) across<1>(lane);
    if constexpr (B >= 32) across<2>(lane);
    if constexpr (B >= 64) butterflies<8>();
    if constexpr (B >= 128) butterflies<16>();
  }
};

__device__ inline void round_token(const Arguments& a, int m, float* token_scale) {
  const int lane = threadIdx.x % 4, padded = (a.tokens + 7) / 8 * 8;
  const char* x = static_cast<const char*>(a.x) + int64_t(m) * columns * size_of<Plan::source>;
  const int at = threadIdx.x / 4, first = at * 128 + lane * 8;
  const bool exists = first < columns;
  Piece piece = {};
  if (exists) {
    piece.load(x, first);
    piece.multiply(a.diagonal, first);
  }
  piece.rotate(lane);
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) most = larger(most, piece.value[i]);
  most = largest(most);
  const bool finite = __float_as_uint(most) < 0x7f800000u;
  const float size = finite ? fmaxf(most, 1e-30f) : __uint_as_float(0x7fc00000u);
  const float inverse = __fdiv_rn(127.0f, size);
  const uint32_t kept = finite ? 0xffffffffu : 0u;
  if (exists) {
    char* to = a.y + (int64_t(at) * padded + m) * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t word[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t n[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)  // 1.5 * 2^23 leaves no place for a fraction: integers in the low byte
          n[i] = __float_as_uint(__fmaf_rn(piece.value[t * 8 + half * 4 + i], inverse, 12582912.0f));
        const uint32_t low = __byte_perm(n[0], n[1], 0x0040), high = __byte_perm(n[2], n[3], 0x0040);
        word[t] = __byte_perm(low, high, 0x5410) & kept;
      }
      store_words<16>(to + ((2 * lane + half) ^ m % 8) * 16, word);
    }
  }
  if (threadIdx.x == 0) token_scale[m] = size * (inverse_root(B) / 127.0f);
}

// The largest |W'| that codes may stand for, in the numbers of table.cuh: the sum of those of all codebooks.
__device__ inline float largest_entry(const Arguments& a) {
  float sum = 0.0f;
  if constexpr (Plan::scope == Scope::E8P) {
    const uint16_t* book = static_cast<const uint16_t*>(a.codebook);
#pragma unroll
    for (int stage = 0; stage < Plan::num_codebooks; ++stage)
      sum += 15.0f * magnitude(half_to_float(book[(stage * 257 + 256) * 8]) / half_to_float(book[256 * 8]));
  } else {
    constexpr int numbers = Plan::vector_size << Plan::entry_bits;
#pragma unroll
    for (int stage = 0; stage < Plan::num_codebooks; ++stage) {
      float most = 0.0f;
      for (int i = threadIdx.x; i < numbers; i += Plan::threads) {
        const int at = stage * numbers + i;
        most = larger(most, Plan::integers ? float(static_cast<const signed char*>(a.codebook)[at])
                                           : half_to_float(static_cast<const uint16_t*>(a.codebook)[at]));
      }
      sum += largest(most);
    }
  }
  return sum;
}

// Scales of all rows of a warp are on their way before the codebook is read.
__device__ inline void scale_rows(const Arguments& a, int first, float* row_scale) {
  const int lane = threadIdx.x % 32;
  float most[Plan::rows_of_warp];
#pragma unroll
  for (int i = 0; i < Plan::rows_of_warp; ++i) {
    const int row = min(first + i, a.rows - 1);
    most[i] = 0.0f;
#pragma unroll 4
    for (int g = lane; g < Plan::groups; g += 32)
      most[i] = larger(most[i], half_to_float(a.scale[int64_t(row) * Plan::groups + g]));
  }
  const float entry = fmaxf(largest_entry(a) * (1.0f / 127.0f), smallest_entry);
#pragma unroll
  for (int i = 0; i < Plan::rows_of_warp; ++i) {
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most[i]));
    if (lane == 0 && first + i < a.rows) row_scale[first + i] = __uint_as_float(bits) * entry;
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) rotate_int8(const Arguments a) {
  // Before it waits, the next kernel reads only codes that no kernel wrote.
  let_next_grid_begin();
  wait_for_grids();
  const int padded = (a.tokens + 7) / 8 * 8, block = blockIdx.x;
  float* token_scale = reinterpret_cast<float*>(a.y + int64_t(padded) * columns);
  if (block < a.tokens)
    round_token(a, block, token_scale);
  else
    scale_rows(a, ((block - a.tokens) * warps + threadIdx.x / 32) * Plan::rows_of_warp, token_scale + padded);
}
