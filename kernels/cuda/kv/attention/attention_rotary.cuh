// SPDX-License-Identifier: Apache-2.0
// The part of the logits of coded tokens that a rotary mean gives (hf_vq/ops/rotary_mean.py): q . R_n m.
//
//     q . R_n m = sum_p  A_p cos(n f_p) + B_p sin(n f_p)        A_p = q_a m_a + q_b m_b      B_p = q_b m_a - q_a m_b
//
// Two steps of a warp, `apart` tokens from each other, lie around a centre c. A and B turn once to c; offsets from it
// are the same for all pairs of steps, so cos and sin of them are one small table of the block:
//
//     [ step ]   ..  other warps  ..   c   ..   [ next step ]        token c + d:  E_d + O_d      E_d = sum_p A_p cos(d f_p)
//      c - d                                         c + d           token c - d:  E_d - O_d      O_d = sum_p B_p sin(d f_p)
//
//     E = cos x A      table rows: the offsets d of a step, 16 a tile; columns: queries, then those of the next pair of
//     O = sin x B      steps; k: pairs of channels, 16 a product. Half the products of tokens times channels
//
// A logit has to be right to a part of 1, and m has hundreds of times the rest of a key. So both factors are fp16 numbers
// in two parts, and three products are added: high high + high low + low high. Per pair, in units of hypot(A, B):
//
//     angles of A and B      2^-20          table             2^-20
//     low low                2^-22          rounded parts     2^-21
//     in all at most 2^-18 of sum_p hypot(A_p, B_p)
//
// Per 32 tokens of 4 queries, D = 128: 12 MMAs, 4 KB of table from shared memory, nothing from memory.
#pragma once
#include "kv/attention/attention_mainloop.cuh"
#include "primitives/rotary.cuh"

struct Rotary {
  static constexpr int products = (Keys::dim / 2 + 15) / 16, pairs = 16 * products;
  static constexpr int queries = queries_of_block;
  // Pairs of steps whose logits a warp finds together: they fill a tile of 8 columns.
  static constexpr int centres = queries < 8 ? at_most(8 / queries, 4) : 1, steps = 2 * centres;
  static constexpr int tiles = at_least(queries / 8, 1);  // of columns
  static constexpr int apart = Plan::threads / 32 * tokens_of_step;
  static constexpr int row = 8 * pairs + 16;  // bytes of the pairs of a query, or of a centre; padded, lanes read apart

  static constexpr int turns_at = 16, scale_at = turns_at + 8 * pairs, query_at = scale_at + whole_pieces(4 * queries);
  static constexpr int table_at = query_at + queries * row, own_at = table_at + Plan::step_tiles * products * 2048;
  // Of a warp: angles of the centres, afterwards logits.
  static constexpr int logits_at = tiles > 1 ? centres * row : 0, logits_bytes = steps * tokens_of_step * queries * 4;
  static constexpr int own_bytes = at_least(centres * row, logits_at + logits_bytes);
  static constexpr int bytes = own_at + Plan::threads / 32 * own_bytes;

  uint32_t base, own;
  uint32_t turning;  // products whose pairs turn; 0: m is zero

  __device__ Rotary(char* shared, int warp)
      : base(uint32_t(__cvta_generic_to_shared(shared))), own(base + own_at + warp * own_bytes), turning(0) {
    if constexpr (Plan::rotary) load_shared<4>(base, &turning);
  }

