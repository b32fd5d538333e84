// SPDX-License-Identifier: Apache-2.0
// Codebooks as lookup tables in shared memory: eight weights of a row become four registers.
//
// VQ-LLM's codebook cache (section V) keeps hot entries in registers and shrinks the rest. This table grows instead:
// lanes that look up different entries of one bank conflict, so every entry is stored `replicas` times,
//
//     bank        0..3   4..7   ...  28..31
//     entry 0    [copy 0 copy 1  ..  copy 7]      16-byte entries: 8 copies, lane i reads copy i % 8
//     entry 1    [copy 0 copy 1  ..  copy 7]
//
// and no two lanes of a phase conflict. A nested residual shares one table with the first code, indexed by both.
// The tables of all codebooks are interleaved: Plan::interleaved times 128 bytes per index. With 256 bytes per index,
// one byte permutation turns a code into an address; else a shift and a LOP3 do. Three codebooks would waste a fourth
// place, so their tables are contiguous. `fused` adjacent short codes form one index (two 4-bit
// codes: 256 entries of two weights).
//
// Integer entries v of 7 bits are bytes, half as many to load. A byte u becomes a float as the mantissa below an
// exponent with step 1: 2^m + u, also in bfloat16, whose mantissa has 7 bits. Even codebooks store 63 + v, odd ones
// 63 - v, so that one subtraction adds the integers of two codebooks and cancels the exponents:
//
//     (2^m + 63 + v0) - (2^m + 63 - v1) = v0 + v1        exact
#pragma once
#include "plan.cuh"
#include "primitives/codes.cuh"
#include "primitives/mma.cuh"

// The second of two nested passes, of which `codebook` is the table for both; a base of `Arguments`.
template <bool Nested> struct SecondCodes {
  __device__ const char* second_codes() const { return nullptr; }
};
template <> struct SecondCodes<true> {
  const uint32_t* second;  // uint8 [rows, second_stream]
  __device__ const char* second_codes() const { return reinterpret_cast<const char*>(second); }
};

struct Table {
  static constexpr bool lattice = Plan::scope == Scope::E8P, integers = Plan::integers, nested = Plan::second_bits > 0;
  static constexpr int x = Plan::vector_size, width = x * Plan::fused;  // weights of an entry
  static constexpr int code_bits = Plan::entry_bits + Plan::second_bits;  // of both passes
  static constexpr int index_bits = lattice ? 8 : code_bits * Plan::fused;
  static constexpr int entries = 1 << index_bits;
  static constexpr int entry_bytes = lattice ? 8 : integers ? width : width == 1 ? 4 : width * 2;
  static constexpr int book_stride = entry_bytes * Plan::replicas;
  static constexpr int books = Plan::num_codebooks + (lattice ? 1 : 0);  // E8P: and the flips of signs
  // Tables are interleaved if their copies fill all banks and each has a place, else contiguous.
  static constexpr bool interleaved = book_stride >= 128 && Plan::interleaved >= books;
  static constexpr int entry_stride = book_stride * (interleaved ? Plan::interleaved : 1);
  static constexpr int book_bytes = interleaved ? book_stride : book_stride * entries;
  static constexpr int bytes = Plan::in_shared ? (interleaved ? entries * entry_stride : books * book_bytes) : 0;
  static constexpr int stored_numbers = lattice ? 257 * 8 : (1 << code_bits) * x;  // of a stage
  static constexpr uint32_t exponent = Plan::dtype == Dtype::FLOAT16 ? 0x64646464 : 0x43434343;  // 2^m, of a byte
  template <bool Nested, int Width> struct OfRow {
    using Kind = Codes<Plan::entry_bits * Plan::fused, Plan::unit / Width>;
  };
  template <int Width> struct OfRow<true, Width> {
    using Kind = NestedCodes<Plan::entry_bits, Plan::second_bits, Plan::unit / Width>;
  };
  using RowCodes = typename OfRow<nested, width>::Kind;

  // Bytes of the residual codes of a row.
  __device__ static int64_t second_stream(int columns) { return (int64_t(columns) * Plan::second_bits + 7) / 8; }

