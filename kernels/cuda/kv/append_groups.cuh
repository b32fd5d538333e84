// SPDX-License-Identifier: Apache-2.0
// Encoding with one codebook per channel group: code_i = argmax_e 2 <e, x_i> - |e|^2.
//
// A warp owns `unit` adjacent groups of a head, whose codes are whole bytes:
//
//     few tokens     entries in registers, spread over lanes; the lanes search one vector together
//     many tokens    entries in shared memory; every lane searches its own tokens
#pragma once
#include "kv/append.cuh"

template <typename S> struct Groups {
  static constexpr int x = S::vector_size, bits = S::entry_bits, vectors = S::dim / x, entries = 1 << bits;
  static constexpr int unit = S::width, units = vectors / unit;
  static constexpr int row_bytes = vectors * bits / 8, unit_bytes = unit * bits / 8;
  static constexpr int across = (units + Plan::threads / 32 - 1) / (Plan::threads / 32);  // blocks for a head
  static constexpr int slots = 4, tokens = 32 * slots;  // of a lane and of a warp per iteration, if there are many
  static constexpr int number = size_of<S::dtype>;      // bytes of one
  using Book = Table<x, bits>;
  static_assert(unit * bits % 8 == 0 && vectors % unit == 0, "codes of a unit are whole bytes");

  int mine;  // unit of this warp
  bool exists;
  Spread<x, bits> spread[S::few ? unit : 1];
  float* tables;

  // Unit `block` * warps + warp of a head.
  __device__ Groups(const uint16_t* codebook, int head, int block, uint32_t* shared) {
    mine = block * (Plan::threads / 32) + threadIdx.x / 32, exists = mine < units;
    if (!exists) return;
    const uint16_t* books = codebook + (int64_t(head) * vectors + mine * unit) * entries * x;
    if constexpr (S::few) {
#pragma unroll
      for (int i = 0; i < unit; ++i) spread[i].load(books + i * entries * x);
    } else {
      tables = reinterpret_cast<float*>(shared) + threadIdx.x / 32 * unit * Book::floats;
#pragma unroll 1
      for (int i = 0; i < unit; ++i)
        typename Book::template Part<32>(books + i * entries * x, threadIdx.x % 32).put(tables + i * Book::floats);
      __syncwarp();
    }
  }

  __device__ int first_channel() const { return mine * unit * x; }

  // One token: its row, the head's mean, what gives R_n m, its codes.
  template <class Turn>
  __device__ void encode(const char* row, const float* mean, const Turn& turn, uint8_t* codes) const {
    float w[unit][x];
#pragma unroll
    for (int i = 0; i < unit; ++i) load(row, mean, i, w[i]);
    const auto turned = turn();
    unsigned long long word = 0;
#pragma unroll
    for (int i = 0; i < unit; ++i) {
      finish(turned, i, w[i]);
      word |= static_cast<unsigned long long>(spread[i].nearest(w[i])) << i * bits;
    }
    if (threadIdx.x % 32 == 0) store(word, codes);
  }

  // `tokens` tokens from `base` on, of `count` of a head. `turned(i)`: the rotary mean of token i.
  template <class Turns>
  __device__ void encode_many(const char* rows, int64_t stride, const float* mean, const Turns& turned, uint8_t* codes,
                              int base, int count) const {
    const int first = base + threadIdx.x % 32;
    unsigned long long word[slots] = {};
#pragma unroll 1
    for (int i = 0; i < unit; ++i) {
      float w[slots][x] = {}, best[slots];
      int code[slots];
#pragma unroll
      for (int slot = 0; slot < slots; ++slot)
        if (first + slot * 32 < count) {
          load(rows + (first + slot * 32) * stride, mean, i, w[slot]);
          finish(turned(first + slot * 32), i, w[slot]);
        }
      const Book book = {tables + i * Book::floats};
      book.search(w, 0, Book::fours, best, code);
      book.pick(w, best, code);
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) word[slot] |= static_cast<unsigned long long>(code[slot]) << i * bits;
    }
#pragma unroll
    for (int slot = 0; slot < slots; ++slot)
      if (first + slot * 32 < count) store(word[slot], codes + int64_t(first + slot * 32) * row_bytes);
  }

 private:
  // x - mean of the vector of group `i` of the unit.
  __device__ void load(const char* row, const float* mean, int i, float (&w)[x]) const {
    const int first = first_channel() + i * x;
    if constexpr (S::aligned) {
      load_floats<S::dtype>(row + first * number, w);
    } else {
#pragma unroll
      for (int c = 0; c < x; ++c) {
        float one[1];
        load_floats<S::dtype>(row + (first + c) * number, one);
        w[c] = one[0];
      }
    }
#pragma unroll
    for (int c = 0; c < x; ++c) w[c] = __fsub_rn(w[c], S::centred ? mean[first + c] : 0.0f);
  }

  // 2 (x - mean - R_n m) of it.
  template <class Turned> __device__ void finish(const Turned& turned, int i, float (&w)[x]) const {
    typename Turned::template Part<x> turning(turned, first_channel() + i * x);
    turning.load();
#pragma unroll
    for (int c = 0; c < x; ++c) {
      if constexpr (Turned::some) w[c] = __fsub_rn(w[c], turning(c));
      w[c] *= 2.0f;
    }
  }

  __device__ void store(unsigned long long word, uint8_t* codes) const {
#pragma unroll
    for (int i = 0; i < unit_bytes; ++i) codes[mine * unit_bytes + i] = uint8_t(word >> 8 * i);
  }
};