  // The table, by the first `threads` threads. It depends on frequencies only.
  __device__ static void fill(const RotaryMean& mean, char* shared, int thread, int threads) {
    const auto turns = [&](int pair) { return pair < mean.pairs ? turns_of(__ldg(mean.inv_freq + pair)) : 0; };
    for (int pair = thread; pair < pairs; pair += threads) reinterpret_cast<uint64_t*>(shared + turns_at)[pair] = turns(pair);
    for (int item = thread; item < Plan::step_tiles * products * 32; item += threads) {
      const int tile = item / (32 * products), product = item / 32 % products, g = item % 32 / 4, t = item % 4;
      uint32_t word[4][4];  // cos, its rest, sin, its rest
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          const int64_t twice = apart + 2 * (16 * tile + g + 8 * half) - tokens_of_step + 1;
          const int pair = 16 * product + 4 * t + 2 * two, at = 2 * two + half;
          float cosine[2], sine[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) cos_sin(twice, turns(pair + i), cosine[i], sine[i]);
          split(cosine[0], cosine[1], word[0][at], word[1][at]);
          split(sine[0], sine[1], word[2][at], word[3][at]);
        }
#pragma unroll
      for (int part = 0; part < 4; ++part)
        store_words<16>(shared + table_at + ((item / 32 * 4 + part) * 32 + item % 32) * 16, word[part]);
    }
  }

  // A and B of the queries from column `first` on, by the first `warps` warps.
  __device__ static void stage(const Arguments& a, int row_of_batch, int kv_head, int first, char* shared, int warps) {
    constexpr int each = (pairs + 31) / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const RotaryMean& mean = rotary_of(a);
    const float* const m = mean.mean + row_of_batch * mean.row + kv_head * mean.head;
    for (int column = warp; column < queries; column += warps) {
      const Column at(a, kv_head, first + column);
      const uint16_t* const q = place(a.query, row_of_batch, at.head, at.query);
      float part[each][2], most = 0.0f;
      uint32_t turning = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int pair = 32 * i + lane;
        float m_a = 0.0f, m_b = 0.0f, q_a = 0.0f, q_b = 0.0f;
        if (pair < mean.pairs) {
          const int one = channel_of(mean, pair, false), other = channel_of(mean, pair, true);
          m_a = __ldg(m + one), m_b = __ldg(m + other);
          if (at.exists) q_a = to_float<Plan::dtype>(__ldg(q + one)), q_b = to_float<Plan::dtype>(__ldg(q + other));
        }
        part[i][0] = q_a * m_a + q_b * m_b, part[i][1] = q_b * m_a - q_a * m_b;
        most = fmaxf(most, fmaxf(fabsf(part[i][0]), fabsf(part[i][1])));
        const uint32_t some = __ballot_sync(0xffffffff, m_a != 0.0f || m_b != 0.0f);
        turning |= (some & 0xffff ? 1 : 0) << 2 * i | (some >> 16 ? 2 : 0) << 2 * i;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
      // As in attention_query.cuh: the largest number near 2^13, so that turned ones are below 2^15.
      const int exponent = min(max(int(__float_as_uint(most) >> 23), 30), 240);
      const float up = __uint_as_float((267 - exponent) << 23), down = __uint_as_float((exponent - 13) << 23);
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (pairs % 32 == 0 || 32 * i + lane < pairs) {
          float* const to = reinterpret_cast<float*>(shared + query_at + column * row) + 2 * (32 * i + lane);
          to[0] = part[i][0] * up, to[1] = part[i][1] * up;
        }
      if (lane == 0) reinterpret_cast<float*>(shared + scale_at)[column] = down * a.scaling;
      if (lane == 0 && column == 0) *reinterpret_cast<uint32_t*>(shared) = turning;
    }
  }

  // Where logits of step `step` are, of those found together.
  __device__ uint32_t logits(int step) const { return own + logits_at + step * tokens_of_step * queries * 4; }
  // In it, those of token number `token` of a step. The halves of a step are read side by side: their banks differ.
  __device__ static uint32_t place_of(int token, int query) {
    return ((token ^ token / (tokens_of_step / 2) * 4) * queries + query) * 4;
  }

  // The query of a lane's column `c` of tile `n`.
  __device__ static int query_of(int n, int c, int lane) {
    return Plan::paired ? lane % 4 : (8 * n + lane % 4 * 2 + c) % queries;
  }
  __device__ static float logit(uint32_t of_step, int token, int query) {
    uint32_t found[1];
    load_shared<4>(of_step + place_of(token, query), found);
    return __uint_as_float(found[0]);
  }

  // The logits of `steps` steps of the warp; the first one's tokens begin at `first`.
  __device__ void find(const RotaryMean& mean, int first, int lane) const {
    const int g = lane / 4, t = lane % 4;
    const int64_t twice = 2 * (first + mean.start) + apart + tokens_of_step - 1;
    for (int i = lane; i < centres * pairs; i += 32) {
      const int centre = i / pairs, pair = i % pairs;
      uint32_t turns[2];
      load_shared<8>(base + turns_at + pair * 8, turns);
      float angle[2];
      cos_sin(twice + 4 * centre * apart, uint64_t(turns[1]) << 32 | turns[0], angle[0], angle[1]);
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(own + centre * row + pair * 8), "f"(angle[0]), "f"(angle[1])
                   : "memory");
    }
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      const uint32_t of_query = base + query_at + (8 * n + g) % queries * row + t * 32;
      const uint32_t of_centre = own + (8 * n + g) / queries % centres * row + t * 32;
      float even[Plan::step_tiles][4] = {}, odd[Plan::step_tiles][4] = {};
