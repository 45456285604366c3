// The experts of a mixture: y = Σ_e weight_e · w2_e(silu(gate_e(x)) · up_e(x)), few tokens.
//
// Two launches stream the weights of every expert that was hit, once: `up` (gate and up rows
// interleaved by eights, so that a lane holds both and applies SiLU·mul) and `down`; a third adds
// a token's experts in ascending index in f32. Weights are the M side of the matrix instructions,
// tokens the N side: a column of 8 tokens costs what one costs.
//
// Packed weights (plugins/expert_tiles.py): groups of 64 rows, units of 64 k in order, four strips
// of 16 rows; a lane's 16 bytes are its fragments. Eight warps split k (WK) and groups (WN); a
// warp keeps the fragments of its tokens in registers and streams its share of the weights through
// a ring of its own (copy engine, one barrier a stage, nothing to synchronise between warps).
//
// Work: each expert hit has ⌈tokens/COLS⌉ blocks; blocks x steps (WN groups each) is one line cut
// into gridDim.x equal pieces. Every block counts the pairs of each expert itself (a few hundred
// ids in L2), which saves a launch. A dot product is always KU units in order of k, then the WK
// parts in order: the bits of a token do not depend on its company nor on the path.
//
// `each_up`, `each_down`: up to four tokens, a pair (token, expert) at a time, weights straight to
// registers, all loads in flight at once; `each_down` fetches its weights while `each_up` runs and
// adds the experts itself.
//
// One layer of 256 experts and a shared one, H 2048, I 512, top 8, on an H200, us, weights cold
// (tokens 1 / 8 / 32 / 128 / 256; floors 3.7 / 24.5 / 67 / 104 / 106):
//   each: 10.8; its down weights through shared memory, decoded on the multiplier: 12.9
//   grouped, each block searching its first expert one by one: 47.5 / 71.5 / 124 / 180 / 308
//   a warp searching 32 at once, decoding on the multiplier: 18.2 / 44.5 / 99.5 / 157 / 300
//
// Macros: HIDDEN, INNER, EXPERTS, K1 (experts a token), UP_WK, DOWN_WK, NT (columns / 8), DEPTH
// (stages of a warp's ring), BUFFERS (of partial sums), DENSE (bf16 weights, else NVFP4).
#include "nvfp4.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int COLS = NT * 8;
constexpr int STRIP = DENSE ? 2048 : 512;  // bytes of 16 rows of a unit
constexpr int SCALES = DENSE ? 0 : 64;
constexpr int STAGE = 4 * (STRIP + SCALES);
constexpr float REST = DENSE ? 1.0f : NVFP4_REST;

template <bool UP>
struct Side {
  static constexpr int K = UP ? HIDDEN : INNER;
  static constexpr int UNITS = (K + 63) / 64;
  static constexpr int WK = UP ? UP_WK : DOWN_WK;
  static constexpr int WN = WARPS / WK;
  static constexpr int KU = UNITS / WK;
  static constexpr int GROUPS = UP ? (INNER + 31) / 32 : (HIDDEN + 63) / 64;
  static constexpr int STEPS = (GROUPS + WN - 1) / WN;
};

