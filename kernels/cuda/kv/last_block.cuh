// SPDX-License-Identifier: Apache-2.0
// The last of several blocks to arrive goes on, and sees all that the others wrote before.
#pragma once

// True for all threads of the last of `blocks` blocks that call it with a counter that begins at 0.
__device__ inline bool arrives_last(int* counter, int blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(counter, 1) == blocks - 1;
  __syncthreads();
  const bool found = last;
  if (found) __threadfence();
  __syncthreads();  // the next call writes again
  return found;
}
