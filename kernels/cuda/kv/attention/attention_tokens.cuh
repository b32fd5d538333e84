// SPDX-License-Identifier: Apache-2.0
// Token ranges of a query: unquantized, coded, and masked tokens.
//
//     position      0 .. sinks          ..           near                     limit
//     query i       [  floats  ]  [      codes      ][  floats of the tail   ]            (sinks from `near` on: tail)
//
//     near(i) = min(coded, max(tail_start, min(i - window + 1, length - fresh)))      limit(i) = i + 1, or by the mask
//
// In a paged cache all tokens are codes, and every row has its own length.
#pragma once
#include "kv/attention/attention_arguments.cuh"
#include "kv/attention/attention_swizzle.cuh"

constexpr bool causal = Plan::mask == Mask::NONE;
constexpr float log2_e = 1.44269504f;

// Token ranges of one row of the batch.
struct Tokens {
  int total, coded, tail_start, first_slot, start;

  __device__ Tokens(const Arguments& a, int row) {
    start = a.start ? int(__ldg(a.start + row)) : 0;
    if constexpr (Plan::page > 0) {
      total = coded = tail_start = int(a.length[row]), first_slot = 0;
    } else if (a.length) {
      total = int(*a.length);
      coded = max(total - a.window, 0), tail_start = max(total - a.tail_slots, 0);
      first_slot = tail_start % max(a.tail_slots, 1);
    } else {
      coded = a.coded, tail_start = a.tail_start, first_slot = 0;
      total = tail_start + a.tail_slots;
    }
  }

  __device__ int near(const Arguments& a, int query) const {
    const int i = total - a.queries + query;
    return max(min(coded, max(tail_start, min(i - a.window + 1, total - a.fresh))), 0);
  }
  __device__ int limit(const Arguments& a, int query) const { return causal ? total - a.queries + query + 1 : total; }
  // Coded tokens are below.
  __device__ int end(const Arguments& a, int query) const { return min(near(a, query), limit(a, query)); }
};

// The query that column `c` of a tile of 8 is for, numbered in its tile.
__device__ inline int query_of(int c) { return Plan::paired ? c / 2 : c; }

// Head and number of a query of a group.
struct Column {
  int head, query;
  bool exists;

  // `first`: of the block's columns.
  __device__ Column(const Arguments& a, int kv_head, int first, int column) {
    if (Plan::swizzle_orders > 1) column %= SwizzleColumns::queries;
    column += first;
    exists = column < a.groups * a.queries;
    column = exists ? column : 0;
    const int in_group = quotient(column, a.inverse_queries);
    head = kv_head * a.groups + in_group, query = column - in_group * a.queries;
  }
};

__device__ inline const char* mask_of(const Arguments& a, int row, const Column& at) {
  return causal ? nullptr : a.mask + row * a.mask_row + at.head * a.mask_head + at.query * a.mask_query;
}

// The logit of a column whose mask is `mask` for position `at`.
__device__ inline float masked(float logit, const char* mask, int at) {
  if constexpr (Plan::mask == Mask::BOOL) {
    return __ldg(mask + at) ? logit : minus_infinity;
  } else if constexpr (!causal) {
    float added[1];
    constexpr Dtype D = Plan::mask == Mask::FLOAT16    ? Dtype::FLOAT16
                        : Plan::mask == Mask::BFLOAT16 ? Dtype::BFLOAT16
                                                       : Dtype::FLOAT32;
    load_floats<D>(mask + int64_t(at) * size_of<D>, added);
    // The least number of a dtype is no infinity: a query that sees nothing else sees such tokens.
    return added[0] == minus_infinity ? minus_infinity : fmaxf(logit + added[0] * log2_e, -1e30f);
  }
  return logit;
}
