// SPDX-License-Identifier: Apache-2.0
// Linear layers of 4-bit weights and 8-bit inputs (hf_vq/formats/qoq.py draws the format).
//
//     x ~ size[m] numbers[m, :],  size = max |x| / 127                                       per token
//     y[m, n] = (scale[n] sum_k numbers[m, k] q[n, k] - zero[n] sum_k numbers[m, k]) size[m] + bias[n]
//     with groups    scale[n] sum_g (step[n, g] sum_k numbers q - zero[n, g] sum_k numbers) size[m] + bias[n]
//
// A vector of codes is 2 kBytes columns, the even ones in the low halves of its bytes; numbers are stored as a vector
// of even columns and a vector of odd columns.
//
//     few tokens     a 16-bit sum of up to eight products is multiplied by its step; zeros are subtracted once per
//                    group. Bytes: codes only. Bottleneck: memory.
//     many tokens    rows become 8-bit integers first, by a table of sixteen per group, and each is used for all
//                    tokens. Bottleneck: dot products.
//
// All integer sums are exact and the epilogue rounds like the reference (hf_vq/ops/w4a8.py): both variants are bitwise
// equal to it.
#pragma once
#include "../linear/activations.h"
#include "../primitives/scratch.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {
namespace w4a8 {

constexpr int64_t kVector = 2 * kBytes;      // columns of a vector of codes
constexpr int64_t kLongestRow = 1 << 16;     // 15 * 17 * 127 times this is less than 2^31
constexpr int64_t kSmallestGroup = 32;
constexpr int64_t kFewTokens = 8;
constexpr int kTokens = 4;                   // whose sums are in registers together
constexpr int kRows = kRegisters >= 32 ? 4 : 2;
constexpr int64_t kBlock = 64;               // tokens whose numbers stay in the L2 cache
constexpr int kWhole = 0, kOne = 1, kSome = 2;  // how a vector of codes gets its step: none, one, one for some lanes

struct Call {
  const hf_vq_w4a8* w;
  const uint8_t* numbers;  // [tokens, vectors, 2, kBytes]
  const int32_t* sums;     // [tokens, groups] of numbers
  const float* size;       // [tokens]
  int64_t tokens, vectors, groups, bytes;
  int shift;               // log2 of a group; column >> shift is its group
  const void* bias;
  int bias_dtype, dtype, status;
  void* y;
};

inline int64_t row_bytes(const Call& call) { return call.vectors * kVector; }

// Codes of vector v of a row; beyond the row's end there are zeros.
inline Bytes codes_at(const Call& call, const uint8_t* row, int64_t v) {
  const int64_t left = call.bytes - v * kBytes;
  if (left >= kBytes) return load_bytes(row + v * kBytes);
  uint8_t rest[kBytes] = {};
  memcpy(rest, row + v * kBytes, size_t(left));
  return load_bytes(rest);
}

// The steps of the groups of vector v, for each lane of its sums.
inline Ints steps_of(const Call& call, const uint8_t* step, int64_t v) {
  int32_t lane[kFloats];
  for (int i = 0; i < kFloats; ++i) {
    const int64_t column = v * kVector + 8 * i;
    lane[i] = column < call.w->in ? step[column >> call.shift] : 0;
  }
  return load_ints(lane);
}

inline void write(const Call& call, int64_t m, int64_t n, int64_t total) {
  const hf_vq_w4a8& w = *call.w;
  double value = double(half_to_float(w.scale[n])) * double(total);
  if (w.row_zero != nullptr) value -= double(w.row_zero[n]) * double(call.sums[m]);
  float y = float(value) * call.size[m];
  if (call.bias != nullptr) y += read_float(call.bias, call.bias_dtype, n);
  write_floats(call.y, call.dtype, m * w.out + n, 1, &y);
}

// Contribution of the zeros of row n to a token's sum.
inline int64_t zeros(const Call& call, int64_t m, int64_t n) {
  if (call.w->zero == nullptr) return 0;
  const uint8_t* zero = call.w->zero + n * call.groups;
  const int32_t* sums = call.sums + m * call.groups;
  int32_t total = 0;
  for (int64_t g = 0; g < call.groups; ++g) total += zero[g] * sums[g];
  return total;
}

// Row n times Tokens tokens from m on.
template <int Steps, int Tokens> inline void few(const Call& call, int64_t n, int64_t m) {
  const hf_vq_w4a8& w = *call.w;
  const uint8_t* row = w.codes + n * call.bytes;
  const uint8_t* step = w.step != nullptr ? w.step + n * call.groups : nullptr;
  const uint8_t* numbers = call.numbers + m * row_bytes(call);
  Ints total[Tokens];
  for (auto& each : total) each = zero_ints();
  for (int64_t v = 0; v < call.vectors; ++v) {
    const Bytes codes = codes_at(call, row, v), low = low_nibbles(codes), high = high_nibbles(codes);
    Ints factor = zero_ints();
    if constexpr (Steps == kOne) factor = splat_int(step[v * kVector >> call.shift]);
    if constexpr (Steps == kSome) factor = steps_of(call, step, v);
    for (int t = 0; t < Tokens; ++t) {
      const uint8_t* number = numbers + t * row_bytes(call) + v * kVector;
      const Ints start = Steps == kWhole ? total[t] : zero_ints();
      const Ints sum = dot_weights(dot_weights(start, low, load_bytes(number)), high, load_bytes(number + kBytes));
      total[t] = Steps == kWhole ? sum : add_product(total[t], sum, factor);
    }
  }
  for (int t = 0; t < Tokens; ++t) write(call, m + t, n, sum(total[t]) - zeros(call, m + t, n));
}

template <int Steps> void run_few(int64_t begin, int64_t end, void* context) {
  const Call& call = *static_cast<const Call*>(context);
  for (int64_t n = begin; n < end; ++n) {
    int64_t m = 0;
    for (; m + kTokens <= call.tokens; m += kTokens) few<Steps, kTokens>(call, n, m);
    for (; m < call.tokens; ++m) few<Steps, 1>(call, n, m);
  }
}

// Bytes of the group that begins at column `first`, in vector v.
inline Bytes within(const Call& call, int64_t v, int64_t first) {
  uint8_t mask[kBytes];
  for (int64_t i = 0; i < kBytes; ++i) {
    const int64_t column = v * kVector + 2 * i;
    mask[i] = column >= first && column < first + call.w->group ? 255 : 0;
  }
  return load_bytes(mask);
}

// Values of the sixteen codes in group g of row n, in the format of `dot`.
inline void table_of(const Call& call, int64_t n, int64_t g, uint8_t (&table)[16]) {
  const int step = call.w->step[n * call.groups + g], zero = call.w->zero[n * call.groups + g];
  for (int q = 0; q < 16; ++q) table[q] = uint8_t(q * step - zero + kLevelBias);
}

// Row n as integers of 8 bits, in the order of numbers; without groups its codes.
inline void expand(const Call& call, int64_t n, uint8_t* to) {
  const hf_vq_w4a8& w = *call.w;
  const uint8_t* row = w.codes + n * call.bytes;
  for (int64_t v = 0; v < call.vectors; ++v, to += kVector) {
    const Bytes codes = codes_at(call, row, v);
    Bytes low = low_nibbles(codes), high = high_nibbles(codes);
    if (w.step != nullptr) {
      const Bytes low_code = low_codes(codes), high_code = high_codes(codes);
      uint8_t table[16];
      low = high = splat_byte(0);
      const int64_t last = (v + 1) * kVector < w.in ? (v + 1) * kVector : w.in;
      for (int64_t g = v * kVector >> call.shift, first = g << call.shift; first < last; ++g, first += w.group) {
        table_of(call, n, g, table);
        const auto book = load_codebook<16, 1>(table);
        Bytes even[1], odd[1];
        lookup(book, low_code, even);
        lookup(book, high_code, odd);
        const Bytes here = w.group >= kVector ? splat_byte(255) : within(call, v, first);
        low = low | (even[0] & here);
        high = high | (odd[0] & here);
      }
    }
    store(to, low);
    store(to + kBytes, high);
  }
}

// Rows n.. of `rows` (some may be the last one again) times Tokens tokens from m on.
template <bool Grouped, int Tokens>
inline void many(const Call& call, const uint8_t* rows, int64_t n, int64_t m, int64_t last) {
  const uint8_t* numbers = call.numbers + m * row_bytes(call);
  Ints total[kRows][Tokens];
  for (auto& row : total)
    for (auto& each : row) each = zero_ints();
  for (int64_t at = 0; at < row_bytes(call); at += kBytes) {
    Bytes weight[kRows];
    for (int r = 0; r < kRows; ++r) weight[r] = load_bytes(rows + r * row_bytes(call) + at);
    for (int t = 0; t < Tokens; ++t) {
      const Bytes number = load_bytes(numbers + t * row_bytes(call) + at);
      for (int r = 0; r < kRows; ++r)
        total[r][t] = Grouped ? dot(total[r][t], weight[r], number) : dot_weights(total[r][t], weight[r], number);
    }
  }
  for (int t = 0; t < Tokens; ++t) {
    int64_t bias = 0;
    if (Grouped && kLevelBias > 0)
      for (int64_t g = 0; g < call.groups; ++g) bias += kLevelBias * call.sums[(m + t) * call.groups + g];
    for (int r = 0; r < kRows && n + r < last; ++r) write(call, m + t, n + r, sum(total[r][t]) - bias);
  }
}

template <bool Grouped> void run_many(int64_t begin, int64_t end, void* context) {
  Call& call = *static_cast<Call*>(context);
  const Scratch<uint8_t> rows{size_t(kRows * row_bytes(call))};
  if (!rows) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  const int64_t last = end * kRows < call.w->out ? end * kRows : call.w->out;
  for (int64_t block = 0; block < call.tokens; block += kBlock) {
    const int64_t after = block + kBlock < call.tokens ? block + kBlock : call.tokens;
    for (int64_t n = begin * kRows; n < last; n += kRows) {
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t row = n + r < last ? n + r : last - 1;
        expand(call, row, rows.get() + r * row_bytes(call));
      }
      int64_t m = block;
      for (; m + kTokens <= after; m += kTokens) many<Grouped, kTokens>(call, rows.get(), n, m, last);
      for (; m < after; ++m) many<Grouped, 1>(call, rows.get(), n, m, last);
    }
  }
}

