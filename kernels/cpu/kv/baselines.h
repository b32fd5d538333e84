// SPDX-License-Identifier: Apache-2.0
// Baselines of the benchmarks: memory bandwidth, q K^T over dense keys, and q K^T over codes without tables in registers.
#pragma once
#include "../primitives/scratch.h"
#include "tables.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {

constexpr int64_t kReadAtOnce = 4 * kBytes;
constexpr int64_t kPieceToRead = 64 << 10;  // bytes worth a thread

struct Reading {
  const uint8_t* memory;
  int64_t total;
};

inline void read_pieces(int64_t first, int64_t last, void* context) {
  Reading& reading = *static_cast<Reading*>(context);
  Bytes seen[4];
  for (Bytes& each : seen) each = splat_byte(0);
  for (const uint8_t* p = reading.memory + first * kReadAtOnce; first < last; ++first, p += kReadAtOnce)
    for (int j = 0; j < 4; ++j) seen[j] = seen[j] | load_bytes(p + j * kBytes);
  uint8_t out[kBytes];
  store(out, (seen[0] | seen[1]) | (seen[2] | seen[3]));
  int64_t total = 0;
  for (uint8_t byte : out) total += byte;
  __atomic_fetch_add(&reading.total, total, __ATOMIC_RELAXED);
}

// Nonzero if one byte is, found in one pass of all threads by full vectors; a multiple of kReadAtOnce is read.
int64_t read_memory(const void* memory, int64_t bytes) {
  Reading reading{static_cast<const uint8_t*>(memory), 0};
  parallel_for(bytes / kReadAtOnce, kPieceToRead / kReadAtOnce, read_pieces, &reading);
  return reading.total;
}

// score[t] = <query, keys[t]>: keys [tokens, dim] in float32 or bfloat16, dim a multiple of 4 kFloats.
int dense_scores(const void* keys, int dtype, const float* query, int64_t tokens, int64_t dim, float* score) {
  if (dim % (4 * kFloats) != 0 || (dtype != HF_VQ_FLOAT32 && dtype != HF_VQ_BFLOAT16)) return HF_VQ_UNSUPPORTED;
  for (int64_t t = 0; t < tokens; ++t) {
    Floats sums[4] = {splat(0), splat(0), splat(0), splat(0)};
    for (int64_t i = 0; i < dim; i += 4 * kFloats)
      for (int j = 0; j < 4; ++j) {
        const int64_t at = t * dim + i + j * kFloats;
        const Floats key = dtype == HF_VQ_FLOAT32 ? load(static_cast<const float*>(keys) + at)
                                                  : load_bfloat(static_cast<const uint16_t*>(keys) + at);
        sums[j] = fma(key, load(query + i + j * kFloats), sums[j]);
      }
    score[t] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return HF_VQ_OK;
}

// score[t] = sum_s T_s[codes[t][s]], T_s[e] = <query_s, codebook[s][e]>: product quantization as textbooks have it,
// with 256 float32 entries a table (64 KB at dim 128, x 2) and one load from a cache for each code.
// codes [tokens, dim / x], dim / x a multiple of 4; codebook fp16 [dim / x, 256, x].
int table_scores(const uint8_t* codes, const uint16_t* codebook, int x, const float* query, int64_t tokens, int64_t dim,
                 float* score) {
  if ((x != 1 && x != 2 && x != 4) || dim > kv::kDim || dim % (4 * x) != 0) return HF_VQ_UNSUPPORTED;
  const int64_t vectors = dim / x;
  const Scratch<float> memory(size_t(vectors) * kv::kEntries);
  if (!memory) return HF_VQ_NO_MEMORY;
  alignas(64) kv::Components number;
  for (int64_t s = 0; s < vectors; ++s) {
    kv::read_entries(codebook + s * kv::kEntries * x, kv::kEntries, x, number);
    for (int e = 0; e < kv::kEntries; e += kFloats) {
      Floats dot = load(number[0] + e) * splat(query[s * x]);
      for (int c = 1; c < x; ++c) dot = fma(load(number[c] + e), splat(query[s * x + c]), dot);
      store(memory.get() + s * kv::kEntries + e, dot);
    }
  }
  for (int64_t t = 0; t < tokens; ++t, codes += vectors) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // a single one would wait for itself
    const float* table = memory.get();
    for (int64_t s = 0; s < vectors; s += 4)
      for (int j = 0; j < 4; ++j, table += kv::kEntries) sums[j] += table[codes[s + j]];
    score[t] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
  return HF_VQ_OK;
}

}  // namespace
}  // namespace hf_vq
