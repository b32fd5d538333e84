// SPDX-License-Identifier: Apache-2.0
// Codebooks as tables in shared memory, made for one thing: eight weights of a row as four registers.
//
// VQ-LLM's codebook cache (section V) keeps hot entries in registers and shrinks the rest. Here the opposite pays:
// lanes that look up different entries of one bank wait for each other, so every entry is stored `replicas` times,
//
//     bank        0..3   4..7   ...  28..31
//     entry 0    [copy 0 copy 1  ..  copy 7]      16-byte entries: 8 copies, lane i reads copy i % 8
//     entry 1    [copy 0 copy 1  ..  copy 7]
//
// and no two lanes of a phase meet. The books of all stages lie interleaved, Plan::interleaved times 128 bytes for each
// index; with 256 bytes, one byte permutation makes an address of a code, else a shift and a LOP3 do. `fused` short
// codes that lie side by side are one index (two 4-bit codes: 256 entries of two weights).
#pragma once
#include "codes.cuh"
#include "mma.cuh"
#include "plan.cuh"

struct Table {
  static constexpr bool lattice = Plan::scope == Scope::E8P;
  static constexpr int x = Plan::vector_size, width = x * Plan::fused;  // weights of an entry
  static constexpr int index_bits = lattice ? 8 : Plan::entry_bits * Plan::fused;
  static constexpr int entries = 1 << index_bits;
  static constexpr int entry_bytes = lattice ? 8 : width == 1 ? 4 : width * 2;
  static constexpr int book_stride = entry_bytes * Plan::replicas;
  static constexpr int books = Plan::stages + (lattice ? 1 : 0);  // E8P: and the flips of signs
  // Books lie interleaved if their copies fill all banks, else one after the other.
  static constexpr bool interleaved = book_stride >= 128;
  static constexpr int entry_stride = book_stride * (interleaved ? Plan::interleaved : 1);
  static constexpr int book_bytes = interleaved ? book_stride : book_stride * entries;
  static constexpr int bytes = Plan::in_shared ? (interleaved ? entries * entry_stride : books * book_bytes) : 0;
  static constexpr int stored_halves = lattice ? 257 * 8 : (1 << Plan::entry_bits) * x;  // of a stage
  using RowCodes = Codes<Plan::entry_bits * Plan::fused, Plan::unit / width>;

  // Where dynamic shared memory begins, and the tables with it: a constant costs nothing in an address.
#if __CUDA_ARCH__ >= 900
  static constexpr uint32_t first = 1024;
#else
  static constexpr uint32_t first = 0;
#endif

  uint32_t copy;  // bytes from an entry to this lane's copy
  const uint16_t* stored;
  float factor = 1.0f;           // of all weights
  uint32_t ratio[Plan::stages];  // E8P: of a stage to the first, twice

  __device__ Table(const uint16_t* codebook, char* shared, int lane)
      : copy(lane % Plan::replicas * entry_bytes), stored(codebook) {
    if (uint32_t(__cvta_generic_to_shared(shared)) != first) __trap();
    if constexpr (lattice) {
      factor = half_to_float(stored[256 * 8]);
#pragma unroll
      for (int stage = 0; stage < Plan::stages; ++stage) {
        const float size = half_to_float(stored[stage * stored_halves + 256 * 8]) / factor;
        ratio[stage] = pack_pair<Plan::dtype>(size, size);
      }
    }
  }

  // All threads of the block; __syncthreads() is left to the caller. A thread writes all copies of an entry, neighbours
  // begin at different banks.
  __device__ void fill() const {
    if constexpr (Plan::in_shared) {
      constexpr int piece = entry_bytes > 16 ? entry_bytes : book_stride < 16 ? book_stride : 16;
      constexpr int pieces = book_stride / piece;
      char* const tables = static_cast<char*>(__cvta_shared_to_generic(first));
#pragma unroll 2
      for (int i = threadIdx.x; i < books * entries; i += Plan::threads) {
        const int index = i % entries, book = i / entries;
        uint32_t one[entry_bytes / 4], word[piece / 4];
        if (lattice && book == Plan::stages)
          flips(index, one);
        else
          entry(book, index, one);
#pragma unroll
        for (int c = 0; c < piece / 4; ++c) word[c] = one[c % (entry_bytes / 4)];
#pragma unroll
        for (int c = 0; c < pieces; ++c)
          store_words<piece>(tables + index * entry_stride + book * book_bytes + (c + index) % pieces * piece, word);
      }
    }
  }

