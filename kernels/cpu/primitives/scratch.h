// SPDX-License-Identifier: Apache-2.0
// Memory of a call that is too large for the stack.
#pragma once
#include <cstddef>
#include <cstdint>
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

// `count` numbers, uninitialised, on a cache line; freed at the end of its scope. malloc takes less time than
// aligned_alloc.
template <typename T> class Scratch {
 public:
  explicit Scratch(size_t count) : memory_(malloc(count * sizeof(T) + 2 * kLine)) {
    data_ = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_) + kLine - 1) / kLine * kLine);
  }
  ~Scratch() { free(memory_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  explicit operator bool() const { return memory_ != nullptr; }
  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }

 private:
  static constexpr size_t kLine = 64;
  void* memory_;
  T* data_;
};

}  // namespace
}  // namespace hf_vq
