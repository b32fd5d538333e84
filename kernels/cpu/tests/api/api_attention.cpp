// SPDX-License-Identifier: Apache-2.0
// hf_vq_attention over tapes of random bytes: every instruction set against plain double arithmetic
// (hf_vq/ops/reference/kv_attention.py) and against scalar.
#include <cmath>

#include "library.h"
#include "tapes.h"

namespace hf_vq::check {
namespace {

constexpr int64_t kLengths[] = {0, 1, 2, 15, 16, 63, 64, 65, 255, 256, 257, 300, 511, 512, 513, 700};

// Sizes of a problem.
struct Shape {
  Coding keys, values;
  int k_dim, v_dim;
  int64_t coded, overlap, tail;  // coded tokens, those of them that are floats too, all that are floats
  int64_t sinks, group, queries, k_first, v_first;
  int64_t batch = random_int(1, 2), heads = random_int(1, 2);
};

Shape random_shape(const Coding& keys) {
  const int dims[] = {16, 32, 64, 80, 96, 128, 256};
  const int64_t groups[] = {1, 1, 2, 4, 7, 8}, queries[] = {1, 1, 1, 2, 3, 9, 33};
  Shape s{keys, kCodings[kValueCodings[random_int(0, 5)]], dims[random_int(0, 6)], 0, kLengths[random_int(0, 15)],
          0, 0, random_int(0, 1) * 4, groups[random_int(0, 5)], queries[random_int(0, 6)], 0, 0};
  if (s.queries > 8) s.group = 1;
  s.v_dim = random_bits() % 4 == 0 ? dims[random_int(0, 6)] : s.k_dim;
  s.overlap = random_int(0, s.coded < 70 ? s.coded : 70);
  s.tail = s.overlap + random_int(0, 3);  // the newest may have no code
  if (s.coded - s.overlap + s.tail < s.queries) s.tail = s.queries - (s.coded - s.overlap);
  s.k_first = random_int(0, 2) * random_int(0, 300);
  s.v_first = s.k_first % 256 + 256 * random_int(0, 2);  // the same place in a block
  return s;
}

// One attention step and what it must give.
struct Step {
  hf_vq_attention_step step{};
  int64_t batch, heads, group, queries, total;
  Tape k, v;
  Rows tail_k, tail_v, sink_k, sink_v, query;
  Guarded<int64_t> start;
  Numbers mask;
  Guarded<float> s_aux;
  Guarded<double> out;    // [batch, heads * group, queries, v.dim]
  Guarded<double> apart;  // by how much two instruction sets may differ there
  double size = 0;        // of a value
  double rounding = 0;    // what 8 bits of the entries do to a value

  explicit Step(const Shape& s)
      : batch(s.batch),
        heads(s.heads),
        group(s.group),
        queries(s.queries),
        total(s.coded - s.overlap + s.tail),
        k(s.keys, batch, heads, s.k_first + s.coded, s.k_dim, random_bits() % 2),
        v(s.values, batch, heads, s.v_first + s.coded, s.v_dim, false),
        tail_k(random_dtype(), batch, heads, s.tail, s.k_dim),
        tail_v(random_dtype(), batch, heads, s.tail, s.v_dim),
        sink_k(tail_k.f.dtype, batch, heads, s.sinks, s.k_dim),
        sink_v(tail_v.f.dtype, batch, heads, s.sinks, s.v_dim),
        query(random_dtype(), batch, heads * group, queries, s.k_dim) {
    k.c.first = s.k_first;
    v.c.first = s.v_first;
    k.c.count = v.c.count = s.coded;
    const float sizes[] = {0.5f, 20, 200};
    if (random_bits() % 2) k.add_rotary(sizes[random_int(0, 2)]);
    if (random_bits() % 2) k.add_smoothing();
    step.k = k.c;
    step.v = v.c;
    step.sink_k = sink_k.f;
    step.sink_v = sink_v.f;
    step.tail_k = tail_k.f;
    step.tail_v = tail_v.f;
    step.query = query.f;
    step.batch = batch;
    step.heads = heads;
    step.group = group;
    step.queries = queries;
    step.tail_start = s.coded - s.overlap;
    step.fresh = random_int(0, queries < s.tail ? queries : s.tail);
    step.window = random_int(0, s.tail + 3);
    step.scaling = float(1 / std::sqrt(double(s.k_dim)));
    step.softcap = random_bits() % 4 == 0 ? 5.0f : 0.0f;
    if (random_bits() % 3 == 0) {
      start = Guarded<int64_t>(size_t(batch));
      for (size_t b = 0; b < start.size(); ++b) start[b] = random_int(0, total - 1);
      step.start = start.get();
    }
    copy_sinks(sink_k, tail_k);
    copy_sinks(sink_v, tail_v);
    if (random_bits() % 3 == 0) {
      s_aux = Guarded<float>(size_t(heads * group));
      for (size_t i = 0; i < s_aux.size(); ++i) s_aux[i] = random_normal();
      step.s_aux = s_aux.get();
    }
    add_mask();
  }

