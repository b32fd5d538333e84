// SPDX-License-Identifier: Apache-2.0
// Arguments of attention.cu. B rows, H KV heads, `groups` query heads for each, Q queries.
#pragma once
#include "primitives/numbers.cuh"

// Numbers of Plan::dtype [B, heads, tokens, D], D side by side; strides count numbers.
struct Floats {
  const uint16_t* at;
  int64_t row, head, token;
};

// A tape: codes uint8 [B, H, tape, bytes of a token], tokens side by side, and scales fp16 [B, H, tape, numbers]. With pages
// (`Plan::page` tokens each), codes [pages, H, page, bytes of a token] and scales [pages, H, page, numbers]: strides of rows are
// those of pages, all as many bytes, multiples of 16, and `first` is 0.
struct Coded {
  const char* codes;
  const uint16_t* scale;     // not read without scales
  const uint16_t* codebook;  // fp16 [entries, x], or learned [H, D / x, entries, x]
  int64_t row, head;         // bytes of codes from one to the next
  int64_t scale_row, scale_head;
  int64_t first;  // index on the tape of position 0
};

struct Arguments {
  Floats query;    // [B, H groups, Q, D]
  Floats sink_k;   // [B, H, sinks, D]
  Floats sink_v;
  Floats tail_k;   // [B, H, tail_slots, D]
  Floats tail_v;
  Coded keys;
  Coded values;
  const float* mean;  // [B, H, D] added to every decoded key, or null
  const float* smoothing;  // [B, H, D], strides of `mean`: keys were multiplied by it before they were coded; or null
  int64_t mean_row, mean_head;
  const int64_t* start;  // [B] position of each row's first token, or null = 0
  const char* mask;      // of Plan::mask [B, H groups, Q, tokens]; strides in bytes
  int64_t mask_row, mask_head, mask_query;
  const float* nothing;   // [H groups] logits that attend to nothing, or null
  const int64_t* length;  // tokens; null: tail_start + tail_slots; with pages [B], of each row
  const int* pages;       // [B, table] numbers of the pages of each row's tokens; not read without pages
  uint16_t* out;          // [B, H groups, Q, Dv] of Plan::dtype
  float* partial;         // of each group of columns and split: statistics and sums
  uint32_t* arrived;      // [groups of columns], zero before and after
  int kv_heads;
  int groups;
  int queries;
  int sinks;
  int tail_start;  // position of the oldest token of the tail, of `tail_slots`
  int tail_slots;  // with `length`: the token at position p is in slot p % tail_slots, and the tail is full
  int window;
  int fresh;
  int coded;   // tokens that have codes; with `length`: all but the newest `window`
  int across;  // groups of columns of a kv head
  int splits;  // blocks for the tokens of one group of columns, at most
  int table;   // from the pages of a row to those of the next
  uint32_t inverse_across, inverse_heads, inverse_splits, inverse_queries;  // ceil(2^32 / x), 0 for 1: see `quotient`
  int settled;    // earlier kernels do not write the codebooks
  float scaling;  // of the logits, times log2 e
  float softcap;  // c log2 e
};

// x / d with 2^32 / d, rounded up, for small numbers: a division costs as much as a trip to memory.
__device__ inline uint32_t quotient(uint32_t x, uint32_t inverse) { return inverse ? __umulhi(x, inverse) : x; }