// Token m: its size, its numbers as the kernels read them, and their sums. u: scratch of row_bytes floats; natural: of
// as many bytes.
inline void prepare(const Call& call, const void* x, int64_t m, float* u, uint8_t* natural, uint8_t* numbers,
                    int32_t* sums, float* size) {
  const hf_vq_w4a8& w = *call.w;
  const int64_t padded = row_bytes(call);
  read_floats(x, call.dtype, m * w.in, w.in, u);
  memset(u + w.in, 0, size_t(padded - w.in) * 4);
  const Floats none = splat(0.0f);
  Floats most = none, not_finite = none;
  for (int64_t i = 0; i < padded; i += kFloats) {
    const Floats a = load(u + i);
    most = max(most, max(a, none - a));
    not_finite = fma(a, none, not_finite);  // 0, or NaN
  }
  const float found = largest(most), magnitude = found > 1e-30f ? found : 1e-30f;
  const Floats inverse = splat(127.0f / magnitude);
  for (int64_t i = 0; i < padded; i += kFloats) store_low_bytes(natural + i, to_levels(load(u + i) * inverse));
  *size = magnitude * (1.0f / 127.0f) + sum(not_finite);
  for (int64_t g = 0; g < call.groups; ++g) {
    int32_t total = 0;
    for (int64_t i = g * w.group; i < (g + 1) * w.group; ++i) total += int8_t(natural[i]);
    sums[g] = total;
  }
  for (int64_t at = 0; at < padded; at += kVector) {
    const Bytes first = load_bytes(natural + at), second = load_bytes(natural + at + kBytes);
    store(numbers + at, even_bytes(first, second));
    store(numbers + at + kBytes, odd_bytes(first, second));
  }
}

