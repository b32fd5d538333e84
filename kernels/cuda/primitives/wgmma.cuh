// SPDX-License-Identifier: Apache-2.0
// Warpgroup MMA (PTX: wgmma.mma_async, sm_90a only), with bulk copies and barriers for its operands.
//
//     d[64 x N] += a[64 x 16] b[16 x N]        16-bit floats, sums in float32
//     d[64 x N] += a[64 x 32] b[32 x N]        bytes, sums in 32 bits: two bytes in place of each 16-bit number
//
// Warp w of four has rows 16 w .. 16 w + 15 of a and d, both in registers: a as in mma.cuh, and of d, in lane 4 g + t,
//
//     d[4 i], d[4 i + 1] = row g, columns 8 i + 2 t, 8 i + 2 t + 1         d[4 i + 2], d[4 i + 3] = row g + 8
//
// b is in shared memory: 128 bytes for each of N columns, 64 numbers along k in pieces of 16 bytes. Piece p of column n
// is at place p ^ n % 8 (128-byte swizzle), and the first column at a multiple of 1024 bytes.
#pragma once
#include "primitives/numbers.cuh"


__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `Left` groups are not complete.
template <int Left> __device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Force a fragment to be complete here. If it is completed between products, the assembler serializes them.
__device__ inline void made(uint32_t (&a)[4]) {
  asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}

// Descriptor of b, at a multiple of 32 bytes in the first 128 bytes of its tile.
__device__ inline uint64_t wgmma_descriptor(uint32_t address) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | (address & 0x3ffff) >> 4;
}
#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)
#define INTEGERS_4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define INTEGERS_16(i) INTEGERS_4(i), INTEGERS_4(i + 4), INTEGERS_4(i + 8), INTEGERS_4(i + 12)
#define INTEGERS_32(i) INTEGERS_16(i), INTEGERS_16(i + 16)
#define INTEGERS_64(i) INTEGERS_32(i), INTEGERS_32(i + 32)
#define INTEGERS_128(i) INTEGERS_64(i), INTEGERS_64(i + 64)
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 \
  NAMES_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 \
  NAMES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 \
  NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_BYTES(N, COUNT, TYPE, A, B)                                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.s32." TYPE ".s8 {" NAMES_##COUNT "}, {" A "}, " B ", 1;" \
               : INTEGERS_##COUNT(0)                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define WGMMA(N, COUNT, TYPE, A, B)                                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" NAMES_##COUNT "}, {" A "}, " B \
               ", 1, 1, 1, 0;"                                                                            \
               : SUMS_##COUNT(0)                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// One product of k16; `d` and `a` must not be accessed before its wait.
template <Dtype D, int N>
__device__ inline void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
#if WITHOUT_PRODUCTS
  d[0] += __uint_as_float(a[0] ^ a[1] ^ a[2] ^ a[3]);
  return;
#endif
  constexpr bool half = D == Dtype::FLOAT16;
  if constexpr (N == 32 && half) WGMMA(32, 16, "f16", "%16, %17, %18, %19", "%20");
  if constexpr (N == 32 && !half) WGMMA(32, 16, "bf16", "%16, %17, %18, %19", "%20");
  if constexpr (N == 64 && half) WGMMA(64, 32, "f16", "%32, %33, %34, %35", "%36");
  if constexpr (N == 64 && !half) WGMMA(64, 32, "bf16", "%32, %33, %34, %35", "%36");
  if constexpr (N == 128 && half) WGMMA(128, 64, "f16", "%64, %65, %66, %67", "%68");
  if constexpr (N == 128 && !half) WGMMA(128, 64, "bf16", "%64, %65, %66, %67", "%68");
  if constexpr (N == 256 && half) WGMMA(256, 128, "f16", "%128, %129, %130, %131", "%132");
  if constexpr (N == 256 && !half) WGMMA(256, 128, "bf16", "%128, %129, %130, %131", "%132");
  static_assert(N == 32 || N == 64 || N == 128 || N == 256, "a size that is written out here");
}

// One product of k32, of signed b and a, modulo 2^32; `Signed`: whether a is signed.
template <bool Signed, int N> __device__ inline void wgmma_bytes(int (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
#if WITHOUT_PRODUCTS
  d[0] += a[0] ^ a[1] ^ a[2] ^ a[3];
  return;
#endif
  if constexpr (N == 32 && Signed) WGMMA_BYTES(32, 16, "s8", "%16, %17, %18, %19", "%20");
  if constexpr (N == 32 && !Signed) WGMMA_BYTES(32, 16, "u8", "%16, %17, %18, %19", "%20");
  if constexpr (N == 64 && Signed) WGMMA_BYTES(64, 32, "s8", "%32, %33, %34, %35", "%36");
  if constexpr (N == 64 && !Signed) WGMMA_BYTES(64, 32, "u8", "%32, %33, %34, %35", "%36");
  if constexpr (N == 128 && Signed) WGMMA_BYTES(128, 64, "s8", "%64, %65, %66, %67", "%68");
  if constexpr (N == 128 && !Signed) WGMMA_BYTES(128, 64, "u8", "%64, %65, %66, %67", "%68");
  if constexpr (N == 256 && Signed) WGMMA_BYTES(256, 128, "s8", "%128, %129, %130, %131", "%132");
  if constexpr (N == 256 && !Signed) WGMMA_BYTES(256, 128, "u8", "%128, %129, %130, %131", "%132");
  static_assert(N == 32 || N == 64 || N == 128 || N == 256, "a size that is written out here");
}

// ---- Barriers in shared memory (mbarrier): a phase ends when `count` arrived and the bytes that were expected came.
// Their memory holds nothing else until `barrier_invalidate`: a store over a barrier that is still valid may be lost,
// also when nobody waits for it any more and all its bytes have come (seen on an H200; PTX forbids it).

__device__ inline void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After all threads have seen its last phase end, before other data is stored there.
__device__ inline void barrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Called after `barrier_init`, before the cluster barrier.
__device__ inline void barriers_are_set() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ inline void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of this parity has ended.
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 1000000;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// True in one lane of the warp, whose lanes are all here. What only that lane does is compiled to uniform instructions.
__device__ inline bool one_lane() {
  uint32_t one;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(one));
  return one;
}

// Bulk copy of `bytes` (a multiple of 16) from global to shared memory; completion is signalled on `barrier`.
__device__ inline void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// To the L2 cache.
__device__ inline void prefetch_bulk(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// All threads of the cluster; after `barriers_are_set` their barriers may be used.
__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Until `threads` threads of this block are at its barrier `name`, whole warps.
__device__ inline void wait_for_warps(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Send four numbers to the same address in block `rank` of the cluster; completion is signalled on the barrier there.
__device__ inline void send(uint32_t to, const float* value, uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 there, told;\nmapa.shared::cluster.u32 there, %0, %1;\nmapa.shared::cluster.u32 told, %2, %1;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [told];\n}" ::"r"(to),
      "r"(rank), "r"(barrier), "f"(value[0]), "f"(value[1]), "f"(value[2]), "f"(value[3])
      : "memory");
}

// A warpgroup has `Count` registers a thread from here on: fewer than before, or more once others left them.
template <int Count> __device__ inline void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

template <int Count> __device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
