// Tiles of 64 tokens' keys and values as wgmma reads them: a ring of two of each in shared memory,
// which a warpgroup of producers fills from the pages of one sequence and kv head. bf16 as it is,
// by cp.async; e4m3 codes by TMA bulk copies, and from there as f16.
//
// Layout: STAGES tiles of keys, as many of values; e4m3: the codes of one of each. A tile: four
// panels as in wgmma16.cuh.
// Macros: those of paged_kv.cuh.
#pragma once
#include "attention/paged_kv.cuh"
#include "common/ptx.cuh"

constexpr int QUERIES = 64, KEYS = 64, GROUP = 128, STAGES = 2;
constexpr int PANEL = KEYS * 128, PANELS = D / 64;  // 64 dimensions of a tile
constexpr int HALF_TILE = PANELS * PANEL;           // keys or values of a tile
constexpr int PRODUCERS = 3;                        // the first of two barriers' names
constexpr int CODES = KEYS * ROW;                   // bytes of e4m3 keys or values of a tile
static_assert(D == 256 && PAGE % KEYS == 0, "unsupported sizes");

struct Barriers {
  u64 full[2][STAGES], empty[2][STAGES];  // of keys, of values
  u64 codes[2];
};

// Where a tile of queries reads from: positions begin (a multiple of 64) … end - 1 of one sequence,
// one kv head.
struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, begin, end, tiles;

  DEVICE int page(int tile) const { return tile < tiles ? pages[(begin + tile * KEYS) / PAGE] : 0; }
  DEVICE int left(int tile) const { return end - begin - tile * KEYS; }
};

// One half of a tile into shared memory. `which`: 0 keys, 1 values.
struct Producer {
  const Source& s;
  u32 tiles;  // of shared memory
  Barriers& b;
  int warp, lane;

  DEVICE const u8* half(int which, int page, int tile) const {
    return (which ? s.values : s.keys) + page_offset(page, s.head, s.begin + tile * KEYS);
  }
  DEVICE u32 place(int which, int tile) const {
    return tiles + (which * STAGES + tile % STAGES) * HALF_TILE;
  }
  DEVICE void wait_empty(int which, int tile) const {
    if (tile >= STAGES) barrier_wait(&b.empty[which][tile % STAGES], (tile / STAGES + 1) & 1);
  }
  DEVICE void announce(int which, int tile) const {
    fence_async();  // wgmma reads through the async proxy
    barrier_arrive(&b.full[which][tile % STAGES]);
  }
};

// The address, opaque: what is added to it stands in the instructions.
DEVICE const u8* kept(const u8* from) {
  asm volatile("" : "+l"(from));
  return from;
}

// bf16: a warp copies a row at once. A half is announced when the one after it is under way.
DEVICE void copy_half(const Producer& p, int which, int tile, int page) {
  p.wait_empty(which, tile);
  const u8* from = kept(p.half(which, page, tile) + p.warp * ROW + p.lane * 16);
  const u32 to = p.place(which, tile) + (p.lane >> 3) * PANEL + p.warp * 128;
  const u32 even = to + (((p.lane & 7) ^ p.warp) << 4);
  const u32 odd = to + (((p.lane & 7) ^ (p.warp + 4)) << 4);
  const int left = p.s.left(tile);
  if (left >= KEYS) {
#pragma unroll
    for (int n = 0; n < KEYS / 4; n++) {
      copy_async((n & 1 ? odd : even) + n * 512, from + n * 4 * ROW);
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < KEYS / 4; n++) {
      const bool there = 4 * n + p.warp < left;
      copy_async((n & 1 ? odd : even) + n * 512, from + (there ? n * 4 * ROW : 0), there ? 16 : 0);
    }
  }
  commit_copies();
}

DEVICE void produce_copies(const Producer& p) {
  int page = p.s.page(0);
#pragma unroll 1
  for (int i = 0; i < p.s.tiles; i++) {
    const int next = p.s.page(i + 1);
    copy_half(p, 0, i, page);
    if (i > 0) wait_copies<1>(), p.announce(1, i - 1);
    copy_half(p, 1, i, page);
    wait_copies<1>(), p.announce(0, i);
    page = next;
  }
  wait_copies<0>(), p.announce(1, p.s.tiles - 1);
}

// e4m3: two warps do the keys and two the values. The codes of a tile come by one TMA bulk copy; a
// lane has 16 of each fourth row. Eight lanes read 128 bytes of codes in a row and write eight bank
// groups: in every second panel neighbouring chunks change places, here, in the queries and in the
// sums. Dimensions come in the order of `slot_of`.
DEVICE void convert(const Producer& p, u32 raw, u32 to, int rows) {
  const int row = (p.warp & 1) * 2 + (p.lane >> 4), panel = p.lane >> 2 & 3;
  const int chunk = (p.lane & 3) * 2 + (panel & 1);
  to += panel * PANEL + row * 128;
  raw += row * ROW + (p.lane & 15) * 16;
  const u32 first = to + ((chunk ^ row) << 4), second = first ^ 16;
#pragma unroll 4
  for (int n = 0; n < KEYS / 4; n++) {
    uint4 c = load_shared16(raw + n * 4 * ROW);
    if (4 * n + row >= rows) c = make_uint4(0, 0, 0, 0);
    u32 low[4], high[4];
    widen(c.x, low[0], high[0]), widen(c.y, low[1], high[1]);
    widen(c.z, low[2], high[2]), widen(c.w, low[3], high[3]);
    const u32 turned = n & 1 ? 64 : 0;  // rows 4 to 7 of eight
    store_shared16((first ^ turned) + n * 512, low[0], low[1], low[2], low[3]);
    store_shared16((second ^ turned) + n * 512, high[0], high[1], high[2], high[3]);
  }
}

DEVICE void produce_codes(const Producer& p) {
  const int which = p.warp >> 1;
  const u32 raw = p.tiles + (2 * STAGES) * HALF_TILE + which * CODES;
  const bool first = (p.warp & 1) == 0 && p.lane == 0;
  u64* const arrived = &p.b.codes[which];
  int page = p.s.page(0);
#pragma unroll 1
  for (int i = 0; i < p.s.tiles; i++) {
    if (i == 0 && first) {
      barrier_expect(arrived, CODES), bulk_load(raw, p.half(which, page, 0), CODES, arrived);
    }
    page = p.s.page(i + 1);
    p.wait_empty(which, i);
    barrier_wait(arrived, i & 1);
    convert(p, raw, p.place(which, i), p.s.left(i));
    p.announce(which, i);
    meet(PRODUCERS + which, 64);  // the codes are read
    if (i + 1 < p.s.tiles && first) {
      barrier_expect(arrived, CODES), bulk_load(raw, p.half(which, page, i + 1), CODES, arrived);
    }
  }
}
