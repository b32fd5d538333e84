// SPDX-License-Identifier: Apache-2.0
// New tokens as codes, written where attention will read them (ops/reference.py, `encode`):
//
//   u = R (x - mean)    codes of u / rms(u)    scale = |u|^2 / <u, chosen entries>
//
// A task owns the tokens of one block of one head: no two tasks write into the same packet. Whole blocks
// are packed at once; single tokens are written over what their packets hold.
#pragma once
#include "encode.h"
#include "hadamard.h"
#include "kernels.h"
#include "threads.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kTokens = 16;  // encoded together

struct Append {
  const hf_vq_codes& codes;
  const hf_vq_floats& x;
  int64_t heads, at, first_block, blocks;  // blocks that the tokens fall into
  Entries entries;                         // unless learned

  Append(const hf_vq_codes& to, const hf_vq_floats& from) : codes(to), x(from) {}
};

// Rows of `count` tokens, centred and rotated, from token `begin` of x on.
inline void read_rows(const Append& job, int64_t batch, int64_t head, int64_t begin, int count, float (*rows)[kDim]) {
  const hf_vq_codes& codes = job.codes;
  const float* mean = codes.mean;
  if (mean != nullptr) mean += batch * codes.mean_stride[0] + head * codes.mean_stride[1];
  for (int t = 0; t < count; ++t) {
    const int64_t at = batch * job.x.stride[0] + head * job.x.stride[1] + (begin + t) * job.x.stride[2];
    read_floats(job.x.data, job.x.dtype, at, codes.dim, rows[t]);
    for (int i = 0; i < codes.dim && mean != nullptr; ++i) rows[t][i] -= mean[i];
    hadamard_blocks(rows[t], codes.dim, codes.block);
    for (int i = codes.dim; i < (codes.dim + 15) / 16 * 16; ++i) rows[t][i] = 0.0f;
  }
}

inline float dot_rows(const float* a, const float* b, int n) {
  constexpr int kSums = 16 / kFloats;
  Floats sums[kSums];
  for (Floats& each : sums) each = splat(0.0f);
  for (int i = 0; i < n; i += 16)
    for (int k = 0; k < kSums; ++k) sums[k] = fma(load(a + i + k * kFloats), load(b + i + k * kFloats), sums[k]);
  for (int k = 1; k < kSums; ++k) sums[0] = sums[0] + sums[k];
  return sum(sums[0]);
}

// Codes of one row under the shared codebook; the unbiased scale is returned.
inline uint16_t encode_row(const Entries& entries, const float* row, int dim, uint8_t* code) {
  alignas(64) float unit[kDim], chosen[kDim];
  const int n = (dim + 15) / 16 * 16;
  const float energy = dot_rows(row, row, n);
  const float rms = __builtin_sqrtf(energy / float(dim));
  const Floats factor = splat(1.0f / (rms > 1e-30f ? rms : 1e-30f));
  for (int i = 0; i < n; i += kFloats) store(unit + i, load(row + i) * factor);
  nearest_shared(entries, unit, dim, code, chosen);
  for (int i = dim; i < n; ++i) chosen[i] = 0.0f;
  const float along = dot_rows(row, chosen, n);
  return float_to_half(energy == 0.0f ? 0.0f : energy / along);
}

// Codes of rows under the learned codebooks of a head.
template <int X>
void encode_learned(const uint16_t* codebook, int entries, const float (*rows)[kDim], int count, int vectors,
                    uint8_t (*code)[kDim]) {
  alignas(64) Components number;
  for (int s = 0; s < vectors; ++s) {
    read_entries(codebook + int64_t(s) * entries * X, entries, X, number);
    for (int t = 0; t < count; ++t) code[t][s] = uint8_t(nearest_entry<X>(number, entries, rows[t] + s * X));
  }
}

inline void encode_rows(const Append& job, int64_t head, const float (*rows)[kDim], int count, uint8_t (*code)[kDim],
                        uint16_t* scale) {
  const hf_vq_codes& codes = job.codes;
  const int vectors = codes.dim / codes.x, entries = 1 << codes.bits;
  if (codes.learned == 0) {
    for (int t = 0; t < count; ++t) scale[t] = encode_row(job.entries, rows[t], codes.dim, code[t]);
    return;
  }
  const uint16_t* codebook = codes.codebook + head * codes.dim * entries;
  if (codes.x == 1) encode_learned<1>(codebook, entries, rows, count, vectors, code);
  if (codes.x == 2) encode_learned<2>(codebook, entries, rows, count, vectors, code);
  if (codes.x == 4) encode_learned<4>(codebook, entries, rows, count, vectors, code);
}

