// SPDX-License-Identifier: Apache-2.0
// Rotated rows of a weight to codes: scales of groups by search (`encode_weight`), and LDLQ inside of blocks
// (`round_weight`). Their specifications are hf_vq/ops/reference/encode_weight.py and round_weight.py.
//
//     lane         r = 0 .. 63: a group, or a row in one block
//     columns      number j of lane r is at [j kLanes + r], so that no step reduces across lanes
//
//     for every vector:   u = numbers / scale -> nearest entry b -> e = numbers - scale b
//     LDLQ:               numbers of later vectors j lose sum_i F_ij e_i; each adds up its sum when its turn comes, in
//                         registers
//
// Bottleneck: comparing entries, of a scale that is tried one multiplication for each. Vectors of 1 or 2 numbers compare
// those of their cell (cells.h), one vector after the other, with scales as lanes; others compare all.
#pragma once
#include "../host/threads.h"
#include "../primitives/scratch.h"
#include "cells.h"

namespace hf_vq {
namespace {
namespace weight {

constexpr int kLanes = 64;
constexpr int kChunk = kRegisters >= 32 ? 4 : 2;        // vectors of lanes that are searched together
constexpr int kChunkLanes = kChunk * kFloats;
constexpr int kTried = kRegisters >= 32 ? 8 : 4;        // scales that are tried together

constexpr int kFactors = 16;                            // that are searched by cells, at most

static_assert(kFactors % kFloats == 0 && HF_VQ_NEAR_LANES % kFloats == 0, "lanes are whole vectors");
static_assert(kLanes % kChunkLanes == 0 && kChunkLanes <= kLanes, "lanes are whole chunks");

struct Call {
  const hf_vq_rows* w;
  const kv::Entries* entries;
  // encode_weight
  const float* factors;
  int count, refit;
  // round_weight
  const float* scales;
  const float* feedback;
  int64_t size, tiles;
  uint8_t* codes;
  uint16_t* scale;
  int status;
};

inline int64_t groups(const hf_vq_rows& w) { return w.in / w.group; }

// Entries, up to a multiple of 16 copies of the first one, which of equally near ones is the one that is found.
inline void read_all(const hf_vq_rows& w, kv::Entries& entries) {
  const int count = (w.entries + kv::kSome - 1) / kv::kSome * kv::kSome;
  uint16_t book[kv::kEntries * kv::kComponents] = {};
  for (int e = 0; e < count; ++e) memcpy(book + e * w.x, w.codebook + (e < w.entries ? e : 0) * w.x, size_t(w.x) * 2);
  kv::read_entries(book, count, w.x, entries);
  entries.ascending = entries.ascending && count == w.entries;
  for (int e = 0; e < count; ++e) {
    float norm = 0;
    for (int c = 0; c < w.x; ++c) norm += entries.number[c][e] * entries.number[c][e];
    entries.bonus[e] = -0.5f * norm;
  }
}

// Numbers of `count` adjacent columns of lanes rows[0..n), as columns; lanes that are not there are 0.
inline void gather(const float* const* rows, int n, int64_t count, float* columns) {
  for (int r = 0; r < kLanes; ++r)
    for (int64_t j = 0; j < count; ++j) columns[j * kLanes + r] = r < n ? rows[r][j] : 0.0f;
}

// Where lane r of a vector's component c is in `u`: the order that kv/encode.h reads.
template <int X> inline float* lane_of(float* u, int r, int c) {
  return u + (r / kv::kTogether * X + c) * kv::kTogether + r % kv::kTogether;
}

// The entry of the largest <u, b> - |b|^2 / 2, the first one of several; u's components are kTogether apart.
template <int X> inline int nearest_of_all(const kv::Entries& entries, const float* u) {
  float best = -kv::kInfinity;
  int found = 0;
  for (int e = 0; e < entries.count; ++e) {
    float along = entries.bonus[e];
    for (int c = 0; c < X; ++c) along = fma(u[c * kv::kTogether], entries.number[c][e], along);
    if (along > best) {
      best = along;
      found = e;
    }
  }
  return found;
}

// The same of those of u's cell, as lanes.
template <int X> inline int nearest_of_cell(const kv::Entries& entries, const hf_vq_cells& cells, const float* u) {
  constexpr int kVectors = HF_VQ_NEAR_LANES / kFloats;
  const int place = place_of<X>(cells, u, kv::kTogether, 1.0f);
  if (place < 0) return nearest_of_all<X>(entries, u);
  const float* numbers = cells.numbers + int64_t(place) * (X + 1) * HF_VQ_NEAR_LANES;
  const int used = (cells.count + kFloats - 1) / kFloats;
  Floats along[kVectors], top = splat(-kv::kInfinity);
  for (int i = 0; i < kVectors; ++i) {
    if (i >= used) break;
    along[i] = load(numbers + X * HF_VQ_NEAR_LANES + i * kFloats);
    for (int c = 0; c < X; ++c)
      along[i] = fma(splat(u[c * kv::kTogether]), load(numbers + c * HF_VQ_NEAR_LANES + i * kFloats), along[i]);
    top = max(top, along[i]);
  }
  const Floats best = splat(largest(top));
  int i = 0, lane = first_at_least(along[0], best);
  while (lane >= kFloats && i + 1 < used) lane = first_at_least(along[++i], best);
  return entries_of(cells, place)[i * kFloats + lane % kFloats];
}

// u = columns / scale of one vector.
template <int X> inline void divide(const float* columns, const float* scale, float* u) {
  for (int r = 0; r < kLanes; r += kFloats) {
    const Floats unit = max(load(scale + r), splat(kv::kSmallest));
    for (int c = 0; c < X; ++c) store(lane_of<X>(u, r, c), load(columns + c * kLanes + r) / unit);
  }
}

// The code of each lane of one vector. Lanes from n on are not there: theirs may stay unchanged.
template <int X> inline void nearest(const Call& call, float* u, int n, uint8_t* code) {
  const kv::Entries& entries = *call.entries;
  if constexpr (X <= 2) {
    if (call.w->scale_cells != nullptr && call.w->scale_cells->numbers != nullptr && !entries.ascending) {
      const hf_vq_cells cells = *call.w->scale_cells;  // a copy: as far as the compiler knows, writing codes changes it
      for (int r = 0; r < n; ++r) code[r] = uint8_t(nearest_of_cell<X>(entries, cells, lane_of<X>(u, r, 0)));
      return;
    }
  }
  for (int r = 0; r < kLanes; r += kChunkLanes) {
    const float* place[kChunk];
    uint8_t* found[kChunk];
    for (int k = 0; k < kChunk; ++k) {
      place[k] = lane_of<X>(u, r + k * kFloats, 0);
      found[k] = code + r + k * kFloats;
    }
    kv::nearest_own_entry<X, kChunk>(entries, place, found);
  }
}

// Add to error[f kLanes + r] the squared distance of lane r's vector w to its nearest entry times each of F scales s:
//
//     min_b |w - s b|^2 = |w|^2 - 2 s max_b (<w, b> - s |b|^2 / 2)
//
// so that all of them share the product. Of single numbers it is added up as such: with 256 entries it is so small that
// float32 loses it in that sum.
template <int X, int F>
inline void add_errors(const kv::Entries& entries, const float* columns, const float* scale, float* error) {
  for (int r = 0; r < kLanes; r += kFloats) {
    Floats vector[X], unit[F], top[F], norm = splat(0.0f);
    for (int c = 0; c < X; ++c) {
      vector[c] = load(columns + c * kLanes + r);
      norm = fma(vector[c], vector[c], norm);
    }
    for (int f = 0; f < F; ++f) {
      unit[f] = load(scale + f * kLanes + r);
      top[f] = splat(X == 1 ? kv::kInfinity : -kv::kInfinity);
    }
    for (int e = 0; e < entries.count; ++e) {
      if constexpr (X == 1) {
        const Floats b = splat(-entries.number[0][e]);
        for (int f = 0; f < F; ++f) {
          const Floats apart = fma(unit[f], b, vector[0]);
          top[f] = min(apart * apart, top[f]);
        }
        continue;
      }
      Floats along = splat(0.0f);
      for (int c = 0; c < X; ++c) along = fma(vector[c], splat(entries.number[c][e]), along);
      for (int f = 0; f < F; ++f) top[f] = max(fma(unit[f], splat(entries.bonus[e]), along), top[f]);
    }
    for (int f = 0; f < F; ++f) {
      const Floats squared = X == 1 ? top[f] : max(fma(splat(-2.0f) * unit[f], top[f], norm), splat(0.0f));
      float* sum = error + f * kLanes + r;
      store(sum, load(sum) + squared);
    }
  }
}

// The sums that add_errors adds up for one group under all factors: error[f] += .. for its vectors of X numbers, with
// the entries of their cells.
template <int X, int N>
inline void add_errors_of_group(const Call& call, const float* group, float inverse, const Floats (&unit)[N],
                                Floats (&error)[N]) {
  const kv::Entries& entries = *call.entries;
  const hf_vq_cells cells = *call.w->factor_cells;
  for (int64_t j = 0; j < call.w->group; j += X) {
    const int place = place_of<X>(cells, group + j, 1, inverse);
    const uint8_t* list = entries_of(cells, place < 0 ? 0 : place);
    Floats vector[X], top[N], norm = splat(0.0f);
    for (int c = 0; c < X; ++c) {
      vector[c] = splat(group[j + c]);
      norm = fma(vector[c], vector[c], norm);
    }
    for (Floats& each : top) each = splat(X == 1 ? kv::kInfinity : -kv::kInfinity);
    const int count = place < 0 ? entries.count : cells.count;
    for (int k = 0; k < count; ++k) {
      const int e = place < 0 ? k : list[k];
      if constexpr (X == 1) {
        const Floats b = splat(-entries.number[0][e]);
        for (int i = 0; i < N; ++i) {
          const Floats apart = fma(unit[i], b, vector[0]);
          top[i] = min(apart * apart, top[i]);
        }
      } else {
        Floats along = splat(0.0f);
        for (int c = 0; c < X; ++c) along = fma(vector[c], splat(entries.number[c][e]), along);
        for (int i = 0; i < N; ++i) top[i] = max(fma(unit[i], splat(entries.bonus[e]), along), top[i]);
      }
    }
    for (int i = 0; i < N; ++i)
      error[i] = error[i] + (X == 1 ? top[i] : max(fma(splat(-2.0f) * unit[i], top[i], norm), splat(0.0f)));
  }
}

// The scale of a group with the least error among its root mean square times each factor.
template <int X, int N> inline float search_group(const Call& call, const float* group, float rms) {
  alignas(64) float tried[N * kFloats], error[N * kFloats];
  for (int f = 0; f < N * kFloats; ++f) tried[f] = rms * call.factors[f < call.count ? f : call.count - 1];
  Floats unit[N], sum[N];
  for (int i = 0; i < N; ++i) {
    unit[i] = load(tried + i * kFloats);
    sum[i] = splat(0.0f);
  }
  add_errors_of_group<X, N>(call, group, rms > kv::kSmallest ? 1.0f / rms : 0.0f, unit, sum);
  for (int i = 0; i < N; ++i) store(error + i * kFloats, sum[i]);
  float best = kv::kInfinity, scale = rms;
  for (int f = 0; f < call.count; ++f) {
    scale = error[f] < best ? tried[f] : scale;
    best = error[f] < best ? error[f] : best;
  }
  return scale;
}

// search_group of `n` groups: their root mean squares become scales.
template <int X> inline void search_groups(const Call& call, const float* const* rows, int n, float* scale) {
  for (int r = 0; r < n; ++r)
    scale[r] = call.count <= kFloats       ? search_group<X, 1>(call, rows[r], scale[r])
               : call.count <= 2 * kFloats ? search_group<X, 2>(call, rows[r], scale[r])
                                           : search_group<X, kFactors / kFloats>(call, rows[r], scale[r]);
}

// fp16 and back: a scale as it is stored.
inline void round_scale(float* scale) {
  uint16_t half[kLanes];
  for (int r = 0; r < kLanes; r += kFloats) {
    store_half(half + r, load(scale + r));
    store(scale + r, load_half(half + r));
  }
}

// The root mean square of each lane's group, times the factor of the least error.
template <int X>
inline void search(const Call& call, const float* const* rows, int n, const float* columns, float* scale) {
  const int64_t group = call.w->group;
  alignas(64) float rms[kLanes], best[kLanes], tried[kTried * kLanes], error[kTried * kLanes];
  for (int r = 0; r < kLanes; r += kFloats) {
    Floats energy = splat(0.0f);
    for (int64_t j = 0; j < group; ++j) {
      const Floats number = load(columns + j * kLanes + r);
      energy = fma(number, number, energy);
    }
    store(rms + r, sqrt(energy / splat(float(group))));
    store(best + r, splat(kv::kInfinity));
    store(scale + r, call.count > 1 ? load(rms + r) : load(rms + r) * splat(call.factors[0]));
  }
  if constexpr (X <= 2) {
    if (call.w->factor_cells != nullptr && call.count > 1 && call.count <= kFactors) {
      search_groups<X>(call, rows, n, scale);
      round_scale(scale);
      return;
    }
  }
  for (int first = 0; call.count > 1 && first < call.count; first += kTried) {
    for (int f = 0; f < kTried; ++f) {
      const int factor = first + f < call.count ? first + f : call.count - 1;  // the last one again is no better
      for (int r = 0; r < kLanes; r += kFloats) {
        store(tried + f * kLanes + r, load(rms + r) * splat(call.factors[factor]));
        store(error + f * kLanes + r, splat(0.0f));
      }
    }
    for (int64_t j = 0; j < group; j += X) add_errors<X, kTried>(*call.entries, columns + j * kLanes, tried, error);
    for (int f = 0; f < kTried; ++f)
      for (int r = 0; r < kLanes; r += kFloats) {
        const Floats found = load(error + f * kLanes + r);
        store(scale + r, where_less(found, load(best + r), load(tried + f * kLanes + r), load(scale + r)));
        store(best + r, min(found, load(best + r)));
      }
  }
  round_scale(scale);
}

// Codes [lanes, vectors] under `scale`; with `fitted`, also the least-squares scale of their entries.
template <int X>
inline void assign(const Call& call, const float* columns, float* u, const float* scale, uint8_t* const* out, int n,
                   float* fitted) {
  const int64_t vectors = call.w->group / X;
  alignas(64) float along[kLanes] = {}, energy[kLanes] = {};
  alignas(64) uint8_t code[kLanes] = {};
  for (int64_t i = 0; i < vectors; ++i) {
    divide<X>(columns + i * X * kLanes, scale, u);
    nearest<X>(call, u, n, code);
    for (int r = 0; r < n; ++r) out[r][i] = code[r];
    if (fitted == nullptr) continue;
    for (int c = 0; c < X; ++c)
      for (int r = 0; r < kLanes; ++r) {
        const float entry = call.entries->number[c][code[r]];
        along[r] += columns[(i * X + c) * kLanes + r] * entry;
        energy[r] += entry * entry;
      }
  }
  if (fitted == nullptr) return;
  for (int r = 0; r < kLanes; ++r) {
    const bool helps = along[r] > 0 && energy[r] > 0 && scale[r] - scale[r] == 0;  // a scale that is not finite stays
    fitted[r] = helps ? along[r] / energy[r] : scale[r];
  }
  round_scale(fitted);
  for (int r = 0; r < kLanes; ++r)
    if (!(scale[r] - scale[r] == 0)) fitted[r] = scale[r];
}

template <int X> void encode_groups(int64_t begin, int64_t end, void* context) {
  Call& call = *static_cast<Call*>(context);
  const hf_vq_rows& w = *call.w;
  const int64_t vectors = w.group / X, all = w.n * groups(w);
  const Scratch<float> columns{size_t(w.group * kLanes)};
  if (!columns) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  alignas(64) float u[kLanes * X], scale[kLanes], fitted[kLanes];
  for (int64_t tile = begin; tile < end; ++tile) {
    const float* rows[kLanes];
    uint8_t* out[kLanes];
    const int64_t first = tile * kLanes;
    const int n = int(all - first < kLanes ? all - first : kLanes);
    for (int r = 0; r < n; ++r) {
      rows[r] = w.rows + (first + r) * w.group;
      out[r] = call.codes + (first + r) * vectors;
    }
    gather(rows, n, w.group, columns.get());
    search<X>(call, rows, n, columns.get(), scale);
    assign<X>(call, columns.get(), u, scale, out, n, call.refit ? fitted : nullptr);
    if (call.refit) {
      assign<X>(call, columns.get(), u, fitted, out, n, scale);
    }
    uint16_t half[kLanes];
    for (int r = 0; r < kLanes; r += kFloats) store_half(half + r, load(scale + r));
    memcpy(call.scale + first, half, size_t(n) * 2);
  }
}

// Components 0..X - 1 of a vector at column j: what is left of them after the errors of the columns before it, which
// `left` holds there.
template <int X> inline void take_errors(const float* feedback, int64_t size, int64_t j, float* left) {
  for (int r = 0; r < kLanes; r += kChunkLanes) {
    Floats sum[X][kChunk];
    for (int c = 0; c < X; ++c)
      for (int k = 0; k < kChunk; ++k) sum[c][k] = load(left + (j + c) * kLanes + r + k * kFloats);
    for (int64_t i = 0; i < j; ++i) {
      Floats error[kChunk];
      for (int k = 0; k < kChunk; ++k) error[k] = load(left + i * kLanes + r + k * kFloats);
      for (int c = 0; c < X; ++c) {
        const Floats factor = splat(feedback[(j + c) * size + i]);
        for (int k = 0; k < kChunk; ++k) sum[c][k] = fma(factor, error[k], sum[c][k]);
      }
    }
    for (int c = 0; c < X; ++c)
      for (int k = 0; k < kChunk; ++k) store(left + (j + c) * kLanes + r + k * kFloats, sum[c][k]);
  }
}

template <int X> void round_tiles(int64_t begin, int64_t end, void* context) {
  Call& call = *static_cast<Call*>(context);
  const hf_vq_rows& w = *call.w;
  const int64_t size = call.size, vectors = w.in / X;
  const Scratch<float> left{size_t(size * kLanes)};
  if (!left) {
    call.status = HF_VQ_NO_MEMORY;
    return;
  }
  alignas(64) float u[kLanes * X], scale[kLanes];
  alignas(64) uint8_t code[kLanes] = {};
  for (int64_t task = begin; task < end; ++task) {
    const int64_t block = task / call.tiles, first = task % call.tiles * kLanes, start = block * size;
    const int n = int(w.n - first < kLanes ? w.n - first : kLanes);
    const float* feedback = call.feedback + block * size * size;
    const float* rows[kLanes];
    for (int r = 0; r < n; ++r) rows[r] = w.rows + (first + r) * w.in + start;
    for (int r = 0; r < kLanes; ++r)
      scale[r] = r < n ? call.scales[(first + r) * groups(w) + start / w.group] : 1.0f;
    gather(rows, n, size, left.get());
    for (int64_t j = 0; j < size; j += X) {
      take_errors<X>(feedback, size, j, left.get());
      float* column = left.get() + j * kLanes;
      divide<X>(column, scale, u);
      nearest<X>(call, u, n, code);
      for (int r = 0; r < n; ++r) call.codes[(first + r) * vectors + (start + j) / X] = code[r];
      for (int c = 0; c < X; ++c)
        for (int r = 0; r < kLanes; ++r)
          column[c * kLanes + r] -= call.entries->number[c][code[r]] * scale[r];
    }
  }
}

inline bool fits(const hf_vq_rows& w) {
  const bool entry = (w.x == 1 || w.x == 2 || w.x == 4) && w.entries >= 2 && w.entries <= kv::kEntries;
  return entry && w.n >= 0 && w.in > 0 && w.group > 0 && w.in % w.group == 0 && w.group % w.x == 0;
}

inline Range with_x(int x, Range one, Range two, Range four) { return x == 1 ? one : x == 2 ? two : four; }

}  // namespace weight

int make_cells(const hf_vq_rows* w, const float* factors, int count, uint8_t* near, float* numbers,
               hf_vq_cells* cells) {
  if (!weight::fits(*w) || w->x > 2 || count < 1 || count > weight::kFactors) return HF_VQ_UNSUPPORTED;
  const Scratch<int> length(HF_VQ_CELLS);
  if (!length) return HF_VQ_NO_MEMORY;
  kv::Entries entries;
  weight::read_all(*w, entries);
  float most = 0.0f, farthest = 0.0f;
  for (int i = 0; i < w->entries * w->x; ++i) {
    const float number = __builtin_fabsf(half_to_float(w->codebook[i]));
    if (!(number < kv::kInfinity)) return HF_VQ_UNSUPPORTED;
    most = number > most ? number : most;
  }
  for (int f = 0; f < count; ++f) {
    if (!(factors[f] > 0.0f)) return HF_VQ_UNSUPPORTED;
    farthest = factors[f] > farthest ? factors[f] : farthest;
  }
  const float reach = 1.25f * most * farthest;
  if (!(reach > kv::kSmallest && reach < 1e6f)) return HF_VQ_UNSUPPORTED;
  const auto list = w->x == 1 ? weight::list_all<1> : weight::list_all<2>;
  if (!list(entries, w->entries, factors, count, reach, near, length.get())) return HF_VQ_UNSUPPORTED;
  const int longest = weight::pack_lists(length.get(), near);
  if (numbers != nullptr) {
    if (longest > HF_VQ_NEAR_LANES) return HF_VQ_UNSUPPORTED;
    weight::write_numbers(entries, w->x, near, longest, numbers);
  }
  *cells = {near, numbers, longest, reach};
  return HF_VQ_OK;
}

int rows_supported(const hf_vq_rows* w) { return weight::fits(*w) ? HF_VQ_OK : HF_VQ_UNSUPPORTED; }

int encode_weight(const hf_vq_rows* w, const float* factors, int count, int refit, uint8_t* codes, uint16_t* scale) {
  if (!weight::fits(*w) || count < 1) return HF_VQ_UNSUPPORTED;
  kv::Entries entries;
  weight::read_all(*w, entries);
  weight::Call call{};
  call.w = w;
  call.entries = &entries;
  call.factors = factors;
  call.count = count;
  call.refit = refit;
  call.codes = codes;
  call.scale = scale;
  const int64_t tiles = (w->n * weight::groups(*w) + weight::kLanes - 1) / weight::kLanes;
  parallel_for(tiles, 1, weight::with_x(w->x, weight::encode_groups<1>, weight::encode_groups<2>,
                                        weight::encode_groups<4>), &call);
  return call.status;
}

int round_weight(const hf_vq_rows* w, const float* scale, const float* feedback, int64_t size, uint8_t* codes) {
  if (!weight::fits(*w) || size < w->x || size % w->x || w->group % size) return HF_VQ_UNSUPPORTED;
  kv::Entries entries;
  weight::read_all(*w, entries);
  weight::Call call{};
  call.w = w;
  call.entries = &entries;
  call.scales = scale;
  call.feedback = feedback;
  call.size = size;
  call.tiles = (w->n + weight::kLanes - 1) / weight::kLanes;
  call.codes = codes;
  parallel_for(w->in / size * call.tiles, 1, weight::with_x(w->x, weight::round_tiles<1>, weight::round_tiles<2>,
                                                            weight::round_tiles<4>), &call);
  return call.status;
}

}  // namespace
}  // namespace hf_vq
