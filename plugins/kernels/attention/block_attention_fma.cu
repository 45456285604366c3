// A block drafter's attention: the tokens of a row's block over the window before it, in pages, and
// over the whole block.
//
// Block (part, kv head, row) has CHUNK positions of the window, the last part the block's own keys;
// KEYS at a time are in shared memory as bf16 (e4m3 codes are exact). For scores a lane has a key
// and a warp every WARPS-th query, so the online softmax needs shuffles alone; for the sums a thread
// has a dimension. The last part of a (row, kv head) to arrive merges them in their order and resets
// the counter. Not timed yet (benchmarks/log/sampling/block_drafter.md).
// Macros: those of attention_kv_pages.cuh; TOKENS (tokens of a row), WINDOW, CHUNK (a multiple of
// KEYS), THREADS.
#include "attention/attention_kv_pages.cuh"

constexpr int KEYS = 32, GROUP = HEADS / KV_HEADS, QUERIES = GROUP * TOKENS, WARPS = THREADS / 32;
constexpr int OWN = (QUERIES + WARPS - 1) / WARPS;                 // queries of a warp
constexpr int SHARES = THREADS / D;                                // threads of a dimension
constexpr int SUMS = (QUERIES + SHARES - 1) / SHARES;              // queries of a thread
constexpr int STRIDE = D + 8, TOKEN = (HEADS + 2 * KV_HEADS) * D;  // of a key; values of a token

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

