// SPDX-License-Identifier: Apache-2.0
// hf_vq::cuda_linear: launch of kernels/cuda/linear/linear.cu without Python.
//
// Python prepared the launch before (hf_vq_cuda_launch). This code checks the tensors against it and fills in addresses.
// The stack holds x, codes, codebook, scale, diagonal or signs, bias (no elements = none) and the launch.
#include "torch_shim.h"

namespace hf_vq {
namespace {

constexpr int kTensors = 7;
constexpr int64_t kWord = 4, kAligned = 16;  // bytes: codes are read by whole words, no load is wider

hf_vq_cuda cuda{};

struct LinearArguments {  // struct Arguments of linear.cu
  const void *codes, *codebook, *scale, *diagonal, *x, *bias;
  void* y;
  int32_t rows, columns, tokens, blocks;
};

struct RotateArguments {  // struct Arguments of rotate.cu
  const void *x, *diagonal;
  void* y;
  uint32_t blocks, across, token_tiles;
};

bool on_device(void* tensor, int64_t device) {
  int32_t type = -1, index = -1;
  return cuda.get_device_type(tensor, &type) == 0 && type == cuda.type &&
         cuda.get_device_index(tensor, &index) == 0 && index == device;
}

bool suits(const Dense& tensor, int64_t numbers, int32_t dtype) {
  return tensor.numel == numbers && tensor.dtype == dtype && uintptr_t(tensor.data) % kAligned == 0;
}

template <typename Arguments>
bool start(int64_t function, int64_t blocks, int64_t threads, int64_t shared, void* stream, Arguments& arguments) {
  void* pointers[] = {&arguments};
  return cuda.launch(handle(uint64_t(function)), uint32_t(blocks), 1, 1, uint32_t(threads), 1, 1, uint32_t(shared),
                     stream, pointers, nullptr) == 0;
}

// y, or NULL if Python has to look after these tensors.
void* linear(const uint64_t* stack) {
  Dense tensors[kTensors];
  for (int i = 0; i < kTensors; ++i)
    if (!read(handle(stack[i]), tensors[i])) return nullptr;
  const auto& [x, codes, codebook, scale, diagonal, bias, launch_tensor] = tensors;
  constexpr int64_t fields = sizeof(hf_vq_cuda_launch) / sizeof(int64_t);
  if (launch_tensor.dtype != cuda.int64 || launch_tensor.numel != fields) return nullptr;
  const auto& launch = *static_cast<const hf_vq_cuda_launch*>(launch_tensor.data);

  for (int i = 0; i < kTensors - 1; ++i)
    if (tensors[i].numel > 0 && !on_device(handle(stack[i]), launch.device)) return nullptr;
  const int32_t dtype = int32_t(launch.dtype), half = torch.floats[HF_VQ_FLOAT16];
  if (!suits(x, launch.tokens * launch.columns, dtype) || !suits(codes, launch.codes, torch.uint8) ||
      !suits(codebook, launch.codebook, int32_t(launch.codebook_dtype)) || !suits(scale, launch.scale, half) ||
      (launch.diagonal > 0 && !suits(diagonal, launch.diagonal, int32_t(launch.diagonal_dtype))) ||
      (bias.numel > 0 && (bias.numel != launch.rows || bias.dtype != dtype)))
    return nullptr;
  if (x.dim < 1 || x.dim > kMostDims || x.sizes[x.dim - 1] != launch.columns || codes.dim != 2 ||
      codes.sizes[0] != launch.rows || launch.codes % kWord != 0)
    return nullptr;

  void* stream = nullptr;
  int32_t capturing = 0;
  if (cuda.get_current_cuda_stream(int32_t(launch.device), &stream) != 0 ||
      cuda.is_capturing(stream, &capturing) != 0 || capturing != 0)
    return nullptr;
  void *y, *to, *between = nullptr, *arranged = nullptr;
  const int32_t device = int32_t(launch.device);
  if (!empty_like(x, launch.rows, cuda.type, device, &y, &to)) return nullptr;
  const void* turned = launch.diagonal > 0 ? diagonal.data : nullptr;
  bool done = true;
  if (launch.before != 0) {
    int64_t size[] = {launch.arranged}, stride[] = {1};
    done = torch.empty_strided(1, size, stride, dtype, cuda.type, device, &between) == 0 &&
           torch.get_data_ptr(between, &arranged) == 0;
    RotateArguments arguments{x.data, turned, arranged, uint32_t(launch.rotations), uint32_t(launch.across),
                              uint32_t(launch.token_tiles)};
    done = done && start(launch.before, launch.before_blocks, launch.before_threads, launch.before_shared_bytes,
                         stream, arguments);
  }
  LinearArguments arguments{codes.data, codebook.data, scale.data, turned, arranged ? arranged : x.data,
                            bias.numel > 0 ? bias.data : nullptr, to, int32_t(launch.rows), int32_t(launch.columns),
                            int32_t(launch.tokens), int32_t(launch.blocks)};
  done = done && start(launch.function, launch.blocks, launch.threads, launch.shared_bytes, stream, arguments);
  if (between != nullptr) torch.delete_tensor_object(between);  // its memory is taken again behind these kernels
  if (done) return y;
  torch.delete_tensor_object(y);
  return nullptr;
}

}  // namespace
}  // namespace hf_vq

void hf_vq_use_cuda(const hf_vq_cuda* cuda) { hf_vq::cuda = *cuda; }

void hf_vq_torch_cuda_linear(uint64_t* stack, uint64_t, uint64_t) {
  hf_vq::answer(stack, hf_vq::kTensors, hf_vq::linear(stack));
}
