// SPDX-License-Identifier: Apache-2.0
// Pipelined loads of codes and scales: from the cache to a warp's buffers in shared memory, `Plan::pipeline_depth` of them.
//
// A buffer holds one step: `Plan::step_tiles` tiles of 16 tokens, which a warp processes in one iteration.
//
//     Plan::bulk    bulk copies of keys, both halves of values, and scales; a barrier per buffer counts the bytes that
//                   arrived. One lane issues those of a whole step, from uniform registers; of a step that is cut off
//                   at the last token, a lane each
//     else          every lane copies its own codes with cp.async, in pieces of 32 contiguous lanes (before sm_90)
//
// The assignment of tokens to fragment rows is free. This one avoids bank conflicts between lanes of one phase that read
// codes in cache order; the values from the middle of the step on are shifted a little:
//
//     keys, rows g, g + 8        lanes 4g .. 4g + 3 have a row, and rows of neighbours differ in the parity of the token
//     values, k = 2t + j         tokens 2j, 2j + 1 of the first half for t = 0, 1, of the second half for t = 2, 3
//
// In a paged cache, a step is within one page, which the page table names; all else is the same.
#pragma once
#include "kv/attention/attention_softmax.cuh"
#include "primitives/wgmma.cuh"

constexpr int tokens_of_step = 16 * Plan::step_tiles;
static_assert(Plan::page % tokens_of_step == 0, "a step lies in one page");

// Pieces of 16 bytes, in bytes: that hold so many; of rows, wherever they begin.
constexpr int whole_pieces(int bytes) { return (bytes + 15) / 16 * 16; }
constexpr int pieces_of_rows(int rows, int row) { return whole_pieces(rows * row) + (row % 16 ? 16 : 0); }

struct Step {
  static constexpr int key_row = Index<Keys>::row_bytes, value_row = Index<Values>::row_bytes;
  static constexpr int half = tokens_of_step / 2;  // tokens
  // Whether all that is copied begins at multiples of 16 bytes, as pages do.
  static constexpr bool in_pages = Plan::page > 0 && Plan::bulk && half * value_row % 16 == 0;
  // From the first half of the values to the second.
  static constexpr int apart = pieces_of_rows(half, value_row), aside = value_row == 32 ? 64 : 32;
  static constexpr int stride = apart + (aside + 128 - apart % 128) % 128;
  static constexpr int key_bytes = TokenCodes<Keys>::bytes, value_bytes = TokenCodes<Values>::bytes;
  static constexpr int numbers = at_least(at_least(Keys::numbers, Values::numbers), 1);  // of a token, at most
  static constexpr int scale_words = numbers == 1 ? tokens_of_step / 2 + 1 : tokens_of_step;  // wherever they begin
  static constexpr int scale_room = Plan::bulk ? 2 * numbers * tokens_of_step + 16 : 4 * scale_words;

  // Bulk copies: keys, two halves of values, scales of keys, scales of values.
  static constexpr int copies = 3 + !Keys::learned + !Values::learned;
  static constexpr int values_at = Plan::bulk ? pieces_of_rows(tokens_of_step, key_row) : Plan::step_tiles * 2 * key_bytes;
  static constexpr int scales_at = values_at + (Plan::bulk ? stride + apart : Plan::step_tiles * 4 * value_bytes);
  static constexpr int barrier_at = whole_pieces(scales_at + 2 * scale_room), bytes = barrier_at + 16 * Plan::bulk;
  static constexpr int ring_bytes = Plan::pipeline_depth * bytes + (Plan::page ? 48 : 32) * Plan::bulk;  // of a warp

  // Token of the key in row `g` or g + 8 of a tile, and of the value at k = 2t + j (j > 1: 2t + 6 + j).
  __device__ static int of_row(int g, int upper, int tile) { return of_value(g / 2, g % 2 + 2 * upper, tile); }
  __device__ static int of_value(int t, int j, int tile) { return t / 2 * half + 8 * tile + 2 * j + ((t + j) & 1); }

