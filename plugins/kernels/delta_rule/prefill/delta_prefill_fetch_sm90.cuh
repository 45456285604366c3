// What delta_prefill_wgmma_sm90.cu's scan has of a tile in shared memory, and the warpgroup that
// fetches it: keys, queries, T, P and the factors by TMA bulk copies (prepare leaves them as wgmma
// reads them), the values by all threads, which convolve them where the node says so. Two buffers:
// a tile is fetched while the one before it is computed.
//
// Panels of 64 columns as in common/wgmma16_sm90.cuh; of the values the same, though ldmatrix reads
// them.
#pragma once
#include "common/wgmma16_sm90.cuh"
#include "delta_rule/prefill/delta_prefill_scan.cuh"

constexpr int GROUP = 128;
constexpr int PANEL = TILE * 128;              // bytes of 64 rows of 64 columns
constexpr int TOKENS = TILE * DS / 4 / GROUP;  // of a thread, that fetches four values of each
constexpr int CORNER = TILE * 32;              // of a warp's outputs
static_assert(KD == 128 && DS == 64 && TILE == 64 && !PACKED, "unsupported sizes");

struct Tile {  // of one buffer
  u8 q[2 * PANEL], k[2 * PANEL];
  u8 t[2 * PANEL], p[2 * PANEL];  // high, low
  u8 v[PANEL];
};
constexpr u32 K_AT = 2 * PANEL, T_AT = 4 * PANEL, P_AT = 6 * PANEL;
struct Bounds {  // of the sequence that a warp is at: rows, those with tokens, its slot
  int begin, end, live, slot;
};
struct Tiles {
  alignas(1024) Tile tile[2];
  u8 o[GROUP / 32][CORNER];
  alignas(16) float f[2][FACTORS * TILE];
  u64 full[2], empty[2];
  Bounds bounds[GROUP / 32];
};

// A consumer's place in its warpgroup and in fragments; computed again at each use, which costs
// fewer registers than keeping it.
struct Lane {
  int thread = forget(threadIdx.x), id = thread % 32, warp = thread % GROUP / 32;
  int row = id / 4, pair = id % 4 * 2;
  u32 token = (id & 7) + (id >> 4) * 8, half = id >> 3 & 1;  // of ldmatrix and stmatrix

  // Where tokens 16 i … of the warp's 16 values are read.
  DEVICE u32 of_tile(int i) const {
    return (i * 16 + token) * 128 + ((warp * 2 + half) ^ (token & 7)) * 16;
  }
};

DEVICE void begin_barriers(Tiles& m) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(&m.full[i], GROUP + 1);  // threads, and the one that asks for TMA's
      barrier_init(&m.empty[i], GROUP / 32 * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

// The thread's part of every tile of a sequence; n tiles came before and, at the end, with it.
DEVICE void fetch_sequence(Tiles& m, const Operands& from, Sequence own, int& n) {
  const int head = blockIdx.y, thread = threadIdx.x % GROUP;
  const int value = thread % (DS / 4) * 4, first = thread / (DS / 4) * TOKENS;
  const int column = VALUES_AT + head * VD + blockIdx.x * DS + value;
#pragma unroll 1
  for (int row = own.begin; row < own.live(); row++, n++) {
    const i64 tile_head = (i64)row * HV + head;
    Tile& tile = m.tile[n & 1];
    u64* const full = &m.full[n & 1];
    auto ready = [&] {
      barrier_wait(&m.empty[n & 1], ~n >> 1 & 1);
      if (thread > 0) return;
      barrier_expect(full, 8 * PANEL + sizeof(m.f[0]));
      bulk_load(tile.q, from.keys + ((i64)row * HK + head / R) * HEAD_KEYS, 4 * PANEL, full);
      bulk_load(tile.t, from.t + tile_head * 2 * PART, 2 * PANEL, full);
      bulk_load(tile.p, from.p + tile_head * 2 * PART, 2 * PANEL, full);
      bulk_load(m.f[n & 1], from.factors + tile_head * FACTORS * TILE, sizeof(m.f[0]), full);
    };
    make_columns<TOKENS, TOKENS>(
        from.columns, row, column, first, ready, [&](int t, const Quad& y) {
          *(Quad*)(tile.v + t * 128 + (value / 8 ^ (t & 7)) * 16 + value % 8 * 2) = y;
        });
    barrier_arrive(full);
  }
#if CONV  // of a row without a token only the states
  if (own.live() < own.end && own.slot >= 0)
    make_columns<TOKENS, TOKENS>(
        from.columns, own.live(), column, first, [] {}, [](int, const Quad&) {});
#endif
}
