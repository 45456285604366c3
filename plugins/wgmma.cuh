// wgmma with the weights in registers: D[64, N] += A[64, 32 bytes of k] · B, B in shared memory.
//
// A: four registers a lane, as mma.sync's 16-row fragment, one 16-row strip a warp. B: N rows of
// 128 bytes, K-major, 128-byte swizzle (chunk ^= row & 7), named by a descriptor. D: f32, four
// values for each 8 columns, as mma.sync's. Ops: bf16 (k = 16) and e4m3 (k = 32).
#pragma once
#include "stream_ptx.cuh"

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The descriptor of a K-major tile in 128-byte swizzle whose rows are 128 bytes: 8 rows a KiB.
DEV u64 wgmma_tile(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

#define F4(d, i) "+f"((d)[i][0]), "+f"((d)[i][1]), "+f"((d)[i][2]), "+f"((d)[i][3])
#define F8(d, i) F4(d, i), F4(d, (i) + 1)
#define F16(d, i) F8(d, i), F8(d, (i) + 2)
#define F32(d, i) F16(d, i), F16(d, (i) + 4)
#define F64(d, i) F32(d, i), F32(d, (i) + 8)
#define A4(a) "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3])

template <bool FP8, int N>
struct Wgmma;

template <>
struct Wgmma<false, 8> {
  static DEV void run(float (&d)[1][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3"
        "}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
        : F4(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<false, 16> {
  static DEV void run(float (&d)[2][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, {%8,%9,%10,%11}, %12, 1, 1, 1, 0;"
        : F8(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<false, 32> {
  static DEV void run(float (&d)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
        : F16(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<false, 64> {
  static DEV void run(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : F32(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<false, 128> {
  static DEV void run(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,"
        "%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
        "%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : F64(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<true, 8> {
  static DEV void run(float (&d)[1][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3"
        "}, {%4,%5,%6,%7}, %8, 1, 1, 1;"
        : F4(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<true, 16> {
  static DEV void run(float (&d)[2][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7"
        "}, {%8,%9,%10,%11}, %12, 1, 1, 1;"
        : F8(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<true, 32> {
  static DEV void run(float (&d)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
        "}, {%16,%17,%18,%19}, %20, 1, 1, 1;"
        : F16(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<true, 64> {
  static DEV void run(float (&d)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, 1, 1, 1;"
        : F32(d, 0)
        : A4(a), "l"(b));
  }
};
template <>
struct Wgmma<true, 128> {
  static DEV void run(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
        "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,"
        "%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,"
        "%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, 1, 1, 1;"
        : F64(d, 0)
        : A4(a), "l"(b));
  }
};

#undef F4
#undef F8
#undef F16
#undef F32
#undef F64
#undef A4