DEVICE uint4 load_words(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
DEVICE uint2 load_scales(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DEVICE float silu_mul(float gate, float up) {
  return __fmul_rn(__fdividef(gate, 1.0f + __expf(-gate)), up);
}
DEVICE float scaled(float dot, float scale2) { return __fmul_rn(dot, scale2 * REST); }

// Two steps of k against a lane's eight activations.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4][4], int half, const uint4& x) {
  mma_bf16(d, a[2 * half], x.x, x.y);
  mma_bf16(d, a[2 * half + 1], x.z, x.w);
}

// --- Which tokens an expert has --------------------------------------------------------------

struct Shared {
  int* first;   // [EXPERTS + 1] blocks before each expert
  int* list;    // [COLS] pairs of this block's tokens, -1 where there is none
  int* found;   // [WARPS]
  u16* ids;     // [pairs]
};

DEVICE void count_blocks(const Shared& s, const int* ids, int pairs) {
  for (int i = threadIdx.x; i <= EXPERTS; i += THREADS) s.first[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    const int id = ids[i];
    s.ids[i] = (u16)id;
    atomicAdd(s.first + id + 1, 1);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    constexpr int EACH = (EXPERTS + 31) / 32;
    const int from = 1 + threadIdx.x * EACH;
    int sum = 0;
    for (int i = from; i < min(from + EACH, EXPERTS + 1); ++i) {
      sum += (s.first[i] + COLS - 1) / COLS;
      s.first[i] = sum;
    }
    int before = sum;
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, before, d);
      if (threadIdx.x >= d) before += other;
    }
    before -= sum;
    for (int i = from; i < min(from + EACH, EXPERTS + 1); ++i) s.first[i] += before;
  }
  __syncthreads();
}

// The pairs of `expert` from its `rank`-th on, in order, into s.list.
DEVICE void find_pairs(const Shared& s, int pairs, int expert, int rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int chunk = (pairs + THREADS - 1) / THREADS * 32;
  const int begin = warp * chunk, end = min(begin + chunk, pairs);
  __syncthreads();
  if (threadIdx.x < COLS) s.list[threadIdx.x] = -1;
  int count = 0;
  for (int i = begin + lane; i - lane < end; i += 32)
    count += __popc(__ballot_sync(~0u, i < end && s.ids[i] == expert));
  if (lane == 0) s.found[warp] = count;
  __syncthreads();
  int at = -rank;
  for (int w = 0; w < warp; ++w) at += s.found[w];
  for (int i = begin + lane; i - lane < end; i += 32) {
    const bool mine = i < end && s.ids[i] == expert;
    const u32 all = __ballot_sync(~0u, mine);
    const int place = at + __popc(all & ((1u << lane) - 1));
    if (mine && place >= 0 && place < COLS) s.list[place] = i;
    at += __popc(all);
  }
  __syncthreads();
}

// The expert of a block of work, not before `expert`; the whole warp searches.
DEVICE int expert_of(const Shared& s, int block, int expert) {
  while (true) {
    const u32 beyond = __ballot_sync(~0u, s.first[min(expert + 1 + (int)lane_id(), EXPERTS)] > block);
    if (beyond) return expert + __ffs(beyond) - 1;
    expert += 32;
  }
}

// --- Streaming -------------------------------------------------------------------------------

// What a warp fetches next: it runs DEPTH stages ahead of what the warp multiplies.
template <bool UP>
struct Feed {
  using S = Side<UP>;
  const u8 *w, *scales;  // the operands
  u8* ring;              // of this warp
  u64* full;
  u64 policy;
  int line, end, block, step, expert, unit, slot;
  u64 at;  // in units

  DEVICE void locate(const Shared& s) {
    expert = expert_of(s, block, expert);
    const int wk = (threadIdx.x >> 5) / S::WN, wn = (threadIdx.x >> 5) % S::WN;
    at = ((u64)expert * S::GROUPS + step * S::WN + wn) * S::UNITS + wk * S::KU;
  }
  DEVICE void start(const Shared& s, int begin) {
    line = begin, block = begin / S::STEPS, step = begin % S::STEPS, expert = 0, unit = 0, slot = 0;
    if (line < end) locate(s);
  }
  // Queues one stage. All lanes keep count, lane 0 issues.
  DEVICE void next(const Shared& s) {
    if (line >= end) return;
    const int wn = (threadIdx.x >> 5) % S::WN;
    const bool busy = S::GROUPS % S::WN == 0 || step * S::WN + wn < S::GROUPS;
    if ((threadIdx.x & 31) == 0 && !busy) barrier_arrive(full + slot);
    if ((threadIdx.x & 31) == 0 && busy) {
      barrier_expect(full + slot, STAGE);
      u8* const to = ring + slot * STAGE;
      bulk_load(to, w + at * (4 * STRIP), 4 * STRIP, full + slot, policy);
      if (SCALES)
        bulk_load(to + 4 * STRIP, scales + at * (4 * SCALES), 4 * SCALES, full + slot, policy);
    }
    if (++slot == DEPTH) slot = 0;
    ++at;
    if (++unit < S::KU) return;
    unit = 0;
    at += S::WN * S::UNITS - S::KU;
    ++line;
    if (++step == S::STEPS) {
      step = 0;
      ++block;
      if (line < end) locate(s);
    }
  }
};