  // A token that is a sink and in the tail is the same in both.
  void copy_sinks(Rows& sinks, const Rows& tail) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t s = 0; s < sinks.f.tokens; ++s) {
          const int64_t t = s + (step.start == nullptr ? 0 : start[size_t(b)]) - step.tail_start;
          for (int64_t d = 0; d < sinks.dim && t >= 0 && t < tail.f.tokens; ++d)
            sinks.numbers.set(sinks.index(b, h, s, d), float(tail.at(b, h, t, d)));
        }
  }

  // A mask over all tokens and a few more, broadcast in any dimension.
  void add_mask() {
    const int64_t kind = random_int(0, 2), length = total + random_int(0, 3);
    if (kind == 0) return;
    const int64_t sizes[3] = {random_bits() % 2 ? batch : 1, random_bits() % 2 ? heads * group : 1,
                              random_bits() % 2 ? queries : 1};
    mask = Numbers(kind == 1 ? HF_VQ_BOOL : random_dtype(), size_t(sizes[0] * sizes[1] * sizes[2] * length));
    for (size_t i = 0; i < mask.size(); ++i) {
      const bool blocked = random_bits() % 4 == 0;
      mask.set(i, kind == 1 ? float(!blocked) : blocked ? -INFINITY : random_float());
    }
    step.mask = mask.data();
    step.mask_dtype = mask.dtype();
    step.mask_stride[0] = sizes[0] > 1 ? sizes[1] * sizes[2] * length : 0;
    step.mask_stride[1] = sizes[1] > 1 ? sizes[2] * length : 0;
    step.mask_stride[2] = sizes[2] > 1 ? length : 0;
  }

  // All keys or values of a head as numbers: the floats of the tail, then what stands for every token
  // outside the window (its codes, or a sink).
  struct Seen {
    int64_t tail, dim;
    Guarded<double> near, far;
  };
  Seen see(const Tape& tape, const Rows& sinks, const Rows& tail, int64_t b, int64_t h) const {
    const int64_t dim = tape.c.dim;
    Seen seen{tail.f.tokens, dim, Guarded<double>(size_t(tail.f.tokens * dim)), Guarded<double>(size_t(total * dim))};
    for (int64_t t = 0; t < tail.f.tokens; ++t)
      for (int64_t d = 0; d < dim; ++d) seen.near[size_t(t * dim + d)] = tail.at(b, h, t, d);
    for (int64_t j = 0; j < total; ++j) {
      double* to = seen.far.get() + j * dim;
      const int64_t slot = j - (step.start == nullptr ? 0 : start[size_t(b)]);
      if (slot >= 0 && slot < sinks.f.tokens)
        for (int64_t d = 0; d < dim; ++d) to[d] = sinks.at(b, h, slot, d);
      else if (j < tape.c.count)
        tape.decode(b, h, tape.c.first + j, to);
      else
        memcpy(to, seen.near.get() + (j - step.tail_start) * dim, size_t(dim) * 8);
    }
    return seen;
  }
  bool exact(int64_t i, int64_t j) const {
    return j >= step.tail_start && (j > i - step.window || j >= total - step.fresh);
  }
  // The row at position j as a query at position i sees it.
  const double* row(const Seen& seen, int64_t i, int64_t j) const {
    return exact(i, j) ? seen.near.get() + (j - step.tail_start) * seen.dim : seen.far.get() + j * seen.dim;
  }
  // True if the token is read from its codes.
  bool is_coded(int64_t b, int64_t i, int64_t j) const {
    const int64_t slot = j - (step.start == nullptr ? 0 : start[size_t(b)]);
    return !exact(i, j) && j < v.c.count && (slot < 0 || slot >= step.sink_k.tokens);
  }