#pragma unroll 1
      for (int product = 0; product < products; ++product) {
        if (!(turning >> product & 1)) continue;
        uint32_t high[2][2], low[2][2];  // of A, of B
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          uint32_t q[4], angle[4];
          load_shared<16>(of_query + product * 128 + two * 16, q);
          load_shared<16>(of_centre + product * 128 + two * 16, angle);
          float turned[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float A = __uint_as_float(q[2 * i]), B = __uint_as_float(q[2 * i + 1]);
            const float cosine = __uint_as_float(angle[2 * i]), sine = __uint_as_float(angle[2 * i + 1]);
            turned[0][i] = A * cosine + B * sine, turned[1][i] = B * cosine - A * sine;
          }
#pragma unroll
          for (int which = 0; which < 2; ++which)
            split(turned[which][0], turned[which][1], high[which][two], low[which][two]);
        }
#pragma unroll
        for (int tile = 0; tile < Plan::step_tiles; ++tile) {
          const uint32_t from = base + table_at + (tile * products + product) * 2048 + lane * 16;
          multiply(from, high[0], low[0], even[tile]);
          multiply(from + 1024, high[1], low[1], odd[tile]);
        }
      }
      if (tiles == 1) __syncwarp();  // angles were where logits will be
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * n + 2 * t + c, query = column % queries, centre = column / queries;
        uint32_t scale[1];
        load_shared<4>(base + scale_at + query * 4, scale);
        if (centre < centres)
#pragma unroll
          for (int tile = 0; tile < Plan::step_tiles; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int token = 16 * tile + g + 8 * half;
              const float e = even[tile][2 * half + c] * __uint_as_float(scale[0]);
              const float o = odd[tile][2 * half + c] * __uint_as_float(scale[0]);
              put(logits(2 * centre) + place_of(tokens_of_step - 1 - token, query), e - o);
              put(logits(2 * centre + 1) + place_of(token, query), e + o);
            }
      }
    }
    __syncwarp();
  }

 private:
  // Two numbers as fp16, and what is missing.
  __device__ static void split(float first, float second, uint32_t& high, uint32_t& low) {
    high = pack_pair<Dtype::FLOAT16>(first, second);
    float one, other;
    unpack_pair<Dtype::FLOAT16>(high, one, other);
    low = pack_pair<Dtype::FLOAT16>(first - one, second - other);
  }

  // sums += 16 rows of the table, both parts, times both parts of 8 columns.
  __device__ static void multiply(uint32_t from, const uint32_t (&high)[2], const uint32_t (&low)[2], float (&sums)[4]) {
    uint32_t word[4], rest[4];
    load_shared<16>(from, word);
    load_shared<16>(from + 512, rest);
    mma<Dtype::FLOAT16>(sums, rest[0], rest[1], rest[2], rest[3], high[0], high[1]);
    mma<Dtype::FLOAT16>(sums, word[0], word[1], word[2], word[3], low[0], low[1]);
    mma<Dtype::FLOAT16>(sums, word[0], word[1], word[2], word[3], high[0], high[1]);
  }

  __device__ static void put(uint32_t to, float number) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(number) : "memory");
  }
};
