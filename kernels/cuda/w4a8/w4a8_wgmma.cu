// SPDX-License-Identifier: Apache-2.0
// y = W x + b with 4-bit W and 8-bit x, as an integer product for many tokens on Hopper (QServe, section 5.2).
//
//     y[m, o] = (sum_k w[o, k] numbers[m, k]) scale[o] size[m] + bias[o]         w and the epilogue: w4a8.cuh
//
// Structure of linear_wgmma.cu, with bytes instead of floats. Tile of a consumer warpgroup: 64 rows of W times
// `token_tile` tokens. Codes become A fragments in registers. x comes through shared memory: a producer warp loads 128
// columns per buffer, swizzled as w4a8_inputs.cu wrote them:
//
//     producer (one lane)   [x 128 columns][x next 128]..      ring of `x_stages` buffers, token_tile x 128 bytes each
//     warpgroup 0           |128 columns|128 columns| ..       while tensor cores multiply, a lane decodes the fragments
//     warpgroup 1             |128 columns|128 columns| ..     of the product after the next one
//
// If a block has too few rows for that, two or three warpgroups split the columns (`split_k_warpgroups`):
//
//     warpgroup 0           |chunk 0|       |chunk 2| ..       the same rows; sums are added at the end
//     warpgroup 1               |chunk 1|       |chunk 3| ..
//
// Bytes: codes once per token_tile tokens, x once per tile of rows, both mostly from L2.
// Bottleneck: tensor cores. A product of 64 x token_tile x 32 takes token_tile / 2 cycles of the one set of tensor cores
// of a multiprocessor; its weights take 6 instructions per lane, 10 with groups.
//
// The assembler serializes products, which nearly doubles the time, unless it can prove that the warps of a warpgroup are
// uniform and that fragments are complete before a product: hence the shuffled `warp` and `made`. Its log says so
// (codegen/jit/compiler.py: SERIALIZED).
#include "plan.cuh"
#include "primitives/pdl.cuh"
#include "w4a8/w4a8.cuh"

constexpr int columns_of_slot = chunk, split = 1, teams = Plan::split_k_warpgroups, producer_registers = 24;
constexpr uint32_t origin = 0, first_byte = 0;
static_assert(Plan::x_stages > teams, "a team has its slot until the next of its slots is full");

#include "primitives/wgmma_ring.cuh"

struct Arguments {
  const char* codes;      // uint8 [rows, columns / 2]
  const uint16_t* scale;  // fp16 [rows]
  const char* zero;       // uint8 [rows, columns / group], without groups float [rows]
  const char* step;       // uint8 [rows, columns / group], or null
  const char* x;          // numbers, swizzled
  const Token* token;     // [tokens]
  const char* bias;       // [rows] of Plan::bias, or null
  uint16_t* y;            // [tokens, rows] of Plan::dtype
  int rows;
  int tokens;
  int columns;            // a multiple of 32
};

constexpr int group = grouped ? Plan::group : 1;

// Shared memory of each warpgroup, behind the ring: factors of its 64 rows, steps and zeros of each warp's 16 rows, and
// sums that are to be stored, 32 tokens for each team. Strides are padded against bank conflicts: rows of steps, tokens,
// and rows 32 .. 63 of a token begin in different banks.
constexpr int grid_stride = Plan::groups / 4 * 4 + 4, token_stride = 64 * 4 + 16;
constexpr int factor_bytes = 64 * sizeof(Row), grid_bytes = grouped ? 2 * 16 * grid_stride : 0;
constexpr int sum_bytes = 32 * token_stride, group_bytes = factor_bytes + 4 * grid_bytes + teams * sum_bytes;
constexpr uint32_t of_groups = sums_barrier + 16;

__device__ inline int place_of(int row) { return row * 4 + row / 32 * 16; }

// Positions of the two rows of a lane. They are adjacent in W, and rows g and g + 8 of the product.
struct Rows {
  const char* first;
  int second;     // bytes behind it
  uint32_t step;  // of the first, in shared memory
  int last;       // columns of a lane
  int end;        // of the chunks of the block

