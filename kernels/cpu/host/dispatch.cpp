// SPDX-License-Identifier: Apache-2.0
// Choice of the kernel table of a target at run time, and the loops that all targets share.
#include <cstdlib>
#include <cstring>

#if defined(_WIN32)
#include <malloc.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(HF_VQ_ARM) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "../kernels.h"
#include "threads.h"

namespace hf_vq {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool runs;
};

// Best first. __builtin_cpu_supports also asks whether the system saves the registers.
struct Candidates {
  Candidate list[4];
  int count;
};

Candidates candidates() {
  Candidates found{};
#if defined(HF_VQ_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  found.list[found.count++] = {&zen4_kernels, avx512 && __builtin_cpu_is("amd")};
  found.list[found.count++] = {&avx512_kernels, avx512};
  found.list[found.count++] = {&avx2_kernels, avx2};
#elif defined(HF_VQ_ARM)
  bool dotprod = false;
#if defined(__APPLE__)
  dotprod = true;  // every 64-bit Mac
#elif defined(__linux__)
  dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  found.list[found.count++] = {&dotprod_kernels, dotprod};
  found.list[found.count++] = {&neon_kernels, true};
#endif
  found.list[found.count++] = {&scalar_kernels, true};
  return found;
}

const Kernels* find(const char* name) {
  const Candidates all = candidates();
  for (int i = 0; i < all.count; ++i)
    if (all.list[i].runs && (name == nullptr || *name == '\0' || strcmp(name, all.list[i].kernels->isa) == 0))
      return all.list[i].kernels;
  return nullptr;
}

const Kernels* in_use = nullptr;

using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, Range, void*);
using NumThreads = int32_t (*)(uint32_t*);
ParallelFor torch_parallel_for = nullptr;
NumThreads torch_num_threads = nullptr;

