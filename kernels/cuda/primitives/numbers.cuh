// SPDX-License-Identifier: Apache-2.0
// Enumerations of plans, fixed-width integers, and loads and stores of fp16, bf16 and fp32.
//
// NVRTC brings no headers and none is needed: a half is 16 bits, and PTX converts.
#pragma once

using int64_t = long long;
using uint64_t = unsigned long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;

enum class Dtype { FLOAT32, FLOAT16, BFLOAT16 };
enum class Scope { SHARED, TILE, E8P };  // weights that share a codebook: all, a tile; or the E8P lattice
enum class Diagonal { NONE, SIGNS, HALVES };  // what inputs are multiplied by: bits (1 = negative), or fp16
enum class Mask { NONE, BOOL, FLOAT32, FLOAT16, BFLOAT16 };  // of attention; none is causal
enum class Source { TOKENS, NORM, GATED };  // of inputs that are rounded: memory, RMSNorm, SiLU of one times another

constexpr float largest_half = 65504.0f;

template <Dtype D> constexpr int size_of = D == Dtype::FLOAT32 ? 4 : 2;

// threadIdx.x, of which nothing is known, or kept, before.
__device__ inline int thread_later() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ inline float half_to_float(uint32_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(uint16_t(half)));
  return value;
}

// Two numbers of a 32-bit word, the first in its low half.
template <Dtype D> __device__ inline void unpack_pair(uint32_t word, float& first, float& second) {
  static_assert(D != Dtype::FLOAT32, "a float32 fills the word");
  if constexpr (D == Dtype::FLOAT16) {
    first = half_to_float(word), second = half_to_float(word >> 16);
  } else {
    first = __uint_as_float(word << 16), second = __uint_as_float(word & 0xffff0000u);
  }
}

template <Dtype D> __device__ inline uint32_t pack_pair(float first, float second) {
  static_assert(D != Dtype::FLOAT32, "a float32 fills the word");
  uint32_t word;
  if constexpr (D == Dtype::FLOAT16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
}

// A finite number as D has it. Codes of the largest float16 numbers may lead a little beyond them: those stay finite.
template <Dtype D> __device__ inline float in_range(float x) {
  if constexpr (D != Dtype::FLOAT16) return x;
  return fabsf(x) < __int_as_float(0x7f800000) ? fminf(fmaxf(x, -largest_half), largest_half) : x;
}

// `Bytes` bytes (2, or a multiple of 4) as words; the address is a multiple of min(Bytes, 16).
template <int Bytes> __device__ inline void load_words(const void* from, uint32_t* word) {
  if constexpr (Bytes == 2) {
    word[0] = *static_cast<const uint16_t*>(from);
  } else if constexpr (Bytes == 4) {
    word[0] = *static_cast<const uint32_t*>(from);
  } else if constexpr (Bytes == 8) {
    const uint2 two = *static_cast<const uint2*>(from);
    word[0] = two.x, word[1] = two.y;
  } else {
    static_assert(Bytes % 16 == 0, "a power of two");
#pragma unroll
    for (int i = 0; i < Bytes / 16; ++i) {
      const uint4 four = static_cast<const uint4*>(from)[i];
      word[4 * i] = four.x, word[4 * i + 1] = four.y, word[4 * i + 2] = four.z, word[4 * i + 3] = four.w;
    }
  }
}

template <int Bytes> __device__ inline void store_words(void* to, const uint32_t* word) {
  if constexpr (Bytes == 2) {
    *static_cast<uint16_t*>(to) = uint16_t(word[0]);
  } else if constexpr (Bytes == 4) {
    *static_cast<uint32_t*>(to) = word[0];
  } else if constexpr (Bytes == 8) {
    *static_cast<uint2*>(to) = {word[0], word[1]};
  } else {
    static_assert(Bytes % 16 == 0, "a power of two");
#pragma unroll
    for (int i = 0; i < Bytes / 16; ++i)
      static_cast<uint4*>(to)[i] = {word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
  }
}

// Words that nobody reads again: they leave no trace in L1. `Line`: the rest of their 128 bytes comes to L2, for whoever
// reads it soon after.
template <int Bytes, bool Line = false> __device__ inline void stream_words(const void* from, uint32_t* word) {
  if constexpr (Line) {
    static_assert(Bytes == 16, "of less nobody measured it");
    asm("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
        : "l"(from));
  } else if constexpr (Bytes == 4) {
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word[0]) : "l"(from));
  } else if constexpr (Bytes == 8) {
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(from));
  } else {
    static_assert(Bytes == 16, "4, 8 or 16");
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
        : "l"(from));
  }
}