  __device__ Rows(const Arguments& a, int row, int end, uint32_t grids) : last(a.columns - 32), end(end) {
    const int of_warp = threadIdx.x % 32 / 4 * 2, bytes = a.columns / 2;
    row += of_warp;
    first = a.codes + int64_t(min(row, a.rows - 1)) * bytes;
    second = row + 1 < a.rows ? bytes : 0;
    step = grids + of_warp * grid_stride;
  }

  __device__ const char* codes(int half, int at) const { return first + half * second + column(at) / 2; }

  // The first of a lane in chunk `at`.
  __device__ uint32_t column(int at) const { return min(at * chunk + threadIdx.x % 4 * 32, uint32_t(last)); }
};

// Steps, then zeros, of the rows of a warp -> shared memory; not waited for.
__device__ inline void copy_grids(const Arguments& a, int first, uint32_t to) {
  constexpr int each = Plan::groups % 4 ? 1 : 4, pieces = Plan::groups / each;
#pragma unroll 4
  for (int at = threadIdx.x % 32; at < 16 * pieces; at += 32) {
    const int row = at / pieces, column = at % pieces * each;
    const int64_t from = int64_t(min(first + row, a.rows - 1)) * Plan::groups + column;
#pragma unroll
    for (int zero = 0; zero < 2; ++zero) {
      const char* of_row = (zero ? a.zero : a.step) + from;
      const uint32_t place = to + (zero * 16 + row) * grid_stride + column;
      if constexpr (each == 4)
        copy_piece<4>(place, of_row);
      else
        store_byte(place, *of_row);
    }
  }
}

// Factors of the rows of a warp -> shared memory.
__device__ inline void keep_factors(const Arguments& a, int first, Row* to) {
  const int lane = threadIdx.x % 32;
  const Row row = row_of(a.scale, a.zero, a.bias, min(first + lane % 16, a.rows - 1));
  if (lane < 16) to[lane] = row;
}

// Prefetch of a lane's codes of one chunk to L2: the codes in flight to registers alone do not hide the latency of DRAM.
__device__ inline void prefetch(const Rows& rows, int at) {
  if (at >= rows.end) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    prefetch_line(rows.codes(half, at));
}

// Codes of a lane in one chunk. Lanes beyond the last columns load the last ones again: x is zero there.
struct Step {
  uint32_t word[2][4];

  __device__ void load(const Rows& rows, int at) {
#pragma unroll
    for (int half = 0; half < 2; ++half) load_words<16>(rows.codes(half, at), word[half]);
    if constexpr (Plan::l2_prefetch > 0) prefetch(rows, at + Plan::l2_prefetch * teams);
  }
};

// Steps and zeros of both rows of a lane.
struct Grids {
  Grid of[2];

  __device__ void load(const Rows& rows, int at) {
    if constexpr (grouped)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t of_row = rows.step + half * grid_stride + rows.column(at) / group;
        of[half].set(load_byte(of_row), load_byte(of_row + 16 * grid_stride));
      }
  }
};

// Eight columns of a lane -> a fragment.
__device__ inline void decode(const Grids& grids, const Step& step, int k, uint32_t (&fragment)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) grids.of[half].decode(step.word[half][k], fragment[half], fragment[2 + half]);
  made(fragment);
}

using Sums = int[tile_tokens / 2];