// Packet and index in it of sub-quantizer s of token t of a block with S sub-quantizers.
inline void locate(int layout, int vectors, int t, int s, int& packet, int& i) {
  packet = layout == HF_VQ_PLANES ? s : t / 64 * (vectors / 4) + s / 4;
  i = layout == HF_VQ_PLANES ? t : t % 64 / 16 * 64 + t % 16 * 4 + s % 4;
}

// Tokens low..high - 1 of a block, the first of which is token `begin` of x.
inline void append_block(const Append& job, int64_t batch, int64_t head, int64_t block, int low, int high, int64_t begin) {
  const hf_vq_codes& codes = job.codes;
  const int vectors = codes.dim / codes.x, bytes = packet_bytes(codes.bits);
  uint8_t* packets = codes.data + batch * codes.data_stride[0] + head * codes.data_stride[1] + block * vectors * bytes;
  const bool whole = low == 0 && high == kBlock;
  uint8_t unpacked[kDim][kBlock];  // where whole
  for (int t = low; t < high; t += kTokens) {
    alignas(64) float rows[kTokens][kDim];
    uint8_t code[kTokens][kDim];
    uint16_t scale[kTokens];
    const int count = high - t < kTokens ? high - t : kTokens;
    read_rows(job, batch, head, begin + t - low, count, rows);
    encode_rows(job, head, rows, count, code, scale);
    for (int k = 0; k < count; ++k)
      for (int s = 0; s < vectors; ++s) {
        int packet, i;
        locate(codes.layout, vectors, t + k, s, packet, i);
        if (whole) unpacked[packet][i] = code[k][s];
        else insert(packets + packet * bytes, codes.bits, i, code[k][s]);
      }
    if (codes.scale != nullptr)
      memcpy(codes.scale + batch * codes.scale_stride[0] + head * codes.scale_stride[1] + block * kBlock + t, scale,
             size_t(count) * 2);
  }
  for (int p = 0; whole && p < vectors; ++p) pack(unpacked[p], codes.bits, packets + p * bytes);
}

inline void append_blocks(int64_t from, int64_t to, void* context) {
  const Append& job = *static_cast<Append*>(context);
  for (int64_t task = from; task < to; ++task) {
    const int64_t block = job.first_block + task % job.blocks, unit = task / job.blocks;
    const int64_t origin = block * kBlock, end = job.at + job.x.tokens;
    const int low = int(job.at > origin ? job.at - origin : 0);
    const int high = int(end - origin < kBlock ? end - origin : kBlock);
    append_block(job, unit / job.heads, unit % job.heads, block, low, high, origin + low - job.at);
  }
}

}  // namespace kv

int codes_supported(const hf_vq_codes* codes, int values) {
  const hf_vq_codes& c = *codes;
  const bool shape = (c.x == 1 || c.x == 2 || c.x == 4) && (c.bits == 4 || c.bits == 6 || c.bits == 8);
  if (!shape || c.dim < 4 || c.dim > kv::kDim || c.dim % (4 * c.x) != 0) return HF_VQ_UNSUPPORTED;
  const bool block = c.block >= 1 && (c.block & (c.block - 1)) == 0 && c.dim % c.block == 0;
  if (!block) return HF_VQ_UNSUPPORTED;
  const int layout = values != 0 || c.learned != 0 ? HF_VQ_PLANES : HF_VQ_QUADS;
  return c.layout == layout ? HF_VQ_OK : HF_VQ_UNSUPPORTED;
}

int append(const hf_vq_codes* codes, const hf_vq_floats* x, int64_t batch, int64_t heads, int64_t at) {
  using namespace kv;
  if (codes_supported(codes, codes->layout == HF_VQ_PLANES) != HF_VQ_OK) return HF_VQ_UNSUPPORTED;
  if (x->tokens == 0 || batch == 0 || heads == 0) return HF_VQ_OK;
  Append job(*codes, *x);
  job.heads = heads;
  job.at = at;
  job.first_block = at / kBlock;
  job.blocks = (at + x->tokens - 1) / kBlock + 1 - job.first_block;
  if (codes->learned == 0) read_entries(codes->codebook, 1 << codes->bits, codes->x, job.entries);
  const int64_t tokens = smaller(x->tokens, kBlock);
  parallel_for(batch * heads * job.blocks, larger(kTokens / tokens, 1), append_blocks, &job);
  return HF_VQ_OK;
}

}  // namespace
}  // namespace hf_vq