  struct CacheRows {
    const char *keys, *values;  // of the first token
    const uint16_t *key_scale, *value_scale;
    int end;  // of the tokens that may be read
    const int* pages;  // of the row
    int64_t page_bytes;    // from one to the next

    __device__ CacheRows(const Arguments& a, int row, int kv_head) {
      const Coded &k = a.keys, &v = a.values;
      if constexpr (Plan::page > 0) pages = a.pages + int64_t(row) * a.table, page_bytes = k.row, row = 0;
      keys = k.codes + row * k.row + kv_head * k.head + k.first * key_row;
      values = v.codes + row * v.row + kv_head * v.head + v.first * value_row;
      key_scale = k.scale + row * k.scale_row + kv_head * k.scale_head + k.first * Keys::numbers;
      value_scale = v.scale + row * v.scale_row + kv_head * v.scale_head + v.first * Values::numbers;
    }

    // Byte offset of the page of a token, and the token's place in it.
    __device__ int64_t page(int at) const {
      if constexpr (Plan::page > 0) return __ldg(pages + at / at_least(Plan::page, 1)) * page_bytes;
      else return 0;
    }
    __device__ static int place(int at) {
      if constexpr (Plan::page > 0) return at % at_least(Plan::page, 1);
      else return at;
    }

    // Token `at`, or the last one, of the first page.
    __device__ const char* key(int at) const { return keys + int64_t(place(min(at, end - 1))) * key_row; }
    __device__ const char* value(int at) const { return values + int64_t(place(min(at, end - 1))) * value_row; }
  };

  // A bulk copy in each step, number `i`: `most` rows of `row` bytes, from row number `begin` on, to offset `to` of a buffer.
  struct BulkCopy {
    int row, begin, most, to;

    // Number of its tape: codes of keys and of values, their scales.
    __device__ static int tape_of(int i) { return i < 2 ? i : i == 2 ? 1 : i - 1 + (i == 3 && Keys::learned); }

    __device__ explicit BulkCopy(int i) {
      const bool of_value = i == 1 || i == 2, of_key_scale = i == 3 && !Keys::learned;
      row = i == 0 ? key_row : of_value ? value_row : 2 * (of_key_scale ? Keys::numbers : Values::numbers);
      begin = i == 2 ? half : 0, most = of_value ? half : tokens_of_step;
      to = i == 0 ? 0 : of_value ? values_at + begin / half * stride : scales_at + (of_key_scale ? 0 : scale_room);
    }
  };

  // What a bulk copy of token 0 reads: it begins `before` bytes earlier, at a multiple of 16 bytes.
  struct Origin {
    const char* from;
    uint32_t before;

    __device__ Origin(const uint32_t* tape, const BulkCopy& copy) {
      from = reinterpret_cast<const char*>(uint64_t(tape[1]) << 32 | tape[0]) + copy.begin * copy.row;
      before = in_pages ? 0 : uint32_t(reinterpret_cast<uint64_t>(from)) & 15, from -= before;
    }
    // Bytes beyond the last readable token are in the same 16 bytes as that token.
    __device__ int size(const BulkCopy& copy, int count) const {
      return count > 0 ? whole_pieces(int(before) + count * copy.row) : 0;
    }
  };

  // The buffers of a warp, before the first copy. Behind them are the addresses of its tapes, so that no registers hold
  // these: codes of keys and of values, their scales; with pages, the row's table of them and the bytes of one.
  __device__ static void begin(const CacheRows& rows, uint32_t ring, int lane) {
    if constexpr (Plan::bulk) {
      if (lane == 0) {
        const auto keep = [&](const void* first, const void* second, int at) {
          const uint64_t one = reinterpret_cast<uint64_t>(first), other = reinterpret_cast<uint64_t>(second);
          asm volatile("st.shared.v2.u64 [%0], {%1, %2};" ::"r"(ring + Plan::pipeline_depth * bytes + at), "l"(one), "l"(other)
                       : "memory");
        };
        keep(rows.keys, rows.values, 0), keep(rows.key_scale, rows.value_scale, 16);
        if constexpr (Plan::page > 0) keep(rows.pages, reinterpret_cast<const void*>(rows.page_bytes), 32);
#pragma unroll
        for (int i = 0; i < Plan::pipeline_depth; ++i) barrier_init(ring + i * bytes + barrier_at, 1);
        barriers_are_set();
      }
      __syncwarp();
    }
  }

