// A block drafter's attention: the tokens of a row's block over the window before it, in pages, and
// over the whole block.
//
// Block (part, kv head, row) has CHUNK positions of the window, the last part the block's own keys;
// KEYS at a time are in shared memory as bf16 (e4m3 codes are exact), all in flight together, those
// of pages before the wait for the previous launch, which writes none. A warp has 16 queries and
// half of the dimensions: scores are computed twice, so that they stay in registers. The last part
// of a (row, kv head) to arrive merges all in their order, with a part in each lane for their
// shares, and resets the counter (benchmarks/log/sampling/block_drafter.md).
// Macros: those of attention_kv_pages.cuh; TOKENS (of a row, up to 32), WINDOW, KEYS (a multiple of
// 32), CHUNK (a multiple of KEYS; up to 32 parts).
#include "attention/attention_kv_pages.cuh"

constexpr int GROUP = HEADS / KV_HEADS, QUERIES = GROUP * TOKENS, TILES = (QUERIES + 15) / 16;
constexpr int WARPS = 2 * TILES, THREADS = 32 * WARPS, STEPS = D / 16, BATCH = 8, STEP = 32;
constexpr int STRIDE = D + 8, TOKEN = (HEADS + 2 * KV_HEADS) * D;  // of a key; values of a token
constexpr int CHUNKS = KEYS * D / 8;                               // of 16 bytes, of a tile

struct Tiles {
  uint4 queries[TILES * 16][STRIDE / 8], keys[KEYS][STRIDE / 8], values[KEYS][STRIDE / 8];
  float shares[32][QUERIES];
};
DYNAMIC_SHARED(block_attention, sizeof(Tiles));
// Of a lane's queries, 8 apart: maxima, its part of the totals, sums of its half's dimensions.
struct Softmax {
  float sums[STEPS][4], top[2], total[2];
};

// Eight values of a key or value of the context, as bf16.
DEVICE uint4 load8(const u8* pages, i64 offset, int at) {
  if constexpr (!KV_FP8) return *(const uint4*)(pages + offset + at * 16);
  const uint2 codes = *(const uint2*)(pages + offset + at * 8);
  float x[8];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    x[e] = from_e4m3((u8)(codes.x >> 8 * e));
    x[e + 4] = from_e4m3((u8)(codes.y >> 8 * e));
  }
  return pack8(x);
}

// The positions from `from` on; behind `end` the last one again, which is not seen.
DEVICE void load_context(Tiles& tiles, const u8* k_pages, const u8* v_pages, const int* table,
                         int kv, int from, int end) {
#pragma unroll 8
  for (int n = 0; n < (CHUNKS + THREADS - 1) / THREADS; ++n) {
    const int i = min(n * THREADS + (int)threadIdx.x, CHUNKS - 1), t = i / (D / 8),
              at = i % (D / 8);
    const int position = min(from + t, end - 1);
    const i64 offset = page_offset(table[position / PAGE], kv, position);
    tiles.keys[t][at] = load8(k_pages, offset, at);
    tiles.values[t][at] = load8(v_pages, offset, at);
  }
}

DEVICE void store_head(uint4* row, const Head& h, float scale, int lane) {
#pragma unroll
  for (int e = 0; e < VEC; ++e) ((u16*)row)[lane * VEC + e] = to_bf16(h.x[e] * scale);
}

// The queries of the block, and if asked for its keys and values, of one kv head: normalised and
// rotated. Values behind the block's are 0.
DEVICE void load_block(Tiles& tiles, const u16* tokens, int kv, const float (&q_weight)[VEC],
                       const float (&k_weight)[VEC], const int* offsets, int row, int start,
                       const float* inv_freq, bool keys) {
  const int lane = lane_id();
#pragma unroll 1
  for (int t = threadIdx.x / 32; t < STEP; t += WARPS) {
    if (t >= TOKENS) {
      for (int i = lane; keys && i < D / 8; i += 32) tiles.values[t][i] = make_uint4(0, 0, 0, 0);
      continue;
    }
    const u16* token = tokens + (i64)t * TOKEN;
    const Rotation turn = rotation_at(place_of<TOKENS>(offsets, row, t, start + t), inv_freq, lane);
#pragma unroll 4
    for (int g = 0; g < GROUP; ++g) {
      Head h = load_head(token + (kv * GROUP + g) * D, lane);
      normalise(h, q_weight), rotate(h, turn, lane);
      store_head(tiles.queries[g * TOKENS + t], h, rsqrtf((float)D), lane);
    }
    if (!keys) continue;
    Head h = load_head(token + (HEADS + kv) * D, lane);
    normalise(h, k_weight), rotate(h, turn, lane);
    store_head(tiles.keys[t], h, 1.0f, lane);
    store_head(tiles.values[t], load_head(token + (HEADS + KV_HEADS + kv) * D, lane), 1.0f, lane);
  }
}

