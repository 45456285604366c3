// wgmma with bf16 weights in registers: D[64, N] += A[64, 16] · B[16, N], B in shared memory.
//
// A: four registers a lane, as mma.sync's 16-row fragment, one strip of 16 rows a warp. B: N rows of
// 128 bytes (64 k), K-major, 128-byte swizzle (16-byte chunk ^= row & 7). D: f32, four values for
// each 8 columns, as mma.sync's.  sm_90a only.
#pragma once
#include "ptx.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// The barrier's arrival of this thread once its copies (copy_async) so far are done.
DEVICE void barrier_arrive_after_copies(u64* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar))
               : "memory");
}
// Reads of d that follow stay behind the wait before.
template <int N> DEVICE void keep_order(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
// More or fewer registers for a warpgroup. The block's sum may not exceed what it had at entry.
template <int N> DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// The descriptor of a tile of B at a multiple of 1024 bytes; + 2 for each 16 k.
DEVICE u64 wgmma_tile(const void* tile) {
  return (u64)((shared_address(tile) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 |
         (u64)1 << 62;
}

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])

template <int N> DEVICE void wgmma_bf16(float (&d)[N / 8][4], const u32 (&a)[4], u64 b);
template <>
DEVICE void wgmma_bf16<8>(float (&d)[1][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3"
        "}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
        : D4(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<16>(float (&d)[2][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : D4(0), D4(1)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<24>(float (&d)[3][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11"
        "}, {%12,%13,%14,%15}, %16, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<32>(float (&d)[4][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2), D4(3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<40>(float (&d)[5][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n40k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"
        "}, {%20,%21,%22,%23}, %24, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<48>(float (&d)[6][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23"
        "}, {%24,%25,%26,%27}, %28, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<56>(float (&d)[7][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n56k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27"
        "}, {%28,%29,%30,%31}, %32, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
template <>
DEVICE void wgmma_bf16<64>(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef D4