// Windows has no aligned_alloc, and frees such memory by another function.
#if defined(_WIN32)
void* allocate_aligned(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
void free_aligned(void* memory) { _aligned_free(memory); }
#else
void* allocate_aligned(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
void free_aligned(void* memory) { free(memory); }
#endif

constexpr int64_t kHugePage = 2 << 20;
int64_t whole_pages(int64_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

}  // namespace

const Kernels& kernels() {
  if (in_use == nullptr) in_use = find(nullptr);
  return *in_use;
}

void parallel_for(int64_t count, int64_t grain, Range range, void* context) {
  const bool pool = torch_parallel_for != nullptr && count > grain;
  if (!pool || torch_parallel_for(0, count, grain, range, context) != 0) {
    if (count > 0) range(0, count, context);
  }
}

int threads() {
  uint32_t count = 1;
  if (torch_num_threads == nullptr || torch_num_threads(&count) != 0) return 1;
  return count < 1 ? 1 : int(count);
}

}  // namespace hf_vq

int hf_vq_abi_version(void) { return HF_VQ_ABI_VERSION; }

const char* hf_vq_isas(void) {
  static char names[64];
  names[0] = '\0';
  const hf_vq::Candidates all = hf_vq::candidates();
  for (int i = 0; i < all.count; ++i) {
    if (!all.list[i].runs) continue;
    if (names[0] != '\0') strcat(names, " ");
    strcat(names, all.list[i].kernels->isa);
  }
  return names;
}

int hf_vq_use_isa(const char* name) {
  const hf_vq::Kernels* found = hf_vq::find(name);
  if (found == nullptr) return HF_VQ_UNSUPPORTED;
  hf_vq::in_use = found;
  return HF_VQ_OK;
}

const char* hf_vq_isa(void) { return hf_vq::kernels().isa; }

void hf_vq_use_threads(void* parallel_for, void* num_threads) {
  hf_vq::torch_parallel_for = reinterpret_cast<hf_vq::ParallelFor>(parallel_for);
  hf_vq::torch_num_threads = reinterpret_cast<hf_vq::NumThreads>(num_threads);
}

void* hf_vq_allocate(int64_t bytes) {
  if (bytes < hf_vq::kHugePage) return calloc(1, bytes > 0 ? size_t(bytes) : 1);
  const size_t size = size_t(hf_vq::whole_pages(bytes));
  void* memory = hf_vq::allocate_aligned(hf_vq::kHugePage, size);
  if (memory == nullptr) return nullptr;
#if defined(__linux__)
  madvise(memory, size, MADV_HUGEPAGE);
#endif
  return memset(memory, 0, size);
}

void hf_vq_free(void* memory, int64_t bytes) {
  if (bytes < hf_vq::kHugePage) return free(memory);
  hf_vq::free_aligned(memory);
}

int hf_vq_linear_supports(const hf_vq_matrix* w) { return hf_vq::kernels().linear_supports(w); }

int hf_vq_linear(const hf_vq_matrix* w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype, void* y) {
  return hf_vq::kernels().linear(w, x, dtype, rows, bias, bias_dtype, y);
}

int hf_vq_decode(const hf_vq_matrix* w, int64_t first, int64_t rows, void* dense, int dtype) {
  return hf_vq::kernels().decode(w, first, rows, dense, dtype);
}

int hf_vq_rotate(const hf_vq_matrix* w, const void* x, int dtype, int64_t rows, void* rotated, int rotated_dtype) {
  return hf_vq::kernels().rotate(w, x, dtype, rows, rotated, rotated_dtype);
}

int hf_vq_rows_supported(const hf_vq_rows* w) { return hf_vq::kernels().rows_supported(w); }

int hf_vq_make_cells(const hf_vq_rows* w, const float* factors, int count, uint8_t* near, float* numbers,
                     hf_vq_cells* cells) {
  return hf_vq::kernels().make_cells(w, factors, count, near, numbers, cells);
}

int hf_vq_encode_weight(const hf_vq_rows* w, const float* factors, int count, int refit, uint8_t* codes,
                        uint16_t* scale) {
  return hf_vq::kernels().encode_weight(w, factors, count, refit, codes, scale);
}

int hf_vq_round_weight(const hf_vq_rows* w, const float* scale, const float* feedback, int64_t size, uint8_t* codes) {
  return hf_vq::kernels().round_weight(w, scale, feedback, size, codes);
}

int hf_vq_vptq_supports(const hf_vq_vptq* w) { return hf_vq::kernels().vptq_supports(w); }

int hf_vq_vptq_linear(const hf_vq_vptq* w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype,
                      void* y) {
  return hf_vq::kernels().vptq_linear(w, x, dtype, rows, bias, bias_dtype, y);
}

int hf_vq_w4a8_supports(const hf_vq_w4a8* w) { return hf_vq::kernels().w4a8_supports(w); }

int hf_vq_w4a8_linear(const hf_vq_w4a8* w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype,
                      void* y) {
  return hf_vq::kernels().w4a8_linear(w, x, dtype, rows, bias, bias_dtype, y);
}

int hf_vq_codes_supported(const hf_vq_codes* codes, int values) { return hf_vq::kernels().codes_supported(codes, values); }

int hf_vq_append(const hf_vq_codes* codes, const hf_vq_floats* x, int64_t batch, int64_t heads, int64_t at) {
  return hf_vq::kernels().append(codes, x, batch, heads, at);
}

int hf_vq_attention(const hf_vq_attention_step* step) { return hf_vq::kernels().attention(step); }

int hf_vq_step_supports(const hf_vq_instruction* program, int64_t count) {
  return hf_vq::kernels().step_supports(program, count);
}

int hf_vq_step(const hf_vq_instruction* program, int64_t count) { return hf_vq::kernels().step(program, count); }

int hf_vq_coded_scores(const hf_vq_attention_step* step, float* score) { return hf_vq::kernels().coded_scores(step, score); }

int64_t hf_vq_read_memory(const void* memory, int64_t bytes) { return hf_vq::kernels().read_memory(memory, bytes); }

int hf_vq_dense_scores(const void* keys, int dtype, const float* query, int64_t tokens, int64_t dim, float* score) {
  return hf_vq::kernels().dense_scores(keys, dtype, query, tokens, dim, score);
}

int hf_vq_table_scores(const uint8_t* codes, const uint16_t* codebook, int x, const float* query, int64_t tokens,
                       int64_t dim, float* score) {
  return hf_vq::kernels().table_scores(codes, codebook, x, query, tokens, dim, score);
}