// To the L2 cache.
__device__ inline void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Load words from shared memory; the address is in the shared state space. Volatile: not moved before a barrier.
template <int Bytes> __device__ inline void load_shared(uint32_t from, uint32_t* word) {
  if constexpr (Bytes == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word[0]) : "r"(from));
  } else if constexpr (Bytes == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(from));
  } else {
    static_assert(Bytes == 16, "4, 8 or 16");
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(from));
  }
}

// Store four numbers to shared memory; the address is in the shared state space.
__device__ inline void store_shared(uint32_t to, const float (&value)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(value[0]), "f"(value[1]), "f"(value[2]),
               "f"(value[3])
               : "memory");
}

__device__ inline void store_pair(uint32_t to, int first, int second) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(first), "r"(second) : "memory");
}

__device__ inline uint32_t load_byte(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ inline void store_byte(uint32_t to, char value) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(to), "r"(int(value)) : "memory");
}

__device__ inline void store_word(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// Copy `bytes` (4, or 0: zeros) of global memory to 4 bytes of shared memory, asynchronously; `to` is an address in the
// shared state space.
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// `Bytes` bytes: 4, 8, or 16, which leave no trace in L1.
template <int Bytes> __device__ inline void copy_piece(uint32_t to, const void* from) {
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes) : "memory");
}

// Close a group: the copies since the last one.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all copies of this thread.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Until at most `Left` groups of this thread are not complete.
template <int Left> __device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

template <Dtype D> __device__ inline float to_float(uint16_t value) {
  if constexpr (D == Dtype::FLOAT16) return half_to_float(value);
  return __uint_as_float(uint32_t(value) << 16);
}

constexpr int log2_of(int power_of_two) { return power_of_two == 1 ? 0 : 1 + log2_of(power_of_two / 2); }
constexpr float inverse_root(int power_of_two) {
  return power_of_two == 1   ? 1.0f
         : power_of_two == 2 ? 0.70710678118654752f
                             : inverse_root(power_of_two / 4) / 2;
}

constexpr int words_of(int bytes) { return bytes < 4 ? 1 : bytes / 4; }

// N neighbouring numbers; their address is a multiple of min(P * size_of<D>, 16), P the largest power of two that divides N.
template <Dtype D, int N> __device__ inline void load_floats(const void* from, float (&value)[N]) {
  constexpr int piece = N & -N;
  if constexpr (piece < N) {
#pragma unroll
    for (int i = 0; i < N; i += piece) {
      float part[piece];
      load_floats<D>(static_cast<const char*>(from) + i * size_of<D>, part);
#pragma unroll
      for (int j = 0; j < piece; ++j) value[i + j] = part[j];
    }
  } else {
    uint32_t word[words_of(N * size_of<D>)];
    load_words<N * size_of<D>>(from, word);
    if constexpr (D == Dtype::FLOAT32) {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = __uint_as_float(word[i]);
    } else if constexpr (N == 1) {
      float none;
      unpack_pair<D>(word[0], value[0], none);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) unpack_pair<D>(word[i / 2], value[i], value[i + 1]);
    }
  }
}

template <Dtype D, int N> __device__ inline void store_floats(void* to, const float (&value)[N]) {
  constexpr int piece = N & -N;
  if constexpr (piece < N) {
#pragma unroll
    for (int i = 0; i < N; i += piece) {
      float part[piece];
#pragma unroll
      for (int j = 0; j < piece; ++j) part[j] = value[i + j];
      store_floats<D>(static_cast<char*>(to) + i * size_of<D>, part);
    }
  } else {
    uint32_t word[words_of(N * size_of<D>)];
    if constexpr (D == Dtype::FLOAT32) {
#pragma unroll
      for (int i = 0; i < N; ++i) word[i] = __float_as_uint(value[i]);
    } else if constexpr (N == 1) {
      word[0] = pack_pair<D>(value[0], 0.0f);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) word[i / 2] = pack_pair<D>(value[i], value[i + 1]);
    }
    store_words<N * size_of<D>>(to, word);
  }
}