  void compute() {
    out = Guarded<double>(size_t(batch * heads * group * queries * v.c.dim));
    apart = Guarded<double>(out.size());
    Guarded<double> score(size_t(total + 1));
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h) {
        const Seen keys = see(k, sink_k, tail_k, b, h), values = see(v, sink_v, tail_v, b, h);
        for (int64_t i = 0; i < total * values.dim; ++i) size = std::fmax(size, std::fabs(values.far[size_t(i)]));
        for (size_t i = 0; i < values.near.size(); ++i) size = std::fmax(size, std::fabs(values.near[i]));
        for (int64_t t = 0; t < v.c.count; ++t) rounding = std::fmax(rounding, v.rounding(b, h, v.c.first + t));
        for (int64_t head = h * group; head < (h + 1) * group; ++head)
          for (int64_t q = 0; q < queries; ++q) compute(keys, values, b, head, q, score.get());
      }
  }

  void compute(const Seen& keys, const Seen& values, int64_t b, int64_t head, int64_t q, double* score) {
    const int64_t i = total - queries + q;
    double most = step.s_aux == nullptr ? -INFINITY : double(s_aux[size_t(head)]), products = 0;
    for (int64_t j = 0; j < total; ++j) {
      const double* key = row(keys, i, j);
      double s = 0, sum = 0;
      for (int64_t d = 0; d < keys.dim; ++d) {
        const double x = query.at(b, head, q, d);
        s += key[d] * x;
        const double means = std::fabs(k.mean_of(b, head / group, d)) + k.rotary_size(b, head / group, int(d));
        sum += (std::fabs(key[d]) + means) * std::fabs(x);
      }
      products = std::fmax(products, sum);
      s *= double(step.scaling);
      if (step.softcap != 0) s = std::tanh(s / double(step.softcap)) * double(step.softcap);
      if (step.mask != nullptr) {
        const double m = double(
            mask[size_t(b * step.mask_stride[0] + head * step.mask_stride[1] + q * step.mask_stride[2] + j)]);
        s = step.mask_dtype != HF_VQ_BOOL ? s + m : m != 0 ? s : -INFINITY;
      } else if (j > i) {
        s = -INFINITY;
      }
      score[j] = s;
      most = std::fmax(most, s);
    }
    const int64_t at = ((b * heads * group + head) * queries + q) * values.dim;
    double *to = out.get() + at, *differ = apart.get() + at;
    for (int64_t d = 0; d < values.dim; ++d) to[d] = differ[d] = 0;
    if (std::isinf(most)) return;  // it sees nothing
    double weights = step.s_aux == nullptr ? 0 : std::exp(double(s_aux[size_t(head)]) - most);
    // Coded values have weights of 14 or 16 bits of the largest weight of a block, times their scales. On two
    // instruction sets they differ by up to a step, with a deviation of 0.3 steps.
    double largest = 0, squares[256] = {}, variance[256] = {};
    for (int64_t j = 0; j < total; ++j) {
      const double weight = std::exp(score[j] - most), *value = row(values, i, j);
      weights += weight;
      for (int64_t d = 0; d < values.dim; ++d) to[d] += weight * value[d];
      const double scale = is_coded(b, i, j) ? v.scale_of(b, head / group, v.c.first + j) : 0;
      if (weight * scale != 0) {
        largest = std::fmax(largest, weight * std::fabs(scale));
        for (int64_t d = 0; d < values.dim; ++d) squares[d] += value[d] * value[d] / (scale * scale);
      }
      if ((v.c.first + j) % 256 != 255 && j + 1 < total) continue;
      for (int64_t d = 0; d < values.dim; ++d) {
        variance[d] += squares[d] * largest * largest;
        squares[d] = 0;
      }
      largest = 0;
    }
    // Sums of floats, whose errors add up like a random walk; exp and tanh.
    const double dim = double(values.dim), blocks = double(total) / 256;
    const double sums = kHalfUlp * (32 + 4 * std::sqrt(blocks)) * std::sqrt(dim);
    products += smoothed_products(b, head, q);
    double logit = kHalfUlp * (double(keys.dim) / 4 + 32) * products + dot_apart(b, head, q);
    logit = logit * double(step.scaling) + 1e-6 * (1 + double(step.softcap));
    for (int64_t d = 0; d < values.dim; ++d) {
      to[d] /= weights;
      differ[d] = size * (std::expm1(2 * logit) + sums) + 7 * 0.3 / 16383 * std::sqrt(variance[d]) / weights;
    }
  }

  // Products of a query with learned entries, which kernels keep as tables of 8 bits above their minimum: those
  // within a factor of two of the widest, of half of it, .. have the same step.
  struct Tables {
    int64_t vectors, entries;
    Guarded<double> table, low, span;
    double widest = 0, products = 0, steps[4] = {};

    Tables(const Tape& k, int64_t head, const double* x)
        : vectors(k.vectors),
          entries(int64_t(1) << k.c.bits),
          table(size_t(vectors * entries)),
          low{size_t(vectors)},
          span{size_t(vectors)} {
      for (int64_t s = 0; s < vectors; ++s) {
        double top = -INFINITY, bottom = INFINITY;
        for (int64_t e = 0; e < entries; ++e) {
          double dot = 0;
          for (int c = 0; c < k.c.x; ++c) dot += x[size_t(s * k.c.x + c)] * k.entry(head, s, int(e), c);
          table[size_t(s * entries + e)] = dot;
          top = std::fmax(top, dot);
          bottom = std::fmin(bottom, dot);
        }
        low[size_t(s)] = bottom;
        span[size_t(s)] = top - bottom;
        widest = std::fmax(widest, top - bottom);
        products += std::fmax(std::fabs(top), std::fabs(bottom));
      }
      for (int64_t s = 0; s < vectors; ++s) step_of(s) = std::fmax(step_of(s), span[size_t(s)] / 255);
    }
    double& step_of(int64_t s) {
      const double halvings = -std::log2(span[size_t(s)] / widest);
      return steps[halvings < 3 ? int(halvings) : 3];
    }
  };

  Guarded<double> query_of(int64_t b, int64_t head, int64_t q) const {
    Guarded<double> x{size_t(k.c.dim)};
    for (int64_t d = 0; d < k.c.dim; ++d) x[size_t(d)] = query.at(b, head, q, d);
    return x;
  }

  // The same, divided by the smoothing of the keys.
  Guarded<double> unsmoothed(int64_t b, int64_t head, int64_t q) const {
    Guarded<double> x = query_of(b, head, q);
    for (int64_t d = 0; d < k.c.dim; ++d) x[size_t(d)] /= k.smoothing_of(b, head / group, d);
    return x;
  }

  // What |q / s| |s k| is at most over coded keys, whose products are rounded to float32 after the rotation.
  double smoothed_products(int64_t b, int64_t head, int64_t q) const {
    if (k.c.smoothing == nullptr) return 0;
    const Guarded<double> x = unsmoothed(b, head, q);
    double squares = 0;
    for (int64_t d = 0; d < k.c.dim; ++d) squares += x[size_t(d)] * x[size_t(d)];
    return std::sqrt(squares * double(k.c.dim)) * k.largest * k.largest_scale(b, head / group);
  }

  // By how much the dot of a query with a coded key may differ, which is exact but for rounding to 8 bits: of
  // the rotated query, or of its products with learned entries.
  double dot_apart(int64_t b, int64_t head, int64_t q) const {
    const int64_t dim = k.c.dim;
    Guarded<double> x = unsmoothed(b, head, q);
    if (!k.c.learned) {
      k.rotate(x.get());
      double unit;
      const double doubt = doubt_of_rounding(x.get(), dim, k.c.block, unit);
      int either = 0;
      for (int64_t d = 0; d < dim && unit > 0; ++d) either += undecided(x[size_t(d)] / unit, doubt);
      return either * unit * k.largest * k.largest_scale(b, head / group);
    }
    Tables t(k, head / group, x.get());
    double total = 0;
    for (int64_t s = 0; s < t.vectors; ++s) {
      // Another order of additions may give it the next step: every table may then be rounded anew.
      for (int halving = 2; halving <= 8; halving *= 2)
        if (std::fabs(t.span[size_t(s)] * halving - t.widest) < 1e-5 * t.widest)
          return double(t.vectors) * t.widest / 255;
      const double unit = t.step_of(s);
      bool either = false;
      for (int64_t e = 0; e < t.entries && unit > 0; ++e) {
        const double above = t.table[size_t(s * t.entries + e)] - t.low[size_t(s)];
        // The three roundings of a dot, of the minimum, of their difference and of the step.
        const double wrong = 8 * (std::fabs(t.low[size_t(s)]) + above) / unit + 4 * 255;
        either |= undecided(above / unit, kHalfUlp * wrong);
      }
      total += either ? unit : 0;
    }
    return total + 16 * kHalfUlp * t.products;
  }

  // By how much rounding to 8 bits moves the dot of a query with the coded key of a token: roundings of n
  // numbers by up to half a step have a deviation of 0.29 sqrt(n) steps.
  double dot_error(int64_t b, int64_t head, int64_t q, int64_t token) const {
    const int64_t h = head / group;
    Guarded<double> x = unsmoothed(b, head, q);
    double squares = 0, entries = 0;
    if (k.c.learned) {
      Tables t(k, h, x.get());
      for (int64_t s = 0; s < t.vectors; ++s) squares += t.step_of(s) * t.step_of(s);
      return 7 * 0.29 * std::sqrt(squares);
    }
    k.rotate(x.get());
    double unit;
    doubt_of_rounding(x.get(), k.c.dim, k.c.block, unit);
    const double step = k.largest / 127, scale = std::fabs(k.scale_of(b, h, token));
    for (int64_t d = 0; d < k.c.dim; ++d) {
      const int code = k.code(k.c.data, b, h, token, d / k.c.x);
      const double number = k.entry(h, d / k.c.x, code, int(d % k.c.x));
      const double rounded = step > 0 ? std::nearbyint(number / step) * step : 0;
      entries += std::fabs(x[size_t(d)] * (rounded - number));
      squares += rounded * rounded * unit * unit;
    }
    return scale * (entries + 7 * 0.29 * std::sqrt(squares));
  }
};

