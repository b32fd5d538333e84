// SPDX-License-Identifier: Apache-2.0
// The part of the logits of coded tokens that a rotary mean gives (hf_vq/ops/rotary_mean.py): q . R_n m.
//
//     q . R_n m = sum_p  A_p cos(n f_p) + B_p sin(n f_p)        A_p = q_a m_a + q_b m_b      B_p = q_b m_a - q_a m_b
//
// Only pairs p that turn are counted: those whose m is not zero, 16 a product.
//
// Two steps of a warp, `apart` tokens from each other, lie around a centre c. A and B turn once to c; offsets from it
// are the same for all pairs of steps, so cos and sin of them are one small table of the block:
//
//     [ step ]   ..  other warps  ..   c   ..   [ next step ]        token c + d:  E_d + O_d      E_d = sum_p A_p cos(d f_p)
//      c - d                                         c + d           token c - d:  E_d - O_d      O_d = sum_p B_p sin(d f_p)
//
//     E = cos x A      table rows: the offsets d of a step, 16 a tile; columns: queries; k: pairs that turn.
//     O = sin x B      Half the products of tokens times channels
//
// Paired queries (attention_gqa_small.cuh) have a second column: for the next pair of steps or, if a step has two tiles, for
// its second tile, whose tokens are 8 later: centre c + 8, and the table is that of the first tile.
//
// Rows and columns are those of the products with codes, so that a lane finds the logits that it needs itself. Those of
// c - d belong to the lane that has the mirrored token: rows g and g ^ 5.
//
// A logit has to be right to a part of 1, and m has hundreds of times the rest of a key. So both factors are fp16 numbers
// in two parts, and three products are added: high high + high low + low high. Per pair, in units of hypot(A, B):
//
//     angles of A and B      2^-20          table             2^-20
//     low low                2^-22          rounded parts     2^-21
//     in all at most 2^-18 of sum_p hypot(A_p, B_p)
//
// Per 32 tokens of 4 queries and 16 pairs: 3 MMAs, 1 KB of table from shared memory, nothing from memory.
#pragma once
#include "kv/attention/attention_mainloop.cuh"
#include "primitives/rotary.cuh"

struct Rotary {
  static constexpr int products = (Keys::dim / 2 + 15) / 16, pairs = 16 * products;  // at most
  static constexpr int queries = queries_of_block;
  // Whether both columns of a query are in use for the two tiles of a step. `centres`: pairs of steps whose logits a warp
  // finds together, in a column each if there are two.
  static constexpr bool by_tiles = Plan::paired && Plan::step_tiles > 1 && Plan::rotary == 1;
  static constexpr int centres = at_least(Plan::rotary, 1), steps = 2 * centres, columns = by_tiles ? 2 : centres;
  static_assert(centres == 1 || Plan::paired, "a query has a column for each");
  static_assert(!by_tiles || Plan::step_tiles == 2, "a query has a column for each tile");
  static constexpr int tiles = Plan::query_tiles, table_tiles = by_tiles ? 1 : Plan::step_tiles;
  static constexpr int last = tokens_of_step - 1 - 8 * by_tiles;  // of the tokens that the table has
  static constexpr int apart = Plan::threads / 32 * tokens_of_step;
  static constexpr int row = 8 * pairs + 16;  // bytes of the pairs of a query; padded, lanes read apart
  static constexpr int each = (Keys::dim / 2 + 31) / 32;  // pairs of a lane, while they are prepared

  static constexpr int turns_at = 16, scale_at = turns_at + 8 * pairs, query_at = scale_at + whole_pieces(4 * queries);
  static constexpr int table_at = query_at + queries * row, own_at = table_at + table_tiles * products * 2048;
  // Of a warp: logits (before: turns of the pairs): of a step, of each column of a lane, those of all lanes.
  static constexpr int lane_bytes = 8 * Plan::step_tiles, step_bytes = tiles * columns_of_lane * 32 * lane_bytes;
  static constexpr int own_bytes = at_least(steps * step_bytes, 8 * pairs);
  static constexpr int bytes = own_at + Plan::threads / 32 * own_bytes;

  uint32_t base, own;

  __device__ Rotary(uint32_t base, int warp) : base(base), own(base + own_at + warp * own_bytes) {}

  // Products of the pairs that turn; 0: none does.
  __device__ int used() const {
    uint32_t word[1];
    load_shared<4>(base, word);
    return word[0];
  }

  // L2 prefetch of what `stage` loads.
  __device__ static void prefetch(const Arguments& arguments, int row_of_batch, int kv_head, int lane) {
    if constexpr (Plan::rotary > 0) {
      const RotaryMean& mean = rotary_of(arguments);
      const float* const m = mean.mean + row_of_batch * mean.row + kv_head * mean.head;
      if (8 * lane < Keys::dim) prefetch_line(m + 8 * lane);
      if (8 * lane < mean.pairs) prefetch_line(mean.inv_freq + 8 * lane);
    }
  }