DEVICE void load_strip(const u8* stage, int strip, u32 (&a)[4][4]) {
  const int lane = threadIdx.x & 31;
  if (DENSE) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = *(const uint4*)(stage + strip * STRIP + i * 512 + lane * 16);
      a[i][0] = v.x, a[i][1] = v.y, a[i][2] = v.z, a[i][3] = v.w;
    }
  } else {
    const u8* scales = stage + 4 * STRIP + strip * SCALES + (lane >> 2) * 8;
    fp4_fragments<true>(*(const uint4*)(stage + strip * STRIP + lane * 16), *(const uint2*)scales, a);
  }
}

// The activations of this block's tokens: lane (g, t) holds k 8t … 8t + 7 of column g.
template <bool UP>
DEVICE void load_tokens(const Shared& s, const u8* in, uint4 (&x)[Side<UP>::KU][NT][2]) {
  using S = Side<UP>;
  const int lane = threadIdx.x & 31, wk = (threadIdx.x >> 5) / S::WN;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int pair = s.list[n * 8 + (lane >> 2)];
    const u64 row = UP ? pair / K1 : pair;
#pragma unroll
    for (int u = 0; u < S::KU; ++u)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = (wk * S::KU + u) * 64 + h * 32 + (lane & 3) * 8;
        const bool inside = pair >= 0 && (S::K % 64 == 0 || k < S::K);
        x[u][n][h] = make_uint4(0, 0, 0, 0);
        if (inside) x[u][n][h] = __ldcg((const uint4*)(in + (row * S::K + k) * 2));
      }
  }
}

// Adds the WK parts of a step in order and writes its rows, a lane's fragment a thread.
template <bool UP>
DEVICE void finish(const Shared& s, const float4* parts, int expert, int step, const float* scale2,
                void* out) {
  using S = Side<UP>;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::WN * 4 * NT * 32; i += THREADS) {
    const int lane = i & 31, n = i / 32 % NT, strip = i / (32 * NT) % 4, wn = i / (128 * NT);
    const float4* from = parts + (wn * 4 * NT + strip * NT + n) * 32 + lane;
    float4 v = from[0];
#pragma unroll
    for (int k = 1; k < S::WK; ++k) {
      const float4 p = from[k * S::WN * 4 * NT * 32];
      v.x += p.x, v.y += p.y, v.z += p.z, v.w += p.w;
    }
    const int g = lane >> 2, group = step * S::WN + wn;
    const int pair0 = s.list[n * 8 + (lane & 3) * 2], pair1 = s.list[n * 8 + (lane & 3) * 2 + 1];
    if (UP) {
      const int row = group * 32 + strip * 8 + g;
      if (row >= INNER) continue;
      const float* two = scale2 + (u64)expert * 2 * INNER + row;
      u16* h = (u16*)out + row;
      const float a = DENSE ? 1.0f : two[0], b = DENSE ? 1.0f : two[INNER];
      if (pair0 >= 0) h[(u64)pair0 * INNER] = to_bf16(silu_mul(scaled(v.x, a), scaled(v.z, b)));
      if (pair1 >= 0) h[(u64)pair1 * INNER] = to_bf16(silu_mul(scaled(v.y, a), scaled(v.w, b)));
    } else {
      const int row = group * 64 + strip * 16 + g;
      if (row >= HIDDEN) continue;
      const float* two = scale2 + (u64)expert * HIDDEN + row;
      float* y = (float*)out + row;
      const bool more = row + 8 < HIDDEN;
      const float a = DENSE ? 1.0f : two[0], b = DENSE ? 1.0f : more ? two[8] : 0.0f;
      if (pair0 >= 0) {
        y[(u64)pair0 * HIDDEN] = scaled(v.x, a);
        if (more) y[(u64)pair0 * HIDDEN + 8] = scaled(v.z, b);
      }
      if (pair1 >= 0) {
        y[(u64)pair1 * HIDDEN] = scaled(v.y, a);
        if (more) y[(u64)pair1 * HIDDEN + 8] = scaled(v.w, b);
      }
    }
  }
}