// Rows of a warpgroup times x, over the chunks of its team. A warp that issues a product waits until those before have read
// their registers: behind each product one fragment is decoded, for the one after the next.
__device__ inline void multiply(const Rows& rows, const Work& work, int team, Turn turn, Step (&next)[Plan::pipeline_depth],
                                Sums& sums) {
  const int begin = work.begin + team;
  turn.pass(team);
  uint32_t fragment[4][4];
  Grids grids;
  if (begin < work.end) {
    grids.load(rows, begin);
#pragma unroll
    for (int k = 0; k < 2; ++k) decode(grids, next[0], k, fragment[k]);
  }
  wait_for_grids();
  uint32_t last = 0;  // barrier of the slot before this one
  const auto release = [&] {
    if (last && threadIdx.x % 32 == 0) barrier_arrive(last);
  };
  for (int first = begin; first < work.end; first += Plan::pipeline_depth * teams) {
#pragma unroll
    for (int i = 0; i < Plan::pipeline_depth; ++i) {
      const int at = first + i * teams;
      if (at >= work.end) break;
      barrier_wait(turn.full(), turn.parity);
      const uint64_t b = wgmma_descriptor(turn.address());
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma_fence();
        wgmma_bytes<false, tile_tokens>(sums, fragment[k], b + 2 * k);
        wgmma_commit();
        wgmma_wait<2>();  // the one two before: its fragment is free, after two of a slot the slot before
        if (k == 1) release();
        if (k < 2) {
          decode(grids, next[i], k + 2, fragment[k + 2]);
        } else {  // after the last chunk nobody reads it
          if (k == 2) grids.load(rows, at + teams);
          decode(grids, next[(i + 1) % Plan::pipeline_depth], k - 2, fragment[k - 2]);
        }
      }
      last = turn.empty();
      turn.pass(teams);
      if (at + Plan::pipeline_depth * teams < work.end) next[i].load(rows, at + Plan::pipeline_depth * teams);
    }
  }
  wgmma_wait<0>();
  release();
}

__device__ inline Token token_of(const Arguments& a, int m) { return a.token[min(m, a.tokens - 1)]; }

// Warpgroups with the same rows, one of each team.
__device__ inline void meet(int part) { wait_for_warps(1 + part, 128 * teams); }

// Epilogue of a warpgroup. Its addresses are computed only after the main loop, which needs the registers.
struct Finish {
  uint32_t group;  // its shared memory
  int thread, team, part, row, token;

  __device__ Finish(const Work& work, uint32_t block) : token(work.token) {
    const int in_block = thread_later(), warpgroup = in_block / 128;
    thread = in_block % 128, team = warpgroup % teams, part = warpgroup / teams;
    row = work.row + part * 64, group = block + of_groups + warpgroup * group_bytes;
  }

  __device__ uint32_t waiting(int of_team) const {
    return group + (of_team - team) * group_bytes + factor_bytes + 4 * grid_bytes;
  }
};

__device__ inline Row factors_of(const Finish& f, int row) {
  uint32_t word[4];
  load_shared<16>(f.group + row * sizeof(Row), word);
  return {__uint_as_float(word[0]), __uint_as_float(word[1]), __uint_as_float(word[2]), int(word[3])};
}

// Sums of eight rows of a token -> y. `from`: those of each team's columns.
__device__ inline void store_whole(const Arguments& a, uint16_t* y, int row, const Row (&factors)[8],
                                   const uint32_t (&from)[teams], const Token& token) {
  int sum[8] = {};
#pragma unroll
  for (int of = 0; of < teams; ++of)
#pragma unroll
    for (int r = 0; r < 8; r += 4) {
      uint32_t four[4];
      load_shared<16>(from[of] + r * 4, four);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[r + c] += int(four[c]);
    }
  uint32_t word[4];
#pragma unroll
  for (int r = 0; r < 8; r += 2)
    word[r / 2] = pack_pair<Plan::dtype>(scaled<true>(sum[r], factors[r], token),
                                         scaled<true>(sum[r + 1], factors[r + 1], token));
  if (a.rows % 8 == 0) {
    if (row < a.rows) store_words<16>(y, word);
  } else {
#pragma unroll
    for (int r = 0; r < 8; ++r)
      if (row + r < a.rows) y[r] = uint16_t(word[r / 2] >> r % 2 * 16);
  }
}

// The same for rows with any zeros, row by row: few registers are left for doubles.
__device__ inline void store_any(const Arguments& a, uint16_t* y, int row, const Finish& f, int of_row,
                                 const uint32_t (&from)[teams], const Token& token) {
#pragma unroll 1
  for (int r = 0; r < 8 && row + r < a.rows; ++r) {
    int sum = 0;
#pragma unroll
    for (int of = 0; of < teams; ++of) {
      uint32_t word;
      load_shared<4>(from[of] + r * 4, &word);
      sum += int(word);
    }
    y[r] = uint16_t(pack_pair<Plan::dtype>(scaled<false, true>(sum, factors_of(f, of_row + r), token), 0.0f));
  }
}

