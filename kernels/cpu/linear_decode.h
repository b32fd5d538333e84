// SPDX-License-Identifier: Apache-2.0
// Rows of a stored matrix as floats, for products with many inputs, and inputs rotated as they are.
//
//     W[o, :] = scale[o, g] * concat_j( sum_z codebook[z][ code[o, j, z] ] )        still rotated
//
// Any scheme of independent stages. A thread takes neighbouring rows; an entry is copied from a float
// table that fits into the L1 cache (4 KB for 256 entries), so that stores bound it: 4 bytes per weight.
#pragma once
#include "activations.h"
#include "threads.h"

namespace hf_vq {
namespace {

constexpr int64_t kDecodePiece = 64 << 10;  // weights worth a thread
constexpr int kUnpacked = 256;              // codes unpacked at a time

// Whether the fields of a matrix belong together; its pointers are not read.
inline bool stored_as_said(const hf_vq_matrix& w) {
  if (w.out <= 0 || w.in <= 0 || w.x < 1 || w.x > 64 || w.bits < 1 || w.bits > 16 || w.stages < 1 || w.stages > 8)
    return false;
  if (w.in % w.x || w.group < 1 || w.in % w.group || !power_of_two(w.block) || w.in % w.block) return false;
  if (w.scope == HF_VQ_E8P) return w.x == 8 && w.bits == 16;
  if (w.scope == HF_VQ_TILE) return w.stages == 1 && w.tile_rows > 0 && w.tile_columns > 0 && w.tile_columns % w.x == 0;
  return w.scope == HF_VQ_SHARED;
}

// Codes first..first + n - 1 of a stream; first is a multiple of 8, n at most kUnpacked.
inline void unpack_codes(const uint8_t* stream, int bits, int64_t first, int64_t n, uint16_t* code) {
  const uint8_t* p = stream + first / 8 * bits;
  int64_t i = 0;
  if (bits == 8) {
    for (; i < n; ++i) code[i] = p[i];
  } else if (bits == 4) {
    for (; i + 2 <= n; i += 2) {
      code[i] = p[i / 2] & 15;
      code[i + 1] = p[i / 2] >> 4;
    }
    if (i < n) code[i] = p[i / 2] & 15;
  } else {
    uint32_t waiting = 0;
    for (int count = 0; i < n; ++i) {
      for (; count < bits; count += 8) waiting |= uint32_t(*p++) << count;
      code[i] = uint16_t(waiting & ((1u << bits) - 1));
      waiting >>= bits;
      count -= bits;
    }
  }
}

// w[8] = s + shift of an E8P code (hf_vq/formats/lattice.py); table: |s| [256, 8], then its parities.
inline void e8p_entry(const float* table, float shift, uint32_t code, float* w) {
  const float* pattern = table + (code & 255) * 8;
  uint32_t signs = code >> 8 & 127, parity = signs ^ signs >> 4;
  parity = 0x6996 >> (parity & 15) & 1;
  signs |= (parity ^ uint32_t(table[256 * 8 + (code & 255)])) << 7;
  const float moved = code & 0x8000 ? -shift : shift;
  uint32_t bits[8];
  memcpy(bits, pattern, 32);
  for (int c = 0; c < 8; ++c) bits[c] ^= signs << (31 - c) & 0x80000000u;
  memcpy(w, bits, 32);
  for (int c = 0; c < 8; ++c) w[c] += moved;
}

template <int X, bool Add> inline void copy_entries(const float* table, int x, const uint16_t* code, int64_t n, float* w) {
  const int size = X ? X : x;
  for (int64_t i = 0; i < n; ++i)
    for (int c = 0; c < size; ++c) w[i * size + c] = (Add ? w[i * size + c] : 0.0f) + table[code[i] * size + c];
}

template <bool Add> inline void find_entries(const float* table, int x, const uint16_t* code, int64_t n, float* w) {
  if (x == 1) return copy_entries<1, Add>(table, x, code, n, w);
  if (x == 2) return copy_entries<2, Add>(table, x, code, n, w);
  if (x == 4) return copy_entries<4, Add>(table, x, code, n, w);
  if (x == 8) return copy_entries<8, Add>(table, x, code, n, w);
  copy_entries<0, Add>(table, x, code, n, w);
}

struct DecodeCall {
  const hf_vq_matrix* w;
  const float* tables;
  int64_t first, book;  // floats of one codebook
  void* dense;
  int dtype, status;
};

// One row into w [in]; a row of tiles has its codebooks at `tables`.
inline void decode_row(const DecodeCall& call, int64_t row, const float* tables, float* to) {
  const hf_vq_matrix& w = *call.w;
  const int64_t vectors = w.in / w.x, stream_bytes = divide_up(vectors * w.bits, 8);
  const int64_t tile = w.scope == HF_VQ_TILE ? w.tile_columns / w.x : vectors;
  uint16_t code[kUnpacked];
  for (int stage = 0; stage < w.stages; ++stage) {
    const uint8_t* stream = w.codes + (row * w.stages + stage) * stream_bytes;
    for (int64_t first = 0; first < vectors; first += kUnpacked) {
      const int64_t n = vectors - first < kUnpacked ? vectors - first : kUnpacked;
      unpack_codes(stream, w.bits, first, n, code);
      if (w.scope == HF_VQ_E8P) {
        const float* table = tables + stage * call.book;
        for (int64_t i = 0; i < n; ++i) {
          float entry[8];
          e8p_entry(table, table[256 * 8 + 256], code[i], entry);
          for (int c = 0; c < 8; ++c) to[(first + i) * 8 + c] = entry[c] + (stage ? to[(first + i) * 8 + c] : 0.0f);
        }
        continue;
      }
      for (int64_t i = 0; i < n;) {  // up to the end of a tile
        const int64_t book = w.scope == HF_VQ_TILE ? (first + i) / tile : stage;
        const int64_t left = (first + i) / tile * tile + tile - (first + i), count = left < n - i ? left : n - i;
        const auto find = stage ? find_entries<true> : find_entries<false>;
        find(tables + book * call.book, w.x, code + i, count, to + (first + i) * w.x);
        i += count;
      }
    }
  }
  const int64_t groups = w.in / w.group;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = half_to_float(w.scale[row * groups + g]);
    for (int64_t i = g * w.group; i < (g + 1) * w.group; ++i) to[i] *= scale;
  }
}

inline int64_t book_floats(const hf_vq_matrix& w) {
  return w.scope == HF_VQ_E8P ? 256 * 8 + 256 + 8 : int64_t(w.x) << w.bits;
}

// A codebook as decode_row reads it.
inline void make_book(const hf_vq_matrix& w, const uint16_t* halves, float* book) {
  if (w.scope != HF_VQ_E8P) {
    read_floats(halves, HF_VQ_FLOAT16, 0, book_floats(w), book);
    return;
  }
  read_floats(halves, HF_VQ_FLOAT16, 0, 256 * 8, book);
  const float shift = half_to_float(halves[256 * 8]);
  for (int row = 0; row < 256; ++row) {
    float total = 0;
    for (int c = 0; c < 8; ++c) total += book[row * 8 + c];
    const float quarter = total / (4 * shift);  // sum of s: at most 12 for a pattern
    book[256 * 8 + row] = quarter > 0 && quarter < 64 ? float(int(quarter + 0.5f) & 1) : 0.0f;
  }
  book[256 * 8 + 256] = shift;
}

inline void run_decode(int64_t begin, int64_t end, void* context) {
  DecodeCall& call = *static_cast<DecodeCall*>(context);
  const hf_vq_matrix& w = *call.w;
  const bool tiles = w.scope == HF_VQ_TILE;
  const int64_t books = tiles ? divide_up(w.in, w.tile_columns) : 0;
  const Scratch<float> row{size_t(w.in)}, tables{size_t(books * call.book)};
  if (!row || !tables) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  int64_t loaded = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t o = call.first + i;
    if (tiles && o / w.tile_rows != loaded) {
      loaded = o / w.tile_rows;
      for (int64_t book = 0; book < books; ++book)
        make_book(w, w.codebook + (loaded * books + book) * call.book, tables.get() + book * call.book);
    }
    decode_row(call, o, tiles ? tables.get() : call.tables, row.get());
    write_floats(call.dense, call.dtype, i * w.in, w.in, row.get());
  }
}

