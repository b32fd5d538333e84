// SPDX-License-Identifier: Apache-2.0
// The codebooks of a plan, fp16 or int8 [num_codebooks, entries, x], in shared memory or in global memory (L2).
//
// VQ-LLM's codebook cache (section V) with two of its tiers; all entries are in one of them. A block loads the codebooks
// once and looks up many codes. Every index is below the number of entries, whatever bytes the codes have.
#pragma once
#include "plan.cuh"
#include "primitives/lattice.cuh"

struct Codebook {
  static constexpr int x = Plan::vector_size;
  static constexpr int entries = Plan::scope == Scope::E8P ? kE8PRows : 1 << Plan::entry_bits;
  static constexpr int entry_bytes = Plan::integers ? x : 2 * x;
  static constexpr int stage_bytes = entries * entry_bytes;
  static constexpr int bytes = Plan::num_codebooks * stage_bytes;  // a multiple of 4

  static_assert(Plan::scope != Scope::E8P || Plan::codebook_in_shared, "parities are folded into a copy");

  const char* numbers;

  // All threads of a block; `shared` holds `bytes` bytes where the plan says so.
  __device__ Codebook(const char* stored, char* shared) : numbers(stored) {
    if constexpr (Plan::codebook_in_shared) {
      constexpr int piece = bytes % 16 == 0 ? 16 : 4;
      for (int at = threadIdx.x * piece; at < bytes; at += Plan::threads * piece) {
        uint32_t word[piece / 4];
        load_words<piece>(stored + at, word);
        store_words<piece>(shared + at, word);
      }
      numbers = shared;
      __syncthreads();
    }
    if constexpr (Plan::scope == Scope::E8P) {
      for (int i = threadIdx.x; i < Plan::num_codebooks * 256; i += Plan::threads) {
        uint16_t* book = reinterpret_cast<uint16_t*>(shared + i / 256 * stage_bytes);
        fold_parity(book + i % 256 * 8, half_to_float(book[256 * 8]));
      }
      __syncthreads();
    }
  }

  // value[x] += the entry of `code` in the codebook of `stage`.
  __device__ void add(int stage, uint32_t code, float (&value)[x]) const {
    const char* book = numbers + stage * stage_bytes;
    if constexpr (Plan::scope == Scope::E8P) {
      add_e8p(reinterpret_cast<const uint16_t*>(book), code, value);
    } else if constexpr (Plan::integers) {
      constexpr int piece = x % 4 ? 4 : x & -x;  // (compiled also for entries that are no integers)
      uint32_t word[(x + 3) / 4];
#pragma unroll
      for (int i = 0; i < x; i += piece) load_words<piece>(book + code * x + i, word + i / 4);
#pragma unroll
      for (int c = 0; c < x; ++c) value[c] += float(int(word[c / 4] << (24 - c % 4 * 8)) >> 24);
    } else {
      float entry[x];
      load_floats<Dtype::FLOAT16>(book + code * entry_bytes, entry);
#pragma unroll
      for (int c = 0; c < x; ++c) value[c] += entry[c];
    }
  }
};