template <bool UP>
DEVICE void stream(const u8* in, const int* ids, int tokens, const u8* w, const u8* scales,
                const float* scale2, void* out) {
  using S = Side<UP>;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[WARPS * DEPTH];
  __shared__ int first[EXPERTS + 1], list[COLS], found[WARPS];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wn = warp % S::WN;
  float4* const parts = (float4*)(memory + WARPS * DEPTH * STAGE);
  constexpr int PARTS = WARPS * 4 * NT * 32;
  const Shared s = {first, list, found, (u16*)(parts + BUFFERS * PARTS)};
  const int pairs = tokens * K1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * DEPTH; ++i) barrier_init(barriers + i, 1);
    barrier_init_fence();
  }
  // `down` reads ids, which are older than the launch before it.
  if (UP) wait_for_previous(), let_next_start();
  count_blocks(s, ids, pairs);
  const u64 total = (u64)first[EXPERTS] * S::STEPS;
  const int begin = (int)(total * blockIdx.x / gridDim.x);
  const int end = (int)(total * (blockIdx.x + 1) / gridDim.x);
  Feed<UP> feed;
  feed.w = w, feed.scales = scales, feed.end = end, feed.policy = evict_first_policy();
  feed.ring = memory + warp * DEPTH * STAGE;
  feed.full = barriers + warp * DEPTH;
  feed.start(s, begin);
  for (int i = 0; i < DEPTH; ++i) feed.next(s);
  if (!UP) wait_for_previous(), let_next_start();

  uint4 x[S::KU][NT][2];
  int expert = 0, block = -1, slot = 0, phase = 0;
#pragma unroll 1
  for (int line = begin; line < end; ++line) {
    const int step = line % S::STEPS;
    if (line / S::STEPS != block) {
      block = line / S::STEPS;
      expert = expert_of(s, block, expert);
      find_pairs(s, pairs, expert, (block - first[expert]) * COLS);
      load_tokens<UP>(s, in, x);
    }
    float sums[4][NT][4] = {};
    const bool busy = S::GROUPS % S::WN == 0 || step * S::WN + wn < S::GROUPS;
#pragma unroll
    for (int u = 0; u < S::KU; ++u) {
      barrier_wait(feed.full + slot, phase);
      if (busy) {
#pragma unroll
        for (int strip = 0; strip < 4; ++strip) {
          u32 a[4][4];
          load_strip(feed.ring + slot * STAGE, strip, a);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            multiply(sums[strip][n], a, 0, x[u][n][0]);
            multiply(sums[strip][n], a, 1, x[u][n][1]);
          }
        }
      }
      __syncwarp();
      feed.next(s);
      if (++slot == DEPTH) slot = 0, phase ^= 1;
    }
    if (BUFFERS == 1) __syncthreads();
    float4* const mine = parts + (BUFFERS == 2 && (line & 1) ? PARTS : 0);
