// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PTX: griddepcontrol; nothing before sm_90).
//
//     kernel A   [prologue]..wait|============|            prologue: reads only data that no running kernel writes, such
//     kernel B               [prologue].......|wait|===    as codes that did not change since the last launch
#pragma once

// Wait for all earlier kernels of the stream: after it, their outputs may be read and their inputs overwritten.
__device__ inline void wait_for_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel begin. Called after `wait_for_grids`, so that all kernels before this one are complete and the
// prologue of the next one may read their outputs. (rotate.cu and w4a8_inputs.cu call it first: the prologue of the
// kernel after them reads only codes that were not written since its last launch.)
__device__ inline void let_next_grid_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