  // What `find` reads, by `preparing` warps, this one number `warp` of them: the table; A and B of the queries from column
  // `first` on. What is between the loads and their use is `meanwhile`.
  template <class Body>
  __device__ static void stage(const Arguments& arguments, int row_of_batch, int kv_head, int first, char* shared, int warp,
                               int preparing, const Body& meanwhile) {
    const int lane = threadIdx.x % 32;
    const RotaryMean& mean = rotary_of(arguments);
    const float* const m = mean.mean + row_of_batch * mean.row + kv_head * mean.head;
    float m_a[each], m_b[each], inv_freq[each];  // of pairs 32 i + lane
    uint16_t q_a[each], q_b[each];
    const auto load = [&](int column) {
      const Column at(arguments, kv_head, first, column);
      const uint16_t* const q = place(arguments.query, row_of_batch, at.head, at.query);
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int pair = 32 * i + lane;
        const bool some = at.exists && pair < mean.pairs;
        q_a[i] = some ? load_early(q + channel_of(mean, pair, false)) : 0;
        q_b[i] = some ? load_early(q + channel_of(mean, pair, true)) : 0;
      }
    };
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int pair = 32 * i + lane;
      const bool some = pair < mean.pairs;
      m_a[i] = some ? load_early(m + channel_of(mean, pair, false)) : 0.0f;
      m_b[i] = some ? load_early(m + channel_of(mean, pair, true)) : 0.0f;
      inv_freq[i] = some ? load_early(mean.inv_freq + pair) : 0.0f;
    }
    if (warp < queries) load(warp);
    meanwhile();

    int place_of[each], count = 0;  // among the pairs that turn; -1: it does not
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const bool turns = m_a[i] != 0.0f || m_b[i] != 0.0f;
      const uint32_t some = __ballot_sync(0xffffffff, turns);
      place_of[i] = turns ? count + __popc(some & ((1u << lane) - 1)) : -1;
      count += __popc(some);
    }
    const int used = (count + 15) / 16;
    const bool behind = lane < 16 * used - count;  // a pair `count + lane` behind the last one
    uint64_t* const turns = reinterpret_cast<uint64_t*>(shared + own_at + threadIdx.x / 32 * own_bytes);
    uint64_t* const known = reinterpret_cast<uint64_t*>(shared + turns_at);
    const auto keep = [&](int at, uint64_t of_pair) {
      turns[at] = of_pair;
      if (warp == 0) known[at] = of_pair;
    };
    if (warp == 0 && lane == 0) *reinterpret_cast<uint32_t*>(shared) = used;
    if (behind) keep(count + lane, 0);
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (place_of[i] >= 0) keep(place_of[i], turns_of(inv_freq[i]));

    for (int column = warp; column < queries; column += preparing) {
      if (column != warp) load(column);
      float A[each], B[each], most = 0.0f;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const float a = to_float<Plan::dtype>(q_a[i]), b = to_float<Plan::dtype>(q_b[i]);
        A[i] = a * m_a[i] + b * m_b[i], B[i] = b * m_a[i] - a * m_b[i];
        most = fmaxf(most, fmaxf(fabsf(A[i]), fabsf(B[i])));
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, step));
      // As in attention_query.cuh: the largest number near 2^13, so that turned ones are below 2^15.
      const int exponent = min(max(int(__float_as_uint(most) >> 23), 30), 240);
      const float up = __uint_as_float((267 - exponent) << 23), down = __uint_as_float((exponent - 13) << 23);
      float2* const to = reinterpret_cast<float2*>(shared + query_at + column * row);
      if (behind) to[count + lane] = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (place_of[i] >= 0) to[place_of[i]] = make_float2(A[i] * up, B[i] * up);
      if (lane == 0) reinterpret_cast<float*>(shared + scale_at)[column] = down * arguments.scaling;
    }

    __syncwarp();  // its turns are there
    const int busy = used == 1 && 2 * queries <= preparing ? queries : 0;  // warps that leave a small table to the others
    const int begin = 32 * (warp - busy) + lane, end = warp < busy ? begin : table_tiles * used * 128;
    for (int item = begin; item < end; item += 32 * (preparing - busy)) {
      const int at = item % 4, g = item / 16 % 8, t = item / 4 % 4, tile = item / 128 % table_tiles;
      const int product = item / (128 * table_tiles), token = Step::of_row(g, at % 2, tile);
      const int64_t twice = apart + 2 * token - last;
      float cosine[2], sine[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) cos_sin(twice, turns[16 * product + 4 * t + at / 2 * 2 + i], cosine[i], sine[i]);
      uint32_t word[4];  // cos, its rest, sin, its rest
      split(cosine[0], cosine[1], word[0], word[1]);
      split(sine[0], sine[1], word[2], word[3]);
      char* const to = shared + table_at + (tile * products + product) * 2048 + item % 128 * 4;
#pragma unroll
      for (int part = 0; part < 4; ++part) *reinterpret_cast<uint32_t*>(to + part * 512) = word[part];
    }
  }

  // Where a lane's logits of step `step` are, of those found together.
  __device__ uint32_t logits(int step, int lane) const { return own + step * step_bytes + lane * lane_bytes; }
  // From it, those of keys g and g + 8 of a tile, in the lane's column `c` of column tile `n`.
  __device__ static void load(uint32_t of_step, int n, int c, int tile, float (&found)[2]) {
    uint32_t word[2];
    load_shared<8>(of_step + (n * columns_of_lane + c) * 32 * lane_bytes + tile * 8, word);
    found[0] = __uint_as_float(word[0]), found[1] = __uint_as_float(word[1]);
  }

  // Before the first time: the logits are zeros, which they stay if nothing turns.
  __device__ void begin(int lane) const {
    __syncwarp();  // turns of the pairs were there
    const float none[2 * Plan::step_tiles] = {};
#pragma unroll
    for (int at = 0; at < steps * step_bytes; at += 32 * lane_bytes) put(logits(0, lane) + at, none);
  }

  // The logits of `steps` steps of the warp; the first one's tokens begin at `first`. False: nothing turns.
  __device__ bool find(const RotaryMean& mean, int first, uint32_t lane) const {
    const int used = this->used();
    if (used == 0) return false;
    asm volatile("" : "+r"(lane));  // no address is kept from one time to the next
    const uint32_t g = lane / 4, t = lane % 4;
    __syncwarp();  // the logits of the time before were read
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      // Of the column g of a tile.
      const uint32_t of_query = base + query_at + (Plan::paired ? g / 2 : (8 * n + g) % queries) * row + t * 32;
      float even[table_tiles][4] = {}, odd[table_tiles][4] = {};
      int product = 0;
#pragma unroll 1
      do {
        float cosines, sines;  // of pair lane % 16 in column lane / 16 of a query
        turn(mean, first, product, lane, cosines, sines);
        uint32_t high[2][2], low[2][2];  // of A, of B
#pragma unroll
        for (int two = 0; two < 2; ++two) {
          uint32_t q[4];
          load_shared<16>(of_query + product * 128 + two * 16, q);
          float turned[2][2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t from = g % 2 % columns * 16 + 4 * t + 2 * two + i;
            const float A = __uint_as_float(q[2 * i]), B = __uint_as_float(q[2 * i + 1]);
            const float cosine = __shfl_sync(0xffffffff, cosines, from), sine = __shfl_sync(0xffffffff, sines, from);
            turned[0][i] = A * cosine + B * sine, turned[1][i] = B * cosine - A * sine;
          }
#pragma unroll
          for (int which = 0; which < 2; ++which)
            split(turned[which][0], turned[which][1], high[which][two], low[which][two]);
        }
#pragma unroll
        for (int tile = 0; tile < table_tiles; ++tile) {
          const uint32_t from = base + table_at + (tile * products + product) * 2048 + lane * 16;
          multiply(from, high[0], low[0], even[tile]);
          multiply(from + 1024, high[1], low[1], odd[tile]);
        }
      } while (++product < used);
      float before[2 * Plan::step_tiles], after[2 * Plan::step_tiles];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (c >= (Plan::paired ? columns : columns_of_lane)) continue;
        const int query = Plan::paired ? t : (8 * n + 2 * t + c) % queries;
        uint32_t scale[1];
        load_shared<4>(base + scale_at + query * 4, scale);
        const float by = __uint_as_float(scale[0]);
#pragma unroll
        for (int i = 0; i < 2 * table_tiles; ++i) {
          const float e = even[i / 2][i % 2 * 2 + c] * by, o = odd[i / 2][i % 2 * 2 + c] * by;
          const int first = by_tiles ? 2 * c : 0;  // of the two rows of a tile
          before[first + 2 * table_tiles - 1 - i] = e - o, after[first + i] = e + o;
        }
        if (by_tiles && c == 0) continue;
        const uint32_t to = (Plan::paired ? 0 : n * columns_of_lane + c) * 32 * lane_bytes;
        const int first_step = Plan::paired && !by_tiles ? 2 * c : 0;
        put(logits(first_step, lane ^ 20) + to, before);
        put(logits(first_step + 1, lane) + to, after);
      }
    }
    __syncwarp();
    return true;
  }

 private:
  // Angles of the pairs of a product at the centres of steps whose first token is `first`: those of a lane.
  __device__ void turn(const RotaryMean& mean, int first, int product, uint32_t lane, float& cosine, float& sine) const {
    uint32_t turns[2];
    load_shared<8>(base + turns_at + (16 * product + lane % 16) * 8, turns);
    // Positions are below 2^29. Of 64 bits times 64, only bits 32 to 63 count, all but the lowest two of them.
    const int twice = 2 * (first + int(mean.start)) + apart + last + int(lane / 16) * (by_tiles ? 16 : 4 * apart);
    cos_sin(int(uint32_t(twice) * turns[1] + 2 * uint32_t(__mulhi(twice, int(turns[0] >> 1)))), cosine, sine);
  }

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

  template <int N> __device__ static void put(uint32_t to, const float (&number)[N]) {
    if constexpr (N == 2)
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(number[0]), "f"(number[1]) : "memory");
    else
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(number[0]), "f"(number[1]), "f"(number[2]),
                   "f"(number[3])
                   : "memory");
  }
};