#pragma unroll
    for (int i = 0; i < 4 * NT; ++i) {
      const float(&d)[4] = sums[i / NT][i % NT];
      mine[(warp * 4 * NT + i) * 32 + lane] = make_float4(d[0], d[1], d[2], d[3]);
    }
    __syncthreads();
    finish<UP>(s, mine, expert, step, scale2, out);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    moe_up(const u8* x, const int* ids, const u8* w13, const u8* scale, const float* scale2,
           void* h, int tokens) {
  stream<true>(x, ids, tokens, w13, scale, scale2, h);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    moe_down(const u8* h, const int* ids, const u8* w2, const u8* scale, const float* scale2,
             void* parts, int tokens) {
  stream<false>(h, ids, tokens, w2, scale, scale2, parts);
}

// The places 0…K1-1 of a token's experts in ascending order of index.
DEVICE void sort_experts(const int* ids, int* order) {
  if (threadIdx.x < K1) {
    const int id = ids[threadIdx.x];
    int rank = 0;
    for (int j = 0; j < K1; ++j) rank += ids[j] < id || (ids[j] == id && j < (int)threadIdx.x);
    order[rank] = threadIdx.x;
  }
}

// A block a token: the weighted sum of its experts.
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const int* ids, const float* weights, const float* parts, u32* y) {
  __shared__ int order[K1];
  const u64 pair = (u64)blockIdx.x * K1;
  sort_experts(ids + pair, order);
  __syncthreads();
  let_next_start();
  float share[K1];
#pragma unroll
  for (int j = 0; j < K1; ++j) share[j] = weights[pair + order[j]];
  wait_for_previous();
  for (int i = threadIdx.x * 4; i < HIDDEN; i += blockDim.x * 4) {
    float4 v[K1];
#pragma unroll
    for (int j = 0; j < K1; ++j) v[j] = __ldcg((const float4*)(parts + (pair + order[j]) * HIDDEN + i));
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < K1; ++j) {
      sum.x = __fmaf_rn(share[j], v[j].x, sum.x), sum.y = __fmaf_rn(share[j], v[j].y, sum.y);
      sum.z = __fmaf_rn(share[j], v[j].z, sum.z), sum.w = __fmaf_rn(share[j], v[j].w, sum.w);
    }
    ((uint2*)y)[((u64)blockIdx.x * HIDDEN + i) / 4] =
        make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  }
}

#if !DENSE
// --- Up to four tokens -----------------------------------------------------------------------

// Two strips of WN groups for one pair; blockIdx = (half group, pair).
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    each_up(const u8* x, const int* ids, const u8* w13, const u8* scale, const float* scale2,
            u16* h) {
  using S = Side<true>;
  __shared__ __align__(16) u8 row[S::UNITS * 128];
  __shared__ float2 parts[2][WARPS][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int wk = warp / S::WN, wn = warp % S::WN;
  const int group = (blockIdx.x >> 1) * S::WN + wn, half = blockIdx.x & 1, pair = blockIdx.y;
  const bool busy = group < S::GROUPS;
  wait_for_previous();
  let_next_start();
  const int expert = ids[pair];
  uint4 words[S::KU][2];
  uint2 scales[S::KU][2];
  if (busy) {
    const u64 at = ((u64)expert * S::GROUPS + group) * S::UNITS + wk * S::KU;
#pragma unroll
    for (int u = 0; u < S::KU; ++u)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u64 strip = (at + u) * 4 + half * 2 + i;
        words[u][i] = load_words(w13 + strip * STRIP + lane * 16);
        scales[u][i] = load_scales(scale + strip * SCALES + (lane >> 2) * 8);
      }
  }
  const u8* from = x + (u64)(pair / K1) * HIDDEN * 2;
  for (int i = threadIdx.x * 16; i < S::UNITS * 128; i += THREADS * 16)
    *(uint4*)(row + i) = i < HIDDEN * 2 ? __ldcg((const uint4*)(from + i)) : make_uint4(0, 0, 0, 0);
  __syncthreads();
  float sums[2][4] = {};
  if (busy) {
#pragma unroll
    for (int u = 0; u < S::KU; ++u) {
      uint4 b[2] = {};
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (lane < 4) b[k] = *(const uint4*)(row + (wk * S::KU + u) * 128 + k * 64 + lane * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 a[4][4];
        fp4_fragments<false>(words[u][i], scales[u][i], a);
        multiply(sums[i], a, 0, b[0]);
        multiply(sums[i], a, 1, b[1]);
      }
    }
  }
  if ((lane & 3) == 0)
    for (int i = 0; i < 2; ++i) parts[i][warp][lane >> 2] = make_float2(sums[i][0], sums[i][2]);
  __syncthreads();
  for (int i = threadIdx.x; i < S::WN * 16; i += THREADS) {
    const int g = i & 7, strip = i >> 3 & 1, n = i >> 4;
    const int out = ((blockIdx.x >> 1) * S::WN + n) * 32 + (half * 2 + strip) * 8 + g;
    if (out >= INNER) continue;
    float2 v = parts[strip][n][g];
    for (int k = 1; k < S::WK; ++k) {
      const float2 p = parts[strip][k * S::WN + n][g];
      v.x += p.x, v.y += p.y;
    }
    const float* two = scale2 + (u64)expert * 2 * INNER + out;
    h[(u64)pair * INNER + out] = to_bf16(silu_mul(scaled(v.x, two[0]), scaled(v.y, two[INNER])));
  }
}

