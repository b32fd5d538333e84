// SPDX-License-Identifier: Apache-2.0
// hf_vq_linear as a boxed kernel of torch's dispatcher: no Python runs between the call and the matrix product.
// The stack holds x, codes, codebook, scale, rotation (signs uint8 or a diagonal fp16), bias (no elements = none) and a
// tensor int32 [9], the last fields of hf_vq_matrix. Nested passes are refused.
#include "torch_shim.h"

namespace hf_vq {

hf_vq_torch torch{};

namespace {

constexpr int kTensors = 7;
constexpr int64_t kNumbers = 9;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// True if the tensors have the sizes of the matrix.
bool sizes_match(const hf_vq_matrix& w, const Dense& codes, const Dense& codebook, const Dense& scale,
                 const Dense& rotation, const Dense& bias) {
  if (w.x < 1 || w.bits < 1 || w.stages < 1 || w.group < 1 || w.in < 1 || w.in % w.x != 0 || w.in % w.group != 0 ||
      w.second_bits != 0)
    return false;
  int64_t halves = (int64_t(w.stages) << w.bits) * w.x;
  if (w.scope == HF_VQ_E8P) halves = int64_t(w.stages) * 257 * 8;
  if (w.scope == HF_VQ_TILE) {
    if (w.tile_rows < 1 || w.tile_columns < 1) return false;
    halves *= divide_up(w.out, w.tile_rows) * divide_up(w.in, w.tile_columns);
  }
  return codes.sizes[1] == divide_up(w.in / w.x * w.bits, 8) * w.stages && codebook.numel == halves &&
         scale.numel == w.out * (w.in / w.group) &&
         (rotation.numel == 0 || rotation.numel == (w.diagonal ? w.in : divide_up(w.in, 8))) &&
         (bias.numel == 0 || bias.numel == w.out);
}

// y, or NULL if a tensor must be converted first or hf_vq_linear refuses.
void* linear(const uint64_t* stack) {
  Dense tensors[kTensors];
  for (int i = 0; i < kTensors; ++i)
    if (!read(handle(stack[i]), tensors[i])) return nullptr;
  const auto& [x, codes, codebook, scale, rotation, bias, matrix] = tensors;
  const int dtype = float_type(x.dtype), bias_dtype = float_type(bias.dtype);
  const int32_t half = torch.floats[HF_VQ_FLOAT16];
  if (dtype < 0 || bias_dtype < 0 || codes.dtype != torch.uint8 || codebook.dtype != half || scale.dtype != half ||
      (rotation.numel > 0 && rotation.dtype != torch.uint8 && rotation.dtype != half))
    return nullptr;
  if (x.dim < 1 || x.dim > kMostDims || x.numel == 0 || codes.dim != 2 || matrix.dtype != torch.int32 ||
      matrix.numel != kNumbers)
    return nullptr;

  const int64_t last = x.dim - 1;
  const int32_t* number = static_cast<const int32_t*>(matrix.data);
  const bool turned = rotation.numel > 0, scaled = turned && rotation.dtype == half;
  const hf_vq_matrix w{static_cast<const uint8_t*>(codes.data),
                       nullptr,
                       static_cast<const uint16_t*>(codebook.data),
                       static_cast<const uint16_t*>(scale.data),
                       turned && !scaled ? static_cast<const uint8_t*>(rotation.data) : nullptr,
                       scaled ? static_cast<const uint16_t*>(rotation.data) : nullptr,
                       codes.sizes[0], x.sizes[last],
                       number[0], number[1], number[2], number[3], number[4], number[5], number[6], number[7], number[8]};
  if (!sizes_match(w, codes, codebook, scale, rotation, bias)) return nullptr;
  const void* added = bias.numel > 0 ? bias.data : nullptr;

  void *y, *data;
  if (!empty_like(x, w.out, torch.cpu, 0, &y, &data)) return nullptr;
  if (hf_vq_linear(&w, x.data, dtype, x.numel / w.in, added, bias_dtype, data) == HF_VQ_OK) return y;
  torch.delete_tensor_object(y);
  return nullptr;
}

}  // namespace
}  // namespace hf_vq

void hf_vq_use_torch(const hf_vq_torch* torch) { hf_vq::torch = *torch; }

void hf_vq_torch_linear(uint64_t* stack, uint64_t, uint64_t) {
  hf_vq::answer(stack, hf_vq::kTensors, hf_vq::linear(stack));
}
