// SPDX-License-Identifier: Apache-2.0
// New tokens to codes, written in the layout that attention reads (ops/reference/codes.py, `encode`):
//
//   u = R (x - mean)    codes of u / rms(u)    scale = |u|^2 / <u, chosen entries>, 65504 at most
//
// A rotary mean R_n m is added to the mean, row by row. What is left is multiplied by `smoothing`.
//
// If the sum of squares of a finite row overflows, the row is read again, scaled by a power of two; no code changes.
//
// A task owns the tokens of one block of a head, so that no two tasks write into one packet. With few tokens it
// owns those of several heads. It processes 16 rows per step, one per lane. If they are tokens 16 g .. 16 g + 15
// of a block, their codes are whole pieces of packets: 64 bytes of a quad, 16 of a plane.
#pragma once
#include "encode.h"
#include "rotary.h"
#include "../primitives/hadamard.h"
#include "../kernels.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {
namespace kv {

template <bool First, class A, class B> struct Choose { using Type = A; };
template <class A, class B> struct Choose<false, A, B> { using Type = B; };

// Pieces that search one learned codebook after the other together: 64 tokens lie in at most five.
constexpr int kPieces = 5;
constexpr int kFew = 4;  // rows, for which lanes would be idle
constexpr float kShrink = 0x1p-72f, kGrow = 0x1p72f, kLargestHalf = 65504.0f;

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

// Rows that are being encoded, in lanes first .. last - 1; the other lanes repeat the first row.
struct Piece {
  int first = 0, last = 0;
  int64_t from[kTogether];        // the row's first number in x
  const float* mean[kTogether];
  const float* smoothing[kTogether];  // null without one
  alignas(64) float number[kDim * kTogether];  // [dim][lane], u / root
  alignas(64) float energy[kTogether], rms[kTogether], factor[kTogether];
  alignas(64) float unit[kTogether];  // scale of the numbers: 1, or kGrow in a row that was read again
  alignas(64) uint8_t codes[kStrip + kDim * kTogether + kStrip];
  uint8_t* const code = codes + kStrip;  // indexed by code_of(); the padding is read but not used
  uint16_t scale[kTogether];
  float turned[kTogether][kDim];  // means with R_n m
};

// The next lane is token t of a head.
inline void add_row(const Append& job, int64_t batch, int64_t head, int64_t t, Piece& piece) {
  static const float zeros[kDim] = {};
  const hf_vq_codes& codes = job.codes;
  piece.from[piece.last] = batch * job.x.stride[0] + head * job.x.stride[1] + t * job.x.stride[2];
  const float* mean =
      codes.mean == nullptr ? zeros : codes.mean + batch * codes.mean_stride[0] + head * codes.mean_stride[1];
  const float* m = turns(codes) ? rotary_mean_of(codes, batch, head) : zeros;
  if (m != zeros && any_turns(m, codes.dim)) {
    const RotaryTable table(codes.rotary_table);
    Turn turn;
    turn_by(table, job.at + t + codes.rotary_start, 0, turn);
    float* to = piece.turned[piece.last];
    add_turned(table, turn, mean, m, codes.dim, to);
    mean = to;
  }
  piece.smoothing[piece.last] =
      codes.smoothing == nullptr ? nullptr : codes.smoothing + batch * codes.mean_stride[0] + head * codes.mean_stride[1];
  piece.mean[piece.last++] = mean;
}

// Load the `count` < kFloats existing numbers at p from number `first` on, and zeros.
inline Floats load_some(const void* p, int dtype, int64_t first, int count) {
  float some[kFloats] = {};
  read_floats(p, dtype, first, count, some);
  return load(some);
}

// A lane whose numbers are huge, or none.
inline void read_shrunk(const Append& job, Piece& piece, int lane) {
  const int dim = job.codes.dim, block = job.codes.block;
  float u[kDim], energy = 0.0f;
  read_floats(job.x.data, job.x.dtype, piece.from[lane], dim, u);
  for (int i = 0; i < dim; ++i) {
    u[i] = (u[i] - piece.mean[lane][i]) * kShrink * (piece.smoothing[lane] == nullptr ? 1.0f : piece.smoothing[lane][i]);
    energy += u[i] * u[i];
  }
  for (int half = 1; half < block; half *= 2)
    for (int i = 0; i < dim; ++i)
      if ((i & half) == 0) {
        const float low = u[i], high = u[i + half];
        u[i] = low + high;
        u[i + half] = low - high;
      }
  for (int i = 0; i < dim; ++i) piece.number[i * kTogether + lane] = u[i];
  float rms[kFloats];
  store(rms, max(sqrt(splat(energy / float(dim))), splat(kSmallest)));
  piece.energy[lane] = energy;
  piece.rms[lane] = rms[0];
  piece.factor[lane] = inverse_root(block) / rms[0];
  piece.unit[lane] = kGrow;
}

// u = R s (x - mean), across the lanes; a rotation keeps |s (x - mean)|.
template <int Dtype> void read_piece(const Append& job, Piece& piece) {
  const int dim = job.codes.dim, block = job.codes.block;
  for (int lane = 0; lane < kTogether; ++lane) {
    if (lane >= piece.first && lane < piece.last) continue;
    piece.from[lane] = piece.from[piece.first];
    piece.mean[lane] = piece.mean[piece.first];
    piece.smoothing[lane] = piece.smoothing[piece.first];
  }
  const Floats root = splat(inverse_root(block));
  Floats energy[kParts];
  for (Floats& each : energy) each = splat(0.0f);
  const int done = block >= kFloats ? kFloats : 1;  // size of the blocks that are transformed on the way
  for (int i = 0; i < dim; i += kFloats)
    for (int part = 0; part < kParts; ++part) {
      const int64_t* from = piece.from + part * kFloats;
      const float* const* mean = piece.mean + part * kFloats;
      const float* const* smoothing = piece.smoothing + part * kFloats;
      Floats v[kFloats];
      if (i + kFloats <= dim) {
        for (int k = 0; k < kFloats; ++k) v[k] = load_floats<Dtype>(job.x.data, from[k] + i) - load(mean[k] + i);
      } else {
        for (int k = 0; k < kFloats; ++k)
          v[k] = load_some(job.x.data, Dtype, from[k] + i, dim - i) - load_some(mean[k], HF_VQ_FLOAT32, i, dim - i);
      }
      if (job.codes.smoothing != nullptr)
        for (int k = 0; k < kFloats; ++k)
          v[k] = v[k] * (i + kFloats <= dim ? load(smoothing[k] + i) : load_some(smoothing[k], HF_VQ_FLOAT32, i, dim - i));
      transpose(v);
      Floats sums[4];
      for (int k = 0; k < kFloats; ++k) sums[k % 4] = k < 4 ? v[k] * v[k] : fma(v[k], v[k], sums[k % 4]);
      energy[part] = energy[part] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
      if (done > 1) butterflies<1>(v);
      for (int k = 0; k < kFloats; ++k) store(piece.number + (i + k) * kTogether + part * kFloats, v[k]);
    }
  for (int part = 0; part < kParts; ++part) {
    const Floats rms = max(sqrt(energy[part] / splat(float(dim))), splat(kSmallest));
    store(piece.energy + part * kFloats, energy[part]);
    store(piece.rms + part * kFloats, rms);
    store(piece.factor + part * kFloats, root / rms);
    store(piece.unit + part * kFloats, splat(1.0f));
  }
  hadamard_lanes(piece.number, dim, done, block, kTogether);
  // Entries that are learned per group have the data's own size.
  for (int lane = 0; lane < kTogether && job.codes.learned == 0; ++lane)
    if (!(piece.energy[lane] < kInfinity)) read_shrunk(job, piece, lane);
}

inline auto reader_of(const Append& job) {
  const int dtype = job.x.dtype;
  return dtype == HF_VQ_FLOAT32   ? read_piece<HF_VQ_FLOAT32>
         : dtype == HF_VQ_FLOAT16 ? read_piece<HF_VQ_FLOAT16>
                                  : read_piece<HF_VQ_BFLOAT16>;
}

// Codes of all sub-vectors u under a shared codebook; along[part] = <their rows, the entries>.
template <int X> void encode_vectors(const Append& job, const float* u, uint8_t* code, Floats (&along)[kParts]) {
  constexpr int kMany = X <= 2 ? 4 : 2;
  const int layout = job.codes.layout, step = code_step(layout);
  for (Floats& each : along) each = splat(0.0f);
  for (int first = 0; first < job.vectors * kParts; first += kMany) {
    const float* vector[kMany];
    uint8_t* place[kMany];
    Floats some[kMany];
    for (int k = 0; k < kMany; ++k) {
      const int s = (first + k) / kParts, lane = (first + k) % kParts * kFloats;
      vector[k] = u + s * X * kTogether + lane;
      place[k] = code_of(layout, code, s) + lane * step;
    }
    nearest_some<X, kMany>(job.entries, vector, place, step, some);
    for (int k = 0; k < kMany; ++k) along[(first + k) % kParts] = along[(first + k) % kParts] + some[k];
  }
}

// Codes under the shared codebook, and unbiased scales.
inline void encode_shared(const Append& job, Piece& piece) {
  const int dim = job.codes.dim, layout = job.codes.layout;
  const Floats none = splat(0.0f);
  Floats along[kParts];
  if (job.entries.ascending) {
    const auto levels = layout == HF_VQ_QUADS ? nearest_levels<HF_VQ_QUADS> : nearest_levels<HF_VQ_PLANES>;
    for (int part = 0, lane = 0; part < kParts; ++part, lane += kFloats)
      along[part] = levels(job.entries, piece.number + lane, load(piece.factor + lane), dim,
                           piece.code + lane * code_step(layout));
  } else {
    float* u = piece.number;
    for (int i = 0; i < dim; ++i)
      for (int part = 0; part < kParts; ++part, u += kFloats) store(u, load(u) * load(piece.factor + part * kFloats));
    const int x = job.codes.x;
    (x == 1 ? encode_vectors<1> : x == 2 ? encode_vectors<2> : encode_vectors<4>)(job, piece.number, piece.code, along);
  }
  for (int part = 0, lane = 0; part < kParts; ++part, lane += kFloats) {
    const Floats energy = load(piece.energy + lane), most = splat(kLargestHalf);
    const Floats scale = energy / (load(piece.rms + lane) * along[part]) * load(piece.unit + lane);
    store_half(piece.scale + lane, where_less(none, energy, where_less(most, scale, most, scale), energy));
  }
}

// Codes of pieces of one head, under its own codebooks.
template <int X> void encode_learned(const Append& job, int64_t head, Piece* pieces, int count) {
  constexpr int kMany = X <= 2 ? 4 : 2;
  const int entries = 1 << job.codes.bits;
  const uint16_t* codebook = job.codes.codebook + head * job.codes.dim * entries;
  int rows = 0;
  for (int p = 0; p < count; ++p) rows += pieces[p].last - pieces[p].first;
  const Floats root = splat(inverse_root(job.codes.block));
  for (int p = 0; p < count && job.codes.block > 1; ++p) {
    float* u = pieces[p].number;
    for (int i = 0; i < job.codes.dim * kTogether; i += kFloats) store(u + i, load(u + i) * root);
  }
  const int vectors = count * kParts;
  Entries book;
  book.count = entries;
  for (int s = 0; s < job.vectors; ++s, codebook += entries * X) {
    if (rows <= kFew) {
      read_entries(codebook, entries, X, book.number);
      for (int p = 0; p < count; ++p)
        for (int r = pieces[p].first; r < pieces[p].last; ++r)
          pieces[p].code[s * kTogether + r] = uint8_t(nearest_entry<X>(book, pieces[p].number + s * X * kTogether + r));
      continue;
    }
    read_entries(codebook, entries, X, book);
    const float* vector[kPieces * kParts];
    uint8_t* place[kPieces * kParts];
    for (int k = 0; k < vectors; ++k) {
      const int lane = k % kParts * kFloats;
      vector[k] = pieces[k / kParts].number + s * X * kTogether + lane;
      place[k] = pieces[k / kParts].code + s * kTogether + lane;
    }
    int k = 0;
    for (; k + kMany <= vectors; k += kMany) nearest_own_entry<X, kMany>(book, vector + k, place + k);
    for (; k < vectors; ++k) nearest_own_entry<X, 1>(book, vector + k, place + k);
  }
}

inline uint8_t* packets_of(const Append& job, int64_t batch, int64_t head, int64_t block) {
  const hf_vq_codes& codes = job.codes;
  const int64_t size = int64_t(job.vectors) * packet_bytes(codes.bits);
  return codes.data + batch * codes.data_stride[0] + head * codes.data_stride[1] + block * size;
}

// Write the codes of lanes first .. last - 1 of a piece that begins with token t of a block; with Width 1, of token t
// only. A plane is written in units of kBytes codes, of which 16 change: no other task owns the rest.
template <int Bits, int Width>
void write_piece(int layout, uint8_t* packets, int vectors, int t, const uint8_t* code, int first, int last) {
  constexpr int kPacket = packet_bytes(Bits);
  alignas(64) uint8_t lanes[kStrip] = {};
  if (layout == HF_VQ_PLANES) {
    using Word = typename Choose<Width == 1, uint8_t, Bytes>::Type;
    const int before = Width == 1 ? 0 : t % kBytes;
    memset(lanes + before + first, 255, size_t(last - first));
    const Word where[] = {load_word<Word>(lanes)};
    for (int s = 0; s < vectors; ++s)
      write_codes<Bits>(packets + s * kPacket, t - before, code + s * kTogether - before, where);
    return;
  }
  using Word = typename Choose<Width == 1, uint32_t, Bytes>::Type;
  memset(lanes + first * 4, 255, size_t(last - first) * 4);
  Word where[4 * Width / sizeof(Word)];
  for (size_t k = 0; k < 4 * Width / sizeof(Word); ++k) where[k] = load_word<Word>(lanes + k * sizeof(Word));
  packets += t / kStrip * (vectors / 4) * kPacket;
  for (int r = 0; r < vectors / 4; ++r)
    write_codes<Bits>(packets + r * kPacket, t % kStrip * 4, code + r * 4 * kTogether, where);
}

template <int Width> inline auto writer_of(const Append& job) {
  const int bits = job.codes.bits;
  return bits == 4 ? write_piece<4, Width> : bits == 6 ? write_piece<6, Width> : write_piece<8, Width>;
}

inline uint16_t* scales_of(const Append& job, int64_t batch, int64_t head) {
  const hf_vq_codes& codes = job.codes;
  return codes.scale + batch * codes.scale_stride[0] + head * codes.scale_stride[1];
}

// Tokens begin..end - 1 of x, of one head. Lane r holds token r of 16 that begin at a multiple of 16.
inline void append_head(const Append& job, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  const auto read = reader_of(job);
  const int most = job.codes.learned == 0 ? 1 : kPieces;
  Piece pieces[kPieces];
  while (begin < end) {
    const int64_t first = begin;
    int count = 0;
    for (; count < most && begin < end; ++count) {
      Piece& piece = pieces[count];
      piece.first = piece.last = int((job.at + begin) % kTogether);
      while (piece.last < kTogether && begin < end) add_row(job, batch, head, begin++, piece);
      read(job, piece);
    }
    if (job.codes.learned == 0) encode_shared(job, pieces[0]);
    else if (job.codes.x == 1) encode_learned<1>(job, head, pieces, count);
    else if (job.codes.x == 2) encode_learned<2>(job, head, pieces, count);
    else encode_learned<4>(job, head, pieces, count);
    int64_t token = job.at + first;
    for (const Piece* piece = pieces; piece < pieces + count; ++piece) {
      const int rows = piece->last - piece->first;
      writer_of<kTogether>(job)(job.codes.layout, packets_of(job, batch, head, token / kBlock), job.vectors,
                                int(token % kBlock) - piece->first, piece->code, piece->first, piece->last);
      if (job.codes.scale != nullptr)
        memcpy(scales_of(job, batch, head) + token, piece->scale + piece->first, size_t(rows) * 2);
      token += rows;
    }
  }
}

// Tokens begin..end - 1 of x, of some heads that share a codebook: at most 16 rows, in order.
inline void append_heads(const Append& job, int64_t first_unit, int64_t last_unit, int64_t begin, int64_t end) {
  Piece piece;
  for (int64_t unit = first_unit; unit < last_unit; ++unit)
    for (int64_t t = begin; t < end; ++t) add_row(job, unit / job.heads, unit % job.heads, t, piece);
  reader_of(job)(job, piece);
  encode_shared(job, piece);
  int lane = 0;
  for (int64_t unit = first_unit; unit < last_unit; ++unit)
    for (int64_t token = job.at + begin; token < job.at + end; ++token, ++lane) {
      const int64_t batch = unit / job.heads, head = unit % job.heads;
      writer_of<1>(job)(job.codes.layout, packets_of(job, batch, head, token / kBlock), job.vectors,
                        int(token % kBlock), piece.code + lane * code_step(job.codes.layout), 0, 1);
      if (job.codes.scale != nullptr) scales_of(job, batch, head)[token] = piece.scale[lane];
    }
}

inline void append_blocks(int64_t from, int64_t to, void* context) {
  const Append& job = *static_cast<Append*>(context);
  for (int64_t task = from; task < to; ++task) {
    const int64_t block = job.first_block + task % job.blocks, unit = task / job.blocks * job.units;
    const int64_t begin = larger(block * kBlock - job.at, 0);
    const int64_t end = smaller((block + 1) * kBlock - job.at, job.x.tokens);
    if (job.units == 1) append_head(job, unit / job.heads, unit % job.heads, begin, end);
    else append_heads(job, unit, smaller(unit + job.units, job.batch * job.heads), begin, end);
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
  if (codes_supported(codes, codes->layout == HF_VQ_PLANES) != HF_VQ_OK || !rotary_supported(*codes))
    return HF_VQ_UNSUPPORTED;
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
