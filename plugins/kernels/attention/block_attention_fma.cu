// A block drafter's attention: the tokens of a row's block over the window before it, in pages, and
// over the whole block.
//
// Block (part, kv head, row) has CHUNK positions of the window, the last part the block's own keys;
// KEYS at a time are in shared memory as bf16 (e4m3 codes are exact). For scores a lane has a key
// and a warp every WARPS-th query, so shuffles alone make the softmax; for sums a thread has a
// dimension. The last part of a (row, kv head) to arrive merges all in their order, with a part in
// each lane for their shares, and resets the counter (benchmarks/log/sampling/block_drafter.md).
// Macros: those of attention_kv_pages.cuh; TOKENS (of a row), WINDOW, CHUNK (a multiple of KEYS; up
// to 32 parts), THREADS.
#include "attention/attention_kv_pages.cuh"

constexpr int KEYS = 32, GROUP = HEADS / KV_HEADS, QUERIES = GROUP * TOKENS, WARPS = THREADS / 32;
constexpr int OWN = (QUERIES + WARPS - 1) / WARPS;                 // queries of a warp
constexpr int SHARES = THREADS / D;                                // threads of a dimension
constexpr int SUMS = (QUERIES + SHARES - 1) / SHARES;              // queries of a thread
constexpr int STRIDE = D + 8, TOKEN = (HEADS + 2 * KV_HEADS) * D;  // of a key; values of a token

struct Tiles {
  float4 queries[QUERIES][D / 4];
  uint4 keys[KEYS][STRIDE / 8], values[KEYS][STRIDE / 8];
  float weights[KEYS][QUERIES], shrink[QUERIES];
};
// The maximum and total of a warp's queries, and a dimension's sums of a thread's.
struct Softmax {
  float top[OWN], total[OWN], sum[SUMS];
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

// A head of a token of the block at `at`, normalised and rotated.
DEVICE Head turned(const u16* from, const float (&weight)[VEC], const int* offsets, int row, int at,
                   int t, const float* inv_freq, int lane) {
  Head h = load_head(from, lane);
  normalise(h, weight);
  rotate(h, rotation_at(place_of<TOKENS>(offsets, row, t, at), inv_freq, lane), lane);
  return h;
}

// The keys and values of the block's tokens, of one kv head, from the first one's key on.
DEVICE void load_block(Tiles& tiles, const u16* first, const float (&weight)[VEC],
                       const int* offsets, int row, int start, const float* inv_freq) {
  const int lane = lane_id();
#pragma unroll 1
  for (int t = threadIdx.x / 32; t < KEYS; t += WARPS) {
    const u16* token = first + (i64)min(t, TOKENS - 1) * TOKEN;
    const Head k = turned(token, weight, offsets, row, start + t, t, inv_freq, lane);
    const RawHead v = load_raw(token + KV_HEADS * D, lane);
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      ((u16*)tiles.keys[t])[lane * VEC + e] = to_bf16(k.x[e]);
      ((u16*)tiles.values[t])[lane * VEC + e] = v.bits[e];
    }
  }
}

// The positions from `from` on; behind `end` the last one again, which is not seen.
DEVICE void load_context(Tiles& tiles, const u8* k_pages, const u8* v_pages, const int* table,
                         int kv, int from, int end) {
#pragma unroll 4
  for (int i = threadIdx.x; i < KEYS * D / 8; i += THREADS) {
    const int t = i / (D / 8), at = i % (D / 8), position = min(from + t, end - 1);
    const i64 offset = page_offset(table[position / PAGE], kv, position);
    tiles.keys[t][at] = load8(k_pages, offset, at);
    tiles.values[t][at] = load8(v_pages, offset, at);
  }
}

// One warp's queries over the tile: `position` is that of the lane's key.
DEVICE void score(Tiles& tiles, Softmax& s, bool there, int distance, float scale, int warp) {
  float x[OWN] = {};
#pragma unroll 1
  for (int d = 0; d < D; d += 8) {
    float k[8];
    unpack8(tiles.keys[lane_id()][d / 8], k);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int q = min(warp + i * WARPS, QUERIES - 1);
      const float4 a = tiles.queries[q][d / 4], b = tiles.queries[q][d / 4 + 1];
      x[i] += a.x * k[0] + a.y * k[1] + a.z * k[2] + a.w * k[3] + b.x * k[4] + b.y * k[5] +
              b.z * k[6] + b.w * k[7];
    }
  }
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int q = warp + i * WARPS;
    const bool seen = there && distance + q % TOKENS < WINDOW;
    const float mine = seen ? x[i] * scale : -1e30f, higher = fmaxf(s.top[i], warp_max(mine));
    const float e = seen ? __expf(mine - higher) : 0.0f, less = __expf(s.top[i] - higher);
    s.total[i] = s.total[i] * less + warp_sum(e), s.top[i] = higher;
    if (q >= QUERIES) continue;
    tiles.weights[lane_id()][q] = e;
    if (lane_id() == 0) tiles.shrink[q] = less;
  }
}

