// SPDX-License-Identifier: Apache-2.0
// One task of an attention step: up to kRows queries of one KV head over a range of its blocks.
//
//   block of 256 tokens    dots with the coded keys -> logits -> running maximum and weights
//                          -> sums of the coded values
//
// Bytes: keys and values of a block once, first keys, then values. They stay rotated: the query is rotated instead, and
// the sum of the values once at the end.
#pragma once
#include "attention_floats.h"
#include "attention_keys.h"
#include "attention_luts.h"
#include "attention_rotary.h"
#include "attention_values.h"
#include "../primitives/hadamard.h"

namespace hf_vq {
namespace {
namespace kv {

// Inner loops for codes of E entries of X numbers.
struct Loops {
  ScoreStrips score_strips[kSharing];    // for 1, 2 .. queries
  WeighPackets weigh_packets[kSharing];
  DecodePackets decode_packets;
  SumTables sum_tables;
};

template <int E, int X> Loops loops() {
  return {{score_strips<E, X, 1>, score_strips<E, X, 2>, score_strips<E, X, 3>, score_strips<E, X, 4>},
          {weigh_packets<E, X, 1>, weigh_packets<E, X, 2>, weigh_packets<E, X, 3>, weigh_packets<E, X, 4>},
          decode_packets<E, X>,
          sum_tables<E>};
}
template <int E> Loops loops(int x) { return x == 1 ? loops<E, 1>() : x == 2 ? loops<E, 2>() : loops<E, 4>(); }
inline Loops loops(const hf_vq_codes& codes) {
  return codes.bits == 4 ? loops<16>(codes.x) : codes.bits == 6 ? loops<64>(codes.x) : loops<256>(codes.x);
}

// Partial result of a row: its sums of coded values (rotated) and of unquantized values.
struct Part {
  Running run;
  alignas(64) float coded[kDim];
  alignas(64) float floats[kDim];
};

// State shared by all tasks.
struct Step {
  const hf_vq_attention_step& ask;
  Loops key, value;
  alignas(64) uint8_t key_table[kEntries * kComponents], value_table[kEntries * kComponents];  // unless learned
  float key_unit, value_unit;
  int64_t rows, chunks;                 // queries of a key/value head; tasks that share them
  int64_t first_block, blocks, splits;  // on the tape of the keys; tasks that share them
  Part* parts;                          // [units][rows][splits], if splits > 1
  float* score;                         // of coded_scores
  int status;

  explicit Step(const hf_vq_attention_step& asked) : ask(asked) {}
};

inline bool learned(const hf_vq_codes& codes) { return codes.learned != 0; }

// Number of queries that share a lookup. Entries that are loaded one by one are decoded once for all queries instead.
inline int sharing(const hf_vq_codes& codes) { return kWideLookup || codes.bits < 8 ? kSharing : 1; }

// Memory of a task; every part begins on a cache line.
struct Desk {
  Weights* weights;   // [rows]
  float* logits;      // [rows][256]
  float* rows;        // [rows][row_floats]
  uint8_t* queries;   // rounded, in tiles of 4 rows; learned keys: Luts [rows], then tables [rows][dim / x][entries]
  uint8_t* decoded;   // 64 packets
  float* dots;        // learned keys: [dim / x][entries]
  uint8_t* table;     // learned values: [dim / x][x][entries]
  float* units;       // of the values' levels, [value dim]
  Turning* turning;   // where keys have a rotary mean: what the head sums,
  float* pairs;       // [rows][2][lanes of the table],
  float* factors;     // [rows][lanes + kSeries],
  float* turned;      // [rows][256], the constant and q . R_n m
  int64_t size;

