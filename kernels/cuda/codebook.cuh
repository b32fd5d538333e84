// SPDX-License-Identifier: Apache-2.0
// The codebooks of all stages of a plan, fp16 [stages, entries, x]: in shared memory or where they lie.
//
// VQ-LLM's codebook cache (section V) with two of its tiers, all entries in the one or in the other. A block loads
// once and looks up many codes; an index is below the number of entries, whatever the code's bytes are.
#pragma once
#include "lattice.cuh"
#include "plan.cuh"

struct Codebook {
  static constexpr int x = Plan::vector_size;
  static constexpr int entries = Plan::scope == Scope::E8P ? kE8PRows : 1 << Plan::entry_bits;
  static constexpr int stage_halves = entries * x;
  static constexpr int bytes = Plan::stages * stage_halves * 2;  // a multiple of 4

  static_assert(Plan::scope != Scope::E8P || Plan::codebook_in_shared, "parities are folded into a copy");

  const uint16_t* halves;

  // All threads of a block; `shared` holds `bytes` bytes where the plan says so.
  __device__ Codebook(const uint16_t* stored, void* shared) : halves(stored) {
    if constexpr (Plan::codebook_in_shared) {
      constexpr int piece = bytes % 16 == 0 ? 16 : 4;
      const char* from = reinterpret_cast<const char*>(stored);
      for (int at = threadIdx.x * piece; at < bytes; at += Plan::threads * piece) {
        uint32_t word[piece / 4];
        load_words<piece>(from + at, word);
        store_words<piece>(static_cast<char*>(shared) + at, word);
      }
      halves = static_cast<const uint16_t*>(shared);
      __syncthreads();
    }
    if constexpr (Plan::scope == Scope::E8P) {
      for (int i = threadIdx.x; i < Plan::stages * 256; i += Plan::threads) {
        uint16_t* book = static_cast<uint16_t*>(shared) + i / 256 * stage_halves;
        fold_parity(book + i % 256 * 8, half_to_float(book[256 * 8]));
      }
      __syncthreads();
    }
  }

  // value[x] += the entry of `code` in the codebook of `stage`.
  __device__ void add(int stage, uint32_t code, float (&value)[x]) const {
    const uint16_t* book = halves + stage * stage_halves;
    if constexpr (Plan::scope == Scope::E8P) {
      add_e8p(book, code, value);
    } else {
      float entry[x];
      load_floats<Dtype::FLOAT16>(book + code * x, entry);
#pragma unroll
      for (int c = 0; c < x; ++c) value[c] += entry[c];
    }
  }
};
