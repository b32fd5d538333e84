// SPDX-License-Identifier: Apache-2.0
// Function table of a target (targets/*.cpp): one pointer per op. dispatch.cpp picks a table at run time.
#pragma once
#include "api.h"

namespace hf_vq {

struct Kernels {
  const char* isa;
  int (*linear_supports)(const hf_vq_matrix*);
  int (*linear)(const hf_vq_matrix*, const void*, int, int64_t, const void*, int, void*);
  int (*decode)(const hf_vq_matrix*, int64_t, int64_t, void*, int);
  int (*rotate)(const hf_vq_matrix*, const void*, int, int64_t, void*, int);
  int (*rows_supported)(const hf_vq_rows*);
  int (*make_cells)(const hf_vq_rows*, const float*, int, uint8_t*, float*, hf_vq_cells*);
  int (*encode_weight)(const hf_vq_rows*, const float*, int, int, uint8_t*, uint16_t*);
  int (*round_weight)(const hf_vq_rows*, const float*, const float*, int64_t, uint8_t*);
  int (*vptq_supports)(const hf_vq_vptq*);
  int (*vptq_linear)(const hf_vq_vptq*, const void*, int, int64_t, const void*, int, void*);
  int (*w4a8_supports)(const hf_vq_w4a8*);
  int (*w4a8_linear)(const hf_vq_w4a8*, const void*, int, int64_t, const void*, int, void*);
  int (*codes_supported)(const hf_vq_codes*, int);
  int (*append)(const hf_vq_codes*, const hf_vq_floats*, int64_t, int64_t, int64_t);
  int (*attention)(const hf_vq_attention_step*);
  int (*step_supports)(const hf_vq_instruction*, int64_t);
  int (*step)(const hf_vq_instruction*, int64_t);
  int (*coded_scores)(const hf_vq_attention_step*, float*);
  int64_t (*read_memory)(const void*, int64_t);
  int (*dense_scores)(const void*, int, const float*, int64_t, int64_t, float*);
  int (*table_scores)(const uint8_t*, const uint16_t*, int, const float*, int64_t, int64_t, float*);
};

#if defined(HF_VQ_X86)
extern const Kernels zen4_kernels, avx512_kernels, avx2_kernels;
#elif defined(HF_VQ_ARM)
extern const Kernels dotprod_kernels, neon_kernels;
#endif
extern const Kernels scalar_kernels;

// The table in use.
const Kernels& kernels();

}  // namespace hf_vq
