// SPDX-License-Identifier: Apache-2.0
// One attention step over a quantized KV cache (specification: ops/reference/kv_attention.py):
//
//   o = sum_j softmax_j(softcap(scaling <q, k_j>) + mask_j) v_j       k_j, v_j floats or codes
//
// Tasks split the queries of a KV head in chunks of kRows. If that leaves threads idle, they also split the blocks of
// tokens (flash decoding); the partial results of a query are then merged with the weights
// e^(maximum of a part - maximum of all).
#pragma once
#include "append.h"
#include "attention_task.h"
#include "../kernels.h"
#include "../primitives/scratch.h"
#include "../host/threads.h"

namespace hf_vq {
namespace {
namespace kv {

// Sinks, then the floats from the window of each row on.
inline void add_all_floats(const Step& step, const Place& place, Row* rows) {
  const hf_vq_attention_step& ask = step.ask;
  int64_t low[kRows], high[kRows], first = INT64_MAX, last = 0;
  const int64_t start = ask.start == nullptr ? 0 : ask.start[place.batch];
  for (int r = 0; r < place.rows; ++r) {
    low[r] = 0;
    high[r] = smaller(rows[r].near, rows[r].end);
  }
  for (int64_t t = 0; t < ask.sink_k.tokens; t += kFloatTokens) {
    const int n = int(smaller(kFloatTokens, ask.sink_k.tokens - t));
    add_floats(ask, ask.sink_k, ask.sink_v, place.batch, place.head, t, n, start + t, rows, place.rows, low, high);
  }
  for (int r = 0; r < place.rows; ++r) {
    low[r] = larger(rows[r].near, ask.tail_start);
    high[r] = rows[r].end;
    first = smaller(first, low[r]);
    last = larger(last, high[r]);
  }
  for (int64_t j = first; j < last; j += kFloatTokens) {
    const int n = int(smaller(kFloatTokens, last - j));
    add_floats(ask, ask.tail_k, ask.tail_v, place.batch, place.head, j - ask.tail_start, n, j, rows, place.rows, low,
               high);
  }
}

inline void leave_part(const Step& step, const Desk& desk, const Row& row, Part& part) {
  const int dim = step.ask.v.dim;
  part.run = row.run;
  memset(part.coded, 0, sizeof part.coded);
  for (int c = 0; c < dim; ++c) part.coded[c] = sum(load(row.lanes + c * kFloats)) * desk.units[c];
  memcpy(part.floats, row.floats, size_t(padded(dim)) * 4);
}

// o = (R^-1 coded + floats) / total of the `count` parts of query `index` of a key/value head.
inline void close_row(const Step& step, int64_t batch, int64_t kv_head, int64_t index, const Part* parts, int64_t count) {
  const hf_vq_attention_step& ask = step.ask;
  const int64_t head = kv_head * ask.group + index / ask.queries, t = index % ask.queries;
  const int dim = ask.v.dim;
  float top = -kInfinity;
  bool broken = false;
  for (int64_t i = 0; i < count; ++i) {
    top = parts[i].run.largest > top ? parts[i].run.largest : top;
    broken |= parts[i].run.broken;
  }
  const bool blind = top == -kInfinity;
  float total = 0.0f;
  if (ask.s_aux != nullptr) {
    top = ask.s_aux[head] > top ? ask.s_aux[head] : top;
    total = exp_of(ask.s_aux[head] - top);
  }
  Part sums;
  memset(sums.coded, 0, sizeof sums.coded);
  memset(sums.floats, 0, sizeof sums.floats);
  for (int64_t i = 0; i < count && !blind; ++i) {
    const Part& part = parts[i];
    if (part.run.largest == -kInfinity) continue;
    const float weight = exp_of(part.run.largest - top);
    total += weight * part.run.total;
    for (int c = 0; c < padded(dim); c += kFloats) {
      store(sums.coded + c, fma(load(part.coded + c), splat(weight), load(sums.coded + c)));
      store(sums.floats + c, fma(load(part.floats + c), splat(weight), load(sums.floats + c)));
    }
  }
  hadamard_blocks(sums.coded, dim, ask.v.block);
  const float share = broken ? __builtin_nanf("") : blind ? 0.0f : 1.0f / total;
  // Codes of the largest numbers may lead a little beyond them: float16 would make that infinite.
  const Floats most = splat(ask.query.dtype == HF_VQ_FLOAT16 ? kLargestHalf : kInfinity), least = splat(0.0f) - most;
  const Floats above = splat(kInfinity), below = splat(-kInfinity);
  for (int c = 0; c < padded(dim); c += kFloats) {
    const Floats x = (load(sums.coded + c) + load(sums.floats + c)) * splat(share);
    const Floats low = where_less(x, least, where_less(below, x, least, x), x);
    store(sums.coded + c, where_less(most, x, where_less(x, above, most, x), low));
  }
  const int64_t at = batch * ask.out_stride[0] + head * ask.out_stride[1] + t * ask.out_stride[2];
  write_floats(ask.out, ask.query.dtype, at, dim, sums.coded);
}

inline void run_task(Step& step, int64_t task) {
  const hf_vq_attention_step& ask = step.ask;
  const int64_t split = task % step.splits, chunk = task / step.splits % step.chunks;
  const int64_t unit = task / step.splits / step.chunks;
  Place place = {unit / ask.heads, unit % ask.heads, chunk * kRows, 0};
  place.rows = int(smaller(kRows, step.rows - place.row));
  const Scratch<uint8_t> memory(size_t(Desk(ask, place.rows, nullptr).size));
  if (!memory) {
    __atomic_store_n(&step.status, int(HF_VQ_NO_MEMORY), __ATOMIC_RELAXED);
    return;
  }
  const Desk desk(ask, place.rows, memory.get());
  Row rows[kRows];
  int64_t end = 0;
  for (int r = 0; r < place.rows; ++r) {
    open_row(step, place, desk, r, rows[r]);
    end = larger(end, smaller(rows[r].near, rows[r].end));
  }
  int64_t block = step.first_block + step.blocks * split / step.splits;
  const int64_t last = step.first_block + step.blocks * (split + 1) / step.splits;
  if (step.score != nullptr) {
    for (; block < last; ++block) {
      const int64_t position = block * kBlock - ask.k.first;
      const int low = int(larger(-position, 0)), high = int(smaller(ask.k.count - position, kBlock));
      coded_logits(step, place, desk, rows, block, low, high);
      for (int r = 0; r < place.rows; ++r)
        memcpy(step.score + (unit * step.rows + place.row + r) * ask.k.count + position + low,
               desk.logits + r * kBlock + low, size_t(high - low) * 4);
    }
    return;
  }
  open_values(step, place, desk);
  if (split == 0) add_all_floats(step, place, rows);
  for (; block < last; ++block) add_block(step, place, desk, rows, block, end);
  for (int r = 0; r < place.rows; ++r) {
    const int64_t index = place.row + r;
    Part alone;
    Part& part = step.splits > 1 ? step.parts[(unit * step.rows + index) * step.splits + split] : alone;
    leave_part(step, desk, rows[r], part);
    if (step.splits == 1) close_row(step, place.batch, place.head, index, &part, 1);
  }
}

inline void run_tasks(int64_t begin, int64_t end, void* context) {
  for (int64_t task = begin; task < end; ++task) run_task(*static_cast<Step*>(context), task);
}

inline void close_rows(int64_t begin, int64_t end, void* context) {
  const Step& step = *static_cast<Step*>(context);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t unit = i / step.rows;
    close_row(step, unit / step.ask.heads, unit % step.ask.heads, i % step.rows, step.parts + i * step.splits,
              step.splits);
  }
}

// Number of tasks that split the blocks of a head: the tasks fill the threads evenly, and each has at least four
// blocks.
inline int64_t splits_for(int64_t tasks, int64_t blocks, int64_t workers) {
  if (workers <= 1 || tasks >= 4 * workers) return 1;
  int64_t divisor = tasks, rest = workers;
  while (rest != 0) {
    const int64_t next = divisor % rest;
    divisor = rest;
    rest = next;
  }
  return larger(smaller(workers / divisor, blocks / 4), 1);
}

// Everything but `parts`, `score` and `splits`.
inline int prepare(Step& step) {
  const hf_vq_attention_step& ask = step.ask;
  if (codes_supported(&ask.k, 0) != HF_VQ_OK || codes_supported(&ask.v, 1) != HF_VQ_OK) return HF_VQ_UNSUPPORTED;
  if ((ask.k.first - ask.v.first) % kBlock != 0 || !rotary_supported(ask.k)) return HF_VQ_UNSUPPORTED;
  step.key = loops(ask.k);
  step.value = loops(ask.v);
  alignas(64) Components number;
  if (!learned(ask.k)) {
    read_entries(ask.k.codebook, 1 << ask.k.bits, ask.k.x, number);
    step.key_unit = round_entries(number, 1 << ask.k.bits, ask.k.x, kLevelBias, step.key_table);
  }
  if (!learned(ask.v)) {
    read_entries(ask.v.codebook, 1 << ask.v.bits, ask.v.x, number);
    step.value_unit = round_entries(number, 1 << ask.v.bits, ask.v.x, 0, step.value_table);
  }
  step.rows = ask.group * ask.queries;
  step.chunks = (step.rows + kRows - 1) / kRows;
  step.first_block = ask.k.first / kBlock;
  step.blocks = ask.k.count == 0 ? 0 : (ask.k.first + ask.k.count - 1) / kBlock + 1 - step.first_block;
  step.splits = splits_for(ask.batch * ask.heads * step.chunks, step.blocks, threads());
  step.parts = nullptr;
  step.score = nullptr;
  step.status = HF_VQ_OK;
  return HF_VQ_OK;
}

}  // namespace kv

int attention(const hf_vq_attention_step* ask) {
  using namespace kv;
  Step step(*ask);
  if (const int status = prepare(step); status != HF_VQ_OK) return status;
  const int64_t units = ask->batch * ask->heads, rows = units * step.rows;
  const Scratch<Part> parts(step.splits > 1 ? size_t(rows * step.splits) : 0);
  if (!parts) return HF_VQ_NO_MEMORY;
  step.parts = parts.get();
  parallel_for(units * step.chunks * step.splits, 1, run_tasks, &step);
  if (step.splits > 1 && step.status == HF_VQ_OK) parallel_for(rows, 1, close_rows, &step);
  return step.status;
}

int coded_scores(const hf_vq_attention_step* ask, float* score) {
  using namespace kv;
  Step step(*ask);
  if (const int status = prepare(step); status != HF_VQ_OK) return status;
  step.score = score;
  parallel_for(ask->batch * ask->heads * step.chunks * step.splits, 1, run_tasks, &step);
  return step.status;
}

}  // namespace
}  // namespace hf_vq
