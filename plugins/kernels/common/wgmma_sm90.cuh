// wgmma with A in registers: D[64, N] += A[64, 32 bytes of k] · B, B in shared memory. sm_90a only.
//
// A: four registers a lane, as mma.sync's m16 fragment, one m16 tile a warp. B: N rows of 128
// bytes, K-major, 128-byte swizzle (16-byte chunk ^= row & 7), named by a descriptor. D: f32, four
// values for each 8 columns, as mma.sync's. Operand types: bf16 (k = 16) and e4m3 (k = 32).
#pragma once
#include "common/ptx.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What x needs is computed before a wait that follows: ptxas moves plain arithmetic behind it. A
// trap if x is negative, which must not be.
DEVICE void settle(float x) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p trap; }" ::"f"(x) : "memory");
}

// Results of wgmma are read after this, which follows their wait: the compiler sees no order.
template <int N>
DEVICE void wgmma_read(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// A value that all lanes share, in a uniform register: a descriptor of it costs no instruction a
// step. From a plain register each wgmma needs two moves, and ptxas recomputes the descriptor.
DEVICE u32 uniform(u32 value) {
  u32 same;
  asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(same) : "r"(value));
  return same;
}

// The descriptor of a K-major tile of rows of 128 bytes in 128-byte swizzle (8 rows a KiB), at a
// multiple of 1024 bytes; + 2 for each 32 bytes of k.
template <class Address>
DEVICE u64 wgmma_tile(Address tile) {
  return (u64)((shared_address(tile) & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 |
         (u64)1 << 62;
}

// The instruction: N columns, `kind` (k and types), D's registers, what follows D; then operands.
#define WGMMA_ASYNC(N, kind, sums, rest, ...) \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N kind " {" sums "}, " rest ";" : __VA_ARGS__)

// Wgmma<FP8, N>::run(d, a, b): d += a · b, b a descriptor; begin(d, a, b): d = a · b, d unset.
template <bool FP8, int N>
struct Wgmma;

// F8: 8 columns of D, four registers, from the i-th eight on; F16, F32, …: so many columns.
#define F8(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define F16(i) F8(i), F8(i + 1)
#define F32(i) F16(i), F16(i + 2)
#define F64(i) F32(i), F32(i + 4)
#define F128(i) F64(i), F64(i + 8)
// `sums`: the places of D's registers in the instruction's text; `rest`: of A and the descriptor.
// After it: whether D is added to; ones, A and B keep their signs; 0, bf16's B is not transposed.
#define ADD(name, add, N, kind, sums, rest, signs, ...)                                            \
  static DEVICE void name(float (&d)[N / 8][4], const u32(&a)[4], u64 b) {                         \
    WGMMA_ASYNC(N, kind, sums, rest ", " add signs, __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), \
                "r"(a[3]), "l"(b));                                                                \
  }
#define ONE(fp8, N, ...)            \
  template <>                       \
  struct Wgmma<fp8, N> {            \
    ADD(run, "1", N, __VA_ARGS__)   \
    ADD(begin, "0", N, __VA_ARGS__) \
  };
#define BOTH(N, sums, rest, ...)                                           \
  ONE(false, N, "k16.f32.bf16.bf16", sums, rest, ", 1, 1, 0", __VA_ARGS__) \
  ONE(true, N, "k32.f32.e4m3.e4m3", sums, rest, ", 1, 1", __VA_ARGS__)

#define R8 "%0,%1,%2,%3"
#define R16 R8 ",%4,%5,%6,%7"
#define R24 R16 ",%8,%9,%10,%11"
#define R32 R24 ",%12,%13,%14,%15"
#define R40 R32 ",%16,%17,%18,%19"
#define R48 R40 ",%20,%21,%22,%23"
#define R56 R48 ",%24,%25,%26,%27"
#define R64 R56 ",%28,%29,%30,%31"
#define R72 R64 ",%32,%33,%34,%35"
#define R80 R72 ",%36,%37,%38,%39"
#define R88 R80 ",%40,%41,%42,%43"
#define R96 R88 ",%44,%45,%46,%47"
#define R104 R96 ",%48,%49,%50,%51"
#define R112 R104 ",%52,%53,%54,%55"
#define R120 R112 ",%56,%57,%58,%59"
#define R128 R120 ",%60,%61,%62,%63"
#define R256                                                                      \
  R128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81" \
       ",%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99" \
       ",%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113"   \
       ",%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

BOTH(8, R8, "{%4,%5,%6,%7}, %8", F8(0))
BOTH(16, R16, "{%8,%9,%10,%11}, %12", F16(0))
BOTH(24, R24, "{%12,%13,%14,%15}, %16", F16(0), F8(2))
BOTH(32, R32, "{%16,%17,%18,%19}, %20", F32(0))
BOTH(40, R40, "{%20,%21,%22,%23}, %24", F32(0), F8(4))
BOTH(48, R48, "{%24,%25,%26,%27}, %28", F32(0), F16(4))
BOTH(56, R56, "{%28,%29,%30,%31}, %32", F32(0), F16(4), F8(6))
BOTH(64, R64, "{%32,%33,%34,%35}, %36", F64(0))
BOTH(72, R72, "{%36,%37,%38,%39}, %40", F64(0), F8(8))
BOTH(80, R80, "{%40,%41,%42,%43}, %44", F64(0), F16(8))
BOTH(88, R88, "{%44,%45,%46,%47}, %48", F64(0), F16(8), F8(10))
BOTH(96, R96, "{%48,%49,%50,%51}, %52", F64(0), F32(8))
BOTH(104, R104, "{%52,%53,%54,%55}, %56", F64(0), F32(8), F8(12))
BOTH(112, R112, "{%56,%57,%58,%59}, %60", F64(0), F32(8), F16(12))
BOTH(120, R120, "{%60,%61,%62,%63}, %64", F64(0), F32(8), F16(12), F8(14))
BOTH(128, R128, "{%64,%65,%66,%67}, %68", F128(0))
BOTH(256, R256, "{%128,%129,%130,%131}, %132", F128(0), F128(16))

#undef F8
#undef F16
#undef F32
#undef F64
#undef F128
#undef ADD
#undef ONE
#undef BOTH
#undef R8
#undef R16
#undef R24
#undef R32
#undef R40
#undef R48
#undef R56
#undef R64
#undef R72
#undef R80
#undef R88
#undef R96
#undef R104
#undef R112
#undef R120
#undef R128
#undef R256
