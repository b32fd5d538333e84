// SPDX-License-Identifier: Apache-2.0
// torch's C shim for ops. No header of torch is included and nothing of it is linked: Python passes the
// functions (api.h). Stacks hold owned handles of tensors. All arguments are tensors: the dispatcher takes longer
// for a number than for a tensor, and versions of torch differ in who frees an optional or a string.
#pragma once
#include <string.h>

#include "../api.h"

namespace hf_vq {

extern hf_vq_torch torch;

struct Dense {
  void* data;
  int64_t* sizes;
  int64_t dim, numel;
  int32_t dtype;
};

inline void* handle(uint64_t value) { return reinterpret_cast<void*>(uintptr_t(value)); }

inline bool read(void* tensor, Dense& found) {
  bool contiguous = false;
  return torch.is_contiguous(tensor, &contiguous) == 0 && contiguous && torch.get_data_ptr(tensor, &found.data) == 0 &&
         torch.get_sizes(tensor, &found.sizes) == 0 && torch.get_dim(tensor, &found.dim) == 0 &&
         torch.get_numel(tensor, &found.numel) == 0 && torch.get_dtype(tensor, &found.dtype) == 0;
}

// enum hf_vq_dtype of a number of torch, or -1.
inline int float_type(int32_t dtype) {
  for (int i = 0; i < 3; ++i)
    if (torch.floats[i] == dtype) return i;
  return -1;
}

constexpr int64_t kMostDims = 8;

// An empty tensor like x but for its last dimension, and where its memory is; false without memory.
inline bool empty_like(const Dense& x, int64_t last, int32_t device_type, int32_t device, void** y, void** data) {
  int64_t sizes[kMostDims], strides[kMostDims], stride = 1;
  for (int64_t d = x.dim - 1; d >= 0; --d) {
    sizes[d] = d == x.dim - 1 ? last : x.sizes[d];
    strides[d] = stride;
    stride *= sizes[d];
  }
  if (torch.empty_strided(x.dim, sizes, strides, x.dtype, device_type, device, y) != 0) return false;
  if (torch.get_data_ptr(*y, data) == 0) return true;
  torch.delete_tensor_object(*y);
  return false;
}

// Return of a boxed kernel: pop its arguments, push y or an undefined tensor.
inline void answer(uint64_t* stack, int arguments, void* y) {
  for (int i = 0; i < arguments; ++i) torch.delete_tensor_object(handle(stack[i]));
  if (y == nullptr) torch.new_uninitialized_tensor(&y);
  stack[0] = uint64_t(reinterpret_cast<uintptr_t>(y));
}

}  // namespace hf_vq