  // First address of dynamic shared memory and of the tables: as a constant it costs no instruction. In a cluster, the
  // highest byte of an address is the rank of the block, and `copy` contains it.
#if __CUDA_ARCH__ >= 900
  static constexpr uint32_t first = 1024;
#else
  static constexpr uint32_t first = 0;
#endif

  uint32_t copy;  // bytes from an entry to this lane's copy
  const uint16_t* stored;  // or int8
  float factor = 1.0f;           // of all weights
  uint32_t ratio[Plan::num_codebooks];  // E8P: of a stage to the first, twice

  __device__ Table(const uint16_t* codebook, char* shared, int lane)
      : copy(lane % Plan::replicas * entry_bytes), stored(codebook) {
    const uint32_t begin = __cvta_generic_to_shared(shared);
    if ((begin & 0xffffff) != first) __trap();
    copy |= begin & 0xff000000;
    if constexpr (lattice) {
      factor = half_to_float(stored[256 * 8]);
#pragma unroll
      for (int stage = 0; stage < Plan::num_codebooks; ++stage) {
        const float size = half_to_float(stored[stage * stored_numbers + 256 * 8]) / factor;
        ratio[stage] = pack_pair<Plan::dtype>(size, size);
      }
    }
  }

  static constexpr int count = books * entries;
  static constexpr int most = lattice ? 2 : entry_bytes < 8 ? 8 : 64 / entry_bytes;
  static constexpr int batch = (count + Plan::threads - 1) / Plan::threads < most
                                   ? (count + Plan::threads - 1) / Plan::threads
                                   : most;  // entries that a thread has in flight
  using Batch = uint32_t[batch][entry_bytes / 4];

  // All threads of the block; __syncthreads() is left to the caller.
  __device__ void fill() const {
    Batch first;
    begin_fill(first);
    end_fill(first);
  }

  // The first entries of a thread, and all the rest: what is done in between does not wait for the first.
  __device__ void begin_fill(Batch& first) const {
    if constexpr (Plan::in_shared) read(threadIdx.x, first);
  }

  __device__ void end_fill(Batch& some) const {
    if constexpr (Plan::in_shared) {
      write(threadIdx.x, some);
      for (int begin = threadIdx.x + batch * Plan::threads; begin < count; begin += batch * Plan::threads) {
        read(begin, some);
        write(begin, some);
      }
    }
  }

  // Weights 8 j .. 8 j + 7 of a lane's part of a row, before scaling, two per register.
  __device__ void eight(const RowCodes (&codes)[Plan::num_codebooks], int j, uint32_t (&weight)[4]) const {
    constexpr int together = integers ? 2 : 1;
#pragma unroll
    for (int stage = 0; stage < Plan::num_codebooks; stage += together) {
      uint32_t part[4];
      if constexpr (integers) {
        integer_eight(stage, codes, j, part);
      } else if constexpr (lattice) {
        lattice_eight(stage, codes[stage], j, part);
      } else if constexpr (width == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t low[1], high[1];
          look_up<4>(stage, codes[stage], 8 * j + 2 * i, 0, low);
          look_up<4>(stage, codes[stage], 8 * j + 2 * i + 1, 0, high);
          part[i] = __byte_perm(low[0], high[0], 0x5410);
        }
      } else {
        constexpr int each = width < 2 ? 2 : width < 8 ? width : 8;  // (compiled also for a width of 1)
#pragma unroll
        for (int i = 0; i < 8 / each; ++i) {
          uint32_t word[each / 2];
          look_up<each * 2>(stage, codes[stage], (8 * j + i * each) / width, (8 * j + i * each) % width * 2, word);
#pragma unroll
          for (int c = 0; c < each / 2; ++c) part[i * each / 2 + c] = word[c];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (stage == 0)
          weight[i] = part[i];
        else
          weight[i] = lattice ? multiply_add<Plan::dtype>(part[i], ratio[stage], weight[i])
                              : add_pair<Plan::dtype>(part[i], weight[i]);
      }
    }
  }

  // Two halves in the dtype of the products.
  __device__ static uint32_t pair(uint32_t halves) {
    if constexpr (Plan::dtype == Dtype::FLOAT16) return halves;
    float first, second;
    unpack_pair<Dtype::FLOAT16>(halves, first, second);
    return pack_pair<Plan::dtype>(first, second);
  }