// Sums -> y, through shared memory, 32 tokens of each team per pass: a lane gets 8 rows of a token, of all teams, and
// eight lanes 128 bytes of y. In registers a lane has rows 2 g and 2 g + 1 of its warp's 16, of tokens 8 i + 2 t and
// 8 i + 2 t + 1.
__device__ inline void finish(const Arguments& a, const Finish& f, const Sums& sums) {
  constexpr int pieces = tile_tokens / 32, rounds = (pieces + teams - 1) / teams;
  const int lane = f.thread % 32, of_row = lane % 8 * 8, of_token = f.thread / 32 * 8 + lane / 8, row = f.row + of_row;
  const uint32_t to = f.waiting(f.team) + lane % 4 * 2 * token_stride + place_of(f.thread / 32 * 16 + lane / 4 * 2);
  Token next = token_of(a, f.token + f.team * 32 + of_token);
  meet(f.part);  // all factors are written
  Row factors[8];
  bool whole = true;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    factors[r] = factors_of(f, of_row + r);
    whole = whole && are_whole(factors[r], factors[r]);
  }
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int piece = 0; piece < pieces; ++piece) {
      if (piece / teams != round) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int at = 16 * piece + 4 * i + c;
          store_pair(to + piece % teams * sum_bytes + (8 * i + c) * token_stride, sums[at], sums[at + 2]);
        }
    }
    meet(f.part);
    const int first = f.token + (round * teams + f.team) * 32 + of_token;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int m = first + half * 4;
      const Token token = next;
      next = token_of(a, half ? first + teams * 32 : first + 4);
      if (round * teams + f.team >= pieces || m >= a.tokens) continue;
      uint32_t from[teams];
#pragma unroll
      for (int of = 0; of < teams; ++of)
        from[of] = f.waiting(of) + f.team * sum_bytes + (of_token + half * 4) * token_stride + place_of(of_row);
      uint16_t* const y = a.y + int64_t(m) * a.rows + row;
      if (grouped || whole)
        store_whole(a, y, row, factors, from, token);
      else
        store_any(a, y, row, f, of_row, from, token);
    }
    meet(f.part);
  }
}

extern "C" __global__ void __launch_bounds__(Plan::threads, Plan::blocks_per_sm) w4a8_wgmma(const Arguments a) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // products of a warpgroup need it to be the same for all
  if (threadIdx.x == math_threads) set_barriers(shared, 0);
  __syncthreads();
  Turn turn(shared);
  const int items = Work::items(a.rows, a.tokens), chunks = (a.columns + chunk - 1) / chunk;
  if (warp >= 4 * warpgroups) {
    leave_registers<producer_registers>();
    wait_for_grids();
    let_next_grid_begin();
    if (threadIdx.x == math_threads)
#pragma unroll 1
      for (int item = blockIdx.x; item < items; item += gridDim.x)
        produce(a.x, a.tokens, Work(a.tokens, chunks, item, 0), turn);
  } else {
    take_registers<math_registers>();
    const int warpgroup = warp / 4, team = warpgroup % teams, part = warpgroup / teams;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      const Work work(a.tokens, chunks, item, 0);
      const int of_group = of_groups + warpgroup * group_bytes, row = work.row + part * 64 + warp % 4 * 16;
      const uint32_t grids = turn.block + of_group + factor_bytes + warp % 4 * grid_bytes;
      const Rows rows(a, row, work.end, grids);
      Step next[Plan::pipeline_depth];
#pragma unroll
      for (int i = 0; i < Plan::pipeline_depth; ++i)
        if (team + i * teams < work.end) next[i].load(rows, team + i * teams);
      if constexpr (grouped) copy_grids(a, row, grids);
#pragma unroll 1
      for (int at = Plan::pipeline_depth; at < Plan::l2_prefetch; ++at) prefetch(rows, team + at * teams);
      keep_factors(a, row, reinterpret_cast<Row*>(shared + of_group) + warp % 4 * 16);
      if constexpr (grouped) wait_for_all_copies();
      __syncwarp();
      Sums sums = {};
      multiply(rows, work, team, turn, next, sums);
      turn.skip(chunks);
      finish(a, Finish(work, turn.block), sums);
    }
  }
}
