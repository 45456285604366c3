// wgmma over bf16 or f16, for attention and the delta rule: Q·K^T with Q in shared memory or in
// registers, and P·V with V in row-major order. sm_90a only.
//
// Tiles: consecutive panels of all rows by 64 values (128 bytes, 128-byte swizzle: 16-byte chunk ^=
// row & 7), at multiples of 1024 bytes; or narrow panels of all rows by 16 values (32 bytes,
// 32-byte swizzle: 16-byte chunk ^= row >> 2 & 1), at multiples of 256 bytes. D as in
// wgmma_sm90.cuh.
#pragma once
#include "common/wgmma_sm90.cuh"

// The descriptor of a tile of ROWS rows with rows as k and columns as N (V): 64 columns a panel; +
// 128 for each 16 of k.
template <int ROWS>
DEVICE u64 wgmma_columns(u32 tile) {
  return (u64)((tile & 0x3FFFF) >> 4) | (u64)(ROWS * 128 >> 4) << 16 | (u64)(1024 >> 4) << 32 |
         (u64)1 << 62;
}

// The descriptor of a narrow panel, K-major: one step of k.
DEVICE u64 wgmma_narrow(u32 panel) {
  return (u64)((panel & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(256 >> 4) << 32 | (u64)3 << 62;
}
// wgmma_columns of narrow panels: 16 columns a panel; + 32 for each 16 of k.
template <int ROWS>
DEVICE u64 wgmma_narrow_columns(u32 tile) {
  return (u64)((tile & 0x3FFFF) >> 4) | (u64)(ROWS * 32 >> 4) << 16 | (u64)(256 >> 4) << 32 |
         (u64)3 << 62;
}

#define F8(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define F32(d, i) F8(d, i), F8(d, i + 1), F8(d, i + 2), F8(d, i + 3)
#define F64(d, i) F32(d, i), F32(d, i + 4)
#define F128(d, i) F64(d, i), F64(d, i + 8)
#define R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R40 R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define R48 R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define R64                                                                                      \
  R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
      ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define R128                                                                                     \
  R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85" \
      ",%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105"   \
      ",%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122"    \
      ",%123,%124,%125,%126,%127"
#define A4(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// Wgmma16<F16>: d += a · b; with FRESH d = a · b.
template <bool F16>
struct Wgmma16;

// `sums`: the places of D's registers in the instruction's text; `rest`: of A and the descriptor;
// `signs`: A and B keep theirs, and which of those in shared memory is transposed.
#define FORM(name, A, N, type, sums, rest, signs, ...)                                            \
  template <bool FRESH>                                                                           \
  static DEVICE void name(float (&d)[N / 8][4], A, u64 b) {                                       \
    if constexpr (FRESH)                                                                          \
      WGMMA_ASYNC(N, "k16.f32." type "." type, sums, rest ", 0, " signs, __VA_ARGS__, "l"(b));    \
    else WGMMA_ASYNC(N, "k16.f32." type "." type, sums, rest ", 1, " signs, __VA_ARGS__, "l"(b)); \
  }
#define IN_REGISTERS const u32(&a)[4]
#define OF_TYPE(f16, type)                                                                    \
  template <>                                                                                 \
  struct Wgmma16<f16> {                                                                       \
    FORM(keys, u64 a, 64, type, R32, "%32, %33", "1, 1, 0, 0", F64(d, 0) : "l"(a))            \
    FORM(keys, u64 a, 96, type, R48, "%48, %49", "1, 1, 0, 0", F64(d, 0), F32(d, 8) : "l"(a)) \
    FORM(keys, u64 a, 128, type, R64, "%64, %65", "1, 1, 0, 0", F128(d, 0) : "l"(a))          \
    FORM(keys, IN_REGISTERS, 64, type, R32, "{%32,%33,%34,%35}, %36", "1, 1, 0",              \
         F64(d, 0) : A4(a))                                                                   \
    FORM(keys, IN_REGISTERS, 32, type, R16, "{%16,%17,%18,%19}, %20", "1, 1, 0",              \
         F32(d, 0) : A4(a))                                                                   \
    FORM(values, IN_REGISTERS, 256, type, R128, "{%128,%129,%130,%131}, %132", "1, 1, 1",     \
         F128(d, 0), F128(d, 16) : A4(a))                                                     \
    FORM(values, IN_REGISTERS, 64, type, R32, "{%32,%33,%34,%35}, %36", "1, 1, 1",            \
         F64(d, 0) : A4(a))                                                                   \
    FORM(values, IN_REGISTERS, 80, type, R40, "{%40,%41,%42,%43}, %44", "1, 1, 1", F64(d, 0), \
         F8(d, 8), F8(d, 9) : A4(a))                                                          \
    FORM(values, IN_REGISTERS, 128, type, R64, "{%64,%65,%66,%67}, %68", "1, 1, 1",           \
         F128(d, 0) : A4(a))                                                                  \
  };

OF_TYPE(false, "bf16")
OF_TYPE(true, "f16")

#undef F8
#undef F32
#undef F64
#undef F128
#undef R16
#undef R32
#undef R40
#undef R48
#undef R64
#undef R128
#undef A4
#undef FORM
#undef IN_REGISTERS
#undef OF_TYPE
