// SPDX-License-Identifier: Apache-2.0
// Starts the tests of one SIMD set. This file is compiled without the flags of the set: on a processor
// that lacks it the program says so and ends.
#include <cstdio>

#include "processor.h"

int run_simd_tests();

int main() {
  if (!hf_vq::check::processor_runs(HF_VQ_ISA)) {
    printf("simd_test %s: skipped, not on this processor\n", HF_VQ_ISA);
    return 0;
  }
  return run_simd_tests();
}