DEVICE float quad(float x, bool sum) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const float other = __shfl_xor_sync(~0u, x, d);
    x = sum ? x + other : fmaxf(x, other);
  }
  return x;
}

// Adds STEP keys from row `first` of the tile on, of which `left` are there; `distance`: of the
// first one from the block. `query`: the lane's first.
DEVICE void attend(const Tiles& tiles, Softmax& s, const u32 (&q)[STEPS][4], int first, int left,
                   int distance, float scale, int query, int half) {
  const int lane = lane_id();
  float x[STEP / 8][4] = {};
  u32 p[STEP / 8][2];
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
#pragma unroll
    for (int n = 0; n < STEP / 8; n += 2) {
      u32 b[4];
      load_matrix(b, &tiles.keys[first + 8 * n + lane / 16 * 8 + lane % 8][2 * k + lane / 8 % 2]);
      mma_bf16(x[n], q[k], b[0], b[1]);
      mma_bf16(x[n + 1], q[k], b[2], b[3]);
    }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = (query + 8 * r) % TOKENS;
    float top = s.top[r];
#pragma unroll
    for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = 8 * n + lane % 4 * 2 + e;
        const bool seen = key < left && distance - key + t < WINDOW;
        x[n][2 * r + e] = seen ? x[n][2 * r + e] * scale : minus_infinity();
        top = fmaxf(top, x[n][2 * r + e]);
      }
    top = quad(top, false);
    const float less = __expf(s.top[r] - top);
    s.top[r] = top, s.total[r] *= less;
#pragma unroll
    for (int n = 0; n < STEP / 8; ++n) {
      const float low = __expf(x[n][2 * r] - top), high = __expf(x[n][2 * r + 1] - top);
      s.total[r] += low + high, p[n][r] = pack_bf16(low, high);
    }
#pragma unroll
    for (int n = 0; n < STEPS; ++n) s.sums[n][2 * r] *= less, s.sums[n][2 * r + 1] *= less;
  }
#pragma unroll
  for (int k = 0; k < STEP / 16; ++k) {
    const u32 a[4] = {p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1]};
#pragma unroll
    for (int n = 0; n < STEPS; n += 2) {
      u32 b[4];
      load_matrix_transposed(
          b, &tiles.values[first + 16 * k + lane % 16][half * STEPS + n + lane / 16]);
      mma_bf16(s.sums[n], a, b[0], b[1]);
      mma_bf16(s.sums[n + 1], a, b[2], b[3]);
    }
  }
}

// The share of each part, a lane's, in the results of a warp's queries.
DEVICE void share_parts(Tiles& tiles, const float2* stats, int active) {
#pragma unroll 4
  for (int q = threadIdx.x / 32; q < QUERIES; q += WARPS) {
    const int lane = lane_id();
    const float2 part =
        lane < active ? __ldcg(stats + lane * QUERIES + q) : make_float2(-1e30f, 0.0f);
    const float less = __expf(part.x - warp_max(part.x)), all = warp_sum(part.y * less);
    tiles.shares[lane][q] = less / all;
  }
}

// Four dimensions of a query over `active` parts; sums of BATCH of them are loaded at once.
DEVICE uint2 merged(const Tiles& tiles, const float* sums, int active, int q) {
  float y[4] = {};
#pragma unroll 1
  for (int first = 0; first < active; first += BATCH) {
    uint4 part[BATCH];
#pragma unroll
    for (int p = 0; p < BATCH; ++p)
      part[p] = load_if16(first + p < active, sums + (i64)(first + p) * QUERIES * D);
#pragma unroll
    for (int p = 0; p < BATCH; ++p)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        y[e] = fmaf(tiles.shares[first + p][q], ((const float*)&part[p])[e], y[e]);
  }
  return make_uint2(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]));
}

