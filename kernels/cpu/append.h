// SPDX-License-Identifier: Apache-2.0
// New tokens as codes, written where attention will read them (ops/reference.py, `encode`):
//
//   u = R (x - mean)    codes of u / rms(u)    scale = |u|^2 / <u, chosen entries>
//
// A task owns the tokens of one block of a head, so that no two tasks write into one packet; of single tokens
// it owns those of several heads. It takes 16 rows at a time through each step, because a step of one row
// waits for the step before. Whole blocks are packed at once, other tokens are written over what their packets
// hold.
#pragma once
#include "encode.h"
#include "hadamard.h"
#include "kernels.h"
#include "threads.h"

namespace hf_vq {
namespace {
namespace kv {

constexpr int kTogether = 16;  // rows

struct Append {
  const hf_vq_codes& codes;
  const hf_vq_floats& x;
  int64_t batch, heads, at;
  int64_t first_block, blocks;  // that the tokens fall into
  int64_t units;                // heads of a task
  int vectors;                  // sub-quantizers
  Entries entries;              // unless learned

  Append(const hf_vq_codes& to, const hf_vq_floats& from) : codes(to), x(from) {}
};

// Rows on their way: token t of x, of a head.
struct Rows {
  int count;
  int64_t batch[kTogether], head[kTogether], t[kTogether];
  alignas(64) float row[kTogether][kDim];  // zeros from dim up to a multiple of 16
  uint8_t code[kTogether][kDim];
  uint16_t scale[kTogether];
};

inline void read_row(const Append& job, Rows& rows, int r) {
  const hf_vq_codes& codes = job.codes;
  float* row = rows.row[r];
  const int64_t batch = rows.batch[r], head = rows.head[r];
  const int64_t from = batch * job.x.stride[0] + head * job.x.stride[1] + rows.t[r] * job.x.stride[2];
  read_floats(job.x.data, job.x.dtype, from, codes.dim, row);
  if (codes.mean != nullptr) {
    const float* mean = codes.mean + batch * codes.mean_stride[0] + head * codes.mean_stride[1];
    for (int i = 0; i < codes.dim; ++i) row[i] -= mean[i];
  }
  hadamard_blocks(row, codes.dim, codes.block);
  for (int i = codes.dim; i < padded(codes.dim); ++i) row[i] = 0.0f;
}

// Codes under the shared codebook, and unbiased scales.
inline void encode_shared(const Append& job, Rows& rows) {
  const int dim = job.codes.dim;
  float energy[kTogether], rms[kTogether], along[kTogether];
  for (int r = 0; r < rows.count; ++r) energy[r] = dot_floats(rows.row[r], rows.row[r], padded(dim));
  for (int r = 0; r < rows.count; ++r) {
    rms[r] = __builtin_sqrtf(energy[r] / float(dim));
    rms[r] = rms[r] > kSmallest ? rms[r] : kSmallest;
  }
  for (int r = 0; r < rows.count; ++r)
    along[r] = nearest_shared(job.entries, rows.row[r], dim, rms[r], rows.code[r]);
  for (int r = 0; r < rows.count; ++r)
    rows.scale[r] = float_to_half(energy[r] == 0.0f ? 0.0f : energy[r] / along[r]);
}

// Codes of rows begin..end - 1, all of one head, under its own codebooks.
template <int X> void encode_learned(const Append& job, Rows& rows, int begin, int end) {
  const int entries = 1 << job.codes.bits;
  const uint16_t* codebook = job.codes.codebook + rows.head[begin] * job.codes.dim * entries;
  alignas(64) Components number;
  for (int s = 0; s < job.vectors; ++s, codebook += entries * X) {
    read_entries(codebook, entries, X, number);
    for (int r = begin; r < end; ++r) rows.code[r][s] = uint8_t(nearest_entry<X>(number, entries, rows.row[r] + s * X));
  }
}

inline void encode_rows(const Append& job, Rows& rows) {
  for (int r = 0; r < rows.count; ++r) read_row(job, rows, r);
  if (job.codes.learned == 0) {
    encode_shared(job, rows);
    return;
  }
  for (int begin = 0, end = 0; begin < rows.count; begin = end) {
    while (end < rows.count && rows.head[end] == rows.head[begin]) ++end;
    if (job.codes.x == 1) encode_learned<1>(job, rows, begin, end);
    if (job.codes.x == 2) encode_learned<2>(job, rows, begin, end);
    if (job.codes.x == 4) encode_learned<4>(job, rows, begin, end);
  }
}

inline uint8_t* packets_of(const Append& job, int64_t batch, int64_t head, int64_t block) {
  const hf_vq_codes& codes = job.codes;
  const int64_t size = int64_t(job.vectors) * packet_bytes(codes.bits);
  return codes.data + batch * codes.data_stride[0] + head * codes.data_stride[1] + block * size;
}

// Codes (over those that are there) and scales of rows.
inline void write_rows(const Append& job, const Rows& rows, bool with_codes) {
  const hf_vq_codes& codes = job.codes;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t token = job.at + rows.t[r];
    if (with_codes)
      write_token(codes.layout, codes.bits, packets_of(job, rows.batch[r], rows.head[r], token / kBlock),
                  job.vectors, int(token % kBlock), rows.code[r]);
    if (codes.scale != nullptr)
      codes.scale[rows.batch[r] * codes.scale_stride[0] + rows.head[r] * codes.scale_stride[1] + token] = rows.scale[r];
  }
}

// Codes of token t of a block as bytes, [packet][256].
inline void place_token(int layout, int vectors, int t, const uint8_t* code, uint8_t (*unpacked)[kBlock]) {
  if (layout == HF_VQ_PLANES) {
    for (int s = 0; s < vectors; ++s) unpacked[s][t] = code[s];
    return;
  }
  const int first = t / 64 * (vectors / 4), i = t % 64 / 16 * 64 + t % 16 * 4;
  for (int r = 0; r < vectors / 4; ++r) memcpy(unpacked[first + r] + i, code + 4 * r, 4);
}

// All tokens of a block of one head, the first of which is token `begin` of x.
inline void append_block(const Append& job, int64_t batch, int64_t head, int64_t begin) {
  const int bytes = packet_bytes(job.codes.bits);
  uint8_t unpacked[kDim][kBlock];
  Rows rows;
  rows.count = kTogether;
  for (int t = 0; t < kBlock; t += kTogether) {
    for (int r = 0; r < kTogether; ++r) {
      rows.batch[r] = batch;
      rows.head[r] = head;
      rows.t[r] = begin + t + r;
    }
    encode_rows(job, rows);
    write_rows(job, rows, false);
    for (int r = 0; r < kTogether; ++r) place_token(job.codes.layout, job.vectors, t + r, rows.code[r], unpacked);
  }
  uint8_t* packets = packets_of(job, batch, head, (job.at + begin) / kBlock);
  for (int p = 0; p < job.vectors; ++p) pack(unpacked[p], job.codes.bits, packets + p * bytes);
}

// Tokens begin..end - 1 of x of some heads.
inline void append_tokens(const Append& job, int64_t first_unit, int64_t last_unit, int64_t begin, int64_t end) {
  Rows rows;
  rows.count = 0;
  int64_t batch = first_unit / job.heads, head = first_unit % job.heads;
  for (int64_t unit = first_unit; unit < last_unit; ++unit) {
    for (int64_t t = begin; t < end; ++t) {
      rows.batch[rows.count] = batch;
      rows.head[rows.count] = head;
      rows.t[rows.count++] = t;
      if (rows.count < kTogether && (unit + 1 < last_unit || t + 1 < end)) continue;
      encode_rows(job, rows);
      write_rows(job, rows, true);
      rows.count = 0;
    }
    if (++head < job.heads) continue;
    head = 0;
    ++batch;
  }
}

inline void append_blocks(int64_t from, int64_t to, void* context) {
  const Append& job = *static_cast<Append*>(context);
  for (int64_t task = from; task < to; ++task) {
    const int64_t block = job.first_block + task % job.blocks, unit = task / job.blocks * job.units;
    const int64_t begin = larger(block * kBlock - job.at, 0);
    const int64_t end = smaller((block + 1) * kBlock - job.at, job.x.tokens);
    if (end - begin == kBlock) append_block(job, unit / job.heads, unit % job.heads, begin);
    else append_tokens(job, unit, smaller(unit + job.units, job.batch * job.heads), begin, end);
  }
}

}  // namespace kv

int codes_supported(const hf_vq_codes* codes, int values) {
  const hf_vq_codes& c = *codes;
  const bool shape = (c.x == 1 || c.x == 2 || c.x == 4) && (c.bits == 4 || c.bits == 6 || c.bits == 8);
  if (!shape || c.dim < 4 || c.dim > kv::kDim || c.dim % (4 * c.x) != 0) return HF_VQ_UNSUPPORTED;
  if (c.block < 1 || (c.block & (c.block - 1)) != 0 || c.dim % c.block != 0) return HF_VQ_UNSUPPORTED;
  const int layout = values != 0 || c.learned != 0 ? HF_VQ_PLANES : HF_VQ_QUADS;
  return c.layout == layout ? HF_VQ_OK : HF_VQ_UNSUPPORTED;
}

int append(const hf_vq_codes* codes, const hf_vq_floats* x, int64_t batch, int64_t heads, int64_t at) {
  using namespace kv;
  if (codes_supported(codes, codes->layout == HF_VQ_PLANES) != HF_VQ_OK) return HF_VQ_UNSUPPORTED;
  if (x->tokens == 0 || batch == 0 || heads == 0) return HF_VQ_OK;
  Append job(*codes, *x);
  job.batch = batch;
  job.heads = heads;
  job.at = at;
  job.vectors = codes->dim / codes->x;
  job.first_block = at / kBlock;
  job.blocks = (at + x->tokens - 1) / kBlock + 1 - job.first_block;
  job.units = x->tokens < kTogether && codes->learned == 0 ? kTogether / x->tokens : 1;
  if (codes->learned == 0) read_entries(codes->codebook, 1 << codes->bits, codes->x, job.entries);
  parallel_for((batch * heads + job.units - 1) / job.units * job.blocks, 1, append_blocks, &job);
  return HF_VQ_OK;
}

}  // namespace
}  // namespace hf_vq