  // Weights 8 j .. 8 j + 7 of what a lane has of a row, before scales, two to a register.
  __device__ void eight(const RowCodes (&codes)[Plan::stages], int j, uint32_t (&weight)[4]) const {
#pragma unroll
    for (int stage = 0; stage < Plan::stages; ++stage) {
      uint32_t part[4];
      if constexpr (lattice) {
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

 private:
  // Entry `index` as it is in the table: `fused` entries of the codebook, in the dtype of the products.
  __device__ void entry(int stage, int index, uint32_t (&word)[entry_bytes / 4]) const {
    const uint16_t* book = stored + stage * stored_halves;
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
      float value[entry_bytes / 2] = {};
#pragma unroll
      for (int i = 0; i < Plan::fused; ++i)
#pragma unroll
        for (int c = 0; c < x; ++c) {
          const int code = index >> i * Plan::entry_bits & ((1 << Plan::entry_bits) - 1);
          value[i * x + c] = half_to_float(__ldg(book + code * x + c));
        }
#pragma unroll
      for (int i = 0; i < entry_bytes / 4; ++i) word[i] = pack_pair<Plan::dtype>(value[2 * i], value[2 * i + 1]);
    }
  }

  // What the upper byte of an E8P code does to a pattern.
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
      return __byte_perm(codes.word[at / 32], copy, 0x5504 | at % 32 / 8 << 4) + first;
    } else {
      return (codes.template field<index_bits, entry_stride>(at) | copy) + first;
    }
  }

  // `Bytes` bytes from byte `part` of the entry of index `i`.
  template <int Bytes>
  __device__ void look_up(int stage, const RowCodes& codes, int i, int part, uint32_t (&word)[Bytes / 4]) const {
    if constexpr (Plan::in_shared) {
      load_shared<Bytes>(address(codes, i * index_bits) + stage * book_bytes + part, word);
    } else {
      const uint16_t* from = stored + stage * stored_halves + codes[i] * width + part / 2;
      uint32_t half[Bytes / 4];
      if constexpr (width == 1)
        half[0] = __ldg(from);
      else
        load_words<Bytes>(from, half);
#pragma unroll
      for (int c = 0; c < Bytes / 4; ++c) {
        word[c] = half[c];
        if constexpr (Plan::dtype == Dtype::BFLOAT16) {
          float first, second;
          unpack_pair<Dtype::FLOAT16>(half[c], first, second);
          word[c] = pack_pair<Dtype::BFLOAT16>(first, second);
        }
      }
    }
  }

  // E8P (lattice.cuh draws the bits of a code): every coordinate is an odd multiple 2 u - 15 of the shift, -15 .. 15.
  // A sign flips the upper three bits of u, and the shift's sign is its last bit: one XOR for four of them, kept as
  // bytes 2 u. A byte becomes a number below an exponent that makes a step of the mantissa 1: 2^m + 2 u.
  __device__ void lattice_eight(int stage, const RowCodes& codes, int j, uint32_t (&weight)[4]) const {
    constexpr bool half = Plan::dtype == Dtype::FLOAT16;
    constexpr uint32_t exponent = half ? 0x64646464 : 0x43434343, centre = half ? 0xe40fe40f : 0xc30fc30f;
    uint32_t pattern[2], flip[2];
    load_shared<8>(address(codes, 16 * j) + stage * book_bytes, pattern);
    load_shared<8>(address(codes, 16 * j + 8) + Plan::stages * book_bytes, flip);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      weight[i] = add_pair<Plan::dtype>(
          __byte_perm(pattern[i / 2] ^ flip[i / 2], exponent, i % 2 ? 0x4342 : 0x4140), centre);
  }
};
