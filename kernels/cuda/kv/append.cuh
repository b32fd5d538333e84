// SPDX-License-Identifier: Apache-2.0
// Encoding of one row of keys or values, the head_dim numbers of one token and head (hf_vq/ops/reference/codes.py):
//
//     r = (x - mean - R_n m) H      s = |r| / sqrt(dim)      code_i = argmax_e 2 <e, r_i / s> - |e|^2      scale = |r|^2 / <r, q>
//
// A scale is at most 65504. Rows of huge numbers are first multiplied by a power of two, so that the sum of their
// squares is finite; this changes no code.
//
// `lanes` threads of a warp share a row. A thread has `width` adjacent vectors, then `width` more every `lanes` * `width`:
//
//     vector of slot j = (j / width * lanes + lane) * width + j % width      2 lanes, width 2:  0 0 1 1  0 0 1 1 ..
//
// Rotations are then butterflies in registers or by shuffles, and the codes of `width` vectors are whole bytes.
//
// The codes of a token do not depend on the number of tokens in the call: sums follow the bits of a vector's number,
// lowest first, whichever lanes hold the vectors, and all searches return the same entry.
#pragma once
#include "kv/append_nearest.cuh"
#include "kv/append_rotary.cuh"

constexpr float huge = 144115188075855872.0f;            // 2^57
constexpr float grow = 4722366482869645213696.0f;         // 2^72
constexpr float shrink = 1.0f / grow;

// The lesser and the greater of two numbers; NaN if one is.
__device__ inline float lesser(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
__device__ inline float greater(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}

constexpr int largest_power(int number) { return number & -number; }

// A lane's part of a row, for codes of a side S: its vector_size, entry_bits, dim, block (of the rotation), lanes, width.
template <typename S> struct Row {
  static constexpr int x = S::vector_size, dim = S::dim, vectors = dim / x;
  static constexpr int lanes = S::lanes, width = S::width;
  static constexpr int uppers = (vectors + lanes * width - 1) / (lanes * width), slots = uppers * width;
  static constexpr int bytes = vectors * S::entry_bits / 8;  // of a row's codes
  static constexpr int numbers = 1 + S::integers;            // fp16 numbers next to the codes
  static_assert(vectors % width == 0 && width * S::entry_bits % 8 == 0, "a lane's codes are whole bytes");
  float value[slots][x];
  int lane;

  __device__ int first(int upper) const { return (upper * lanes + lane) * width; }  // vector

  __device__ bool has(int upper) const { return vectors == lanes * slots || first(upper) < vectors; }

  // (x - mean - R_n m) times `smoothing()` unless that is null; a row that does not exist is zero. `aligned`: for the
  // widest loads. `turn()` gives R_n m: all lanes call it, once their other numbers are on their way.
  template <Dtype D, bool aligned, bool centred, class Smoothing, class Turn>
  __device__ void load(const char* row, const float* mean, const Smoothing& smoothing, const Turn& turn, bool exists) {
    using Turned = decltype(turn());
    static_assert(!Turned::some || !S::few || S::learned || uppers == 1, "few tokens call `turn` once");
    lane = threadIdx.x % lanes;
#pragma unroll
    for (int upper = 0; upper < uppers; ++upper) {
      constexpr int count = width * x;
      const int at = first(upper) * x;
      float part[count] = {}, centre[count] = {}, factor[count];
      const bool here = exists && has(upper);
      const float* const factors = centred ? smoothing() : nullptr;
      if (here) {
        if constexpr (aligned) {
          load_floats<D>(row + at * size_of<D>, part);
        } else {
#pragma unroll
          for (int i = 0; i < count; ++i) {
            float one[1];
            load_floats<D>(row + (at + i) * size_of<D>, one);
            part[i] = one[0];
          }
        }
        if constexpr (centred) load_floats<Dtype::FLOAT32>(mean + at, centre);
        if (factors) load_floats<Dtype::FLOAT32>(factors + at, factor);
      }
      typename Turned::template Part<count> turning(turn(), at);
      if (here) turning.load();
#pragma unroll
      for (int i = 0; i < count; ++i) {
        float& number = value[upper * width + i / x][i % x];
        number = __fsub_rn(part[i], centre[i]);
        if constexpr (Turned::some)
          if (here) number = __fsub_rn(number, turning(i));
        if (factors && here) number = __fmul_rn(number, factor[i]);
      }
    }
  }

  // L2 prefetch of what `load` reads besides the token, by a thread each for 32 bytes.
  __device__ static void prefetch(const float* mean, const float* smoothing, const float* m) {
    const int at = 8 * threadIdx.x;
    if (at >= dim) return;
    if (mean) prefetch_line(mean + at);
    if (mean && smoothing) prefetch_line(smoothing + at);
    if (m) prefetch_line(m + at);
  }

  // A row of huge numbers becomes smaller. Returns what 1 is then. All lanes of a warp.
  __device__ float bring_in_range() {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < slots * x; ++i) most = fmaxf(most, fabsf(value[i / x][i % x]));
    if (!__any_sync(0xffffffffu, most >= huge)) return 1.0f;
#pragma unroll
    for (int half = 1; half < lanes; half *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, half));
    if (most < huge) return 1.0f;
#pragma unroll
    for (int i = 0; i < slots * x; ++i) value[i / x][i % x] *= shrink;
    return grow;
  }

  // Times the root of the block's size.
  __device__ void rotate() {
    if constexpr (S::block > 1) {
      constexpr int own = width * x < S::block ? width * x : S::block;
#pragma unroll
      for (int half = 1; half < own; half *= 2)
#pragma unroll
        for (int i = 0; i < slots * x; ++i)
          if (!(i & half)) butterfly(i, i + half);
#pragma unroll
      for (int half = 1; half < lanes && half * width * x < S::block; half *= 2) {
        const float sign = lane & half ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < slots * x; ++i) {
          float& mine = value[i / x][i % x];
          mine = fmaf(sign, mine, __shfl_xor_sync(0xffffffffu, mine, half));
        }
      }
#pragma unroll
      for (int half = width * x; half * lanes < S::block; half *= 2)
#pragma unroll
        for (int i = 0; i < slots * x; ++i)
          if (!(i & half)) butterfly(i, i + half);
    }
  }

  // Sum over the row of what each vector gives.
  __device__ float sum(float (&part)[slots]) const {
#pragma unroll
    for (int half = 1; half < width; half *= 2)
#pragma unroll
      for (int i = 0; i < slots; i += 2 * half) part[i] += part[i + half];
#pragma unroll
    for (int half = 1; half < lanes; half *= 2)
#pragma unroll
      for (int i = 0; i < slots; i += width) part[i] += __shfl_xor_sync(0xffffffffu, part[i], half);
#pragma unroll
    for (int half = width; half < slots; half *= 2)
#pragma unroll
      for (int i = 0; i + half < slots; i += 2 * half) part[i] += part[i + half];
    return part[0];
  }

  __device__ float energy() const {
    float part[slots];
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) part[slot] = norm_of(value[slot]);
    return sum(part);
  }

  // Normalise a rotated row to a mean square of 1 and double it: w = 2 v of its vectors. Returns 2 / s.
  __device__ float normalise(float energy) {
    const float square = energy * (1.0f / dim);
    float factor;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(factor) : "f"(square));
    factor = 2.0f * fminf(factor, 1e30f);  // zeros
