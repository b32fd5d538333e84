// SPDX-License-Identifier: Apache-2.0
// Memory of a call that is too large for the stack.
#pragma once
#include <cstddef>
#include <cstdlib>
#if defined(_WIN32)
#include <malloc.h>
#endif

namespace hf_vq {
namespace {

// Windows has no aligned_alloc, and frees such memory by another function.
#if defined(_WIN32)
inline void* allocate_aligned(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
inline void free_aligned(void* memory) { _aligned_free(memory); }
#else
inline void* allocate_aligned(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
inline void free_aligned(void* memory) { free(memory); }
#endif

// `count` numbers, uninitialised, on a cache line; freed at the end of its scope.
template <typename T> class Scratch {
 public:
  explicit Scratch(size_t count)
      : data_(static_cast<T*>(allocate_aligned(64, (count * sizeof(T) + 63) / 64 * 64 + 64))) {}
  ~Scratch() { free_aligned(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  explicit operator bool() const { return data_ != nullptr; }
  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace
}  // namespace hf_vq
