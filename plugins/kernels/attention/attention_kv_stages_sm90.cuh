// Tiles of keys and values, of 64 tokens, in the layout of wgmma: a ring of two of each in shared
// memory. A producer warpgroup fills it from the pages of one sequence and kv head: bf16 by
// cp.async, e4m3 codes through registers, where they become f16 (a code is exact in f16).
//
// Layout: STAGES tiles of keys, then STAGES of values. A tile has four panels (wgmma16_sm90.cuh).
// Macros: those of attention_kv_pages.cuh.
#pragma once
#include "attention/attention_kv_pages.cuh"
#include "common/ptx.cuh"

constexpr int QUERIES = 64, KEYS = 64, GROUP = 128, STAGES = 2;
constexpr int PANEL = KEYS * 128, PANELS = D / 64;  // 64 dimensions of a tile
constexpr int HALF_TILE = PANELS * PANEL;           // keys or values of a tile
constexpr int PART = 32;                            // tokens of codes in a producer's registers
static_assert(D == 256 && PAGE % KEYS == 0, "unsupported sizes");

struct Barriers {
  u64 full[2][STAGES], empty[2][STAGES];  // of keys, of values
};

// The keys and values of a tile of queries: positions begin (a multiple of 64) … end - 1 of one
// sequence, one kv head.
struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, begin, end, tiles;

  DEVICE int page(int tile) const { return tile < tiles ? pages[(begin + tile * KEYS) / PAGE] : 0; }
  // Tokens from the first of a tile on; 0 after the last tile, which may end within the sequence.
  DEVICE int left(int tile) const { return tile < tiles ? end - begin - tile * KEYS : 0; }
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

// The address, opaque to the compiler: constants added to it become immediate offsets.
DEVICE const u8* opaque(const u8* from) {
  asm volatile("" : "+l"(from));
  return from;
}

// bf16: a warp copies a row at a time. A half is announced after the copies of the next one start.
DEVICE void copy_half(const Producer& p, int which, int tile, int page) {
  p.wait_empty(which, tile);
  const u8* from = opaque(p.half(which, page, tile) + p.warp * ROW + p.lane * 16);
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

// e4m3: two warps produce the keys and two the values, in parts of 32 tokens; the next part is
// loaded while one is converted. A lane has 16 codes of every fourth row. Eight lanes write four
// neighbouring chunks of two rows: eight bank groups.
struct Codes {
  uint4 raw[PART / 4];

  DEVICE void load(int n, const u8* from, int left) {
    raw[n] = load_if16(4 * n < left, from + n * 4 * ROW);
  }
};

// Converts a part and loads the next one, row by row. `left`: rows of the next part from the lane's
// first one on. Dimensions are in the order of `slot_of`.
DEVICE void convert_part(Codes& codes, u32 first, u32 second, const u8* next, int left) {
#pragma unroll
  for (int n = 0; n < PART / 4; n++) {
    const uint4 c = codes.raw[n];
    u32 low[4], high[4];
    widen(c.x, low[0], high[0]), widen(c.y, low[1], high[1]);
    widen(c.z, low[2], high[2]), widen(c.w, low[3], high[3]);
    codes.load(n, next, left);
    const u32 turned = n & 1 ? 64 : 0;  // rows 4 to 7 of eight
    store_shared16((first ^ turned) + n * 512, low[0], low[1], low[2], low[3]);
    store_shared16((second ^ turned) + n * 512, high[0], high[1], high[2], high[3]);
  }
}

DEVICE void produce_codes(const Producer& p) {
  const int which = p.warp >> 1, row = (p.warp & 1) * 2 + (p.lane >> 2 & 1);
  const int chunk = (p.lane & 3) * 2, panel = p.lane >> 3;
  const int column = row * ROW + panel * 64 + (p.lane & 3) * 16;
  Codes codes;
  const u8* from = p.half(which, p.s.page(0), 0) + column;
#pragma unroll
  for (int n = 0; n < PART / 4; n++) codes.load(n, from, p.s.left(0) - row);
#pragma unroll 1
  for (int i = 0; i < p.s.tiles; i++) {
    const int page = p.s.page(i + 1);
    const u32 to = p.place(which, i) + panel * PANEL + row * 128;
    const u32 first = to + ((chunk ^ row) << 4), second = to + (((chunk + 1) ^ row) << 4);
    p.wait_empty(which, i);
#pragma unroll
    for (int part = 0; part < KEYS / PART; part++) {
      const bool last = part + 1 == KEYS / PART;
      from = opaque(last ? p.half(which, page, i + 1) + column : from + PART * ROW);
      const int left = last ? p.s.left(i + 1) : p.s.left(i) - (part + 1) * PART;
      const u32 down = part * PART * 128;
      convert_part(codes, first + down, second + down, from, left - row);
    }
    p.announce(which, i);
  }
}
