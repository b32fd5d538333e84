// SPDX-License-Identifier: Apache-2.0
// One decode step of a static KV cache (hf_vq/ops/kv_ops.py): append new tokens, encode those that leave the window.
//
// The kernel writes the new tokens to the ring buffer and the sinks, the codes of the tokens that leave the window, and
// the key mean, and the rotary mean, when the first token is encoded. It reads the length from device memory and advances it.
//
//     position   length - window ..           length ..
//                leave the window, coded      new: slot position % slots of the ring        slots >= window + new
//
// Blocks: one per row and head of the keys (learned codebooks: `across` * `shares` per head, for channel groups); then
// the same for values. Each block adds 1 to the upper half of the length after reading it; the last block to do so
// writes the new length.
#include "kv/append.cuh"
#include "kv/append_groups.cuh"
#include "kv/append_integers.cuh"
#include "primitives/pdl.cuh"

// Tensors of keys or of values, [batch, heads, .., dim]; all but `fresh` are contiguous.
struct Side {
  const char* fresh;         // the new tokens
  const uint16_t* codebook;  // fp16 [entries, x], or [heads, vectors, entries, x]; not read for integers
  char* ring;
  char* sinks;
  float* mean;
  const float* smoothing;  // by which rows less their mean are multiplied, or null
  uint8_t* codes;
  uint16_t* scale;             // and zero, of integers
  const uint32_t* lists;       // of the grid
  int64_t batch, head, token;  // bytes from one to the next of `fresh`
  float cells_per_unit;        // of the grid
  int unused;
};

struct Arguments {
  Side keys, values;
  const int64_t* start;        // [batch], or null: zeros
  unsigned long long* length;  // [1]
  uint8_t* frozen;             // [batch, heads], or null: the mean is given
  int heads, pairs, tokens;    // pairs: batch * heads
  int sinks, slots, window, capacity;
  int shares;                  // blocks that share the batch, of learned codebooks
};

template <typename S> struct Head {
  static constexpr int number = size_of<S::dtype>, row_bytes = S::dim * number;
  static_assert(S::dim <= Plan::threads, "a thread copies one number of a token");
  const Arguments& a;
  const Side& side;
  int pair, batch, start;
  const char* fresh;
  char* ring;

  __device__ Head(const Arguments& a, const Side& side, int pair) : a(a), side(side), pair(pair), batch(pair / a.heads) {
    fresh = side.fresh + batch * side.batch + pair % a.heads * side.head;
    ring = side.ring + int64_t(pair) * a.slots * row_bytes;
  }

  __device__ char* slot(int position) const { return ring + int64_t(uint32_t(position) % uint32_t(a.slots)) * row_bytes; }

  __device__ const float* mean() const { return S::centred ? side.mean + int64_t(pair) * S::dim : nullptr; }
  __device__ const float* smoothing() const { return side.smoothing ? side.smoothing + int64_t(pair) * S::dim : nullptr; }

  // m of the rotary mean, or null.
  __device__ float* turning() const {
    if constexpr (S::rotary) {
      const RotaryMean& mean = rotary_of<Arguments>(a);
      return const_cast<float*>(mean.mean) + batch * mean.row + pair % a.heads * mean.head;
    }
    return nullptr;
  }
  // Position that angles count, of the token at index `token`.
  __device__ int64_t position(int token) const {
    if constexpr (S::rotary) return rotary_of<Arguments>(a).start + token;
    return 0;
  }

  __device__ int64_t row(int position) const { return int64_t(pair) * a.capacity + position; }  // of the tape

  // Number `i` of new token `token`, in the stored dtype.
  __device__ uint32_t bits(int token, int i) const {
    const char* from = fresh + token * side.token + i * number;
    if constexpr (number == 4) return *reinterpret_cast<const uint32_t*>(from);
    else return *reinterpret_cast<const uint16_t*>(from);
  }

  __device__ void put(int position, int i, uint32_t bits) const {
    write(slot(position), i, bits);
    const int sink = position - start;
    if (sink >= 0 && sink < a.sinks) write(side.sinks + int64_t(pair * a.sinks + sink) * row_bytes, i, bits);
  }

  static __device__ void write(char* row, int i, uint32_t bits) {
    if constexpr (number == 4) reinterpret_cast<uint32_t*>(row)[i] = bits;
    else reinterpret_cast<uint16_t*>(row)[i] = uint16_t(bits);
  }

  // The mean of half a window from the first token after the sinks on.
  __device__ void freeze() const {
    const int first = start + a.sinks;
    const int count = max(a.window / 2, 1);
    if constexpr (S::rotary) {
      if (threadIdx.x < 32)
        measure_means<S::dim>(rotary_of<Arguments>(a), position(first), count, side.mean + int64_t(pair) * S::dim, turning(), [&](int token, int channel) {
                                float one[1];
                                load_floats<S::dtype>(slot(first + token) + channel * number, one);
                                return one[0];
                              });
    } else if (threadIdx.x < S::dim) {
      float sum = 0.0f;
#pragma unroll 4
      for (int i = 0; i < count; ++i) {
        float one[1];
        load_floats<S::dtype>(slot(first + i) + threadIdx.x * number, one);
        sum += fabsf(one[0]) <= largest_in_mean ? one[0] : 0.0f;  // only its token is lost, not the head
      }
      side.mean[int64_t(pair) * S::dim + threadIdx.x] = sum / count;
    }
    if (threadIdx.x == 0) a.frozen[pair] = 1;
    __syncthreads();
  }
};