// Compute on some pool; the answer lies between gaps that nobody writes.
bool attend(Step& s, Rows& to, Tally& tally, const char* isa) {
  const Guarded<uint8_t> before = to.numbers.copy_bytes();
  s.step.out = to.numbers.data();
  for (int d = 0; d < 3; ++d) s.step.out_stride[d] = to.f.stride[d];
  use_some_threads();
  if (!tally.computed(library.attention(&s.step))) {
    that(library.codes_supported(&s.step.k, 0) != HF_VQ_OK || library.codes_supported(&s.step.v, 1) != HF_VQ_OK,
         "attention %s refuses what it supports", isa);
    return false;
  }
  const size_t size = size_of(to.f.dtype), gap = size_t(to.f.stride[2] - to.dim) * size;
  bool kept = true;
  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t h = 0; h < s.heads * s.group; ++h)
      for (int64_t q = 0; q + 1 < s.queries; ++q) {
        const size_t at = to.index(b, h, q, to.dim) * size;
        kept = kept && memcmp(before.get() + at, static_cast<uint8_t*>(to.numbers.data()) + at, gap) == 0;
      }
  that(kept, "attention %s wrote between rows", isa);
  return true;
}

void check_attention(Step& s, Tally& tally) {
  s.compute();
  Rows first(HF_VQ_FLOAT32, 1, 1, 0, 1);
  bool compared = false;
  for (int i = 0; i < isas.count; ++i) {
    library.use_isa(isas.names[i]);
    Rows got(s.query.f.dtype, s.batch, s.heads * s.group, s.queries, s.v.c.dim);
    if (!attend(s, got, tally, isas.names[i])) continue;
    double worst = 0, excess = 0;
    const double last_bit = step_of(s.query.f.dtype);
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads * s.group; ++h)
        for (int64_t q = 0; q < s.queries; ++q)
          for (int64_t d = 0; d < s.v.c.dim; ++d) {
            const double value = got.at(b, h, q, d);
            const size_t at = size_t(((b * s.heads * s.group + h) * s.queries + q) * s.v.c.dim + d);
            const double error = std::fabs(value - s.out[at]);
            worst = std::isfinite(error) ? std::fmax(worst, error) : INFINITY;
            if (!compared) continue;
            const double other = first.at(b, h, q, d);
            excess = std::fmax(excess, std::fabs(value - other) - s.apart[at] - last_bit * std::fabs(other));
          }
    // Queries and entries of keys have 8 bits, which moves logits by up to one percent of the largest.
    that(worst <= (0.03 + last_bit) * s.size + s.rounding && excess <= 0,
         "attention %s %s / %s dim %d %d, coded %d from %d and %d, total %d, tail from %d, sinks %d, window %d, "
         "fresh %d, queries %d, group %d%s%s%s%s, %d rotary pairs from %d: error %g, from scalar %g more "
         "than allowed, of %g",
         isas.names[i], s.k.coding.name, s.v.coding.name, s.k.c.dim, s.v.c.dim, int(s.k.c.count), int(s.k.c.first),
         int(s.v.c.first), int(s.total), int(s.step.tail_start), int(s.sink_k.f.tokens), int(s.step.window),
         int(s.step.fresh), int(s.queries), int(s.group), s.step.mask ? ", mask" : "", s.step.start ? ", start" : "",
         s.step.s_aux ? ", s_aux" : "", s.k.c.smoothing ? ", smoothing" : "", int(s.k.inv_freq.size()),
         int(s.k.c.rotary_start), worst, excess, s.size);
    if (!compared) first = std::move(got);
    compared = true;
  }
}

