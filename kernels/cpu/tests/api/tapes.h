// SPDX-License-Identifier: Apache-2.0
// Codes of a KV cache in memory, written code by code in the layout of hf_vq/ops/layout.py; and unquantized tokens.
#pragma once
#include <cmath>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

// Format of keys or values.
struct Coding {
  const char* name;
  int x, bits, learned, layout;
};

constexpr Coding kCodings[] = {
    {"u4", 2, 8, 0, HF_VQ_QUADS},         {"u3", 2, 6, 0, HF_VQ_QUADS},         {"u2", 4, 8, 0, HF_VQ_QUADS},
    {"1x4", 1, 4, 0, HF_VQ_QUADS},        {"u4 values", 2, 8, 0, HF_VQ_PLANES}, {"u3 values", 2, 6, 0, HF_VQ_PLANES},
    {"u2 values", 4, 8, 0, HF_VQ_PLANES}, {"1x4 values", 1, 4, 0, HF_VQ_PLANES}, {"cq-4", 2, 8, 1, HF_VQ_PLANES},
    {"cq-2", 4, 8, 1, HF_VQ_PLANES},      {"nomad-4", 1, 4, 1, HF_VQ_PLANES},   {"nomad-2", 2, 4, 1, HF_VQ_PLANES},
    {"nomad-1", 4, 4, 1, HF_VQ_PLANES},
};
constexpr int kKeyCodings[] = {0, 1, 2, 3, 8, 9, 10, 11, 12};
constexpr int kValueCodings[] = {4, 5, 6, 7, 8, 9};

// A tape of random bytes for `tokens` tokens, with its codebook and scales. Heads do not touch: there is
// a gap behind each, whose bytes nobody may change.
struct Tape {
  Coding coding;
  hf_vq_codes c{};
  int64_t batch, heads, tokens, vectors, block_bytes;
  Guarded<uint8_t> data;
  Guarded<uint16_t> scale, codebook;
  Guarded<float> mean, smoothing, rotary_mean, rotary_table, inv_freq;
  double largest = 0;  // of the entries
  bool interleaved = false;

  Tape(const Coding& how, int64_t batch_size, int64_t heads_count, int64_t tokens_count, int dim, bool with_mean)
      : coding(how), batch(batch_size), heads(heads_count), tokens(tokens_count) {
    vectors = dim / how.x;
    block_bytes = vectors * 32 * how.bits;
    const int64_t blocks = (tokens + 255) / 256, lists = batch * heads, gap = random_int(0, 1) * 7;
    c.data_stride[1] = blocks * block_bytes + gap;
    c.data_stride[0] = heads * c.data_stride[1] + gap;
    data = Guarded<uint8_t>(span(c.data_stride, blocks * block_bytes));
    fill_some(data.get(), data.bytes());
    c.data = data.get();
    if (!how.learned) {
      c.scale_stride[1] = tokens + gap;
      c.scale_stride[0] = heads * c.scale_stride[1] + gap;
      scale = random_halves(span(c.scale_stride, tokens), 1, random_bits() % 4 != 0);
      c.scale = scale.get();
    }
    const size_t tables = how.learned ? size_t(heads * vectors) : 1;
    codebook = random_halves((tables * size_t(how.x)) << how.bits, 1, false);
    c.codebook = codebook.get();
    for (size_t i = 0; i < codebook.size(); ++i)
      largest = std::fmax(largest, std::fabs(double(half_to_float(codebook[i]))));
    if (with_mean) {
      mean = Guarded<float>(size_t(lists * dim));
      for (size_t i = 0; i < mean.size(); ++i) mean[i] = random_normal();
      c.mean = mean.get();
    }
    c.mean_stride[0] = heads * dim;
    c.mean_stride[1] = dim;
    c.layout = how.layout;
    c.x = how.x;
    c.bits = how.bits;
    c.learned = how.learned;
    c.dim = dim;
    c.block = how.learned ? 1 : dim & -dim;
  }

  // Factors of universal codes; those of some heads are 1. The mean square of 1 / s is 1, so that logits are as large
  // as without.
  void add_smoothing() {
    if (coding.learned) return;
    smoothing = Guarded<float>(size_t(batch * heads * c.dim));
    for (int64_t list = 0; list < batch * heads; ++list) {
      float* s = &smoothing[size_t(list * c.dim)];
      const float spread = random_bits() % 4 == 0 ? 0.0f : 0.7f;
      double inverse = 0;
      for (int i = 0; i < c.dim; ++i) {
        s[i] = std::exp(spread * random_normal());
        inverse += 1 / (double(s[i]) * double(s[i])) / c.dim;
      }
      for (int i = 0; i < c.dim; ++i) s[i] *= float(std::sqrt(inverse));
    }
    c.smoothing = smoothing.get();
  }

