// Epilogue of attention_decode_mma.cu and attention_round_mma.cu: the merge of partial sums
// (over a block's readers, groups of FAN chunks, a row's groups), then gate and quantised copies.
//
// Every sum runs in a fixed order: warps, chunks, groups ascending. The last block to arrive at a
// group merges its FAN parts at most, and the last at a row its groups: no block reads all partial
// sums of a long row in sequence.
// Macros: the kernel's; FUSED (0: store o; 1: y = o * sigmoid(gate): store y if KEEP, and its
// copies), KEEP, QUANT, COPIES.
#pragma once
#include "attention/attention_kv_pages.cuh"
#include "common/quad_quant.cuh"

#ifndef QUERIES  // attention_decode_mma.cu: a query a row, a ring of tiles a warp
#define QUERIES 1
#define TOKENS 1
#define READERS WARPS
#define TEAM 1
#define STEP_TILES 1
#define MERGE_BATCH 1
#define CHUNK_STRIDE HEAD_GROUPS  // places of partial sums from a chunk to the next
#endif

constexpr int TILE = 16 * ROW;  // bytes of 16 tokens' keys
constexpr int WEIGHTS = 1024;  // bytes of a team's weights of a tile: where its keys are, or behind
constexpr int SLOT = STEP_TILES * (2 * TILE + (TEAM > STEP_TILES ? WEIGHTS : 0));  // a step
constexpr int RING = STAGES * SLOT;
constexpr int REFERENCES = TEAM > 1 ? (3 * STEP_TILES + 1) * 128 : 0;  // of a team, behind its ring
constexpr int PITCH = D + 8;  // elements of a query row: rows in distinct banks
constexpr int WIDE = D + 4;   // floats of an accumulator row, likewise
constexpr int COLUMNS = 8;    // heads of a group, padded to n8
constexpr int FAN = 8;
static_assert(MOST_CHUNKS <= FAN * FAN, "groups of FAN chunks are merged by one more merge");
constexpr int QUADS = GQA_GROUP * (D / 4);  // pieces of four dimensions of a group's heads
constexpr int THREADS = 32 * WARPS;
constexpr int ITEMS_PER_WARP = (GQA_GROUP + 2 + WARPS - 1) / WARPS;
static_assert(GQA_GROUP <= COLUMNS && PAGE >= 16 && (PAGE & (PAGE - 1)) == 0, "unsupported sizes");
constexpr int MERGE = COLUMNS * WIDE * 4;
constexpr int SUMS = MERGE_BATCH * MERGE;
constexpr int ARENA = (RING > SUMS ? RING : SUMS) + REFERENCES;  // of a reader: its ring or sums
constexpr int N = (QUERIES * GQA_GROUP + 7) / 8;     // pieces of eight columns of a team
constexpr int SHARERS = TEAM / STEP_TILES;           // warps of a team that score one tile
constexpr int SCORED = (N + SHARERS - 1) / SHARERS;  // pieces that each scores

struct Row {
  int before, slot, length, chunk;  // chunks of the rows before it; tokens of its chunks
};

struct Block {
  u8 arena[READERS][ARENA];
  u16 queries[TEAM > 1 ? 8 * SCORED * SHARERS : GQA_GROUP][PITCH];
  u8 fresh[TOKENS * 2][ROW];                     // the new tokens' keys and values, as stored
  float2 tally[MERGE_BATCH * READERS][COLUMNS];  // (maximum, sum) of a warp
  float scales[4];                               // of the quantised copies
  int last, items;                               // work items of a round
  int visible, queries_now;  // of a round's work item: positions that the first of its queries sees
  Row rows[1];               // and one more, for the total of one token's
};
static_assert(sizeof(Block) <= SHARED, "SHARED is the size of Block");

// Of a block's threads, the sum of `n` over those before this one, and `total` before, to which it
// adds them all. `sums`: of the warps.
DEVICE int count_before(int n, int& total, int* sums, int warp, int lane) {
  int sum = n;
#pragma unroll
  for (int s = 1; s < 32; s <<= 1) {
    int other = __shfl_up_sync(~0u, sum, s);
    if (lane >= s) sum += other;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  int before = total + sum - n;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    int other = sums[w];
    total += other;
    if (w < warp) before += other;
  }
  return before;
}

struct WorkItem {
  int row, chunk, chunks, head, slot, length, begin, end;
};

struct Out {
  u16* o;
  const u16* qkv;  // holds the gates
  const float* scales;
  u8 *q[2], *q_scale[2];
};

// The gates of piece i; loaded while the piece before is summed.
DEVICE uint2 gate_of(const WorkItem& u, const u16* qkv, int i) {
  int head = u.head * GQA_GROUP + i / (D / 4);
  const u16* from = qkv + (i64)u.row * WIDTH + head * 2 * D + D + i % (D / 4) * 4;
  return FUSED && i < QUADS ? *reinterpret_cast<const uint2*>(from) : uint2{};
}

