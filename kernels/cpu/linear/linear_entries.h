// SPDX-License-Identifier: Apache-2.0
// Linear layers that look entries up without 8-bit tables, with vectors of multiples of eight along the row (AQLM 1x16):
//
//     y[m, o] = scale[o] sum_z sum_j < codebook[z][ code[o, j, z] ], u[m, j] > + bias[o]        u = x rotated
//
// A thread owns adjacent rows and processes runs of 256 codes, whose entries stay in L1 for all inputs. Only the float32
// sums round.
//
// Bytes: codes once, 16 per lookup of an entry. Bottleneck: lookups in L2.
#pragma once
#include "entries.h"
#include "linear_decode.h"

namespace hf_vq {
namespace {
namespace entries {

struct RowsCall {
  const hf_vq_matrix* w;
  const float* x;     // [inputs, octets, vectors, kEight]: u, eights of entries apart
  int64_t stride, octet, inputs;
  const void* bias;
  int bias_dtype, dtype, status;
  void* y;
};

// True if this kernel supports a matrix: vectors of multiples of eight, one scale per row.
inline bool fits(const hf_vq_matrix& w) {
  return stored_as_said(w) && w.scope == HF_VQ_SHARED && w.x % kEight == 0 && w.group == w.in;
}

inline void run_entries(int64_t begin, int64_t end, void* context) {
  RowsCall& call = *static_cast<RowsCall*>(context);
  const hf_vq_matrix& w = *call.w;
  const int64_t vectors = w.in / w.x, stream_bytes = divide_up(vectors * w.bits, 8);
  const Scratch<float> sums{size_t(call.inputs * kSums)};
  if (!sums) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  uint16_t code[kRun];
  for (int64_t o = begin; o < end; ++o) {
    memset(sums.get(), 0, size_t(call.inputs * kSums) * 4);
    for (int stage = 0; stage < w.stages; ++stage) {
      const uint8_t* stream = w.codes + (o * w.stages + stage) * stream_bytes;
      const uint16_t* book = w.codebook + ((int64_t(stage) * w.x) << w.bits);
      for (int64_t first = 0; first < vectors; first += kRun) {
        int n = int(vectors - first < kRun ? vectors - first : kRun);
        unpack_codes(stream, w.bits, first, n, code);
        for (; n % kStep; ++n) code[n] = 0;
        for (int eight = 0; eight < w.x / kEight; ++eight)
          add_inputs<false, false, true>({book + eight * kEight, nullptr, w.x}, code, nullptr, n,
                                         call.x + eight * call.octet + first * kEight, call.stride, call.inputs,
                                         sums.get());
      }
    }
    const float scale = half_to_float(w.scale[o]), bias = call.bias ? read_float(call.bias, call.bias_dtype, o) : 0.0f;
    for (int64_t m = 0; m < call.inputs; ++m) {
      Floats total = load(sums.get() + m * kSums);
      for (int part = 1; part < kParts; ++part) total = total + load(sums.get() + m * kSums + part * kFloats);
      const float y = sum(total) * scale + bias;
      write_floats(call.y, call.dtype, m * w.out + o, 1, &y);
    }
  }
}

inline int compute(const hf_vq_matrix& w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype,
                   void* y) {
  const int64_t vectors = w.in / w.x, eights = w.x / kEight, padded = divide_up(vectors, kStep) * kStep;
  RowsCall call{&w, nullptr, eights * padded * kEight, padded * kEight, rows, bias, bias_dtype, dtype, HF_VQ_OK, y};
  const Scratch<float> u{size_t(rows * call.stride + kFloats)}, rotated{size_t(w.in)};
  if (!u || !rotated) return HF_VQ_NO_MEMORY;
  memset(u.get(), 0, size_t(rows * call.stride + kFloats) * 4);
  for (int64_t m = 0; m < rows; ++m) {
    rotate_row(w, x, dtype, m, rotated.get());
    for (int64_t j = 0; j < vectors; ++j)
      for (int64_t eight = 0; eight < eights; ++eight)
        memcpy(u.get() + m * call.stride + eight * call.octet + j * kEight,
               rotated.get() + (j * eights + eight) * kEight, kEight * 4);
  }
  call.x = u.get();
  parallel_for(w.out, divide_up(16 << 10, vectors * w.stages), run_entries, &call);
  return call.status;
}

}  // namespace entries
}  // namespace
}  // namespace hf_vq