  Desk(const hf_vq_attention_step& ask, int count, uint8_t* memory) : size(0) {
    const int64_t key_entries = int64_t(ask.k.dim / ask.k.x) << ask.k.bits;
    weights = take<Weights>(memory, count);
    logits = take<float>(memory, count * kBlock);
    rows = take<float>(memory, count * row_floats(ask));
    queries = take<uint8_t>(memory, count * (learned(ask.k) ? int64_t(sizeof(Luts)) + key_entries : kDim));
    decoded = take<uint8_t>(memory, 64 * kBlock);
    dots = take<float>(memory, learned(ask.k) ? key_entries : 0);
    table = take<uint8_t>(memory, learned(ask.v) ? int64_t(ask.v.dim) << ask.v.bits : 0);
    units = take<float>(memory, kDim);
    const int64_t some = turns(ask.k) ? count : 0, lanes = turns(ask.k) ? RotaryTable(ask.k.rotary_table).lanes : 0;
    turning = take<Turning>(memory, turns(ask.k));
    pairs = take<float>(memory, some * 2 * lanes);
    factors = take<float>(memory, some * (lanes + kSeries));
    turned = take<float>(memory, some * kBlock);
  }
  static int64_t row_floats(const hf_vq_attention_step& ask) {
    return padded(ask.k.dim) + padded(ask.v.dim) + int64_t(ask.v.dim) * kFloats;
  }