// Four dimensions of one head's o = x * scale. All lanes of a warp call together.
DEVICE void store_output(const Out& out, const WorkItem& u, int i, float4 x, float scale, uint2 g,
                         bool live) {
  int column = (u.head * GQA_GROUP + i / (D / 4)) * D + i % (D / 4) * 4;
  uint2 bits = make_uint2(pack_bf16(x.x * scale, x.y * scale), pack_bf16(x.z * scale, x.w * scale));
  if constexpr (FUSED) {
    float y[4] = {low_bf16(bits.x) * fast_sigmoid(low_bf16(g.x)),
                  high_bf16(bits.x) * fast_sigmoid(high_bf16(g.x)),
                  low_bf16(bits.y) * fast_sigmoid(low_bf16(g.y)),
                  high_bf16(bits.y) * fast_sigmoid(high_bf16(g.y))};
    bits = make_uint2(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]));
    y[0] = low_bf16(bits.x), y[1] = high_bf16(bits.x);
    y[2] = low_bf16(bits.y), y[3] = high_bf16(bits.y);
    float top = fmaxf(fmaxf(fabsf(y[0]), fabsf(y[1])), fmaxf(fabsf(y[2]), fabsf(y[3])));
    float amax = QUANT == 2 ? warp_max(live ? top : 0.0f) : 0.0f;
    quantise<HEADS * D>(y, u.row, column, amax, out.scales, out.q, out.q_scale, live);
  }
  if ((KEEP || !FUSED) && live) {
    *reinterpret_cast<uint2*>(out.o + (i64)u.row * HEADS * D + column) = bits;
  }
}

DEVICE void add_scaled(float4& sum, const float4& x, float by) {
  sum.x = fmaf(x.x, by, sum.x), sum.y = fmaf(x.y, by, sum.y);
  sum.z = fmaf(x.z, by, sum.z), sum.w = fmaf(x.w, by, sum.w);
}

// Piece i of the block's sums over its readers (place `slot` of their arenas): to the result if the
// row has one chunk, else to scratch memory.
DEVICE void merge_warps(Block& b, const WorkItem& u, int slot, int i, float scale, const Out& out,
                        uint2 gate, float4* sums, float2* tallies) {
  int column = min(i / (D / 4), GQA_GROUP - 1), d = i % (D / 4) * 4;
  float top = minus_infinity(), total = 0.0f;
#pragma unroll
  for (int w = 0; w < READERS; w++) top = fmaxf(top, b.tally[slot * READERS + w][column].x);
  float4 sum = {};
#pragma unroll
  for (int w = 0; w < READERS; w++) {
    float2 tally = b.tally[slot * READERS + w][column];
    float by = exp2_fast(tally.x - top);
    total = fmaf(tally.y, by, total);
    const float* rows = reinterpret_cast<const float*>(b.arena[w] + slot * MERGE);
    add_scaled(sum, *reinterpret_cast<const float4*>(rows + column * WIDE + d), by);
  }
  if (u.chunks == 1) {  // 0: an inert row
    store_output(out, u, i, sum, total > 0.0f ? __fdividef(scale, total) : 0.0f, gate, i < QUADS);
  } else if (i < QUADS) {
    sums[i] = sum;
    if (d == 0) tallies[2 * column] = make_float2(top, total);
  }
}

// A piece of a query's sums to be merged: `count` parts (0: nothing), the first of them at place
// `at`; to the result if `last`, else to the place of the first part.
struct Merge {
  WorkItem u;
  int piece, count;
  i64 at;
  bool last;
};

// Merges each thread's pieces, `AT_ONCE` in flight. Parts are at distances of `step` chunks, in
// ascending order; the second half of a tally is the group's. `find`: the merge of piece i.
template <int AT_ONCE, class Find>
DEVICE void merge_parts(int pieces, int step, float scale, const Out& out, float4* sums,
                        float2* tallies, const Find& find) {
  const i64 stride = (i64)step * CHUNK_STRIDE;
  const int half = step > 1;
#pragma unroll 1
  for (int i = forget(threadIdx.x); i - lane_id() < pieces; i += AT_ONCE * THREADS) {
    Merge m[AT_ONCE];
    uint2 gate[AT_ONCE];
    float2 tally[AT_ONCE][FAN];
    float4 part[AT_ONCE][FAN];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      m[n] = find(i + n * THREADS);
      const int at = min(m[n].piece, QUADS - 1), column = at / (D / 4);
      gate[n] = m[n].last && m[n].count > 0 ? gate_of(m[n].u, out.qkv, m[n].piece) : uint2{};
#pragma unroll
      for (int c = 0; c < FAN; c++) {
        tally[n][c] = make_float2(minus_infinity(), 0.0f), part[n][c] = float4{};
        const i64 chunk = m[n].at + c * stride;
        if (c < m[n].count) {
          tally[n][c] = __ldcg(&tallies[(chunk * GQA_GROUP + column) * 2 + half]);
          part[n][c] = __ldcg(&sums[chunk * QUADS + at]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      float top = minus_infinity(), total = 0.0f;
      float4 sum = {};
#pragma unroll
      for (int c = 0; c < FAN; c++) top = fmaxf(top, tally[n][c].x);
#pragma unroll
      for (int c = 0; c < FAN; c++) {
        float by = exp2_fast(tally[n][c].x - top);
        total = fmaf(tally[n][c].y, by, total);
        add_scaled(sum, part[n][c], by);
      }
      const int at = m[n].piece;
      const bool live = at < QUADS && m[n].count > 0;
      if (m[n].last) {
        store_output(out, m[n].u, at, sum, __fdividef(scale, total), gate[n], live);
      } else if (live) {
        sums[m[n].at * QUADS + at] = sum;
        const i64 group = (m[n].at * GQA_GROUP + at / (D / 4)) * 2 + 1;
        if (at % (D / 4) == 0) tallies[group] = make_float2(top, total);
      }
    }
  }
}

// True in the last of `expected` blocks to arrive, which resets the counter to zero. It sees what
// the other blocks wrote by loads that bypass L1.
DEVICE bool arrive_last(Block& b, int* counter, int expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    b.last = count_up(counter) == expected - 1;
    if (b.last) *counter = 0;
  }
  __syncthreads();
  return b.last;
}
