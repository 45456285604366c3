// What common/wgmma_sm90.cuh and common/wgmma16_sm90.cuh mean, for a compiler of the host: a
// warpgroup's matrix instructions as the PTX manual says, in double precision, done when they are
// asked for. What is read too late, or overwritten too early, does not show; what is wrong in a
// descriptor, a swizzle, a fragment or a phase of a barrier does.
#pragma once
#include "common/ptx.cuh"

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int PENDING>
void wgmma_wait() {
  __syncwarp();  // all lanes have read
}
inline void settle(float x) { check(!(x < 0), "a value that must not be negative is"); }
inline u32 uniform(u32 value) { return __reduce_or_sync(~0u, value); }
template <int N>
void keep_order(float (&)[N][4]) {}
template <int N>
void more_registers() {}
template <int N>
void fewer_registers() {}

// A descriptor: where a tile begins, and how far behind it its second panel of 64 columns begins.
inline u64 wgmma_tile(u32 tile) {
  check(tile % 1024 == 0, "a tile is not at a multiple of 1024");
  return tile >> 4;
}
template <int ROWS>
u64 wgmma_columns(u32 tile) {
  return wgmma_tile(tile) | (u64)(ROWS * 128 >> 4) << 16;
}
// The same of narrow panels, of 16 columns.
inline u64 wgmma_narrow(u32 panel) {
  check(panel % 256 == 0, "a narrow panel is not at a multiple of 256");
  return panel >> 4 | (u64)3 << 62;
}
template <int ROWS>
u64 wgmma_narrow_columns(u32 tile) {
  return wgmma_narrow(tile) | (u64)(ROWS * 32 >> 4) << 16;
}
// The value at (row, column) of rows of 128 bytes: 16-byte chunks are XOR-ed with the row; of 32
// bytes: with its bit 2.
inline u16 wgmma_value(u64 of, int row, int column) {
  const u32 begin = (u32)(of & 0x3FFF) << 4, panel = (u32)(of >> 16 & 0x3FFF) << 4;
  if (of >> 62 == 3) {
    const u32 at = begin + column / 16 * panel + row * 32 + column % 16 * 2;
    return load_shared<u16>(at ^ (at >> 7 & 1) << 4);
  }
  const u32 at = begin + column / 64 * panel + row * 128 + column % 64 * 2;
  return load_shared<u16>(at ^ (at >> 7 & 7) << 4);
}
template <bool F16>
struct Wgmma16 {
  static float value(u16 bits) { return F16 ? from_f16(bits) : value_of_bf16(bits); }
  // Rows g and g + 8 of a lane's part of A.
  struct Operand {
    float x[2][16];
  };
  static Operand operand(u64 a) {
    const int first = (threadIdx.x % 128 / 32) * 16 + lane_id() / 4;
    Operand found;
    for (int j = 0; j < 2; ++j)
      for (int k = 0; k < 16; ++k) found.x[j][k] = value(wgmma_value(a, first + 8 * j, k));
    return found;
  }
  static Operand operand(const u32 (&a)[4]) {
    const auto all = gathered({a[0], a[1], a[2], a[3]});
    Operand found;
    for (int j = 0; j < 2; ++j)
      for (int k = 0; k < 16; ++k) {
        const u32 pair = all[lane_id() / 4 * 4 + k % 8 / 2][j + k / 8 * 2];
        found.x[j][k] = value(pair >> k % 2 * 16 & 0xffff);
      }
    __syncwarp();
    return found;
  }
  template <bool FRESH, int N, class B>
  static void add(float (&d)[N][4], const Operand& a, const B& b) {
    for (int n = 0; n < N; ++n)
      for (int column = 0; column < 2; ++column) {
        float of[16];
        for (int k = 0; k < 16; ++k) of[k] = value(b(k, 8 * n + lane_id() % 4 * 2 + column));
        for (int j = 0; j < 2; ++j) {
          double sum = FRESH ? 0 : d[n][2 * j + column];
          for (int k = 0; k < 16; ++k) sum += (double)a.x[j][k] * of[k];
          d[n][2 * j + column] = (float)sum;
        }
      }
  }
  template <bool FRESH, int N, class A>
  static void keys(float (&d)[N][4], const A& a, u64 b) {
    add<FRESH>(d, operand(a), [=](int k, int n) { return wgmma_value(b, n, k); });
  }
  template <bool FRESH, int N>
  static void values(float (&d)[N][4], const u32 (&a)[4], u64 b) {
    add<FRESH>(d, operand(a), [=](int k, int n) { return wgmma_value(b, k, n); });
  }
};

// common/wgmma_sm90.cuh's: A in registers, K-major B.
template <int N>
void wgmma_read(float (&)[N][4]) {}
template <bool FP8, int N>
struct Wgmma {
  typedef float Sums[N / 8][4];
  template <bool FRESH>
  static void add(Sums& d, const u32 (&a)[4], u64 b) {
    if constexpr (FP8) return add_e4m3<FRESH>(d, a, b);
    using Of = Wgmma16<false>;
    Of::add<FRESH>(d, Of::operand(a), [=](int k, int n) { return wgmma_value(b, n, k); });
  }
  // Row g + 8 j, k of A: byte k % 4 of register j + k / 16 * 2 of lane k / 4 % 4 of the row.
  template <bool FRESH>
  static void add_e4m3(Sums& d, const u32 (&a)[4], u64 b) {
    const auto all = gathered({a[0], a[1], a[2], a[3]});
    for (int n = 0; n < N / 8; ++n)
      for (int i = 0; i < 4; ++i) {
        double sum = FRESH ? 0 : d[n][i];
        for (int k = 0; k < 32; ++k) {
          const u32 word = all[lane_id() / 4 * 4 + k / 4 % 4][i / 2 + k / 16 * 2];
          const u32 pair = wgmma_value(b, 8 * n + lane_id() % 4 * 2 + i % 2, k / 2);
          sum += (double)value_of_e4m3(word >> k % 4 * 8) * value_of_e4m3(pair >> k % 2 * 8);
        }
        d[n][i] = (float)sum;
      }
    __syncwarp();
  }
  static void run(Sums& d, const u32 (&a)[4], u64 b) { add<false>(d, a, b); }
  static void begin(Sums& d, const u32 (&a)[4], u64 b) { add<true>(d, a, b); }
};