#pragma unroll
    for (int i = 0; i < slots * x; ++i)
      value[i / x][i % x] = __fmul_rn(value[i / x][i % x], __fmul_rn(factor, inverse_root(S::block)));
    return factor;
  }

  __device__ float along(int slot, const float (&entry)[x]) const {
    float sum = __fmul_rn(value[slot][0], entry[0]);
#pragma unroll
    for (int c = 1; c < x; ++c) sum = fmaf(value[slot][c], entry[c], sum);
    return has(slot / width) ? sum : 0.0f;
  }

  __device__ void store(const int (&code)[slots], uint8_t* codes) const {
    constexpr int size = width * S::entry_bits / 8, aligned = largest_power(bytes | size);
#pragma unroll
    for (int upper = 0; upper < uppers; ++upper) {
      if (!has(upper)) continue;
      uint8_t* to = codes + (upper * lanes + lane) * size;
      if constexpr (size <= 4) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < width; ++k) word |= uint32_t(code[upper * width + k]) << k * S::entry_bits;
        if constexpr (aligned >= size) {
          if constexpr (size == 1) *to = uint8_t(word);
          else store_words<size>(to, &word);
        } else {
#pragma unroll
          for (int i = 0; i < size; ++i) to[i] = uint8_t(word >> 8 * i);
        }
      } else {
#pragma unroll
        for (int i = 0; i < size; ++i) {
          uint32_t byte = 0;
#pragma unroll
          for (int k = 0; k < width; ++k) {
            const int shift = k * S::entry_bits - 8 * i;
            if (shift < 8 && shift > -S::entry_bits) {
              const uint32_t one = code[upper * width + k];
              byte |= shift < 0 ? one >> -shift : one << shift;
            }
          }
          to[i] = uint8_t(byte);
        }
      }
    }
  }

 private:
  __device__ void butterfly(int i, int j) {
    const float low = value[i / x][i % x], high = value[j / x][j % x];
    value[i / x][i % x] = low + high, value[j / x][j % x] = low - high;
  }
};