// Bypass L1, which may hold an old value.
__device__ inline int length_of(const Arguments& a) {
  uint32_t low;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(low) : "l"(a.length) : "memory");
  return low;
}

// Count this block as done, after all of its threads have read the length; the last block writes the new length. The
// last warp does it, so that the other warps go on.
__device__ inline void leave(const Arguments& a, int length) {
  constexpr unsigned long long one = 1ull << 32;
  if (threadIdx.x == Plan::threads - 1 && atomicAdd(a.length, one) / one == gridDim.x - 1) *a.length = length + a.tokens;
}

// Block `number` of those of a side.
template <typename S>
__device__ inline void store_side(const Arguments& a, const Side& side, int number, uint32_t* shared) {
  constexpr int bytes = S::dim / S::vector_size * S::entry_bits / 8;  // of a row's codes
  // Numbers `begin` .. `end` of new tokens to their places; the length before them.
  const auto copy = [&](Head<S>& head, int begin, int end) {
    // All at once; then nothing is waited for but the token that leaves.
    const int i = begin + threadIdx.x;
    const uint32_t bits = i < end ? head.bits(0, i) : 0;
    head.start = a.start ? int(a.start[head.batch]) : 0;
    const bool frozen = S::centred && !S::learned && a.frozen ? a.frozen[head.pair] : true;
    const int length = length_of(a);
    if (i < end) {
      head.put(length, i, bits);
      for (int token = 1; token < a.tokens; ++token) head.put(length + token, i, head.bits(token, i));
    }
    const bool freezes = !frozen && length + a.tokens - a.window > head.start + a.sinks;
    if (freezes || a.window < a.tokens) __syncthreads();
    if constexpr (S::centred && !S::learned)
      if (freezes) head.freeze();
    return length;
  };
  if constexpr (S::learned) {
    using Mine = Groups<S>;
    const int block = number % Mine::across, share = number / Mine::across % a.shares;
    const int of_head = number / (Mine::across * a.shares);
    const Mine groups(side.codebook, of_head, block, shared);
    Turner<S::rotary, true, 32, Mine::unit * S::vector_size, 1> turner(rotary_or_null<S::rotary>(a), groups.first_channel(), shared);
    constexpr int numbers = Plan::threads / 32 * Mine::unit * S::vector_size;  // of a block
    wait_for_grids();
    let_next_grid_begin();
    int length = 0;
    for (int pair = share * a.heads + of_head; pair < a.pairs; pair += a.shares * a.heads) {
      Head<S> head(a, side, pair);
      length = copy(head, block * numbers, min((block + 1) * numbers, S::dim));
      const int first = length - a.window, last = min(first + a.tokens, a.capacity);
      for (int position = max(first, 0); groups.exists && position < last; ++position)
        groups.encode(head.slot(position), head.mean(),
                      [&] { return turner(head.turning(), head.position(position), 1, 0); }, side.codes + head.row(position) * bytes);
    }
    __syncthreads();
    leave(a, length);
  } else {
    const Encoder<S> search(side.codebook, side.lists, side.cells_per_unit, shared);
    Head<S> head(a, side, number);
    constexpr bool together = search.split > 1;  // all warps have the same rows
    constexpr int teams = 32 / S::lanes, at_a_time = teams * (together ? 1 : Plan::threads / 32);
    const int own = (together ? threadIdx.x % 32 : threadIdx.x) / S::lanes;  // row, of those of the block
    Turner<S::rotary, true, Plan::threads, S::dim, at_a_time> turner(rotary_or_null<S::rotary>(a), 0, shared + Encoder<S>::words);
    Row<S>::prefetch(head.mean(), head.smoothing(), head.turning());
    wait_for_grids();
    let_next_grid_begin();
    const int length = copy(head, 0, S::dim);
    const int first = length - a.window, last = min(first + a.tokens, a.capacity);
    int base = first;  // position of the block's first row
    Row<S> row;
    const auto load = [&] {
      const int position = base + own;
      const bool exists = position >= 0 && position < last;
      row.template load<S::dtype, true, S::centred>(
          head.slot(exists ? position : 0), head.mean(), [&] { return head.smoothing(); },
          [&] { return turner(head.turning(), head.position(base), min(last - base, at_a_time), own); }, exists);
    };
    load();
    search.prepare();
    if constexpr (S::integers && !S::rotary) __syncthreads();  // all have read the length, as barriers say else
    leave(a, length);
    while (base < last) {
      const int position = base + own;
      const int64_t at = head.row(position);
      if (base + own / teams * teams < last)  // any row of the warp
        search.encode(row, position >= 0 && position < last, side.codes + at * bytes, side.scale + at * Row<S>::numbers);
      if constexpr (together) __syncthreads();
      base += at_a_time;
      if (base < last) load();
    }
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) kv_step(const WithRotaryMean<Arguments, Plan::keys::rotary> a) {
  extern __shared__ uint4 shared[];
  uint32_t* words = reinterpret_cast<uint32_t*>(shared);
  const int blocks = Plan::keys::learned ? a.heads * a.shares * Groups<Plan::keys>::across : a.pairs;
  const int number = blockIdx.x;
  if (number < blocks) store_side<Plan::keys>(a, a.keys, number, words);
  else store_side<Plan::values>(a, a.values, number - blocks, words);
}