inline bool fits(const hf_vq_w4a8& w) {
  const bool sizes = w.out > 0 && w.in > 0 && w.in <= kLongestRow && w.group > 0 && w.in % w.group == 0;
  return sizes && (w.group == w.in || (w.group >= kSmallestGroup && power_of_two(w.group)));
}

inline int compute(const hf_vq_w4a8& w, const void* x, int dtype, int64_t tokens, const void* bias, int bias_dtype,
                   void* y) {
  Call call{};
  call.w = &w;
  call.tokens = tokens;
  call.vectors = divide_up(w.in, kVector);
  call.groups = w.in / w.group;
  call.bytes = divide_up(w.in, 2);
  while (int64_t(1) << call.shift < w.group) ++call.shift;
  call.bias = bias;
  call.bias_dtype = bias_dtype;
  call.dtype = dtype;
  call.y = y;
  const int64_t padded = row_bytes(call);
  const Scratch<uint8_t> numbers{size_t(tokens * padded)}, natural{size_t(padded)};
  const Scratch<int32_t> sums{size_t(tokens * call.groups)};
  const Scratch<float> size{size_t(tokens)}, u{size_t(padded)};
  if (!numbers || !natural || !sums || !size || !u) return HF_VQ_NO_MEMORY;
  for (int64_t m = 0; m < tokens; ++m)
    prepare(call, x, m, u.get(), natural.get(), numbers.get() + m * padded, sums.get() + m * call.groups,
            size.get() + m);
  call.numbers = numbers.get();
  call.sums = sums.get();
  call.size = size.get();
  const int64_t grain = divide_up(64 << 10, w.in);
  if (tokens <= kFewTokens) {
    const bool some = w.group % kVector != 0;
    const Range run = w.step == nullptr ? run_few<kWhole> : some ? run_few<kSome> : run_few<kOne>;
    parallel_for(w.out, grain, run, &call);
  } else {
    parallel_for(divide_up(w.out, kRows), divide_up(grain, kRows), w.step != nullptr ? run_many<true> : run_many<false>,
                 &call);
  }
  return call.status;
}

}  // namespace w4a8

int w4a8_supports(const hf_vq_w4a8* w) { return w4a8::fits(*w) ? HF_VQ_OK : HF_VQ_UNSUPPORTED; }

int w4a8_linear(const hf_vq_w4a8* w, const void* x, int dtype, int64_t rows, const void* bias, int bias_dtype, void* y) {
  if (dtype > HF_VQ_BFLOAT16 || bias_dtype > HF_VQ_BFLOAT16 || !w4a8::fits(*w)) return HF_VQ_UNSUPPORTED;
  return w4a8::compute(*w, x, dtype, rows, bias, bias_dtype, y);
}

}  // namespace
}  // namespace hf_vq