template <bool first, typename A, typename B> struct OneOf { using type = A; };
template <typename A, typename B> struct OneOf<false, A, B> { using type = B; };

struct Nothing {
  __device__ Nothing(const uint16_t*, int) {}
};

// A block's search for the codes of rows of a side S, whose codebook is one for all vectors. Where there are `few` rows,
// its warps share the entries, for the same rows; else every warp has its own rows. With `cells`, x is 2.
template <typename S> struct Search {
  static constexpr int x = S::vector_size, cells = S::cells, slots = Row<S>::slots;
  static constexpr int split = S::few && !cells ? Plan::threads / 32 : 1;
  using Whole = Table<x, S::entry_bits>;
  using Plane = Grid<S::entry_bits, cells ? cells : 1>;
  static constexpr int table_words = cells ? Plane::words : Whole::floats;
  static constexpr int words = table_words + (split > 1 ? 2 * Plan::threads * slots : 0);  // of shared memory
  using Part = typename Whole::template Part<Plan::threads>;
  typename OneOf<(cells > 0), Nothing, Part>::type part;  // of the table, in flight
  Whole whole;
  Plane plane;
  float2* partial_sums;  // [split][slots][32 lanes]: scores and codes

  // All threads of a block.
  __device__ Search(const uint16_t* codebook, const uint32_t* lists, float cells_per_unit, uint32_t* shared)
      : part(codebook, threadIdx.x) {
    if constexpr (cells > 0) {
      Plane::fill(lists, codebook, shared);
      commit_copies();
      plane.cell = shared, plane.entry = shared + cells * cells, plane.cells_per_unit = cells_per_unit;
    }
    whole.table = reinterpret_cast<const float*>(shared);
    partial_sums = reinterpret_cast<float2*>(shared + table_words);
  }

  // To be called by all threads before the first search.
  __device__ void prepare() const {
    if constexpr (cells > 0) wait_for_copies<0>();
    else part.put(const_cast<float*>(whole.table));
    __syncthreads();
  }

  // True in warps that have the codes.
  __device__ bool nearest(const float (&w)[slots][x], int (&code)[slots]) const {
    if constexpr (cells > 0) {
      plane.search(w, code);
      return true;
    } else {
      constexpr int part = (Whole::fours + split - 1) / split;
      const int warp = split > 1 ? threadIdx.x / 32 : 0, lane = threadIdx.x % 32;
      float best[slots];
      whole.search(w, warp * part, min((warp + 1) * part, Whole::fours), best, code);  // code: of fours
      if constexpr (split > 1) {
#pragma unroll
        for (int slot = 0; slot < slots; ++slot)
          partial_sums[(warp * slots + slot) * 32 + lane] = {best[slot], __int_as_float(code[slot])};
        __syncthreads();
        if (warp > 0) return false;
#pragma unroll
        for (int slot = 0; slot < slots; ++slot)
#pragma unroll
          for (int other = 1; other < split; ++other) {
            const float2 its = partial_sums[(other * slots + slot) * 32 + lane];
            if (its.x > best[slot]) best[slot] = its.x, code[slot] = __float_as_int(its.y);
          }
      }
      whole.pick(w, best, code);
      return true;
    }
  }

  __device__ void get(int code, float (&entry)[x]) const {
    if constexpr (cells > 0) {
      plane.get(code, entry);
    } else {
#pragma unroll
      for (int c = 0; c < x; ++c) entry[c] = whole.number(code, c);
    }
  }

  // Codes and scale of a row that is loaded. All lanes of a warp; all warps that share entries.
  __device__ void encode(Row<S>& row, bool exists, uint8_t* codes, uint16_t* scale) const {
    float part[slots];
    int code[slots];
    const float unit = row.bring_in_range();
    const float energy = row.energy();  // the same after a rotation, which goes on meanwhile
    row.rotate();
    const float factor = row.normalise(energy);
    if (!nearest(row.value, code)) return;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float entry[x];
      get(code[slot], entry);
      part[slot] = row.along(slot, entry);
    }
    const float along = row.sum(part);
    if (!exists) return;
    row.store(code, codes);
    if (row.lane == 0) {
      const float found = energy == 0.0f ? 0.0f : lesser(__fdividef(energy * factor, along) * unit, largest_half);
      *scale = uint16_t(pack_pair<Dtype::FLOAT16>(found, 0.0f));
    }
  }
};
