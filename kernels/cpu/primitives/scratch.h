// SPDX-License-Identifier: Apache-2.0
// Memory of a call that is too large for the stack.
#pragma once
#include <cstddef>
#include <cstdlib>

namespace hf_vq {
namespace {

// `count` numbers, uninitialised, on a cache line; freed at the end of its scope.
template <typename T> class Scratch {
 public:
  explicit Scratch(size_t count)
      : data_(static_cast<T*>(aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64 + 64))) {}
  ~Scratch() { free(data_); }
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
