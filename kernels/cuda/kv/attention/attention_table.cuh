// SPDX-License-Identifier: Apache-2.0
// Codebooks of keys and values as lookup tables in shared memory; looked-up entries are fragments of mma.cuh.
//
// One universal codebook (`UniversalTable`): like table.cuh, every entry is replicated for each group of banks, so that
// lanes with different entries never conflict,
//
//     index i    [copy 0 copy 1 .. copy 31]     4-byte entries (two numbers); 8-byte entries: 16 copies
//
// and with 256 bytes per index one byte permutation turns a code into an address. Keys and values with the same codebook
// share a table; two different tables with byte-wide indices are interleaved, 128 bytes each.
//
// Interface of a table:
//
//     offset, bytes                   its first byte in shared memory, and its size
//     together<Part>()                indices of one lookup step of a lane; divides its indices of the part
//     Table(codebook, head, lane)     view of this lane; `codebook` in stored layout, for all heads
//     fill(shared, thread, threads)   by the first `threads` threads; the caller calls __syncthreads()
//     look_up<Part>(codes, i, entry)  entries of indices i .. i + together - 1 of the lane's share of a token (i is a
//                                     constant once loops are unrolled): `words` registers each, two fp16 a register
//
// A lookup never reads outside of the table, whatever bytes the codes have.
#pragma once
#include "kv/attention/attention_kv_fragments.cuh"

// First address of dynamic shared memory: as a constant it costs no instruction.
#if __CUDA_ARCH__ >= 900
constexpr uint32_t shared_begin = 1024;
#else
constexpr uint32_t shared_begin = 0;
#endif

template <class Side> struct UniversalTable;
template <class Side> struct LearnedTable;  // attention_learned.cuh
template <class Side> struct IntegerTable;  // attention_integers.cuh
template <bool Learned, bool Integers, class Side> struct TableFor { using Type = UniversalTable<Side>; };
template <class Side> struct TableFor<true, false, Side> { using Type = LearnedTable<Side>; };
template <class Side> struct TableFor<false, true, Side> { using Type = IntegerTable<Side>; };
template <class Side> using TableOf = typename TableFor<Side::learned, Side::integers, Side>::Type;

// Offset of a table that does not overlap the table of the keys.
template <class Side, class First = Keys> constexpr int after_keys = TableOf<First>::bytes;
template <> constexpr int after_keys<Keys> = 0;

template <class Side> struct UniversalTable {
  static constexpr bool of_values = Side::sharers == 8;
  static constexpr int words = Index<Side>::words, entries = 1 << Index<Side>::bits;
  static constexpr int entry_bytes = 4 * words, replicas = 128 / entry_bytes;
  static constexpr bool by_bytes = Index<Side>::bits == 8;
  static constexpr int stride = by_bytes ? 256 : 128;
  static constexpr bool keys_too = of_values && !Keys::learned && !Keys::integers;  // have such a table
  static constexpr bool same = keys_too && Plan::one_codebook;
  static constexpr bool next_to_keys = keys_too && !same && by_bytes && Index<Keys>::bits == 8;
  static constexpr int offset = next_to_keys ? 128 : same ? 0 : after_keys<Side>;
  static constexpr int bytes = same || next_to_keys ? 0 : entries * stride;
  static constexpr int stored_entries = 1 << Side::entry_bits;

  uint32_t copy;  // bytes from an entry to this lane's copy
  const uint16_t* stored;

  __device__ UniversalTable(const uint16_t* codebook, int, int lane)
      : copy(lane % replicas * entry_bytes), stored(codebook) {}

  template <int Part> static constexpr int together() { return at_most(2 / words, Share<Side, Part>::indexes); }

  // A thread writes all copies of an entry; neighbours begin at different banks.
  __device__ void fill(char* shared, int thread, int threads) const {
    if constexpr (!same)
      for (int index = thread; index < entries; index += threads) {
        uint32_t entry[words], word[4];
#pragma unroll
        for (int i = 0; i < Side::fused; ++i) {
          const int code = index >> i * Side::entry_bits & (stored_entries - 1);
          if constexpr (Side::x == 1) {
            const uint32_t half = __ldg(stored + code);
            entry[i / 2] = i % 2 ? entry[i / 2] | half << 16 : half;
          } else {
            load_words<2 * Side::x>(stored + code * Side::x, entry + i * Side::x / 2);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) word[i] = entry[i % words];
#pragma unroll
        for (int i = 0; i < 8; ++i) store_words<16>(shared + offset + index * stride + (i + index) % 8 * 16, word);
      }
  }

  template <int Part, class RowCodes>
  __device__ void look_up(const RowCodes& codes, int i, uint32_t (&entry)[together<Part>() * words]) const {
#pragma unroll
    for (int k = 0; k < together<Part>(); ++k)
      load_shared<entry_bytes>(address(codes, (i + k) * Index<Side>::bits) + shared_begin + offset, entry + k * words);
  }

 private:
  // From the beginning of the table to this lane's copy of the entry whose index has its bits at `at`.
  template <class RowCodes> __device__ uint32_t address(const RowCodes& codes, int at) const {
    if constexpr (by_bytes)  // a byte of the codes above the byte of the copy
      return __byte_perm(codes.word[at / 32], copy, 0x7504 | at % 32 / 8 << 4);
    else
      return codes.template field<Index<Side>::bits, stride>(at) | copy;
  }
};
