// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PTX: griddepcontrol; nothing before sm_90).
//
//     kernel A   [prologue]..wait|============|            prologue: reads only data that no running kernel writes, such
//     kernel B               [prologue].......|wait|===    as codes that did not change since the last launch
#pragma once

// What earlier kernels wrote may be read, and what they read may be written, from here on.
__device__ inline void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin. After `wait_for_grids`: then whatever came before this kernel is complete, so that the
// next one may read in its prologue what they wrote. (rotate.cu and w4a8_inputs.cu, before kernels whose prologue
// reads codes of which nobody has written since they ran last, let them begin at once.)
__device__ inline void let_next_grid_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
