// How decode attention's partial sums come together: what a block keeps in shared memory, the sums
// over its warps, and the sums over a row's chunks by the last block to arrive.
//
// Every sum runs in a fixed order: warps ascending, chunks ascending. Included by paged_decode.cu
// alone, whose macros it reads.
#pragma once
#include "paged_kv.cuh"

constexpr int TILE = 16 * ROW;                // bytes of 16 tokens' keys
constexpr int RING = STAGES * 2 * TILE;       // bytes of one warp's ring
constexpr int PITCH = D + 8;                  // elements of a query row: rows in distinct banks
constexpr int WIDE = D + 4;                   // floats of an accumulator row, likewise
constexpr int MOST_CHUNKS = 64, COLUMNS = 8;  // heads of a group are padded to the matrix unit's 8
constexpr int THREADS = 32 * WARPS, MINE = (GROUP + 2 + WARPS - 1) / WARPS;
static_assert(GROUP <= COLUMNS && PAGE >= 16 && (PAGE & (PAGE - 1)) == 0, "unsupported sizes");
constexpr int MERGE = COLUMNS * WIDE * 4;
constexpr int ARENA = RING > MERGE ? RING : MERGE;  // of one warp: its ring, then its sums

struct Row {
  int before, slot, length;  // chunks of the rows before it
};

struct Block {
  u8 arena[WARPS][ARENA];
  u16 queries[COLUMNS][PITCH];
  u8 fresh[2][ROW];                     // the new token's key and value, as stored
  float2 tally[WARPS][COLUMNS];         // (maximum, sum) of a warp
  float weight[COLUMNS][MOST_CHUNKS];   // of each chunk in the merge
  int last;
  Row rows[1];                          // and one more, for the total
};
static_assert(sizeof(Block) <= SHARED, "SHARED is the size of Block");

struct Unit {
  int row, chunk, chunks, head, slot, length, begin, end;
};

DEVICE void store_output(u16* o, const Unit& u, int column, int d, float4 x, float scale) {
  long long at = ((long long)u.row * HEADS + u.head * GROUP + column) * D + d;
  *reinterpret_cast<uint2*>(o + at) = make_uint2(pack_bf16x2(x.x * scale, x.y * scale),
                                                 pack_bf16x2(x.z * scale, x.w * scale));
}

DEVICE void add_scaled(float4& sum, const float4& x, float by) {
  sum.x = fmaf(x.x, by, sum.x), sum.y = fmaf(x.y, by, sum.y);
  sum.z = fmaf(x.z, by, sum.z), sum.w = fmaf(x.w, by, sum.w);
}

// The block's sums over its warps, to `o` where the row has one chunk, else to the scratch.
DEVICE void merge_warps(Block& b, const Unit& u, float scale, u16* o, float4* sums,
                        float2* tallies) {
#pragma unroll 1  // its registers would add to those of the loop over tokens
  for (int i = threadIdx.x; i < GROUP * (D / 4); i += THREADS) {
    int column = i / (D / 4), d = i % (D / 4) * 4;
    float top = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, b.tally[w][column].x);
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      float2 tally = b.tally[w][column];
      float by = tally.x > minus_infinity() ? exp2_fast(tally.x - top) : 0.0f;
      total = fmaf(tally.y, by, total);
      const float* rows = reinterpret_cast<const float*>(b.arena[w]);
      add_scaled(sum, *reinterpret_cast<const float4*>(rows + column * WIDE + d), by);
    }
    if (u.chunks == 1) {
      store_output(o, u, column, d, sum, total > 0.0f ? scale / total : 0.0f);  // 0: an inert row
    } else {
      sums[i] = sum;
      if (d == 0) tallies[column] = make_float2(top, total);
    }
  }
}

// The chunks of one (row, kv head), in their order, to `o`.
DEVICE void merge_chunks(Block& b, const Unit& u, float scale, u16* o, const float4* sums,
                      const float2* tallies) {
#pragma unroll 1
  for (int column = threadIdx.x >> 5; column < GROUP; column += WARPS) {
    int lane = threadIdx.x & 31;
    float2 tally[MOST_CHUNKS / 32];
    float top = minus_infinity(), total = 0.0f;
#pragma unroll
    for (int k = 0; k < MOST_CHUNKS / 32; k++) {
      int c = lane + 32 * k;
      tally[k] = c < u.chunks ? __ldcg(&tallies[(long long)c * KV_HEADS * GROUP + column])
                              : make_float2(minus_infinity(), 0.0f);
      top = fmaxf(top, tally[k].x);
    }
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, s));
#pragma unroll
    for (int k = 0; k < MOST_CHUNKS / 32; k++) {
      tally[k].x = exp2_fast(tally[k].x - top);
      total = fmaf(tally[k].x, tally[k].y, total);
    }
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) total += __shfl_xor_sync(~0u, total, s);
#pragma unroll
    for (int k = 0; k < MOST_CHUNKS / 32; k++) {
      b.weight[column][lane + 32 * k] = tally[k].x * (scale / total);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < GROUP * (D / 4); i += THREADS) {
    int column = i / (D / 4);
    float4 sum = {};
#pragma unroll 8
    for (int c = 0; c < u.chunks; c++) {
      float4 part = __ldcg(&sums[(long long)c * KV_HEADS * GROUP * (D / 4) + i]);
      add_scaled(sum, part, b.weight[column][c]);
    }
    store_output(o, u, column, i % (D / 4) * 4, sum, 1.0f);
  }
}

// Whether this block is the last of its (row, kv head) to arrive; the counter is left at zero.
DEVICE bool arrive_last(Block& b, const Unit& u, int* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // cumulative: covers what the block wrote before the barrier
    int* counter = arrivals + u.row * KV_HEADS + u.head;
    b.last = atomicAdd(counter, 1) == u.chunks - 1;
    if (b.last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  return b.last;
}
