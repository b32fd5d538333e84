// SPDX-License-Identifier: Apache-2.0
// Instructions of hf_vq_step one by one, against double. That of attention is hf_vq_append and hf_vq_attention, which have
// separate tests; tests/integration/generation/test_native_step.py compares it with what a cache does.
#include <cmath>

#include "arrays.h"
#include "library.h"

namespace hf_vq::check {
namespace {

// Numbers [size] of a type at random strides, some of them 0, between guards.
struct Place {
  hf_vq_operand x{};
  Numbers numbers;

  Place() = default;
  Place(int dtype, const int64_t (&size)[3], bool repeats) {
    int64_t stride = random_int(0, 3) == 0 ? 2 : 1, last = 0;
    for (int axis = 2; axis >= 0; --axis) {
      const bool same = repeats && random_int(0, 2) == 0;
      x.stride[axis] = same ? 0 : stride;
      last += x.stride[axis] * (size[axis] - 1);
      if (!same) stride = stride * size[axis] + random_int(0, 1) * 3;
    }
    numbers = Numbers(dtype, size_t(last + 1));
    numbers.fill_normal();
    x.data = numbers.data();
    x.dtype = dtype;
  }
  size_t at(int64_t i, int64_t j, int64_t k) const {
    return size_t(i * x.stride[0] + j * x.stride[1] + k * x.stride[2]);
  }
};

double plain(int op, double a, double b) {
  switch (op) {
    case HF_VQ_COPY: return a;
    case HF_VQ_NEGATE: return -a;
    case HF_VQ_ABS: return std::fabs(a);
    case HF_VQ_SQUARE: return a * a;
    case HF_VQ_CUBE: return a * a * a;
    case HF_VQ_SQRT: return std::sqrt(a);
    case HF_VQ_RSQRT: return 1 / std::sqrt(a);
    case HF_VQ_RECIPROCAL: return 1 / a;
    case HF_VQ_SILU: return a / (1 + std::exp(-a));
    case HF_VQ_RELU: return a < 0 ? 0 : a;
    case HF_VQ_ADD: return a + b;
    case HF_VQ_SUBTRACT: return a - b;
    case HF_VQ_MULTIPLY: return a * b;
    case HF_VQ_DIVIDE: return a / b;
    case HF_VQ_MAXIMUM: return std::isnan(b) || b > a ? b : a;  // NaN if one of them is
    default: return std::isnan(b) || b < a ? b : a;
  }
}

bool near(double got, double want, int dtype, double size) {
  if (std::isnan(want) || std::isinf(want)) return got == want || (std::isnan(got) && std::isnan(want));
  return std::fabs(got - want) <= step_of(dtype) * std::fabs(want) + 2e-6 * size;
}

void check_elementwise(int op, const char* isa, Tally& tally) {
  const int64_t size[3] = {random_int(1, 3), random_int(1, 4), random_int(1, 70) * (random_int(0, 5) == 0 ? 9 : 1)};
  Place a(random_dtype(), size, true), b(random_dtype(), size, true);
  const int out = op == HF_VQ_COPY ? random_dtype() : HF_VQ_FLOAT32;
  Place y(out, size, false);
  const bool positive = op == HF_VQ_SQRT || op == HF_VQ_RSQRT, number = random_bits() % 3 == 0;
  for (size_t i = 0; i < a.numbers.size(); ++i) a.numbers.set(i, positive ? std::fabs(a.numbers[i]) + 0.1f : 3 * a.numbers[i]);
  for (Place* x : {&a, &b})  // as PyTorch computes with them
    if (!positive && random_int(0, 2) == 0)
      x->numbers.set(0, random_int(0, 1) == 0 ? NAN : random_int(0, 1) == 0 ? INFINITY : -INFINITY);
  hf_vq_instruction p{};
  p.y = y.x;
  p.a = a.x;
  if (!number) p.b = b.x;
  p.number = 0.75f;
  p.op = op;
  p.rounded = random_dtype();
  for (int i = 0; i < 3; ++i) p.size[i] = size[i];
  that(library.step_supports(&p, 1) == HF_VQ_OK, "step %d %s refuses a valid instruction", op, isa);
  if (!tally.computed(library.step(&p, 1))) return;
  const int coarse = step_of(out) > step_of(p.rounded) ? out : p.rounded;
  bool right = true;
  for (int64_t i = 0; i < size[0]; ++i)
    for (int64_t j = 0; j < size[1]; ++j)
      for (int64_t k = 0; k < size[2]; ++k) {
        const double x = a.numbers[a.at(i, j, k)], other = number ? 0.75 : double(b.numbers[b.at(i, j, k)]);
        const double want = plain(op, x, other), got = y.numbers[y.at(i, j, k)];
        const bool huge = std::fabs(want) > 6e4 && std::isfinite(want);  // beyond fp16
        right = right && (huge || near(got, want, coarse, 1 + std::fabs(want)));
      }
  that(right, "step %d %s: a number is wrong", op, isa);
}

void check_mean(const char* isa, Tally& tally) {
  const int64_t size[3] = {random_int(1, 2), random_int(1, 4), random_int(1, random_int(0, 3) == 0 ? 9000 : 600)};
  Place a(random_dtype(), size, false);
  const int64_t out_size[3] = {size[0], size[1], 1};
  Place y(HF_VQ_FLOAT32, out_size, false);
  hf_vq_instruction p{};
  p.y = y.x;
  p.a = a.x;
  p.op = HF_VQ_MEAN;
  p.rounded = random_dtype();
  for (int i = 0; i < 3; ++i) p.size[i] = size[i];
  if (!tally.computed(library.step(&p, 1))) return;
  bool right = true;
  for (int64_t i = 0; i < size[0]; ++i)
    for (int64_t j = 0; j < size[1]; ++j) {
      double middle = 0;
      for (int64_t k = 0; k < size[2]; ++k) middle += a.numbers[a.at(i, j, k)] / double(size[2]);
      right = right && near(y.numbers[y.at(i, j, 0)], middle, p.rounded, 1);
    }
  that(right, "step %s: a mean is wrong", isa);
}

int answer(int64_t number) { return number == 7 ? HF_VQ_OK : HF_VQ_NO_MEMORY; }

// What the caller computes: any answer but HF_VQ_OK ends the step.
void check_calls(const char* isa) {
  float x = 1;
  hf_vq_call call{answer, 7};
  hf_vq_instruction p{};
  p.y = p.a = {&x, {0, 0, 1}, HF_VQ_FLOAT32};
  p.size[0] = p.size[1] = p.size[2] = 1;
  p.op = HF_VQ_CALL;
  p.detail = &call;
  that(library.step_supports(&p, 1) == HF_VQ_OK && library.step(&p, 1) == HF_VQ_OK, "step %s does not call", isa);
  call.number = 8;
  that(library.step(&p, 1) == HF_VQ_CALL_ENDED, "step %s does not hear what a call answers", isa);
  call.run = nullptr;
  that(library.step_supports(&p, 1) == HF_VQ_UNSUPPORTED, "step %s supports a call of nothing", isa);
}

// Rows int8 with their scale, as hf_vq/formats/integers.py stores them.
void fill_int8(Guarded<uint8_t>& rows, int64_t out, int64_t in) {
  for (int64_t o = 0; o < out; ++o) {
    uint8_t* row = rows.get() + o * (in + 2);
    for (int64_t k = 0; k < in; ++k) row[k] = uint8_t(int8_t(random_int(-127, 127)));
    const uint16_t scale = float_to_half(0.01f + 0.01f * std::fabs(random_float()));
    memcpy(row + in, &scale, 2);
  }
}

void check_matrix(bool look_up, const char* isa, Tally& tally) {
  const int64_t out = random_int(1, 200), in = random_int(1, 300);
  const bool int8 = random_bits() % 4 == 0, columns = look_up && !int8 && random_bits() % 3 == 0;
  Numbers dense(random_dtype(), size_t(int8 ? 0 : out * in));
  dense.fill_normal();
  Guarded<uint8_t> rows(size_t(int8 ? out * (in + 2) : 0));
  if (int8) fill_int8(rows, out, in);
  hf_vq_dense w{dense.data(), out, in, columns ? 1 : in, columns ? out : 1, dense.dtype()};
  if (int8) w = {rows.get(), out, in, in + 2, 1, HF_VQ_INT8};
  const int64_t length = look_up ? in : out, row = random_int(0, out - 1);
  Numbers x(HF_VQ_FLOAT32, size_t(look_up ? 1 : in)), y(HF_VQ_FLOAT32, size_t(length)), bias(random_dtype(), size_t(out));
  x.fill_normal();
  bias.fill_normal();
  if (look_up) x.set(0, float(row));
  hf_vq_instruction p{};
  p.y = {y.data(), {0, 0, 1}, HF_VQ_FLOAT32};
  p.a = {x.data(), {0, 0, 1}, HF_VQ_FLOAT32};
  const bool biased = !look_up && random_bits() % 2;
  if (biased) p.c = {bias.data(), {0, 0, 1}, bias.dtype()};
  p.detail = &w;
  p.op = look_up ? HF_VQ_LOOK_UP : HF_VQ_DENSE;
  p.rounded = random_dtype();
  p.size[0] = p.size[1] = 1;
  p.size[2] = length;
  use_some_threads();
  that(library.step_supports(&p, 1) == HF_VQ_OK, "step %s refuses a matrix", isa);
  if (!tally.computed(library.step(&p, 1))) return;
  const auto weight = [&](int64_t o, int64_t k) {
    if (!int8) return double(dense[size_t(o * w.out_stride + k * w.in_stride)]);
    uint16_t scale;
    memcpy(&scale, rows.get() + o * (in + 2) + in, 2);
    return double(int8_t(rows[size_t(o * (in + 2) + k)])) * half_to_float(scale);
  };
  double largest = 0;
  for (size_t k = 0; k < x.size(); ++k) largest = std::fmax(largest, std::fabs(double(x[k])));
  bool right = true;
  for (int64_t o = 0; o < length; ++o) {
    double want = look_up ? weight(row, o) : biased ? bias[size_t(o)] : 0, size = std::fabs(want), rounding = 0;
    for (int64_t k = 0; k < in && !look_up; ++k) {
      want += weight(o, k) * x[size_t(k)];
      size += std::fabs(weight(o, k) * x[size_t(k)]);
      rounding += std::fabs(weight(o, k)) * largest / 16319 * 0.51;  // of inputs of int8, to 15 bits
    }
    Numbers rounded(p.rounded, 1);
    rounded.set(0, float(want));
    // A row that is looked up is exact but for its dtype. Sums are nearly so: numbers of float16 below the
    // smallest normal one are 2^-24 apart.
    const double least = p.rounded == HF_VQ_FLOAT16 ? std::ldexp(1.0, -25) : 0.0;
    const double doubt = step_of(p.rounded) * std::fabs(want) + least + 1e-6 * size + (int8 ? rounding : 0);
    right = right && (look_up ? y[size_t(o)] == rounded[0] : std::fabs(y[size_t(o)] - want) <= doubt);
  }
  that(right, "step %s: a product is wrong (int8 %d, columns %d, look_up %d)", isa, int8, columns, look_up);
  if (look_up) {
    x.set(0, float(out));
    that(library.step(&p, 1) == HF_VQ_UNSUPPORTED, "step %s looks up a row that is not there", isa);
  }
}

void check_refusals(const char* isa) {
  float number = 1;
  hf_vq_instruction p{};
  p.y = p.a = {&number, {0, 0, 1}, HF_VQ_FLOAT32};
  p.size[0] = p.size[1] = p.size[2] = 1;
  that(library.step_supports(&p, 1) == HF_VQ_OK, "step %s refuses a copy", isa);
  const auto refused = [&](const char* what, hf_vq_instruction wrong) {
    that(library.step_supports(&wrong, 1) == HF_VQ_UNSUPPORTED, "step %s supports %s", isa, what);
  };
  hf_vq_instruction wrong = p;
  wrong.op = HF_VQ_NUM_OPS;
  refused("an op that there is not", wrong);
  wrong = p;
  wrong.size[1] = 0;
  refused("no numbers", wrong);
  wrong = p;
  wrong.a.data = nullptr;
  refused("no operand", wrong);
  wrong = p;
  wrong.op = HF_VQ_ADD;
  wrong.y.dtype = HF_VQ_BFLOAT16;
  refused("a sum in bf16", wrong);
  for (int op : {int(HF_VQ_LOOK_UP), int(HF_VQ_DENSE), int(HF_VQ_CODES), int(HF_VQ_ATTENTION), int(HF_VQ_CALL)}) {
    wrong = p;
    wrong.op = op;
    refused("a matrix that is not there", wrong);
  }
  const hf_vq_dense gaps{&number, 1, 1, 3, 2, HF_VQ_FLOAT32}, large{&number, 7, 7, 7, 1, HF_VQ_FLOAT32};
  for (const hf_vq_dense* w : {&gaps, &large}) {
    wrong = p;
    wrong.op = HF_VQ_LOOK_UP;
    wrong.detail = const_cast<hf_vq_dense*>(w);
    refused("a matrix with gaps, or of another size", wrong);
  }
  const hf_vq_dense columns{&number, 1, 1, 1, 2, HF_VQ_FLOAT32};
  wrong = p;
  wrong.op = HF_VQ_DENSE;
  wrong.detail = const_cast<hf_vq_dense*>(&columns);
  refused("a product with columns", wrong);
}

}  // namespace

void test_step() {
  Tally tally{"step"};
  for (int i = 0; i < isas.count; ++i) {
    library.use_isa(isas.names[i]);
    check_refusals(isas.names[i]);
    check_calls(isas.names[i]);
    for (int repeat = 0; repeat < 4 * repeats; ++repeat) {
      for (int op = HF_VQ_COPY; op < HF_VQ_MEAN; ++op) check_elementwise(op, isas.names[i], tally);
      check_mean(isas.names[i], tally);
      check_matrix(false, isas.names[i], tally);
      check_matrix(true, isas.names[i], tally);
    }
  }
  tally.report();
}

}  // namespace hf_vq::check