 private:
  template <typename T> T* take(uint8_t* memory, int64_t count) {
    T* const found = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + size);  // null: the size is asked
    size += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return found;
  }
};

// Queries of a task: `rows` of them from `row` on.
struct Place {
  int64_t batch, head, row;
  int rows;
};

inline int tile_of(const Place& place, int r) { return int(smaller(place.rows - r / 4 * 4, 4)); }
inline Luts& luts_of(const Desk& desk, int r) { return reinterpret_cast<Luts*>(desk.queries)[r]; }

// Row r of the task: its query, rotated and rounded, and its bounds.
inline void open_row(const Step& step, const Place& place, const Desk& desk, int r, Row& row) {
  const hf_vq_attention_step& ask = step.ask;
  const hf_vq_codes& k = ask.k;
  const int64_t index = place.row + r, t = index % ask.queries, head = place.head * ask.group + index / ask.queries;
  row.query = desk.rows + r * Desk::row_floats(ask);
  row.floats = row.query + padded(k.dim);
  row.lanes = row.floats + padded(ask.v.dim);
  memset(row.query, 0, size_t(Desk::row_floats(ask)) * 4);
  read_token(ask.query, place.batch, head, t, k.dim, row.query);
  look(ask, t, row);
  row.run = kNothing;
  row.mask = place.batch * ask.mask_stride[0] + head * ask.mask_stride[1] + t * ask.mask_stride[2];
  row.constant = 0.0f;
  if (k.mean != nullptr) {
    const float* mean = k.mean + place.batch * k.mean_stride[0] + place.head * k.mean_stride[1];
    for (int i = 0; i < k.dim; ++i) row.constant += row.query[i] * mean[i];
  }
  float rotated[kDim];
  memcpy(rotated, row.query, size_t(k.dim) * 4);
  if (k.smoothing != nullptr) {
    const float* smoothing = k.smoothing + place.batch * k.mean_stride[0] + place.head * k.mean_stride[1];
    for (int i = 0; i < k.dim; ++i) rotated[i] /= smoothing[i];
  }
  hadamard_blocks(rotated, k.dim, k.block);
  if (learned(k)) {
    const int vectors = k.dim / k.x, entries = 1 << k.bits;
    Luts& luts = luts_of(desk, r);
    luts.table = reinterpret_cast<uint8_t*>(&luts_of(desk, place.rows)) + int64_t(r) * vectors * entries;
    make_luts(rotated, k.codebook + place.head * k.dim * entries, vectors, entries, k.x, desk.dots, luts);
    row.factor = ask.scaling;
    row.constant += luts.constant;
  } else {
    float unit;
    uint8_t* bytes = desk.queries + r / 4 * 4 * kDim;
    row.bias = -kLevelBias * round_query(rotated, k.dim, k.x, r % 4, tile_of(place, r), bytes, unit);
    row.factor = unit * step.key_unit * ask.scaling;
  }
  row.constant *= ask.scaling;
  if (!turns(k)) return;
  const RotaryTable table(k.rotary_table);
  const float* m = rotary_mean_of(k, place.batch, place.head);
  if (r == 0) choose_functions(table, m, *desk.turning);
  if (desk.turning->functions == 0) return;
  open_pairs(table, m, k.rotary_start, row.query, ask.scaling, desk.pairs + r * 2 * table.lanes);
}

// The values' tables, if every head has its own, and what their levels are worth.
inline void open_values(const Step& step, const Place& place, const Desk& desk) {
  const hf_vq_codes& v = step.ask.v;
  const int entries = 1 << v.bits;
  for (int s = 0; s < v.dim / v.x; ++s) {
    float unit = step.value_unit;
    if (learned(v)) {
      alignas(64) Components number;
      read_entries(v.codebook + (place.head * v.dim + s * v.x) * entries, entries, v.x, number);
      unit = round_entries(number, entries, v.x, 0, desk.table + s * v.x * entries);
    }
    for (int c = 0; c < v.x; ++c) desk.units[s * v.x + c] = unit;
  }
}

inline int64_t block_bytes(const hf_vq_codes& codes) { return codes.dim / codes.x * packet_bytes(codes.bits); }

inline const uint8_t* block_of(const hf_vq_codes& codes, const Place& place, int64_t block) {
  return codes.data + place.batch * codes.data_stride[0] + place.head * codes.data_stride[1] + block * block_bytes(codes);
}

// Scales of tokens low..high - 1 of a block, NaN where they are not finite; 0 elsewhere. Those of the next block
// are fetched.
inline void read_scales(const hf_vq_codes& codes, const Place& place, int64_t block, int low, int high, float* scale) {
  if (codes.scale == nullptr) {
    for (int i = 0; i < kBlock; i += kFloats) store(scale + i, splat(1.0f));
    return;
  }
  const int64_t at = place.batch * codes.scale_stride[0] + place.head * codes.scale_stride[1] + block * kBlock;
  for (int i = 0; i < kBlock; i += 32) __builtin_prefetch(codes.scale + at + kBlock + i, 0, 1);
  float some[kBlock];
  if (high - low < kBlock) {
    memset(some, 0, sizeof some);
    read_floats(codes.scale, HF_VQ_FLOAT16, at + low, high - low, some + low);
  }
  for (int i = 0; i < kBlock; i += kFloats) {
    const Floats x = high - low < kBlock ? load(some + i) : load_half(codes.scale + at + i);
    store(scale + i, x + (x - x));
  }
}

// desk.logits[r][t] <- the dot of query r and key t, in units of factor and scale, without the constant, of
// all tokens in the strips of tokens low..high - 1.
inline void score_block(const Step& step, const Place& place, const Desk& desk, const Row* rows, const uint8_t* packets,
                        int low, int high) {
  const hf_vq_codes& k = step.ask.k;
  if (learned(k)) {
    for (int r = 0; r < place.rows; ++r)
      score_tables(step.key.sum_tables, luts_of(desk, r), 1 << k.bits, packets, block_bytes(k), desk.logits + r * kBlock);
    return;
  }
  const int quads = k.dim / k.x / 4, begin = low / kStrip, end = (high + kStrip - 1) / kStrip;
  const int64_t strip = int64_t(quads) * packet_bytes(k.bits);
  int32_t bias[kRows];
  float* out[kRows];
  for (int r = 0; r < place.rows; ++r) {
    bias[r] = rows[r].bias;
    out[r] = desk.logits + r * kBlock + begin * kStrip;
  }
  if (place.rows <= sharing(k)) {
    step.key.score_strips[place.rows - 1](step.key_table, packets + begin * strip, end - begin, quads, desk.queries,
                                          bias, out);
    return;
  }
  for (int u = begin; u < end; ++u) {
    step.key.decode_packets(step.key_table, 0, packets + u * strip, quads, desk.decoded);
    for (int r = 0; r < place.rows; r += 4)
      score_decoded(tile_of(place, r), desk.decoded, quads * k.x, desk.queries + r * kDim, bias + r, out + r);
    for (int r = 0; r < place.rows; ++r) out[r] += kStrip;
  }
}

// lanes of every row += its weights times the values of a block.
inline void weigh_block(const Step& step, const Place& place, const Desk& desk, const Row* rows, const uint8_t* packets) {
  const hf_vq_codes& v = step.ask.v;
  const int count = v.dim / v.x, some = 64 / v.x;
  const int64_t stride = learned(v) ? int64_t(v.x) << v.bits : 0;
  const uint8_t* table = learned(v) ? desk.table : step.value_table;
  if (place.rows <= sharing(v)) {
    float* lanes[kSharing];
    for (int r = 0; r < place.rows; ++r) lanes[r] = rows[r].lanes;
    step.value.weigh_packets[place.rows - 1](table, stride, packets, count, desk.weights, lanes);
    return;
  }
  for (int s = 0; s < count; s += some) {
    const int n = int(smaller(some, count - s));
    step.value.decode_packets(table + s * stride, stride, packets + s * packet_bytes(v.bits), n, desk.decoded);
    for (int r = 0; r < place.rows; ++r)
      if (desk.weights[r].step != 0.0f)
        weigh_decoded(desk.decoded, n * v.x, desk.weights[r], rows[r].lanes + s * v.x * kFloats);
  }
}

// desk.logits <- logits of a block that begins at `position`, as if all of its tokens were in sight.
inline void coded_logits(const Step& step, const Place& place, const Desk& desk, const Row* rows, int64_t block, int low,
                         int high) {
  alignas(64) float scale[kBlock];
  read_scales(step.ask.k, place, block, low, high, scale);
  const hf_vq_codes& k = step.ask.k;
  score_block(step, place, desk, rows, block_of(k, place, block), low, high);
  if (!turns(k) || desk.turning->functions == 0) {
    for (int r = 0; r < place.rows; ++r) {
      float* s = desk.logits + r * kBlock;
      for (int i = 0; i < kBlock; i += kFloats)
        store(s + i, fma(load(s + i), splat(rows[r].factor) * load(scale + i), splat(rows[r].constant)));
    }
    return;
  }
  float constant[kRows];
  for (int r = 0; r < place.rows; ++r) constant[r] = rows[r].constant;
  turn_block(RotaryTable(k.rotary_table), *desk.turning, block * kBlock + k.rotary_start, low, high, place.rows,
             desk.pairs, constant, desk.factors, desk.turned);
  for (int r = 0; r < place.rows; ++r) {
    float* s = desk.logits + r * kBlock;
    for (int i = 0; i < kBlock; i += kFloats)
      store(s + i, fma(load(s + i), splat(rows[r].factor) * load(scale + i), load(desk.turned + r * kBlock + i)));
  }
}

// Add a block of the tape of the keys; no row sees codes from position `end` on.
inline void add_block(const Step& step, const Place& place, const Desk& desk, Row* rows, int64_t block, int64_t end) {
  const hf_vq_attention_step& ask = step.ask;
  const int64_t position = block * kBlock - ask.k.first;  // of the block's first token
  const int low = int(larger(-position, 0)), high = int(smaller(end - position, kBlock));
  if (low >= high) return;
  coded_logits(step, place, desk, rows, block, low, high);
  const int64_t v_block = block + (ask.v.first - ask.k.first) / kBlock;
  alignas(64) float scale[kBlock];
  read_scales(ask.v, place, v_block, low, high, scale);

  const int64_t start = ask.start == nullptr ? 0 : ask.start[place.batch];
  const int sink_low = int(larger(smaller(start - position, kBlock), 0));
  const int sink_high = int(smaller(larger(start + ask.sink_k.tokens - position, 0), kBlock));
  bool any = false, negative = false;
  float lowest[kRows];
  for (int r = 0; r < place.rows; ++r) {
    float *s = desk.logits + r * kBlock, highest;
    Weights& w = desk.weights[r];
    w.step = lowest[r] = 0.0f;
    const int last = int(smaller(smaller(rows[r].near, rows[r].end) - position, high));
    if (last <= low) continue;
    finish_logits(ask, rows[r], position, low, last, kBlock, s);
    for (int i = sink_low; i < sink_high; ++i) s[i] = -kInfinity;
    if (!soften(rows[r], ask.v.dim, s, kBlock)) continue;
    if (!scale_weights(s, scale, highest, lowest[r])) {
      rows[r].run.broken = true;
      lowest[r] = 0.0f;
      continue;
    }
    round_weights(s, 1.0f, highest, w);
    any |= w.step != 0.0f;
    negative |= lowest[r] < 0.0f;
  }
  const uint8_t* values = block_of(ask.v, place, v_block);
  if (any) weigh_block(step, place, desk, rows, values);
  if (!negative) return;
  for (int r = 0; r < place.rows; ++r) {
    round_weights(desk.logits + r * kBlock, -1.0f, -lowest[r], desk.weights[r]);
    desk.weights[r].step = -desk.weights[r].step;
  }
  weigh_block(step, place, desk, rows, values);
}

}  // namespace kv
}  // namespace
}  // namespace hf_vq