// Grid: (parts, kv heads, rows).
extern "C" __global__ void __launch_bounds__(THREADS)
    block_attention(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                    const int* rope_offsets, const float* kv_scale, const u8* k_pages,
                    const u8* v_pages, const int* page_table, const int* slots, const int* starts,
                    const int* counts, u16* o, float* sums, float* stats, int* arrived,
                    int most_pages) {
  __align__(16) __shared__ float queries[QUERIES][D];
  __align__(16) __shared__ u16 keys[KEYS][STRIDE], values[KEYS][STRIDE];
  __shared__ float weights[KEYS][QUERIES], shrink[QUERIES];
  __shared__ int last;
  const int part = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, parts = gridDim.x;
  const int warp = threadIdx.x / 32, lane = lane_id();
  const int dim = threadIdx.x % D, share = threadIdx.x / D;
  float weight[VEC];
  load_floats(weight, q_norm + lane * VEC);
  wait_for_previous();
  launch_dependents();
  const int slot = slots[row], start = starts[row];
  const u16* tokens = qkv + (i64)row * TOKENS * TOKEN;
  u16* out = o + (i64)row * TOKENS * HEADS * D;
  if (slot < 0 || counts[row] <= 0) {
    if (part == 0 && share == 0)
#pragma unroll 1
      for (int q = 0; q < QUERIES; ++q)
        out[(q % TOKENS * HEADS + kv * GROUP + q / TOKENS) * D + dim] = 0;
    return;
  }
  const int low = max(0, start - WINDOW + 1), behind = start - low;
  const int active = (behind + CHUNK - 1) / CHUNK + 1;  // parts with keys
  const bool own = part == parts - 1;
  if (!own && part * CHUNK >= behind) return;
#pragma unroll 1
  for (int q = warp; q < QUERIES; q += WARPS) {
    const int t = q % TOKENS;
    Head h = load_head(tokens + (i64)t * TOKEN + (kv * GROUP + q / TOKENS) * D, lane);
    normalise(h, weight);
    rotate(h, rotation_at(place_of<TOKENS>(rope_offsets, row, t, start + t), inv_freq, lane), lane);
#pragma unroll
    for (int e = 0; e < VEC; ++e) queries[q][lane * VEC + e] = h.x[e] * rsqrtf((float)D);
  }
  const int first = own ? start : low + part * CHUNK;
  const int end = own ? start + TOKENS : min(start, first + CHUNK);
  const float key_scale = KV_FP8 && !own ? kv_scale[0] : 1.0f;
  const float value_scale = KV_FP8 && !own ? kv_scale[1] : 1.0f;
  float top[OWN], total[OWN], sum[SUMS];
#pragma unroll
  for (int i = 0; i < OWN; ++i) top[i] = -1e30f, total[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
  load_floats(weight, k_norm + lane * VEC);
#pragma unroll 1
  for (int from = first; from < end; from += KEYS) {
    __syncthreads();  // the keys before were read; the queries are written
    if (own) {
#pragma unroll 1
      for (int t = warp; t < KEYS; t += WARPS) {
        Head k = {}, v = {};
        if (t < TOKENS) {
          const u16* token = tokens + (i64)t * TOKEN + (HEADS + kv) * D;
          k = load_head(token, lane), v = load_head(token + KV_HEADS * D, lane);
          normalise(k, weight);
          const Place place = place_of<TOKENS>(rope_offsets, row, t, start + t);
          rotate(k, rotation_at(place, inv_freq, lane), lane);
        }
#pragma unroll
        for (int e = 0; e < VEC; ++e)
          keys[t][lane * VEC + e] = to_bf16(k.x[e]), values[t][lane * VEC + e] = to_bf16(v.x[e]);
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < KEYS * D / 8; i += THREADS) {
        const int t = i / (D / 8), at = i % (D / 8), position = from + t;
        uint4 k = make_uint4(0, 0, 0, 0), v = k;
        if (position < end) {
          const int page = page_table[(i64)slot * most_pages + position / PAGE];
          const i64 offset = page_offset(page, kv, position);
          k = load8(k_pages, offset, at), v = load8(v_pages, offset, at);
        }
        *(uint4*)&keys[t][at * 8] = k, *(uint4*)&values[t][at * 8] = v;
      }
    }
    __syncthreads();
    const int position = from + lane;
    float score[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) score[i] = 0.0f;
#pragma unroll 1
    for (int d = 0; d < D; d += 8) {
      float k[8];
      unpack8(*(const uint4*)&keys[lane][d], k);
#pragma unroll
      for (int i = 0; i < OWN; ++i) {
        const int q = min(warp + i * WARPS, QUERIES - 1);
        const float4 a = *(const float4*)&queries[q][d], b = *(const float4*)&queries[q][d + 4];
        score[i] += a.x * k[0] + a.y * k[1] + a.z * k[2] + a.w * k[3] + b.x * k[4] + b.y * k[5] +
                    b.z * k[6] + b.w * k[7];
      }
    }
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int q = warp + i * WARPS;
      const bool seen = position < end && (own || start + q % TOKENS - position < WINDOW);
      const float x = seen ? score[i] * key_scale : -1e30f;
      const float higher = fmaxf(top[i], warp_max(x));
      const float e = seen ? __expf(x - higher) : 0.0f, less = __expf(top[i] - higher);
      total[i] = total[i] * less + warp_sum(e), top[i] = higher;
      if (q < QUERIES) {
        weights[lane][q] = e;
        if (lane == 0) shrink[q] = less;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sum[i] *= shrink[min(share + i * SHARES, QUERIES - 1)];
#pragma unroll 1
    for (int k = 0; k < KEYS; ++k) {
      const float v = from_bf16(values[k][dim]);
#pragma unroll
      for (int i = 0; i < SUMS; ++i)
        sum[i] = fmaf(weights[k][min(share + i * SHARES, QUERIES - 1)], v, sum[i]);
    }
  }
  // What the parts have, [row, kv head, part, query]: sums of D values, their maximum and total.
  const int group = row * KV_HEADS + kv;
  const int place = own ? active - 1 : part;
  const i64 base = ((i64)group * parts + place) * QUERIES;
#pragma unroll
  for (int i = 0; i < SUMS; ++i)
    if (share + i * SHARES < QUERIES)
      sums[(base + share + i * SHARES) * D + dim] = sum[i] * value_scale;
#pragma unroll
  for (int i = 0; i < OWN; ++i)
    if (lane == 0 && warp + i * WARPS < QUERIES) {
      stats[(base + warp + i * WARPS) * 2] = top[i];
      stats[(base + warp + i * WARPS) * 2 + 1] = total[i];
    }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = count_up(arrived + group) == active - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[group] = 0;
  const i64 begin = (i64)group * parts * QUERIES;
#pragma unroll 1
  for (int q = share; q < QUERIES; q += SHARES) {
    float highest = -1e30f, all = 0.0f, value = 0.0f;
#pragma unroll 1
    for (int p = 0; p < active; ++p)
      highest = fmaxf(highest, __ldcg(stats + (begin + p * QUERIES + q) * 2));
#pragma unroll 1
    for (int p = 0; p < active; ++p) {
      const i64 at = begin + p * QUERIES + q;
      const float less = __expf(__ldcg(stats + at * 2) - highest);
      all = fmaf(__ldcg(stats + at * 2 + 1), less, all);
      value = fmaf(__ldcg(sums + at * D + dim), less, value);
    }
    out[(q % TOKENS * HEADS + kv * GROUP + q / TOKENS) * D + dim] = to_bf16(value / all);
  }
}
