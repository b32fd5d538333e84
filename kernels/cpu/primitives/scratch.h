// SPDX-License-Identifier: Apache-2.0
// Memory of a call that is too large for the stack.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace hf_vq {
namespace {

// `count` numbers, uninitialised, on a cache line, and a line behind the last that may be read; freed at the end of its
// scope. malloc takes less time than aligned_alloc.
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