int decode(const hf_vq_matrix* w, int64_t first, int64_t rows, void* dense, int dtype) {
  if (!stored_as_said(*w) || dtype == HF_VQ_BOOL) return HF_VQ_UNSUPPORTED;
  const int stages = w->scope == HF_VQ_TILE ? 0 : w->stages;
  const int64_t halves = w->scope == HF_VQ_E8P ? 257 * 8 : int64_t(w->x) << w->bits;
  DecodeCall call{w, nullptr, first, book_floats(*w), dense, dtype, HF_VQ_OK};
  const Scratch<float> tables{size_t(stages * call.book)};
  if (!tables) return HF_VQ_NO_MEMORY;
  for (int stage = 0; stage < stages && rows > 0; ++stage)
    make_book(*w, w->codebook + stage * halves, tables.get() + stage * call.book);
  call.tables = tables.get();
  parallel_for(rows, divide_up(kDecodePiece, w->in), run_decode, &call);
  return call.status;
}

struct RotateCall {
  const hf_vq_matrix* w;
  const void* x;
  int dtype;
  void* rotated;
  int rotated_dtype, status;
};

inline void run_rotate(int64_t begin, int64_t end, void* context) {
  RotateCall& call = *static_cast<RotateCall*>(context);
  const Scratch<float> u{size_t(call.w->in)};
  if (!u) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    rotate_row(*call.w, call.x, call.dtype, row, u.get());
    write_floats(call.rotated, call.rotated_dtype, row * call.w->in, call.w->in, u.get());
  }
}

int rotate(const hf_vq_matrix* w, const void* x, int dtype, int64_t rows, void* rotated, int rotated_dtype) {
  if (w->in <= 0 || !power_of_two(w->block) || w->in % w->block || dtype == HF_VQ_BOOL || rotated_dtype == HF_VQ_BOOL)
    return HF_VQ_UNSUPPORTED;
  RotateCall call{w, x, dtype, rotated, rotated_dtype, HF_VQ_OK};
  parallel_for(rows, divide_up(16 << 10, w->in), run_rotate, &call);
  return call.status;
}

}  // namespace
}  // namespace hf_vq
