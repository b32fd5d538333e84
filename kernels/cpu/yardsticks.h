// SPDX-License-Identifier: Apache-2.0
// What the benchmarks compare with: how fast memory can be read, and q K^T over dense keys.
#pragma once
#include "floats.h"

namespace hf_vq {
namespace {

// The sum of all bytes, read in one pass by full vectors; a multiple of 4 kBytes is read.
int64_t read_memory(const void* memory, int64_t bytes) {
  const uint8_t* p = static_cast<const uint8_t*>(memory);
  Bytes seen[4];
  for (Bytes& each : seen) each = splat_byte(0);
  for (int64_t i = 0; i + 4 * kBytes <= bytes; i += 4 * kBytes)
    for (int j = 0; j < 4; ++j) seen[j] = seen[j] | load_bytes(p + i + j * kBytes);
  uint8_t out[kBytes];
  store(out, (seen[0] | seen[1]) | (seen[2] | seen[3]));
  int64_t total = 0;
  for (uint8_t byte : out) total += byte;
  return total;
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

}  // namespace
}  // namespace hf_vq
