// SPDX-License-Identifier: Apache-2.0
// Codes of keys or values to dense rows, still rotated:
//
//     out[b, h, t, :] = scale[b, h, t] * (concat_j( codebook[ code[b, h, t, j] ] ) - zero[b, h, t]) + mean[b, h, :]
//
// Tile of a block: Plan::tokens tokens of one head and Plan::slice of its channels; the entries of these channels are
// in shared memory. A thread decodes 8 channels of a token per iteration (16-bit floats: one store of 16 bytes);
// adjacent threads have adjacent channels. A thread has codes of Plan::pipeline_depth tokens in flight.
//
// Bytes: the output once, codes and scales once, entries once per block (from L2).
// Bottleneck: writing the output. Attention reads it next, so the caller decodes only what fits into L2.
#include "plan.cuh"
#include "primitives/numbers.cuh"

struct Arguments {
  const uint8_t* codes;      // [B, H, tokens, bytes of a token], at the first token
  const uint16_t* codebook;  // fp16 [entries, x], or of each head and group [H, dim / x, entries, x]
  const uint16_t* scale;     // fp16 [B, H, tokens], or with zeros [B, H, tokens, 2], at the first; if there are any
  const float* mean;         // [B, H, dim], rotated too, or null
  char* out;                 // [B, H, tokens, dim] of Plan::out
  int64_t codes_row;         // bytes from one row of the batch to the next
  int64_t codes_head;        // and from one head
  int64_t scale_row;         // numbers
  int64_t scale_head;
  int heads;
  int tokens;
};

constexpr int x = Plan::vector_size, dim = Plan::dim, unit = 8;
constexpr int unit_bytes = Plan::entry_bits / x;  // of its codes: 8 / x codes
constexpr int units = Plan::slice / unit, slices = dim / Plan::slice;
constexpr int entries = 1 << Plan::entry_bits, groups = Plan::learned ? Plan::slice / x : 1;
constexpr int table_bytes = groups * entries * x * 2;
constexpr int at_a_time = Plan::threads / units;  // tokens
static_assert(Plan::entry_bits % x == 0 && unit % x == 0 && Plan::slice % unit == 0 && dim % Plan::slice == 0, "whole bytes");

// Codes of 8 channels, from bytes that begin at a multiple of nothing.
struct Unit {
  uint32_t word[unit_bytes > 4 ? 2 : 1];

  __device__ void load(const uint8_t* from) {
    if constexpr ((unit_bytes & (unit_bytes - 1)) == 0) {  // and so is the size of a token
      if constexpr (unit_bytes == 1)
        word[0] = __ldg(from);
      else
        load_words<unit_bytes>(from, word);
    } else {
#pragma unroll
      for (int i = 0; i < unit_bytes; ++i) {
        const uint32_t byte = uint32_t(__ldg(from + i)) << i % 4 * 8;
        word[i / 4] = i % 4 ? word[i / 4] | byte : byte;
      }
    }
  }

  __device__ uint32_t operator[](int i) const {
    constexpr int bits = Plan::entry_bits;
    const int at = i * bits / 32, shift = i * bits % 32;
    uint32_t code = word[at] >> shift;
    if (shift + bits > 32) code |= word[at + 1] << (32 - shift);
    return code & (entries - 1);
  }
};

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) dequantize_kv(const Arguments a) {
  extern __shared__ __align__(16) char table[];
  const int tiles = (a.tokens + Plan::tokens - 1) / Plan::tokens;
  const int slice = blockIdx.x / tiles % slices, head_of_row = blockIdx.x / (tiles * slices);
  const int row = head_of_row / a.heads, head = head_of_row % a.heads;

  const int64_t book = Plan::learned ? (int64_t(head) * (dim / x) + slice * groups) * entries * x : 0;
  constexpr int piece = table_bytes % 16 == 0 ? 16 : 4;
  for (int at = threadIdx.x * piece; at < table_bytes; at += Plan::threads * piece) {
    uint32_t word[piece / 4];
    load_words<piece>(reinterpret_cast<const char*>(a.codebook + book) + at, word);
    store_words<piece>(table + at, word);
  }
  __syncthreads();

  const int own = threadIdx.x % units;
  const int channel = slice * Plan::slice + own * unit;
  const uint8_t* codes = a.codes + row * a.codes_row + head * a.codes_head + channel / unit * unit_bytes;
  const uint16_t* scale = a.scale + row * a.scale_row + head * a.scale_head;
  char* out = a.out + (int64_t(head_of_row) * a.tokens * dim + channel) * size_of<Plan::out>;
  const int first = blockIdx.x % tiles * Plan::tokens, end = min(first + Plan::tokens, a.tokens);
  if (threadIdx.x >= at_a_time * units) return;
  float mean[unit] = {};
  if (a.mean) load_floats<Dtype::FLOAT32>(a.mean + int64_t(head_of_row) * dim + channel, mean);
  for (int token = first + threadIdx.x / units; token < end; token += at_a_time * Plan::pipeline_depth) {
    Unit next[Plan::pipeline_depth];
    uint32_t factor[Plan::pipeline_depth];
#pragma unroll
    for (int step = 0; step < Plan::pipeline_depth; ++step) {
      const int t = min(token + step * at_a_time, end - 1);
      next[step].load(codes + int64_t(t) * (dim / unit * unit_bytes));
      if constexpr (Plan::zero) factor[step] = __ldg(reinterpret_cast<const uint32_t*>(scale) + t);
      else if constexpr (Plan::scaled) factor[step] = __ldg(scale + t);
    }
#pragma unroll
    for (int step = 0; step < Plan::pipeline_depth; ++step) {
      const int t = token + step * at_a_time;
      float value[unit];
#pragma unroll
      for (int i = 0; i < unit / x; ++i) {
        const int group = Plan::learned ? own * (unit / x) + i : 0;
        float entry[x];
        load_floats<Dtype::FLOAT16>(table + (group * entries + next[step][i]) * (2 * x), entry);
#pragma unroll
        for (int c = 0; c < x; ++c) {
          if constexpr (Plan::zero) entry[c] = __fsub_rn(entry[c], half_to_float(factor[step] >> 16));
          const float scaled = Plan::scaled ? __fmul_rn(entry[c], half_to_float(factor[step])) : entry[c];
          value[i * x + c] = in_range<Plan::out>(scaled + mean[i * x + c]);
        }
      }
      if (t < end) store_floats<Plan::out>(out + int64_t(t) * dim * size_of<Plan::out>, value);
    }
  }
}