  // After the last step of a warp, before its slots hold anything else.
  __device__ static void end(uint32_t ring, int lane) {
    if constexpr (Plan::bulk) {
      __syncwarp();  // no lane waits any more
      if (lane < Plan::pipeline_depth) barrier_invalidate(ring + lane * bytes + barrier_at);
    }
  }

  // L2 prefetch of the tokens from `first` on. It is safe while earlier kernels still write: L2 stays coherent.
  __device__ static void prefetch(uint32_t ring, int first, int end, int lane) {
    if constexpr (Plan::bulk) {
      if (lane < copies) {
        const BulkCopy copy(lane);
        uint32_t tape[2];
        load_shared<8>(ring + Plan::pipeline_depth * bytes + 8 * BulkCopy::tape_of(lane), tape);
        const Origin origin(tape, copy);
        const int size = origin.size(copy, min(end - first - copy.begin, copy.most));
        if (size > 0) prefetch_bulk(origin.from + int64_t(first) * copy.row, size);
      }
    }
  }

  // The tokens from `first` on, to a buffer of `ring`.
  __device__ static void copy(const CacheRows& from, int first, uint32_t ring, uint32_t to, int lane) {
    if constexpr (Plan::bulk) {
      const uint32_t kept = ring + Plan::pipeline_depth * bytes;
      int64_t page = 0;
      if constexpr (Plan::page > 0) {
        uint32_t word[4];
        load_shared<16>(kept + 32, word);
        const int* const pages = reinterpret_cast<const int*>(uint64_t(word[1]) << 32 | word[0]);
        page = __ldg(pages + first / at_least(Plan::page, 1)) * int64_t(uint64_t(word[3]) << 32 | word[2]);
      }
      const int place = from.place(first), count = from.end - first;
      if (count >= tokens_of_step) {
        if (one_lane()) {
          int all = 0;
          uint32_t tape[8];
          load_shared<16>(kept, reinterpret_cast<uint32_t(&)[4]>(tape[0]));
          if constexpr (copies > 3) load_shared<16>(kept + 16, reinterpret_cast<uint32_t(&)[4]>(tape[4]));
#pragma unroll
          for (int i = 0; i < copies; ++i) {
            const BulkCopy copy(i);
            const Origin origin(tape + 2 * BulkCopy::tape_of(i), copy);
            const int size = origin.size(copy, copy.most);
            all += size;
            copy_bulk(to + copy.to, origin.from + page + int64_t(place) * copy.row, size, to + barrier_at);
          }
          barrier_expect(to + barrier_at, all);
        }
      } else {
        int size = 0;
        if (lane < copies) {
          const BulkCopy copy(lane);
          uint32_t tape[2];
          load_shared<8>(kept + 8 * BulkCopy::tape_of(lane), tape);
          const Origin origin(tape, copy);
          size = origin.size(copy, min(count - copy.begin, copy.most));
          if (size > 0) copy_bulk(to + copy.to, origin.from + page + int64_t(place) * copy.row, size, to + barrier_at);
        }
        size = __reduce_add_sync(0xffffffff, size);
        if (lane == 0) barrier_expect(to + barrier_at, size);
      }
    } else {
      const int64_t page = from.page(first);
#pragma unroll
      for (int i = 0; i < 2 * Plan::step_tiles; ++i)
        TokenCodes<Keys>::copy(to + i * key_bytes, from.key(first + of_row(lane / 4, i % 2, i / 2)) + page, lane);
#pragma unroll
      for (int i = 0; i < 4 * Plan::step_tiles; ++i)
        TokenCodes<Values>::copy(to + values_at + i * value_bytes,
                                 from.value(first + of_value(lane % 4, i % 4, i / 4)) + page, lane);
      // Words that hold scales, with at least one that may be read.
      const auto scales = [&](const uint16_t* scale, int each, uint32_t slot) {
        const int64_t at = reinterpret_cast<int64_t>(scale + from.place(first) * each) + page, word = at & ~int64_t(3);
        const int odd = at & 2 ? 1 : 0, needed = (min(tokens_of_step, from.end - first) * each + odd + 1) / 2;
        if (lane < scale_words) {
          const bool read = lane < needed;
          copy_async(slot + lane * 4, reinterpret_cast<const char*>(word) + (read ? lane * 4 : 0), read ? 4 : 0);
        }
      };
      if constexpr (!Keys::learned) scales(from.key_scale, Keys::numbers, to + scales_at);
      if constexpr (!Values::learned) scales(from.value_scale, Values::numbers, to + scales_at + scale_room);
    }
  }

