// SPDX-License-Identifier: Apache-2.0
// Helpers of the test programs: counted checks, fresh random numbers, and buffers between guards.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>

#if defined(__linux__)
// AddressSanitizer's, in a program that is linked with it.
extern "C" void __asan_poison_memory_region(const volatile void*, size_t) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void*, size_t) __attribute__((weak));
#endif

namespace hf_vq::check {

// Counters of the whole program.
inline int64_t checks = 0, failures = 0;
inline uint64_t random_state = 0;

namespace {

// Count a check; print the first failures as printf does.
[[gnu::format(printf, 2, 3)]] inline bool that(bool ok, const char* format, ...) {
  ++checks;
  if (ok) return true;
  if (++failures <= 20) {
    va_list arguments;
    va_start(arguments, format);
    fputs("  FAILED: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
  }
  return false;
}

[[noreturn]] inline void stop(const char* why) {
  fprintf(stderr, "test program: %s\n", why);
  exit(2);
}

// -- random numbers ------------------------------------------------------------------------------

// splitmix64, from a seed that is new in every run. It is printed at once, since a program may not come to
// its end; with HF_VQ_TEST_SEED it runs again.
inline void start(const char* program) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const char* again = getenv("HF_VQ_TEST_SEED");
  random_state = again != nullptr ? strtoull(again, nullptr, 10)
                                  : (uint64_t(now.tv_nsec) * 1000003 + uint64_t(getpid())) % 1000000000;
  printf("%s, HF_VQ_TEST_SEED=%llu\n", program, static_cast<unsigned long long>(random_state));
  fflush(stdout);
}
inline uint64_t random_bits() {
  uint64_t z = random_state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}
// In [first, last].
inline int64_t random_int(int64_t first, int64_t last) {
  return first + int64_t(random_bits() % uint64_t(last - first + 1));
}
// In [-1, 1).
inline float random_float() { return float(int64_t(random_bits() >> 40) - (1 << 23)) / float(1 << 23); }
// Nearly Gaussian, variance 1.
inline float random_normal() {
  float total = 0;
  for (int i = 0; i < 6; ++i) total += random_float();
  return total * 0.70710678f;
}
inline void fill_random(void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(p)[i] = uint8_t(random_bits());
}
// Bytes at random, or all the same.
inline void fill_some(void* p, size_t bytes) {
  const int kind = int(random_int(0, 9));
  if (kind > 1) fill_random(p, bytes);
  else if (bytes > 0) memset(p, kind == 0 ? 0 : 255, bytes);
}

// -- memory --------------------------------------------------------------------------------------

// `count` numbers of which either the last ends at a page that nobody may touch, or the first begins
// after one (`from_start`): a read or write outside is a fault on every processor, also by an
// instruction that a sanitizer does not see. The slack on the other side is poisoned for
// AddressSanitizer, and a canary in it is read at the end.
template <typename T> class Guarded {
 public:
  Guarded() = default;
  explicit Guarded(size_t count, bool from_start = random_bits() % 4 == 0) : count_(count) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    inner_ = (bytes() + page - 1) / page * page + (count == 0 ? page : 0);
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, inner_ + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) stop("no memory");
    uint8_t* inner = base_ + page;
    if (mprotect(inner, inner_, PROT_READ | PROT_WRITE) != 0) stop("no memory");
    memset(inner, kCanary, inner_);
    data_ = reinterpret_cast<T*>(from_start ? inner : inner + inner_ - bytes());
    slack_ = from_start ? inner + bytes() : inner;
    // Fresh memory is a NaN in every float type: what was never written shows.
    memset(static_cast<void*>(data_), 0xff, bytes());
    poison(true);
  }
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(inner_, other.inner_);
    std::swap(count_, other.count_);
    std::swap(data_, other.data_);
    std::swap(slack_, other.slack_);
    return *this;
  }
  ~Guarded() {
    if (base_ == nullptr) return;
    poison(false);
    size_t intact = 0;
    while (intact < inner_ - bytes() && slack_[intact] == kCanary) ++intact;
    that(intact == inner_ - bytes(), "a write outside a buffer of %zu bytes", bytes());
    munmap(base_, inner_ + 2 * size_t(sysconf(_SC_PAGESIZE)));
  }

  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

  Guarded copy() const {
    Guarded other(count_);
    if (count_ > 0) memcpy(static_cast<void*>(other.data_), data_, bytes());
    return other;
  }

 private:
  static constexpr uint8_t kCanary = 0xa5;

  void poison([[maybe_unused]] bool on) {
#if defined(__linux__)
    if (__asan_poison_memory_region == nullptr) return;
    if (on) __asan_poison_memory_region(slack_, inner_ - bytes());
    else __asan_unpoison_memory_region(base_ + sysconf(_SC_PAGESIZE), inner_);
#endif
  }

  uint8_t* base_ = nullptr;
  uint8_t* slack_ = nullptr;
  T* data_ = nullptr;
  size_t inner_ = 0, count_ = 0;
};

// The last line of a program, and its exit status.
inline int finish(const char* program, const char* what) {
  printf("%s %s: %lld checks, %lld failures\n", program, what, static_cast<long long>(checks),
         static_cast<long long>(failures));
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace hf_vq::check