 private:
  __device__ void read(int begin, Batch& one) const {
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int i = begin + k * Plan::threads, index = i % entries, book = i / entries;
      if (i >= count) break;
      if (lattice && book == Plan::num_codebooks)
        flips(index, one[k]);
      else
        entry(book, index, one[k]);
    }
  }

  // All copies of each; neighbours begin at different banks.
  __device__ void write(int begin, const Batch& one) const {
    constexpr int piece = entry_bytes > 16 ? entry_bytes : book_stride < 16 ? book_stride : 16;
    constexpr int pieces = book_stride / piece;
    char* const tables = static_cast<char*>(__cvta_shared_to_generic(first | (copy & 0xff000000)));
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      const int i = begin + k * Plan::threads, index = i % entries, book = i / entries;
      if (i >= count) break;
      uint32_t word[piece / 4];
#pragma unroll
      for (int c = 0; c < piece / 4; ++c) word[c] = one[k][c % (entry_bytes / 4)];
#pragma unroll
      for (int c = 0; c < pieces; ++c)
        store_words<piece>(tables + index * entry_stride + book * book_bytes + (c + index) % pieces * piece, word);
    }
  }

  // Entry `index` of the table: `fused` entries of the codebook, in the dtype of the products.
  __device__ void entry(int stage, int index, uint32_t (&word)[entry_bytes / 4]) const {
    const uint16_t* book = stored + stage * stored_numbers;
    if constexpr (lattice) {
      const float shift = half_to_float(__ldg(book + 256 * 8));
      int parity = 0;
      word[0] = word[1] = 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int size = __float2int_rn(half_to_float(__ldg(book + index * 8 + c)) / (2.0f * shift)) / 2;  // 0 .. 3
        parity ^= size & 1;
        word[c / 4] |= (9 + 2 * (size & 3)) * 2 << c % 4 * 8;
      }
      if (parity) word[1] ^= 0x1c000000;
    } else {
#pragma unroll
      for (int i = 0; i < Plan::fused; ++i) {
        const int code = index >> i * code_bits & ((1 << code_bits) - 1);
        if constexpr (integers) {
          load_words<x < 4 ? 4 : x>(integers_of(stage) + code * x, word + i * x / 4);
        } else if constexpr (x == 1) {
          const uint32_t half = __ldg(book + code);
          word[i / 2] = i % 2 ? word[i / 2] | half << 16 : half;
        } else {
          load_words<2 * x>(book + code * x, word + i * x / 2);
        }
      }
#pragma unroll
      for (int i = 0; i < entry_bytes / 4; ++i) word[i] = integers ? biased(stage, word[i]) : pair(word[i]);
    }
  }

  __device__ const char* integers_of(int stage) const {
    return reinterpret_cast<const char*>(stored) + stage * stored_numbers;
  }

  // Four integers v of -63 .. 63 as bytes 63 + v or 63 - v.
  __device__ static uint32_t biased(int stage, uint32_t four) {
    four &= 0x7f7f7f7f;
    return stage % 2 ? four ^ 0x3f3f3f3f : (four ^ 0x40404040) - 0x01010101;
  }

  // Sign flips that the upper byte of an E8P code applies to a pattern.
  __device__ static void flips(int signs, uint32_t (&word)[entry_bytes / 4]) {
    const uint32_t all = (signs & 127) | (__popc(signs & 127) & 1) << 7;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (c % 4 == 0) word[c / 4] = signs & 128 ? 0x02020202u : 0;
      word[c / 4] ^= (all >> c & 1 ? 0x1c : 0) << c % 4 * 8;
    }
  }

  // Address of this lane's copy of the entry whose index has its bits at `at`, in the first book.
  __device__ uint32_t address(const RowCodes& codes, int at) const {
    if constexpr (index_bits == 8 && entry_stride == 256) {  // a byte of the codes above the byte of the copy
      return by_byte(codes, at) + first;
    } else {
      return (codes.template field<index_bits, entry_stride>(at) | copy) + first;
    }
  }

  template <int Bits, int Count> __device__ uint32_t by_byte(const Codes<Bits, Count>& codes, int at) const {
    return __byte_perm(codes.word[at / 32], copy, 0x7504 | at % 32 / 8 << 4);
  }

  template <int First, int Second, int Count>  // 4 + 4 bits have whole bytes
  __device__ uint32_t by_byte(const NestedCodes<First, Second, Count>& codes, int at) const {
    return codes.template field<First + Second, entry_stride>(at) | copy;
  }

  template <int Count> __device__ uint32_t by_byte(const NestedCodes<4, 4, Count>& codes, int at) const {
    return __byte_perm(codes.bytes_of(at), copy, 0x7504 | at % 64 / 16 << 4);
  }

  // `Bytes` bytes from byte `part` of the entry of index `i`.
  template <int Bytes>
  __device__ void look_up(int stage, const RowCodes& codes, int i, int part, uint32_t (&word)[Bytes / 4]) const {
    if constexpr (Plan::in_shared) {
#if WITHOUT_LOOKUPS
      for (int c = 0; c < Bytes / 4; ++c) word[c] = address(codes, i * index_bits) + c;
#else
      load_shared<Bytes>(address(codes, i * index_bits) + stage * book_bytes + part, word);
#endif
    } else {
      const uint16_t* from = stored + stage * stored_numbers + codes[i] * width + part / 2;
      if constexpr (integers)
        load_words<Bytes>(integers_of(stage) + codes[i] * width + part, word);
      else if constexpr (width == 1)
        word[0] = __ldg(from);
      else
        load_words<Bytes>(from, word);
#pragma unroll
      for (int c = 0; c < Bytes / 4; ++c) word[c] = integers ? biased(stage, word[c]) : pair(word[c]);
    }
  }

  // Integers of two stages, or of the last one.
  __device__ void integer_eight(int stage, const RowCodes (&codes)[Plan::num_codebooks], int j, uint32_t (&weight)[4]) const {
    constexpr int each = width < 8 ? 4 : 8;
    constexpr uint32_t minus_one = Plan::dtype == Dtype::FLOAT16 ? 0xbc00bc00 : 0xbf80bf80;
#pragma unroll
    for (int i = 0; i < 8 / each; ++i) {
      const int at = 8 * j + i * each;
      uint32_t even[each / 4], odd[each / 4];
      look_up<each>(stage, codes[stage], at / width, at % width, even);
      if (stage + 1 < Plan::num_codebooks) look_up<each>(stage + 1, codes[stage + 1], at / width, at % width, odd);
#pragma unroll
      for (int c = 0; c < each / 2; ++c) {
        const uint32_t bytes = c % 2 ? 0x4342 : 0x4140, none = stage + 1 == Plan::num_codebooks;
        weight[i * each / 2 + c] = multiply_add<Plan::dtype>(
            __byte_perm(none ? 0x3f3f3f3f : odd[c / 2], exponent, bytes), minus_one,
            __byte_perm(even[c / 2], exponent, bytes));
      }
    }
  }

  // E8P (lattice.cuh draws the bits of a code): every coordinate is an odd multiple 2 u - 15 of the shift, -15 .. 15.
  // A sign flips the upper three bits of u, and the shift's sign is its last bit: one XOR for four of them, kept as
  // bytes 2 u, which become numbers as integers do: 2^m + 2 u.
  __device__ void lattice_eight(int stage, const RowCodes& codes, int j, uint32_t (&weight)[4]) const {
    constexpr uint32_t centre = Plan::dtype == Dtype::FLOAT16 ? 0xe40fe40f : 0xc30fc30f;
    uint32_t pattern[2], flip[2];
#if WITHOUT_LOOKUPS
    pattern[0] = pattern[1] = address(codes, 16 * j);
    flip[0] = flip[1] = address(codes, 16 * j + 8);
#else
    load_shared<8>(address(codes, 16 * j) + stage * book_bytes, pattern);
    load_shared<8>(address(codes, 16 * j + 8) + Plan::num_codebooks * book_bytes, flip);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weight[i] = add_pair<Plan::dtype>(
          __byte_perm(pattern[i / 2] ^ flip[i / 2], exponent, i % 2 ? 0x4342 : 0x4140), centre);
  }
};