  __device__ static void commit() {
    if constexpr (!Plan::bulk) commit_copies();
  }

  // Wait until the next buffer is full, after this step's `commit`. `turn`: parity of the rounds over all buffers.
  __device__ static void wait(uint32_t slot, uint32_t turn) {
    if constexpr (Plan::bulk) barrier_wait(slot + barrier_at, turn);
    else wait_for_copies<Plan::pipeline_depth - 1>();
  }

  // Load the codes of a buffer.
  __device__ static void load(TokenCodes<Keys> (&keys)[Plan::step_tiles][2], const CacheRows& from, int first, uint32_t slot,
                              int lane) {
#pragma unroll
    for (int i = 0; i < 2 * Plan::step_tiles; ++i) {
      TokenCodes<Keys>& one = keys[i / 2][i % 2];
      const int token = of_row(lane / 4, i % 2, i / 2);
      if constexpr (Plan::bulk) one.load_row(slot + odd<key_row>(from.keys) + token * key_row, lane);
      else one.load(slot + i * key_bytes, from.key(first + token), lane);
    }
  }
  __device__ static void load(TokenCodes<Values> (&values)[Plan::step_tiles][4], const CacheRows& from, int first,
                              uint32_t slot, int lane) {
#pragma unroll
    for (int i = 0; i < 4 * Plan::step_tiles; ++i) {
      TokenCodes<Values>& one = values[i / 4][i % 4];
      const int token = of_value(lane % 4, i % 4, i / 4), later = lane % 4 / 2;
      if constexpr (Plan::bulk)
        one.load_row(slot + values_at + later * (stride - half * value_row) +
                         odd<value_row>(from.values + later * half * value_row) + token * value_row, lane);
      else
        one.load(slot + values_at + i * value_bytes, from.value(first + token), lane);
    }
  }

  // Scale and zero of token `i` of a step.
  struct Numbers {
    float scale, zero;
  };
  __device__ static Numbers key_numbers(const CacheRows& from, uint32_t slot, int i) {
    return numbers_of<Keys>(from.key_scale, slot + scales_at, i);
  }
  __device__ static Numbers value_numbers(const CacheRows& from, uint32_t slot, int i) {
    return numbers_of<Values>(from.value_scale, slot + scales_at + scale_room, i);
  }

 private:
  // Bytes before a row, in the first piece of 16 bytes that was copied. Steps are whole pieces.
  template <int Row> __device__ static uint32_t odd(const void* row) {
    return Row % 16 && !in_pages ? uint32_t(reinterpret_cast<int64_t>(row)) & 15 : 0;
  }

  template <class Side> __device__ static Numbers numbers_of(const uint16_t* tape, uint32_t slot, int i) {
    const uint32_t before = in_pages ? 0 : uint32_t(reinterpret_cast<int64_t>(tape)) & (Plan::bulk ? 15 : 2);
    if constexpr (Side::integers) {
      uint32_t both[1];
      Numbers found;
      load_shared<4>(slot + before + 4 * i, both);
      unpack_pair<Dtype::FLOAT16>(both[0], found.scale, found.zero);
      return found;
    } else {
      uint16_t number;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(number) : "r"(slot + before + 2 * i));
      return {half_to_float(number), 0.0f};
    }
  }
};