// One strip of 16 outputs of a token over all its experts; blockIdx = (strip, token).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    each_down(const u8* h, const int* ids, const float* weights, const u8* w2, const u8* scale,
              const float* scale2, u16* y) {
  using S = Side<false>;
  constexpr int TURNS = (K1 + S::WN - 1) / S::WN;
  __shared__ float parts[K1][S::WK][16];
  __shared__ int order[K1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int wk = warp / S::WN, wn = warp % S::WN;
  const u64 pair0 = (u64)blockIdx.y * K1;
  ids += pair0;
  uint4 words[TURNS][S::KU];
  uint2 scales[TURNS][S::KU];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int j = i * S::WN + wn;
    if (j >= K1) continue;
    const u64 at = ((u64)ids[j] * S::GROUPS + (blockIdx.x >> 2)) * S::UNITS + wk * S::KU;
#pragma unroll
    for (int u = 0; u < S::KU; ++u) {
      const u64 strip = (at + u) * 4 + (blockIdx.x & 3);
      words[i][u] = load_words(w2 + strip * STRIP + lane * 16);
      scales[i][u] = load_scales(scale + strip * SCALES + (lane >> 2) * 8);
    }
  }
  sort_experts(ids, order);
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int j = i * S::WN + wn;
    if (j >= K1) continue;
    float sums[4] = {};
#pragma unroll
    for (int u = 0; u < S::KU; ++u) {
      const int k = (wk * S::KU + u) * 64 + lane * 8;
      uint4 b[2] = {};
#pragma unroll
      for (int p = 0; p < 2; ++p)
        if (lane < 4 && k + p * 32 < INNER)
          b[p] = __ldcg((const uint4*)(h + ((pair0 + j) * INNER + k + p * 32) * 2));
      u32 a[4][4];
      fp4_fragments<false>(words[i][u], scales[i][u], a);
      multiply(sums, a, 0, b[0]);
      multiply(sums, a, 1, b[1]);
    }
    if ((lane & 3) == 0) parts[j][wk][lane >> 2] = sums[0], parts[j][wk][8 + (lane >> 2)] = sums[2];
  }
  __syncthreads();
  const int out = blockIdx.x * 16 + threadIdx.x;
  if (threadIdx.x >= 16 || out >= HIDDEN) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < K1; ++i) {
    const int j = order[i];
    float dot = parts[j][0][threadIdx.x];
    for (int k = 1; k < S::WK; ++k) dot += parts[j][k][threadIdx.x];
    const float one = scaled(dot, scale2[(u64)ids[j] * HIDDEN + out]);
    sum = __fmaf_rn(weights[pair0 + j], one, sum);
  }
  y[(u64)blockIdx.y * HIDDEN + out] = to_bf16(sum);
}
#endif
