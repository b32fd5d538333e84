// SPDX-License-Identifier: Apache-2.0
// Codes to dense rows in float32, for products with many inputs; and rotation of inputs that stay floats.
//
//     W[o, :] = scale[o, g] * concat_j( sum_z codebook[z][ code[o, j, z] ] )        still rotated
//
// All schemes with independent codebooks, and nested passes. A thread owns adjacent rows. Entries are copied from
// float tables, which for 256 entries fit into L1. 4-bit codes are decoded in pairs: a byte indexes a table of pairs.
//
// Bytes: 4 per weight written. Bottleneck: stores.
#pragma once
#include "activations.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {

constexpr int64_t kDecodePiece = 64 << 10;  // weights worth a thread
constexpr int kUnpacked = 256;              // codes unpacked per iteration

// True if the fields of a matrix are consistent; its pointers are not read.
inline bool stored_as_said(const hf_vq_matrix& w) {
  if (w.out <= 0 || w.in <= 0 || w.x < 1 || w.x > 64 || w.bits < 1 || w.bits > 16 || w.stages < 1 || w.stages > 8)
    return false;
  if (w.second_bits != 0 && (w.second_bits < 0 || w.bits + w.second_bits > 8 || w.x != 1 || w.stages != 1 ||
                             w.scope != HF_VQ_SHARED))
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
  } else if (bits == 16) {
    memcpy(code, p, size_t(n) * 2);
  } else if (bits == 12) {
    for (; i + 2 <= n; i += 2, p += 3) {
      code[i] = uint16_t(p[0] | (p[1] & 15) << 8);
      code[i + 1] = uint16_t(p[1] >> 4 | p[2] << 4);
    }
    if (i < n) code[i] = uint16_t(p[0] | (p[1] & 15) << 8);
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

// Decoding parameters of a matrix; pairs of 4-bit codes become one 8-bit code.
struct Decoding {
  int x, bits;      // of a stream
  int64_t entries;  // of one codebook
  int64_t floats;   // of its table
};

// A table of E8P: |s| [256, 8], -1 or 1 for every bit of a byte [256, 8], the parity of every |s|, the shift.
constexpr int kE8PSigns = 256 * 8, kE8PParity = 2 * 256 * 8, kE8PShift = kE8PParity + 256;

inline Decoding decoding_of(const hf_vq_matrix& w) {
  if (w.scope == HF_VQ_E8P) return {8, 16, 257, kE8PShift + 1};
  const int64_t both = int64_t(1) << (w.bits + w.second_bits);  // entries of nested passes
  if (w.second_bits != 0) return {1, w.bits, both, both};
  if (w.scope == HF_VQ_SHARED && w.bits == 4 && w.in / w.x % 2 == 0) return {2 * w.x, 8, 16, 256 * 2 * w.x};
  return {w.x, w.bits, int64_t(1) << w.bits, int64_t(w.x) << w.bits};
}

// The table of a codebook fp16 [entries, x].
inline void make_book(const hf_vq_matrix& w, const Decoding& how, const uint16_t* halves, float* book) {
  if (w.scope == HF_VQ_E8P) {
    read_floats(halves, HF_VQ_FLOAT16, 0, 256 * 8, book);
    const float shift = half_to_float(halves[256 * 8]);
    for (int row = 0; row < 256; ++row) {
      float total = 0;
      for (int c = 0; c < 8; ++c) {
        total += book[row * 8 + c];
        book[kE8PSigns + row * 8 + c] = row >> c & 1 ? -1.0f : 1.0f;
      }
      const float sum_of_s = total / (4 * shift);  // at most 12 for a pattern
      book[kE8PParity + row] = sum_of_s > 0 && sum_of_s < 64 ? float(int(sum_of_s + 0.5f) & 1) : 0.0f;
    }
    book[kE8PShift] = shift;
  } else if (how.bits == w.bits) {
    read_floats(halves, HF_VQ_FLOAT16, 0, how.floats, book);
  } else {
    for (int pair = 0; pair < 256; ++pair)
      for (int c = 0; c < how.x; ++c)
        book[pair * how.x + c] = half_to_float(halves[(c < w.x ? pair & 15 : pair >> 4) * w.x + c % w.x]);
  }
}

template <int X, bool Add> inline void copy_entries(const float* table, int x, const uint16_t* code, int64_t n, float* w) {
  const int size = X ? X : x;
  for (int64_t i = 0; i < n; ++i, w += size) {
    const float* entry = table + code[i] * size;
    if constexpr (X > 0 && !Add) {
      memcpy(w, entry, X * 4);
    } else {
      for (int c = 0; c < size; ++c) w[c] = (Add ? w[c] : 0.0f) + entry[c];
    }
  }
}

// w[n, x] = entries of the codes, or += them.
template <bool Add> inline void find_entries(const float* table, int x, const uint16_t* code, int64_t n, float* w) {
  if (x == 1) return copy_entries<1, Add>(table, x, code, n, w);
  if (x == 2) return copy_entries<2, Add>(table, x, code, n, w);
  if (x == 4) return copy_entries<4, Add>(table, x, code, n, w);
  if (x == 8) return copy_entries<8, Add>(table, x, code, n, w);
  copy_entries<0, Add>(table, x, code, n, w);
}

// The same for E8P codes (hf_vq/formats/lattice.py draws the bits).
template <bool Add> inline void find_e8p(const float* table, const uint16_t* codes, int64_t n, float* w) {
  const float shift = table[kE8PShift];
  for (int64_t i = 0; i < n; ++i, w += 8) {
    const uint32_t code = codes[i], row = code & 255, signs = code >> 8 & 127;
    const uint32_t odd = (0x6996u >> ((signs ^ signs >> 4) & 15) & 1) ^ uint32_t(table[kE8PParity + row]);
    const float moved = code & 0x8000 ? -shift : shift;
    const float *size = table + row * 8, *sign = table + kE8PSigns + (signs | odd << 7) * 8;
    for (int c = 0; c < 8; ++c) w[c] = (Add ? w[c] : 0.0f) + (size[c] * sign[c] + moved);
  }
}

struct DecodeCall {
  const hf_vq_matrix* w;
  Decoding how;
  const float* tables;
  const uint64_t* words;  // the only table, an entry of two numbers a word; or null
  int64_t first;
  void* dense;
  int dtype, status;
};

// Row `row` of W into `to`; the codebooks of its tiles, or of the stages, are at `tables`.
inline void decode_row(const DecodeCall& call, int64_t row, const float* tables, float* to) {
  const hf_vq_matrix& w = *call.w;
  const Decoding& how = call.how;
  const bool tiles = w.scope == HF_VQ_TILE;
  const int64_t vectors = w.in / how.x, stream_bytes = divide_up(vectors * how.bits, 8);
  const int64_t tile = tiles ? w.tile_columns / how.x : vectors;
  uint16_t code[kUnpacked];
  for (int stage = 0; stage < w.stages; ++stage) {
    const uint8_t* stream = w.codes + (row * w.stages + stage) * stream_bytes;
    for (int64_t first = 0; first < vectors; first += kUnpacked) {
      const int64_t n = vectors - first < kUnpacked ? vectors - first : kUnpacked;
      unpack_codes(stream, how.bits, first, n, code);
      if (w.second_bits != 0) {
        uint16_t second[kUnpacked];
        unpack_codes(w.second + row * divide_up(w.in * w.second_bits, 8), w.second_bits, first, n, second);
        for (int64_t i = 0; i < n; ++i) code[i] = uint16_t(code[i] << w.second_bits | second[i]);
      }
      for (int64_t i = 0; i < n;) {  // up to the end of a tile
        const int64_t number = (first + i) / tile, left = (number + 1) * tile - first - i;
        const int64_t count = left < n - i ? left : n - i;
        const float* table = tables + (tiles ? number : stage) * how.floats;
        float* at = to + (first + i) * how.x;
        if (w.scope == HF_VQ_E8P)
          stage ? find_e8p<true>(table, code + i, count, at) : find_e8p<false>(table, code + i, count, at);
        else
          stage ? find_entries<true>(table, how.x, code + i, count, at)
                : find_entries<false>(table, how.x, code + i, count, at);
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

// True for 8-bit codes of one table of two numbers each.
inline bool made_of_words(const hf_vq_matrix& w, const Decoding& how) {
  return w.scope == HF_VQ_SHARED && w.stages == 1 && how.x == 2 && how.bits == 8 && w.group % kFloats == 0;
}

// Row `row` of W into `to`, its table in words.
inline void decode_words(const DecodeCall& call, int64_t row, float* to) {
  const hf_vq_matrix& w = *call.w;
  const int64_t groups = w.in / w.group;
  const uint8_t* code = w.codes + row * (w.in / 2);
  for (int64_t g = 0; g < groups; ++g) {
    const Floats scale = splat(half_to_float(w.scale[row * groups + g]));
    for (int64_t i = g * w.group; i < (g + 1) * w.group; i += kFloats)
      store(to + i, as_floats(load_words<256, 8>(call.words, code + i / 2)) * scale);
  }
}

inline void run_decode(int64_t begin, int64_t end, void* context) {
  DecodeCall& call = *static_cast<DecodeCall*>(context);
  const hf_vq_matrix& w = *call.w;
  const bool tiles = w.scope == HF_VQ_TILE, direct = call.dtype == HF_VQ_FLOAT32;
  const int64_t books = tiles ? divide_up(w.in, w.tile_columns) : 0;
  const Scratch<float> scratch{size_t(w.in)}, tables{size_t(books * call.how.floats)};
  if (!scratch || !tables) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  int64_t loaded = -1;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = call.first + i;
    if (tiles && row / w.tile_rows != loaded) {
      loaded = row / w.tile_rows;
      for (int64_t book = 0; book < books; ++book)
        make_book(w, call.how, w.codebook + (loaded * books + book) * call.how.entries * w.x,
                  tables.get() + book * call.how.floats);
    }
    float* to = direct ? static_cast<float*>(call.dense) + i * w.in : scratch.get();
    if (call.words != nullptr) decode_words(call, row, to);
    else decode_row(call, row, tiles ? tables.get() : call.tables, to);
    if (!direct) write_floats(call.dense, call.dtype, i * w.in, w.in, to);
  }
}

int decode(const hf_vq_matrix* w, int64_t first, int64_t rows, void* dense, int dtype) {
  if (!stored_as_said(*w) || dtype == HF_VQ_BOOL) return HF_VQ_UNSUPPORTED;
  DecodeCall call{w, decoding_of(*w), nullptr, nullptr, first, dense, dtype, HF_VQ_OK};
  const int stages = w->scope == HF_VQ_TILE ? 0 : w->stages;
  const bool in_words = made_of_words(*w, call.how);
  const Scratch<float> tables{size_t(stages * call.how.floats)};
  const Scratch<uint64_t> words{size_t(in_words ? 256 : 0)};
  if (!tables || !words) return HF_VQ_NO_MEMORY;
  for (int stage = 0; stage < stages && rows > 0; ++stage)
    make_book(*w, call.how, w->codebook + stage * call.how.entries * w->x, tables.get() + stage * call.how.floats);
  call.tables = tables.get();
  if (in_words) {
    memcpy(words.get(), tables.get(), 256 * 8);
    call.words = words.get();
  }
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
  hf_vq_matrix w = *call.w;
  const Scratch<float> u{size_t(w.in)}, sign{size_t(w.signs != nullptr ? w.in : 0)};
  if (!u || !sign) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  // Unpacked once for all rows: that takes longer than the rest of a row.
  const bool signs = w.signs != nullptr;
  if (signs)
    for (int64_t i = 0; i < w.in; ++i) sign[size_t(i)] = w.signs[i / 8] >> (i % 8) & 1 ? -1.0f : 1.0f;
  w.signs = nullptr;
  for (int64_t row = begin; row < end; ++row) {
    read_floats(call.x, call.dtype, row * w.in, w.in, u.get());
    if (signs)
      for (int64_t i = 0; i < w.in; ++i) u[size_t(i)] *= sign[size_t(i)];
    rotate_floats(w, u.get());
    write_floats(call.rotated, call.rotated_dtype, row * w.in, w.in, u.get());
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