// hf_vq_coded_scores of the first query of every head.
void check_scores(Step& s, Tally& tally) {
  const int64_t count = s.k.c.count, queries = s.heads * s.group * s.queries;
  for (int i = 0; i < isas.count; ++i) {
    library.use_isa(isas.names[i]);
    Guarded<float> score(size_t(s.batch * queries * count));
    use_some_threads();
    if (!tally.computed(library.coded_scores(&s.step, score.get()))) continue;
    Guarded<double> key{size_t(s.k.c.dim)};
    double excess = 0, worst = 0;
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t head = 0; head < s.heads * s.group; ++head)
        for (int64_t j = 0; j < count; j += count > 20 ? random_int(1, 20) : 1) {
          s.k.decode(b, head / s.group, s.k.c.first + j, key.get());
          double want = 0, sizes = 0;
          for (int64_t d = 0; d < s.k.c.dim; ++d) {
            const double q = s.query.at(b, head, 0, d);
            want += q * key[size_t(d)];
            const double means =
                std::fabs(s.k.mean_of(b, head / s.group, d)) + s.k.rotary_size(b, head / s.group, int(d));
            sizes += std::fabs(q) * (std::fabs(key[size_t(d)]) + means);
          }
          const double got = double(score[size_t((b * queries + head * s.queries) * count + j)]);
          const double error = std::fabs(got - want * double(s.step.scaling));
          sizes += s.smoothed_products(b, head, 0);
          const double floats = kHalfUlp * (double(s.k.c.dim) / 4 + 32) * sizes;
          const double allowed = s.dot_error(b, head, 0, s.k.c.first + j) + floats;
          worst = std::isfinite(error) ? std::fmax(worst, error) : INFINITY;
          excess = std::fmax(excess, error - allowed * double(s.step.scaling));
        }
    that(std::isfinite(worst) && excess <= 0, "coded_scores %s %s dim %d: error %g, %g more than allowed",
         isas.names[i], s.k.coding.name, s.k.c.dim, worst, excess);
  }
}