// Adds the tile's weighted values of a dimension.
DEVICE void add(const Tiles& tiles, Softmax& s, int dim, int share) {
#pragma unroll
  for (int i = 0; i < SUMS; ++i) s.sum[i] *= tiles.shrink[min(share + i * SHARES, QUERIES - 1)];
#pragma unroll 1
  for (int k = 0; k < KEYS; ++k) {
    const float v = from_bf16(((const u16*)tiles.values[k])[dim]);
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
      s.sum[i] = fmaf(tiles.weights[k][min(share + i * SHARES, QUERIES - 1)], v, s.sum[i]);
  }
}

// The share of each part, a lane's, in the results of a warp's queries.
DEVICE void share_parts(Tiles& tiles, const float* stats, int active, int warp) {
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int q = min(warp + i * WARPS, QUERIES - 1), lane = lane_id();
    const float2 part = lane < active ? __ldcg((const float2*)stats + lane * QUERIES + q)
                                      : make_float2(-1e30f, 0.0f);
    const float less = __expf(part.x - warp_max(part.x)), all = warp_sum(part.y * less);
    tiles.weights[lane][q] = less / all;
  }
}

// A query's dimension over `active` parts.
DEVICE float merged(const Tiles& tiles, const float* sums, int active, int q) {
  float value = 0.0f;
#pragma unroll 8
  for (int p = 0; p < active; ++p)
    value = fmaf(tiles.weights[p][q], __ldcg(sums + (i64)p * QUERIES * D), value);
  return value;
}

// Grid: (parts, kv heads, rows). `sums`, `stats`: [row, kv head, part, query] of D and of 2.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    block_attention(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                    const int* offsets, const float* kv_scale, const u8* k_pages, const u8* v_pages,
                    const int* page_table, const int* slots, const int* starts, const int* counts,
                    u16* o, float* sums, float* stats, int* arrived, int most_pages) {
  __shared__ Tiles tiles;
  __shared__ int last;
  const int part = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, parts = gridDim.x;
  const int warp = threadIdx.x / 32, lane = lane_id(), dim = threadIdx.x % D;
  const int share = threadIdx.x / D, group = row * KV_HEADS + kv;
  float weight[VEC];
  load_floats(weight, q_norm + lane * VEC);
  wait_for_previous();
  launch_dependents();
  const int slot = slots[row], start = starts[row];
  const u16* tokens = qkv + (i64)row * TOKENS * TOKEN;
  const auto out = [&](int q) -> u16& {
    return o[((i64)(row * TOKENS + q % TOKENS) * HEADS + kv * GROUP + q / TOKENS) * D + dim];
  };
  if (slot < 0 || counts[row] <= 0) {
    for (int q = share; part == 0 && q < QUERIES; q += SHARES) out(q) = 0;
    return;
  }
  const int low = max(0, start - WINDOW + 1), behind = start - low;
  const int active = (behind + CHUNK - 1) / CHUNK + 1;  // parts with keys
  const bool own = part == parts - 1, coded = KV_FP8 && !own;
  if (!own && part * CHUNK >= behind) return;
#pragma unroll 4
  for (int q = warp; q < QUERIES; q += WARPS) {
    const int t = q % TOKENS;
    const u16* from = tokens + (i64)t * TOKEN + (kv * GROUP + q / TOKENS) * D;
    const Head h = turned(from, weight, offsets, row, start + t, t, inv_freq, lane);
#pragma unroll
    for (int e = 0; e < VEC; ++e)
      ((float*)tiles.queries[q])[lane * VEC + e] = h.x[e] * rsqrtf((float)D);
  }
  const int first = own ? start : low + part * CHUNK;
  const int end = own ? start + TOKENS : min(start, first + CHUNK);
  Softmax s = {};
#pragma unroll
  for (int i = 0; i < OWN; ++i) s.top[i] = -1e30f;
  load_floats(weight, k_norm + lane * VEC);
#pragma unroll 1
  for (int from = first; from < end; from += KEYS) {
    __syncthreads();  // the keys before were read
    if (own) {
      load_block(tiles, tokens + (HEADS + kv) * D, weight, offsets, row, start, inv_freq);
    } else {
      const int* table = page_table + (i64)slot * most_pages;
      load_context(tiles, k_pages, v_pages, table, kv, from, end);
    }
    __syncthreads();
    const int distance = own ? -TOKENS : start - from - lane;
    score(tiles, s, from + lane < end, distance, coded ? kv_scale[0] : 1.0f, warp);
    __syncthreads();
    add(tiles, s, dim, share);
  }
  const i64 begin = (i64)group * parts * QUERIES,
            base = begin + (own ? active - 1 : part) * QUERIES;
#pragma unroll
  for (int i = 0; i < SUMS; ++i)
    if (share + i * SHARES < QUERIES)
      sums[(base + share + i * SHARES) * D + dim] = s.sum[i] * (coded ? kv_scale[1] : 1.0f);
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    if (lane == 0 && warp + i * WARPS < QUERIES)
      ((float2*)stats)[base + warp + i * WARPS] = make_float2(s.top[i], s.total[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(arrived + group) == active - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[group] = 0;
  share_parts(tiles, stats + begin * 2, active, warp);
  __syncthreads();
#pragma unroll 4
  for (int q = share; q < QUERIES; q += SHARES)
    out(q) = to_bf16(merged(tiles, sums + (begin + q) * D + dim, active, q));
}
