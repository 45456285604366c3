// What delta_prefill_wgmma_sm90.cu's scan has of a tile in shared memory, and the warpgroup that
// fetches it: a warp the keys, one the queries, one the values and factors (cp.async), one T and P
// (TMA bulk copies: prepare leaves them as wgmma reads them). Two buffers: a tile is fetched while
// the one before it is computed. Each warp waits for its own copies alone, fences the async proxy
// and arrives.
//
// Panels of 64 columns as in common/wgmma16_sm90.cuh; of the values the same, though ldmatrix reads
// them.
#pragma once
#include "common/wgmma16_sm90.cuh"
#include "delta_rule/prefill/delta_prefill_scan.cuh"

constexpr int GROUP = 128;
constexpr int PANEL = TILE * 128;  // bytes of 64 rows of 64 columns
constexpr int CORNER = TILE * 32;  // of a warp's outputs
static_assert(KD == 128 && DS == 64 && TILE == 64 && !PACKED, "unsupported sizes");

struct Tile {  // of one buffer
  u8 k[2 * PANEL], q[2 * PANEL];
  u8 t[2 * PANEL], p[2 * PANEL];  // high, low
  u8 v[PANEL];
};
constexpr u32 QUERIES_AT = 2 * PANEL, T_AT = 4 * PANEL, P_AT = 6 * PANEL;
struct Bounds {  // of the sequence that a warp is at: rows, those with tokens, its slot
  int begin, end, live, slot;
};
struct Tiles {
  alignas(1024) Tile tile[2];
  u8 o[GROUP / 32][CORNER];
  float f[2][FACTORS * TILE];
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
      barrier_init(&m.full[i], 3 * 32 + 1);  // lanes that copy, and the one that asks for TMA's
      barrier_init(&m.empty[i], GROUP / 32 * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

// CHUNKS 16-byte pieces of each of 64 rows; rows from `valid` on are zeros.
template <int CHUNKS>
DEVICE void copy_rows(u32 to, const u16* from, int valid, int lane) {
  constexpr int AT_ONCE = 32 / CHUNKS;  // rows of an instruction
  const int row = lane / CHUNKS, chunk = lane % CHUNKS;
  from += row * WIDTH + chunk * 8;
  const u32 first = to + chunk / 8 * PANEL + row * 128;
#pragma unroll
  for (int i = 0; i < TILE / AT_ONCE; i++) {
    const u32 turned = ((chunk % 8) ^ ((i * AT_ONCE & 7) + row)) * 16;
    const bool there = i * AT_ONCE + row < valid;
    copy_async(first + turned + i * AT_ONCE * 128, from + (there ? i * AT_ONCE * WIDTH : 0),
               there ? 16 : 0);
  }
}

// The warp's part of every tile of a sequence; n tiles came before and, at the end, with it.
DEVICE void fetch_sequence(Tiles& m, const Operands& from, Sequence own, int& n) {
  const int head = blockIdx.y, warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int row = own.begin; row < own.live(); row++, n++) {
    const int valid = own.valid(row);
    const u16* tokens = from.c + (i64)row * TILE * WIDTH;
    const i64 tile_head = (i64)row * HV + head;
    Tile& tile = m.tile[n & 1];
    u64* const full = &m.full[n & 1];
    barrier_wait(&m.empty[n & 1], ~n >> 1 & 1);
    if (warp == 3) {
      if (lane == 0) {
        barrier_expect(full, 4 * PANEL);
        bulk_load(tile.t, from.t + tile_head * 2 * TILE * TILE, 2 * PANEL, full);
        bulk_load(tile.p, from.p + tile_head * 2 * TILE * TILE, 2 * PANEL, full);
      }
      continue;
    }
    if (warp == 0) {
      copy_rows<16>(shared_address(tile.k), tokens + (HK + head / R) * KD, valid, lane);
    } else if (warp == 1) {
      copy_rows<16>(shared_address(tile.q), tokens + head / R * KD, valid, lane);
    } else {
      const float* f = from.factors + tile_head * FACTORS * TILE;
      for (int i = lane * 4; i < FACTORS * TILE; i += 128) copy_async(m.f[n & 1] + i, f + i);
      copy_rows<8>(shared_address(tile.v), tokens + 2 * HK * KD + head * VD + blockIdx.x * DS,
                   valid, lane);
    }
    commit_copies();
    wait_copies<0>();
    fence_async();
    barrier_arrive(full);
  }
}