// Memory is all that counts here: floats of any bits.
void check_wild(Step& s) {
  Tally tally{"wild"};
  s.k.make_wild();
  s.v.make_wild();
  for (Rows* rows : {&s.tail_k, &s.tail_v, &s.sink_k, &s.sink_v, &s.query}) rows->numbers.make_wild();
  if (s.mask.dtype() != HF_VQ_BOOL) s.mask.make_wild();
  fill_random(s.s_aux.get(), s.s_aux.bytes());
  for (int i = 0; i < isas.count; ++i) {
    library.use_isa(isas.names[i]);
    Rows got(s.query.f.dtype, s.batch, s.heads * s.group, s.queries, s.v.c.dim);
    attend(s, got, tally, isas.names[i]);
  }
}

}  // namespace

void test_attention() {
  Tally tally{"attention"}, scores{"coded_scores"};
  for (int dim : {260, 320, 512}) {  // more tables than sums of 16 bits hold
    const Tape tape(kCodings[kKeyCodings[random_int(0, 8)]], 1, 1, 1, dim, false);
    that(library.codes_supported(&tape.c, 0) == HF_VQ_UNSUPPORTED, "keys of %d numbers are supported", dim);
  }
  for (int key : kKeyCodings) {
    for (int repeat = 0; repeat < repeats; ++repeat) {
      Step step(random_shape(kCodings[key]));
      check_attention(step, tally);
      check_scores(step, scores);
      if (repeat % 2) check_wild(step);
    }
  }
  if (repeats >= 8) {  // a million tokens
    Shape shape = random_shape(kCodings[kKeyCodings[random_int(0, 2)]]);
    shape.k_dim = shape.v_dim = 16;
    shape.batch = shape.heads = shape.queries = 1;
    shape.coded = 1 << 20;
    shape.tail = shape.overlap = 64;
    Step step(shape);
    check_attention(step, tally);
  }
  tally.report();
  scores.report();
}

}  // namespace hf_vq::check
