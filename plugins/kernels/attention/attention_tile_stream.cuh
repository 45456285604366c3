// A ring of 16-token tiles in shared memory, filled by cp.async from pages. A reader of a chunk is
// a warp with a ring, or a team of warps that takes STEP_TILES tiles at once and shares one.
// Macros: those of attention_merge.cuh.
#pragma once
#include "attention/attention_merge.cuh"

constexpr int IN_FLIGHT = TEAM == 1 ? STAGES : STAGES - 1;  // steps
static_assert(TEAM == 1 || (STAGES > 1 && ROW >= 128), "a team's ring has a step in use");

// A warp's tiles of a work item: tile i begins at position first + i·STRIDE. The warps that share a
// tile copy some rows of it each.
struct TileStream {
  static constexpr int STRIDE = 16 * READERS * STEP_TILES, PIECES = ROW / 32 / SHARERS;

  const u8 *keys, *values;
  const int* pages;
  u32 ring;                                  // the address of its tile of the first step
  int first, end, steps, stored, head, ids;  // steps: those of the team

  DEVICE static int piece() { return threadIdx.x / 32 % TEAM / STEP_TILES * PIECES; }
  DEVICE u32 tile(int i) const { return ring + i % STAGES * SLOT; }
  // The ids of the pages of 32 tiles from this position on, one a lane.
  DEVICE void find_pages(int position) {
    const int ahead = position + STRIDE * lane_id();
    ids = ahead < end ? pages[ahead / PAGE] : 0;
  }
  // Starts the copies of the first tiles.
  DEVICE void start() {
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; i++) {
      if (i < steps) load(i, first + i * STRIDE);
      commit_copies();
    }
  }
  // Starts the copies of tile i, which is at this position. Addresses of rows of 128 bytes or more
  // differ in few bits.
  DEVICE void load(int i, int position) {
    const int lane = lane_id(), at = piece() * 32 + lane, r = at / (ROW / 16), c = at % (ROW / 16);
    if ((i & 31) == 0) find_pages(position);
    i64 from = page_offset(__shfl_sync(~0u, ids, i & 31), head, position) + at * 16;
    const u8 *key = keys + from, *value = values + from;
    const u32 to = tile(i), place = to + swizzled<ROW>(r, c);
    const int left = min(stored, end) - position - r;  // rows beyond are zeros, not a page's NaN
#pragma unroll
    for (int n = 0; n < PIECES; n++) {
      const int rows = 512 * n / ROW;
      const u32 at =
          ROW < 128 ? to + swizzled<ROW>(r + rows, c) : (place ^ (rows & 7) << 4) + n * 512;
      copy_async(at, key + n * 512, rows < left ? 16 : 0);
      copy_async(at + TILE, value + n * 512, rows < left ? 16 : 0);
    }
  }
  // Copies the row's new tokens into this warp's rows of a tile, where cp.async wrote zeros.
  DEVICE void patch(int position, u8* tile, const u8* fresh) const {
    constexpr int ROWS = 16 / SHARERS;
    const int base = position + piece() * 512 / ROW, low = max(stored, base);
    const int n = min(end, base + ROWS) - low;
#pragma unroll 1
    for (int at = lane_id(); at < n * 2 * (ROW / 16); at += 32) {
      int c = at % (ROW / 16), which = at / (ROW / 16) % 2, there = low + at / (ROW / 8);
      *reinterpret_cast<uint4*>(tile + which * TILE + swizzled<ROW>(there - position, c)) =
          *reinterpret_cast<const uint4*>(fresh + (2 * (there - stored) + which) * ROW + c * 16);
    }
    __syncwarp();
  }
};

// The warp's tiles of positions begin … end - 1 of a row; its first `stored` are in pages.
DEVICE TileStream stream_of(const u8* arena, const u8* keys, const u8* values, const int* pages,
                            int begin, int end, int stored, int head, int reader, int member) {
  const int from = begin + 16 * reader, mine = member % STEP_TILES;
  TileStream stream{keys, values, pages, shared_address(arena) + mine * 2 * TILE};
  stream.first = from + 16 * READERS * mine, stream.end = end;
  stream.stored = stored, stream.head = head;
  const int longest = FOLLOWED ? begin : from;
  stream.steps = max(0, end - longest + TileStream::STRIDE - 1) / TileStream::STRIDE;
  return stream;
}