// Grid: (parts, kv heads, rows). `sums`, `stats`: [row, kv head, part, query] of D and of 2.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    block_attention(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                    const int* offsets, const float* kv_scale, const u8* k_pages, const u8* v_pages,
                    const int* page_table, const int* slots, const int* starts, const int* counts,
                    u16* o, float* sums, float2* stats, int* arrived, int most_pages) {
  extern __shared__ __align__(16) u8 shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  __shared__ int last;
  const int part = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, parts = gridDim.x;
  const int warp = threadIdx.x / 32, lane = lane_id(), group = row * KV_HEADS + kv;
  const int half = warp % 2, query = warp / 2 * 16 + lane / 4;
  const int slot = slots[row], start = starts[row];
  const bool live = slot >= 0 && counts[row] > 0, own = part == parts - 1, coded = KV_FP8 && !own;
  const int low = max(0, start - WINDOW + 1), behind = start - low;
  const int active = (behind + CHUNK - 1) / CHUNK + 1;  // parts with keys
  if (!(live ? own || part * CHUNK < behind : part == 0)) return;
  const int first = own ? start : low + part * CHUNK;
  const int end = own ? start + TOKENS : min(start, first + CHUNK);
  const int* table = page_table + (i64)slot * most_pages;
  if (live && !own) load_context(tiles, k_pages, v_pages, table, kv, first, end);
  float q_weight[VEC], k_weight[VEC];
  load_floats(q_weight, q_norm + lane * VEC), load_floats(k_weight, k_norm + lane * VEC);
  wait_for_previous();
  launch_dependents();
  const auto out = [&](int i) -> uint2& {
    const int q = i / (D / 4), token = row * TOKENS + q % TOKENS;
    return ((uint2*)o)[((i64)token * HEADS + kv * GROUP + q / TOKENS) * (D / 4) + i % (D / 4)];
  };
  if (!live) {
    for (int i = threadIdx.x; i < QUERIES * D / 4; i += THREADS) out(i) = make_uint2(0, 0);
    return;
  }
  load_block(tiles, qkv + (i64)row * TOKENS * TOKEN, kv, q_weight, k_weight, offsets, row, start,
             inv_freq, own);
  __syncthreads();
  u32 q[STEPS][4];
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
    load_matrix(q[k], &tiles.queries[warp / 2 * 16 + lane % 16][2 * k + lane / 16]);
  Softmax s = {};
  s.top[0] = s.top[1] = -1e30f;
#pragma unroll 1
  for (int from = first; from < end; from += STEP) {
    const int at = (from - first) % KEYS;
    if (from > first && at == 0) {
      __syncthreads();  // the keys before were read
      load_context(tiles, k_pages, v_pages, table, kv, from, end);
      __syncthreads();
    }
    attend(tiles, s, q, at, end - from, own ? -TOKENS : start - from, coded ? kv_scale[0] : 1.0f,
           query, half);
  }
  const i64 begin = (i64)group * parts * QUERIES,
            base = begin + (own ? active - 1 : part) * QUERIES;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int mine = query + 8 * r;
    const float total = quad(s.total[r], true), scale = coded ? kv_scale[1] : 1.0f;
    if (mine >= QUERIES) continue;
    float* to = sums + (base + mine) * D + half * (D / 2) + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < STEPS; ++n)
      *(float2*)(to + 8 * n) = make_float2(s.sums[n][2 * r] * scale, s.sums[n][2 * r + 1] * scale);
    if (half == 0 && lane % 4 == 0) stats[base + mine] = make_float2(s.top[r], total);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(arrived + group) == active - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[group] = 0;
  share_parts(tiles, stats + begin, active);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < QUERIES * D / 4; i += THREADS)
    out(i) = merged(tiles, sums + begin * D + i * 4, active, i / (D / 4));
}
