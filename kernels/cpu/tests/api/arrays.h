// SPDX-License-Identifier: Apache-2.0
// Arrays of numbers in the dtypes of the C ABI, between guards.
#pragma once
#include "../../api.h"
#include "../../primitives/numbers.h"
#include "../check.h"

namespace hf_vq::check {
namespace {

inline size_t size_of(int dtype) { return dtype == HF_VQ_FLOAT32 ? 4 : dtype == HF_VQ_BOOL ? 1 : 2; }

// Relative distance of two neighbours.
inline double step_of(int dtype) {
  return dtype == HF_VQ_FLOAT32 ? 1.2e-7 : dtype == HF_VQ_FLOAT16 ? 9.8e-4 : 7.9e-3;
}

constexpr double kHalfUlp = 5.9604644775390625e-8;  // 2^-24: what rounding to float32 may do, relative

inline int random_dtype() { return int(random_int(HF_VQ_FLOAT32, HF_VQ_BFLOAT16)); }

// `count` numbers of a dtype; a new one is NaN everywhere.
class Numbers {
 public:
  Numbers() = default;
  Numbers(int dtype, size_t count) : memory_(count * size_of(dtype)), dtype_(dtype) {}

  int dtype() const { return dtype_; }
  size_t size() const { return memory_.size() / size_of(dtype_); }
  void* data() const { return memory_.get(); }

  void set(size_t i, float value) {
    uint8_t* p = memory_.get() + i * size_of(dtype_);
    const uint16_t half = dtype_ == HF_VQ_FLOAT16 ? float_to_half(value) : float_to_bfloat(value);
    if (dtype_ == HF_VQ_BOOL) *p = value != 0;
    else if (dtype_ == HF_VQ_FLOAT32) memcpy(p, &value, 4);
    else memcpy(p, &half, 2);
  }
  float operator[](size_t i) const {
    const uint8_t* p = memory_.get() + i * size_of(dtype_);
    if (dtype_ == HF_VQ_BOOL) return *p;
    if (dtype_ == HF_VQ_FLOAT32) {
      float value;
      memcpy(&value, p, 4);
      return value;
    }
    uint16_t half;
    memcpy(&half, p, 2);
    return dtype_ == HF_VQ_FLOAT16 ? half_to_float(half) : bfloat_to_float(half);
  }
  void fill_normal(float size = 1) {
    for (size_t i = 0; i < this->size(); ++i) set(i, random_normal() * size);
  }
  Guarded<uint8_t> copy_bytes() const { return memory_.copy(); }
  void make_wild() { fill_random(memory_.get(), memory_.bytes()); }

 private:
  Guarded<uint8_t> memory_;
  int dtype_ = HF_VQ_FLOAT32;
};

// fp16 numbers that are about `size`, as codebooks and scales hold them.
inline Guarded<uint16_t> random_halves(size_t count, float size, bool positive) {
  Guarded<uint16_t> halves(count);
  for (size_t i = 0; i < count; ++i) {
    const float value = positive ? 0.5f + 0.5f * random_float() + 0.05f : random_normal();
    halves[i] = float_to_half(value * size);
  }
  return halves;
}

// x [n] <- H x / sqrt(n), by the textbook definition.
inline void plain_hadamard(double* x, int64_t n) {
  for (int64_t half = 1; half < n; half *= 2)
    for (int64_t i = 0; i < n; ++i)
      if ((i & half) == 0) {
        const double a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  for (int64_t i = 0; i < n; ++i) x[i] *= 1 / __builtin_sqrt(double(n));
}

// Numbers u [n] are rounded to integers of `step` = max |u| / steps after a Hadamard transform in float32, each of
// whose passes, factor and constant are wrong by half an ulp of the norm. An instruction set that adds in
// another order may round a number to the other side if it lies nearer than this, in steps, to the middle.
inline double doubt_of_rounding(const double* u, int64_t n, int64_t block, double& step, double steps = 127) {
  double largest = 0, norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    largest = __builtin_fmax(largest, __builtin_fabs(u[i]));
    norm += u[i] * u[i];
  }
  step = largest / steps;
  if (step == 0) return 0;
  return kHalfUlp * (2 * (double(__builtin_ctzll(uint64_t(block))) + 2) * __builtin_sqrt(norm) / step + 3 * steps);
}
inline bool undecided(double units, double doubt) {
  return __builtin_fabs(units - __builtin_floor(units) - 0.5) < doubt;
}

}  // namespace
}  // namespace hf_vq::check
