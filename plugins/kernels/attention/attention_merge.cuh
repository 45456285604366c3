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
#define MERGE_BATCH 1
#define CHUNK_STRIDE HEAD_GROUPS  // places of partial sums from a chunk to the next
#endif

constexpr int TILE = 16 * ROW;           // bytes of 16 tokens' keys
constexpr int RING = STAGES * 2 * TILE;  // bytes of one warp's ring
constexpr int PITCH = D + 8;             // elements of a query row: rows in distinct banks
constexpr int WIDE = D + 4;              // floats of an accumulator row, likewise
constexpr int COLUMNS = 8;               // heads of a group, padded to n8
constexpr int FAN = 8;
static_assert(MOST_CHUNKS <= FAN * FAN, "groups of FAN chunks are merged by one more merge");
constexpr int QUADS = GQA_GROUP * (D / 4);  // pieces of four dimensions of a group's heads
constexpr int THREADS = 32 * WARPS, MERGED = WARPS > 4 && TOKENS == 1 ? 2 : 1;  // pieces unrolled
constexpr int ITEMS_PER_WARP = (GQA_GROUP + 2 + WARPS - 1) / WARPS;
static_assert(GQA_GROUP <= COLUMNS && PAGE >= 16 && (PAGE & (PAGE - 1)) == 0, "unsupported sizes");
constexpr int MERGE = COLUMNS * WIDE * 4;
constexpr int SUMS = MERGE_BATCH * MERGE;
constexpr int WEIGHTS = QUERIES > 1 ? 512 * QUERIES * (STAGES > 2 ? 2 : 1) : 0;  // of a team
constexpr int LOOP_BYTES = RING + WEIGHTS;
constexpr int ARENA =
    LOOP_BYTES > SUMS ? LOOP_BYTES : SUMS;  // of a reader: its ring, then its sums

struct Row {
  int before, slot, length, chunk;  // chunks of the rows before it; tokens of its chunks
};

struct Block {
  u8 arena[READERS][ARENA];
  u16 queries[QUERIES * COLUMNS][PITCH];
  u8 fresh[TOKENS * 2][ROW];                     // the new tokens' keys and values, as stored
  float2 tally[MERGE_BATCH * READERS][COLUMNS];  // (maximum, sum) of a warp
  float scales[4];                               // of the quantised copies
  int last;
  Row rows[1];  // and one more, for the total
};
static_assert(sizeof(Block) <= SHARED, "SHARED is the size of Block");

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

// The block's sums over its readers (place `slot` of their arenas): to the result if the row has
// one chunk, else to scratch memory.
DEVICE void merge_warps(Block& b, const WorkItem& u, int slot, float scale, const Out& out,
                        uint2 gate, float4* sums, float2* tallies) {
#pragma unroll 1  // its registers would add to those of the loop over tokens
  for (int i = threadIdx.x; i - lane_id() < QUADS; i += THREADS) {
    uint2 next = u.chunks == 1 ? gate_of(u, out.qkv, i + THREADS) : uint2{};
    int column = min(i / (D / 4), GQA_GROUP - 1), d = i % (D / 4) * 4;
    float top = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int w = 0; w < READERS; w++) top = fmaxf(top, b.tally[slot * READERS + w][column].x);
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < READERS; w++) {
      float2 tally = b.tally[slot * READERS + w][column];
      float by = tally.x > minus_infinity() ? exp2_fast(tally.x - top) : 0.0f;
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
    gate = next;
  }
}

// The sum of `count` parts at distances of `step` chunks, in ascending order: to the result if
// `last`, else to the place of the first part. The second half of a tally is the group's.
DEVICE void merge_parts(const WorkItem& u, int count, int step, float scale, const Out& out,
                        float4* sums, float2* tallies, bool last) {
  const i64 stride = (i64)step * CHUNK_STRIDE;
  const int half = step > 1;
  uint2 gate = last ? gate_of(u, out.qkv, threadIdx.x) : uint2{};
#pragma unroll MERGED
  for (int i = threadIdx.x; i - lane_id() < QUADS; i += THREADS) {
    uint2 next = last ? gate_of(u, out.qkv, i + THREADS) : uint2{};
    int at = min(i, QUADS - 1), column = at / (D / 4);
    float2 tally[FAN];
    float4 part[FAN];
#pragma unroll
    for (int c = 0; c < FAN; c++) {
      tally[c] = make_float2(minus_infinity(), 0.0f), part[c] = float4{};
      if (c < count) {
        tally[c] = __ldcg(&tallies[(c * stride * GQA_GROUP + column) * 2 + half]);
        part[c] = __ldcg(&sums[c * stride * QUADS + at]);
      }
    }
    float top = minus_infinity(), total = 0.0f;
    float4 sum = {};
#pragma unroll
    for (int c = 0; c < FAN; c++) top = fmaxf(top, tally[c].x);
#pragma unroll
    for (int c = 0; c < FAN; c++) {
      float by = exp2_fast(tally[c].x - top);
      total = fmaf(tally[c].y, by, total);
      add_scaled(sum, part[c], by);
    }
    if (last) {
      store_output(out, u, i, sum, __fdividef(scale, total), gate, i < QUADS);
    } else if (i < QUADS) {
      sums[at] = sum;
      if (at % (D / 4) == 0) tallies[2 * column + 1] = make_float2(top, total);
    }
    gate = next;
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

// The merge after a work item of a row of several chunks. `sums`, `tallies`: of the row's first
// chunk. Counters of a row and its group of heads: arrived FANs, then the arrived chunks of each.
DEVICE void merge_row(Block& b, const WorkItem& u, float scale, const Out& out, float4* sums,
                      float2* tallies, int* arrivals) {
  int group = u.chunk / FAN, groups = (u.chunks + FAN - 1) / FAN;
  int count = min(FAN, u.chunks - group * FAN);
  int* counters = arrivals + (u.row * HEAD_GROUPS + u.head) * (FAN + 1);
  if (!arrive_last(b, counters + 1 + group, count)) return;
  const i64 first = (i64)group * FAN * HEAD_GROUPS;
  merge_parts(u, count, 1, scale, out, sums + first * QUADS, tallies + first * GQA_GROUP * 2,
              groups == 1);
  if (groups == 1 || !arrive_last(b, counters, groups)) return;
  merge_parts(u, groups, FAN, scale, out, sums, tallies, true);
}
