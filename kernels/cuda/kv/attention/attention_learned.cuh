// SPDX-License-Identifier: Apache-2.0
// Lookup tables of codebooks learned per KV head and channel group, in shared memory. Every entry is stored once:
//
//     index i    [group 0  group 1 ..  128 bytes of groups]  [128 more]      256 bytes from one index to the next
//
// The group alone selects the bank, and the lane selects the group (attention_swizzle.cuh): 32 lanes with lookups of 4
// bytes, or 16 lanes with 8 bytes, touch every bank once. One byte permutation of index and lane offset is an address.
//
// In global memory the table is [H][panels][entries][128 bytes]; each panel of 128 bytes has the layout of shared memory
// (hf_vq/backends/cuda/kv/codebooks.py orders the groups), and cp.async copies it without passing registers.
#pragma once
#include "kv/attention/attention_swizzle.cuh"
#include "kv/attention/attention_table.cuh"

// Panels of keys or of values. Values come first; keys begin next to their last panel if there is room.
template <class Side> constexpr int panels_of = Side::learned ? (2 * Side::dim + 127) / 128 : 0;
template <class Side> constexpr int learned_offset() {
  if constexpr (Side::sharers == 8 && !Keys::learned) return after_keys<Side>;
  else return 0;
}

template <class Side> struct LearnedTable {
  static constexpr bool of_values = Side::sharers == 8;
  static constexpr int words = Index<Side>::words, entry_bytes = 4 * words;
  static constexpr int entries = 1 << Index<Side>::bits, stride = 256, panel = 128;
  static_assert(Index<Side>::bits == 8, "an index is a byte of an address");
  static constexpr int panels = panels_of<Side>, first_panel = of_values ? 0 : panels_of<Values>;
  static constexpr int offset = learned_offset<Side>();
  static constexpr int bytes = ((first_panel + panels + 1) / 2 - (first_panel + 1) / 2) * entries * stride;

  template <int Part> static constexpr int together() { return swizzle_size<Side, Part>; }

  __device__ LearnedTable(const uint16_t* codebook, int head, int lane)
      : stored(reinterpret_cast<const char*>(codebook) + int64_t(head) * panels * entries * panel),
        g(of_values ? lane % 4 * 2 : lane / 4), near(g, lane), far(g, lane) {}

  // By `threads` threads, a multiple of 32, of which this is number `thread`; eight copy a row of a panel. Waiting for
  // the copies is left to the caller, too.
  __device__ void fill(char* shared, int thread, int threads) const {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + thread % 8 * 16;
    const char* const from = stored + thread % 8 * 16;
#pragma unroll
    for (int p = 0; p < panels; ++p)
#pragma unroll 4
      for (int index = thread / 8; index < entries; index += threads / 8)
        copy_piece<16>(to + place(p) + index * stride, from + (p * entries + index) * panel);
  }

  template <int Part, class RowCodes>
  __device__ void look_up(const RowCodes& codes, int i, uint32_t (&entry)[together<Part>() * words]) const {
    constexpr int c = together<Part>();
    const Order<Part>& order = part<Part>();
    uint32_t word[(c + 3) / 4];
#pragma unroll
    for (int k = 0; k < c; k += 4) {
      const uint32_t codes_of = codes.word[i / 4], more = c == 8 ? codes.word[i / 4 + 1] : 0;
      word[k / 4] = __byte_perm(c < 4 ? codes_of >> i % 4 * 8 : codes_of, more, order.select[k / 4]);
    }
    const int row = Order<Part>::begin + i * Side::sharers * entry_bytes;
#pragma unroll
    for (int k = 0; k < c; ++k)
      load_shared<entry_bytes>(order.address(word[k / 4], k) + shared_begin + place(row / panel) + row % panel,
                               entry + k * words);
    // Undo the bits of the order that no column accounts for.
#pragma unroll
    for (int b = 1; b < c; b *= 2) {
      const int bit = of_values ? 2 * b : b;  // of g
      if (SwizzleColumns::known & bit) continue;
#pragma unroll
      for (int k = 0; k < c * words; ++k) {
        if (k / words & b) continue;
        const uint32_t one = entry[k], other = entry[k + b * words];
        entry[k] = g & bit ? other : one, entry[k + b * words] = g & bit ? one : other;
      }
    }
  }

 private:
  // The order in which a lane takes the groups of a part.
  template <int Part> struct Order {
    using S = Share<Side, Part>;
    static constexpr int c = together<Part>(), begin = S::first / Index<Side>::width * entry_bytes;
    static constexpr bool narrow = Side::sharers * c * entry_bytes <= panel;
    uint32_t select[(c + 3) / 4] = {}, low[narrow ? (c + 3) / 4 : (c + 1) / 2] = {};

    __device__ Order(int g, int lane) {
#pragma unroll
      for (int k = 0; k < c; ++k) {
        const int group = k ^ swizzle_order_of<Side, Part>(g), byte = (S::owner(lane) * c + group) * entry_bytes;
        select[k / 4] |= group << k % 4 * 4;
        low[narrow ? k / 4 : k / 2] |= byte << (narrow ? k % 4 : k % 2) * 8;
      }
    }

    // Second byte: code k of `word`. First byte: this lane's. Where `low` has four of these and no zero for the upper
    // half, the sign of one, which is below 128, fills it.
    __device__ uint32_t address(uint32_t word, int k) const {
      const uint32_t sign = 12 + k % 4;
      const uint32_t bytes = k % 4 << 4 | (narrow ? sign << 12 | sign << 8 | (4 + k % 4) : 0x7600 | (4 + k % 2));
      uint32_t address;
      asm("prmt.b32 %0, %1, %2, %3;" : "=r"(address) : "r"(word), "r"(low[narrow ? k / 4 : k / 2]), "r"(bytes));
      return address;
    }
  };

  // Offset of a panel.
  __device__ static constexpr int place(int number) {
    const int at = first_panel + number;
    return offset + at / 2 * entries * stride + at % 2 * panel;
  }

  template <int Part> __device__ const Order<Part>& part() const {
    if constexpr (Part) return far;
    else return near;
  }

  const char* stored;
  int g;  // a token of the tile whose order is this lane's
  Order<0> near;
  Order<1> far;
};
