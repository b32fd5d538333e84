// SPDX-License-Identifier: Apache-2.0
// hf_vq_append and hf_vq_attention as boxed kernels of torch's dispatcher, like hf_vq_linear in torch_linear.cpp. A
// missing optional tensor has no elements. `shape` int32 [6]: the last fields of hf_vq_codes.
#include "torch_shim.h"

namespace hf_vq {
namespace {

constexpr int kShape = 6;
constexpr int64_t kBlockTokens = 256;

// A tensor [batch, heads, tokens or blocks, numbers], which may be a view; its last dimension is dense.
struct Rows : Dense {
  int64_t* strides;
};

bool read_rows(uint64_t value, Rows& found) {
  void* tensor = handle(value);
  return torch.get_data_ptr(tensor, &found.data) == 0 && torch.get_sizes(tensor, &found.sizes) == 0 &&
         torch.get_strides(tensor, &found.strides) == 0 && torch.get_dim(tensor, &found.dim) == 0 &&
         torch.get_numel(tensor, &found.numel) == 0 && torch.get_dtype(tensor, &found.dtype) == 0 && found.dim == 4 &&
         (found.strides[3] == 1 || found.sizes[3] <= 1);
}

bool read_shape(uint64_t value, const int32_t*& shape) {
  Dense found;
  if (!read(handle(value), found) || found.dtype != torch.int32 || found.numel != kShape) return false;
  shape = static_cast<const int32_t*>(found.data);
  return shape[1] >= 1 && shape[2] >= 1 && shape[2] <= 8 && shape[4] >= 1 && shape[4] % shape[1] == 0;
}

bool floats_of(const Rows& x, int64_t batch, int64_t heads, int64_t dim, hf_vq_floats& floats) {
  const int type = float_type(x.dtype);
  floats = {x.data, {x.strides[0], x.strides[1], x.strides[2]}, x.sizes[2], type};
  return type >= 0 && x.sizes[0] == batch && x.sizes[1] == heads && x.sizes[3] == dim;
}

// Codes on a tape from `first` on, if the tape is that long. stack: codes, scale, codebook; mean, smoothing: their places, or
// 0.
bool codes_of(uint64_t data, uint64_t scales, uint64_t book, uint64_t mean, uint64_t smoothing, uint64_t shapes,
              int64_t batch, int64_t heads, int64_t first, int64_t count, int64_t tokens, hf_vq_codes& codes) {
  const int32_t* shape;
  Rows tape, scale;
  Dense codebook, middle{}, factors{};
  if (!read_shape(shapes, shape) || !read_rows(data, tape) || !read_rows(scales, scale)) return false;
  if (!read(handle(book), codebook) || (mean != 0 && !read(handle(mean), middle))) return false;
  if (smoothing != 0 && !read(handle(smoothing), factors)) return false;
  const int64_t x = shape[1], bits = shape[2], dim = shape[4], end = first + tokens;
  const int64_t block = dim / x * 32 * bits, entries = (shape[3] ? heads * dim : x) << bits;
  const int32_t half = torch.floats[HF_VQ_FLOAT16];
  const bool scaled = scale.sizes[3] != 0;
  if (first < 0 || tokens < 0 || tape.dtype != torch.uint8 || scale.dtype != half || codebook.dtype != half) return false;
  if (tape.sizes[0] != batch || tape.sizes[1] != heads || tape.sizes[3] != block || tape.strides[2] != block) return false;
  if (tape.sizes[2] * kBlockTokens < end || codebook.numel != entries) return false;
  if (scale.sizes[0] != batch || scale.sizes[1] != heads || scale.sizes[3] > 1) return false;
  if (scaled && (scale.sizes[2] < end || scale.strides[2] != 1)) return false;
  const Dense* const both[] = {&middle, &factors};
  for (const Dense* of_heads : both)
    if (of_heads->numel != 0 && (of_heads->dtype != torch.floats[HF_VQ_FLOAT32] || of_heads->numel != batch * heads * dim))
      return false;
  codes = {static_cast<uint8_t*>(tape.data),
           scaled ? static_cast<uint16_t*>(scale.data) : nullptr,
           static_cast<const uint16_t*>(codebook.data),
           middle.numel != 0 ? static_cast<const float*>(middle.data) : nullptr,
           factors.numel != 0 ? static_cast<const float*>(factors.data) : nullptr, nullptr, nullptr,
           {tape.strides[0], tape.strides[1]}, {scale.strides[0], scale.strides[1]}, {heads * dim, dim}, {0, 0},
           first, count, 0, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5]};
  return true;
}

// A rotary mean, and the table of its frequencies; `start` is n of the token at index 0 of the tape.
bool add_rotary(uint64_t mean, uint64_t table, int64_t start, int64_t batch, int64_t heads, hf_vq_codes& codes) {
  Dense m, values;
  const int32_t type = torch.floats[HF_VQ_FLOAT32];
  if (!read(handle(mean), m)) return false;
  if (m.numel == 0) return true;
  if (!read(handle(table), values) || m.dtype != type || values.dtype != type || values.numel < 1) return false;
  const float* numbers = static_cast<const float*>(values.data);
  if (m.numel != batch * heads * codes.dim || !(numbers[0] >= 0.0f && numbers[0] <= float(codes.dim / 2)) ||
      values.numel != hf_vq_rotary_table_size(int32_t(numbers[0])))
    return false;
  codes.rotary_mean = static_cast<const float*>(m.data);
  codes.rotary_table = numbers;
  codes.rotary_stride[0] = heads * codes.dim;
  codes.rotary_stride[1] = codes.dim;
  codes.rotary_start = start;
  return true;
}

float number(uint64_t value) {
  double found;
  memcpy(&found, &value, sizeof found);
  return float(found);
}

// stack: x, mean, smoothing, codebook, codes, scale, shape, rotary_mean, rotary_table, at, rotary_start
void* append(const uint64_t* stack) {
  Rows x;
  hf_vq_floats floats;
  hf_vq_codes codes;
  const int64_t at = int64_t(stack[9]);
  if (!read_rows(stack[0], x) || at < 0) return nullptr;
  const int64_t batch = x.sizes[0], heads = x.sizes[1];
  if (!codes_of(stack[4], stack[5], stack[3], stack[1], stack[2], stack[6], batch, heads, 0, 0, at + x.sizes[2], codes) ||
      !add_rotary(stack[7], stack[8], int64_t(stack[10]), batch, heads, codes) ||
      !floats_of(x, batch, heads, codes.dim, floats) || hf_vq_append(&codes, &floats, batch, heads, at) != HF_VQ_OK)
    return nullptr;
  void *done, *data;
  const Dense none{nullptr, x.sizes, 1, 0, torch.int32};
  return empty_like(none, 0, torch.cpu, 0, &done, &data) ? done : nullptr;
}

// stack: query, sink_k, sink_v, k_codes, k_scale, k_mean, k_smoothing, v_codes, v_scale, tail_k, tail_v, codebook_k,
// codebook_v, k_shape, v_shape, rotary_mean, rotary_table, tail_start, window, fresh, coded, k_first, v_first, rotary_start,
// scaling, softcap
void* attention(const uint64_t* stack) {
  Rows query, sink_k, sink_v, tail_k, tail_v;
  if (!read_rows(stack[0], query) || !read_rows(stack[1], sink_k) || !read_rows(stack[2], sink_v) ||
      !read_rows(stack[9], tail_k) || !read_rows(stack[10], tail_v))
    return nullptr;
  const int64_t batch = query.sizes[0], heads = tail_k.sizes[1], queries = query.sizes[2];
  const int64_t tail_start = int64_t(stack[17]), coded = int64_t(stack[20]);
  hf_vq_attention_step step{};
  if (heads < 1 || query.sizes[1] % heads != 0 || query.numel == 0 || tail_start < 0 ||
      sink_k.sizes[2] != sink_v.sizes[2] || tail_k.sizes[2] != tail_v.sizes[2])
    return nullptr;
  if (!codes_of(stack[3], stack[4], stack[11], stack[5], stack[6], stack[13], batch, heads, int64_t(stack[21]), coded,
                coded, step.k) ||
      !codes_of(stack[7], stack[8], stack[12], 0, 0, stack[14], batch, heads, int64_t(stack[22]), coded, coded, step.v) ||
      !add_rotary(stack[15], stack[16], int64_t(stack[23]), batch, heads, step.k))
    return nullptr;
  const int64_t dim = step.k.dim, value_dim = step.v.dim;
  if (!floats_of(sink_k, batch, heads, dim, step.sink_k) || !floats_of(sink_v, batch, heads, value_dim, step.sink_v) ||
      !floats_of(tail_k, batch, heads, dim, step.tail_k) || !floats_of(tail_v, batch, heads, value_dim, step.tail_v) ||
      !floats_of(query, batch, query.sizes[1], dim, step.query))
    return nullptr;
  step.out_stride[0] = query.sizes[1] * queries * value_dim;
  step.out_stride[1] = queries * value_dim;
  step.out_stride[2] = value_dim;
  step.batch = batch;
  step.heads = heads;
  step.group = query.sizes[1] / heads;
  step.queries = queries;
  step.tail_start = tail_start;
  step.window = int64_t(stack[18]);
  step.fresh = int64_t(stack[19]);
  step.scaling = number(stack[24]);
  step.softcap = number(stack[25]);
  void* out;
  if (!empty_like(query, value_dim, torch.cpu, 0, &out, &step.out)) return nullptr;
  if (hf_vq_attention(&step) == HF_VQ_OK) return out;
  torch.delete_tensor_object(out);
  return nullptr;
}

}  // namespace
}  // namespace hf_vq

void hf_vq_torch_append(uint64_t* stack, uint64_t, uint64_t) { hf_vq::answer(stack, 9, hf_vq::append(stack)); }

void hf_vq_torch_attention(uint64_t* stack, uint64_t, uint64_t) { hf_vq::answer(stack, 17, hf_vq::attention(stack)); }
