// SPDX-License-Identifier: Apache-2.0
#include "processor.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hf_vq::check {

bool processor_runs(const char* isa) {
  if (strcmp(isa, "scalar") == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (strcmp(isa, "avx2") == 0) return avx2;
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if !defined(HF_VQ_EMULATE_VBMI)
  avx512 = avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
#endif
  if (strcmp(isa, "zen4") == 0) return avx512 && __builtin_cpu_is("amd");
  if (strcmp(isa, "avx512") == 0) return avx512;
#elif defined(__aarch64__)
  if (strcmp(isa, "neon") == 0) return true;
#if defined(__linux__)
  if (strcmp(isa, "dotprod") == 0) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  if (strcmp(isa, "dotprod") == 0) return true;
#endif
#endif
  return false;
}

}  // namespace hf_vq::check
