// SPDX-License-Identifier: Apache-2.0
// Loops over torch's own thread pool: its `torch_parallel_for`, whose address Python hands over when
// the library is loaded. Without it loops run in the calling thread. OpenMP is never linked: a wheel
// would carry a second runtime, whose pool would fight with torch's.
#pragma once
#include <cstdint>

namespace hf_vq {

using Range = void (*)(int64_t begin, int64_t end, void* context);

// Call range(begin, end, context) so that [0, count) is covered once, in pieces of at least `grain`.
void parallel_for(int64_t count, int64_t grain, Range range, void* context);

// Threads that parallel_for may use.
int threads();

}  // namespace hf_vq