  // A rotary mean of about `size`: of all pairs, of some, or of some heads.
  void add_rotary(float size) {
    const int pairs = random_bits() % 2 ? c.dim / 2 : int(random_int(0, c.dim / 2)), which = int(random_int(0, 3));
    const double bases[] = {1e4, 1e6, 10}, base = bases[random_int(0, 2)];
    const int64_t starts[] = {0, 1, 77, 65000, 100000, 4000000, -300}, gap = random_int(0, 2);
    interleaved = random_bits() % 2;
    inv_freq = Guarded<float>(size_t(pairs));
    for (int p = 0; p < pairs; ++p) inv_freq[size_t(p)] = float(std::pow(base, -double(p) / pairs));
    rotary_table = Guarded<float>(size_t(library.rotary_table_size(pairs)));
    library.rotary_table(inv_freq.get(), pairs, interleaved, rotary_table.get());
    c.rotary_stride[1] = c.dim + gap;
    c.rotary_stride[0] = heads * c.rotary_stride[1] + gap;
    rotary_mean = Guarded<float>(span(c.rotary_stride, c.dim));
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h) {
        const bool none = which == 3 && random_bits() % 2;
        float* m = &rotary_mean[size_t(b * c.rotary_stride[0] + h * c.rotary_stride[1])];
        for (int i = 0; i < c.dim; ++i) m[i] = 0;
        for (int p = 0; p < pairs && !none; ++p) {
          if (which > 0 && random_bits() % 4 != 0) continue;
          m[first(p)] = random_normal() * size;
          m[second(p)] = random_normal() * size;
        }
      }
    c.rotary_mean = rotary_mean.get();
    c.rotary_table = rotary_table.get();
    c.rotary_start = starts[random_int(0, 6)];
  }
  int first(int p) const { return interleaved ? 2 * p : p; }
  int second(int p) const { return interleaved ? 2 * p + 1 : p + int(inv_freq.size()); }

  // R_n m of a token is added to row [dim].
  void add_turned(int64_t b, int64_t h, int64_t token, double* row) const {
    if (c.rotary_mean == nullptr) return;
    const float* m = c.rotary_mean + b * c.rotary_stride[0] + h * c.rotary_stride[1];
    for (int p = 0; p < int(inv_freq.size()); ++p) {
      const double angle = double(token + c.rotary_start) * double(inv_freq[size_t(p)]);
      const double a = double(m[first(p)]), side = double(m[second(p)]);
      row[first(p)] += a * std::cos(angle) - side * std::sin(angle);
      row[second(p)] += side * std::cos(angle) + a * std::sin(angle);
    }
  }
  // What |R_n m| is at most in channel i.
  double rotary_size(int64_t b, int64_t h, int i) const {
    if (c.rotary_mean == nullptr) return 0;
    const float* m = c.rotary_mean + b * c.rotary_stride[0] + h * c.rotary_stride[1];
    for (int p = 0; p < int(inv_freq.size()); ++p)
      if (i == first(p) || i == second(p)) return std::hypot(double(m[first(p)]), double(m[second(p)]));
    return 0;
  }

  // Floats of any bits: NaN, infinity, numbers of any size.
  void make_wild() {
    fill_random(scale.get(), scale.bytes());
    fill_random(codebook.get(), codebook.bytes());
    fill_random(mean.get(), mean.bytes());
    fill_random(smoothing.get(), smoothing.bytes());
    fill_random(rotary_mean.get(), rotary_mean.bytes());
  }

  size_t span(const int64_t* stride, int64_t last) const {
    return size_t((batch - 1) * stride[0] + (heads - 1) * stride[1] + last);
  }

  // Position of code (token, s) in its packet, and of the packet in its block.
  int place(int64_t token, int64_t s, int64_t& packet) const {
    const int t = int(token % 256);
    if (coding.layout == HF_VQ_PLANES) {
      packet = s;
      return t;
    }
    packet = t / 64 * (vectors / 4) + s / 4;
    return t % 64 / 16 * 64 + t % 16 * 4 + int(s % 4);
  }

  int code(const uint8_t* tape, int64_t b, int64_t h, int64_t token, int64_t s) const {
    int64_t packet;
    const int i = place(token, s, packet), v = i / 64, j = i % 64;
    const uint8_t* p = tape + b * c.data_stride[0] + h * c.data_stride[1] + token / 256 * block_bytes +
                       packet * 32 * coding.bits;
    if (coding.bits == 8) return p[i];
    const int low = p[v / 2 * 64 + j] >> v % 2 * 4 & 15;
    return coding.bits == 4 ? low : low | (p[128 + j] >> 2 * v & 3) << 4;
  }

  // Component i of an entry.
  double entry(int64_t h, int64_t s, int code, int i) const {
    const int64_t table = coding.learned ? h * vectors + s : 0;
    return double(half_to_float(codebook[size_t((table << coding.bits) + code) * size_t(coding.x) + size_t(i)]));
  }

  double scale_of(int64_t b, int64_t h, int64_t token) const {
    if (scale.size() == 0) return 1;
    return double(half_to_float(scale[size_t(b * c.scale_stride[0] + h * c.scale_stride[1] + token)]));
  }

  // Of the tokens that attention reads.
  double largest_scale(int64_t b, int64_t h) const {
    double scale = 0;
    for (int64_t t = 0; t < c.count; ++t) scale = std::fmax(scale, std::fabs(scale_of(b, h, c.first + t)));
    return scale;
  }

  double mean_of(int64_t b, int64_t h, int64_t i) const {
    return c.mean == nullptr ? 0 : double(mean[size_t(b * c.mean_stride[0] + h * c.mean_stride[1] + i)]);
  }

  double smoothing_of(int64_t b, int64_t h, int64_t i) const {
    return c.smoothing == nullptr ? 1 : double(smoothing[size_t(b * c.mean_stride[0] + h * c.mean_stride[1] + i)]);
  }

  void rotate(double* row) const {
    for (int64_t i = 0; i < c.dim; i += c.block) plain_hadamard(row + i, c.block);
  }

  // The token of position `token` on the tape, decoded: row [dim].
  void decode(int64_t b, int64_t h, int64_t token, double* row) const {
    for (int64_t i = 0; i < c.dim; ++i)
      row[i] = entry(h, i / c.x, code(c.data, b, h, token, i / c.x), int(i % c.x)) * scale_of(b, h, token);
    rotate(row);
    for (int64_t i = 0; i < c.dim; ++i) row[i] = row[i] / smoothing_of(b, h, i) + mean_of(b, h, i);
    add_turned(b, h, token, row);
  }

  // By how much a decoded number is wrong at most if entries are rounded to 8 bits. The transform adds up the
  // errors of a block: where all its codes are the same, to sqrt(block) times the error of an entry.
  double rounding(int64_t b, int64_t h, int64_t token) const {
    if (c.learned || largest == 0) return 0;
    const double step = largest / 127;
    double row[256], worst = 0;
    for (int64_t i = 0; i < c.dim; ++i) {
      const double number = entry(h, i / c.x, code(c.data, b, h, token, i / c.x), int(i % c.x));
      row[i] = (std::nearbyint(number / step) * step - number) * scale_of(b, h, token);
    }
    rotate(row);
    for (int64_t i = 0; i < c.dim; ++i) worst = std::fmax(worst, std::fabs(row[i]));
    return worst;
  }
};

// [batch, heads, tokens, dim] of a dtype with gaps between tokens, heads and rows.
struct Rows {
  Numbers numbers;
  hf_vq_floats f{};
  int64_t dim;

  Rows(int dtype, int64_t batch, int64_t heads, int64_t tokens, int64_t row) : dim(row) {
    const int64_t gap = random_int(0, 2);
    f.stride[2] = dim + gap;
    f.stride[1] = tokens * f.stride[2] + gap;
    f.stride[0] = heads * f.stride[1] + gap;
    f.tokens = tokens;
    f.dtype = dtype;
    const int64_t last = (batch - 1) * f.stride[0] + (heads - 1) * f.stride[1] + (tokens - 1) * f.stride[2] + dim;
    numbers = Numbers(dtype, tokens > 0 ? size_t(last) : 0);
    numbers.fill_normal();
    f.data = numbers.data();
  }
  size_t index(int64_t b, int64_t h, int64_t t, int64_t i) const {
    return size_t(b * f.stride[0] + h * f.stride[1] + t * f.stride[2] + i);
  }
  double at(int64_t b, int64_t h, int64_t t, int64_t i) const { return double(numbers[index(b, h, t, i)]); }
};

}  // namespace
}  // namespace hf_vq::check
