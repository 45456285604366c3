// The experts of a mixture: y = Σ_e weight_e · w2_e(silu(gate_e(x)) · up_e(x)), any format.
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
// into gridDim.x equal pieces, to the strip. Every block counts the pairs of each expert itself,
// which saves a launch. A dot product is always KU units in order of k, then the WK
// parts in order: the bits of a token do not depend on its company nor on the path.
//
// The ids of all pairs lie in shared memory. More tokens than fit run in chunks (CHUNKED), each with
// launches of its own, over the same scratch memory; each reads its experts' weights again.
//
// Formats that quantise activations (QUANT) have a launch before each product (moe_quantise.cuh),
// whose codes are exact in bf16, as are those of the weights.
//
// One layer of 256 experts and a shared one, H 2048, I 512, top 8, NVFP4, on an H200, us, weights
// cold (tokens 8 / 32 / 128 / 256; floors 25 / 68 / 104 / 106):
//   each block searching its first expert one by one: 71.5 / 124 / 180 / 308, weights all alike
//   a warp searching 32 at once, decoding on the multiplier: 44.5 / 99.5 / 157 / 300, alike
//   the same, random weights: 47.4 / 106 / 166 / 286; cut to the step or the strip, one or two
//   buffers of sums: no difference. Left out at 32: block scales, 100; decoding, 83.
//
// Macros: those of moe_common.cuh, NT (columns / 8), DEPTH (stages of a warp's ring), BUFFERS (of
// partial sums), RESIDENT (blocks of an SM), QUANT (0 none, 1 fp8, 2 fp8_block, 3 nvfp4).
#include "moe_quantise.cuh"

constexpr int COLS = NT * 8;
#include "moe_route.cuh"

constexpr int STAGE = 4 * (STRIP + SCALES);

// `h` as the second product takes it, or whole where it is still to be quantised.
DEVICE void put_inner(void* h, u64 at, float value) {
  if (QUANT) ((float*)h)[at] = value;
  else ((u16*)h)[at] = to_bf16(value);
}

// A block's share of the line, in strips: what lies between two steps' ends.
struct Piece {
  int step, block, from, to;  // strips from … to - 1 of the step
  template <bool UP> DEVICE void at(int place, int end) {
    const int line = place / 4;
    step = line % Side<UP>::STEPS, block = line / Side<UP>::STEPS;
    from = place % 4, to = min(4, from + end - place);
  }
};

// What a warp fetches next: it runs DEPTH stages ahead of what the warp multiplies.
template <bool UP>
struct Feed {
  using S = Side<UP>;
  const u8 *w, *scales;  // the operands
  u8* ring;              // of this warp
  u64* full;
  u64 policy;
  int place, end, expert, unit, slot;
  Piece piece;
  u64 unit0;

  DEVICE void locate(const Shared& s) {
    if (place >= end) return;
    piece.at<UP>(place, end);
    expert = expert_of(s, piece.block, expert);
    const int wk = (threadIdx.x >> 5) / S::WN, wn = (threadIdx.x >> 5) % S::WN;
    unit0 = ((u64)expert * S::GROUPS + piece.step * S::WN + wn) * S::UNITS + wk * S::KU;
  }
  DEVICE void start(const Shared& s, int begin) {
    place = begin, expert = 0, unit = 0, slot = 0;
    locate(s);
  }
  // Queues one stage. All lanes keep count, lane 0 issues.
  DEVICE void next(const Shared& s) {
    if (place >= end) return;
    const int wn = (threadIdx.x >> 5) % S::WN;
    const bool busy = S::GROUPS % S::WN == 0 || piece.step * S::WN + wn < S::GROUPS;
    if ((threadIdx.x & 31) == 0 && !busy) barrier_arrive(full + slot);
    if ((threadIdx.x & 31) == 0 && busy) {
      const int strips = piece.to - piece.from;
      const u64 at = (unit0 + unit) * 4 + piece.from;
      u8* const to = ring + slot * STAGE;
      barrier_expect(full + slot, strips * (STRIP + SCALES));
      bulk_load(to + piece.from * STRIP, w + at * STRIP, strips * STRIP, full + slot, policy);
      if (SCALES)
        bulk_load(to + 4 * STRIP + piece.from * SCALES, scales + at * SCALES, strips * SCALES,
                  full + slot, policy);
    }
    if (++slot == DEPTH) slot = 0;
    if (++unit < S::KU) return;
    unit = 0;
    place += piece.to - piece.from;
    locate(s);
  }
};

// The activations of this block's tokens: lane (g, t) holds k 8t … 8t + 7 of column g.
template <bool UP>
DEVICE void load_tokens(const Shared& s, const u8* in, uint4 (&x)[Side<UP>::KU][NT][2]) {
  using S = Side<UP>;
  const int lane = threadIdx.x & 31, wk = (threadIdx.x >> 5) / S::WN;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int pair = s.list[n * 8 + (lane >> 2)];
    const u64 row = UP && !BY_PAIR ? pair / K1 : pair;
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

// The scales of a product beside its weights.
struct Scales {
  const float* row;    // of a weight row; of fp8_block: f32 [E, ⌈N/128⌉, ⌈K/128⌉]
  const float* given;  // of an expert's input, where it was quantised by one
  const float* x;      // fp8_block: of the input's rows, f32 [rows, ⌈K/128⌉]

  DEVICE float of(int expert, u64 at) const {
    if (WEIGHTS == 0 || QUANT == 2) return 1.0f;
    return BY_PAIR ? row[at] * given[expert] : row[at];
  }
};

// Adds the WK parts of a piece in order and writes its rows, a lane's fragment a thread.
template <bool UP>
DEVICE void finish(const Shared& s, const float4* parts, int expert, const Piece& piece,
                   const Scales& scales, void* out) {
  using S = Side<UP>;
#pragma unroll 1
  for (int i = threadIdx.x; i < S::WN * 4 * NT * 32; i += THREADS) {
    const int lane = i & 31, n = i / 32 % NT, strip = i / (32 * NT) % 4, wn = i / (128 * NT);
    if (strip < piece.from || strip >= piece.to) continue;
    const float4* from = parts + (wn * 4 * NT + strip * NT + n) * 32 + lane;
    float4 v = from[0];
#pragma unroll
    for (int k = 1; k < S::WK; ++k) {
      const float4 p = from[k * S::WN * 4 * NT * 32];
      v.x += p.x, v.y += p.y, v.z += p.z, v.w += p.w;
    }
    const int g = lane >> 2, group = piece.step * S::WN + wn;
    const int pair0 = s.list[n * 8 + (lane & 3) * 2], pair1 = s.list[n * 8 + (lane & 3) * 2 + 1];
    if (UP) {
      const int row = group * 32 + strip * 8 + g;
      if (row >= INNER) continue;
      const u64 at = (u64)expert * 2 * INNER + row;
      const float a = scales.of(expert, at), b = scales.of(expert, at + INNER);
      const float h0 = silu_mul(scaled(v.x, a), scaled(v.z, b));
      const float h1 = silu_mul(scaled(v.y, a), scaled(v.w, b));
      if (pair0 >= 0) put_inner(out, (u64)pair0 * INNER + row, h0);
      if (pair1 >= 0) put_inner(out, (u64)pair1 * INNER + row, h1);
    } else {
      const int row = group * 64 + strip * 16 + g;
      if (row >= HIDDEN) continue;
      const u64 at = (u64)expert * HIDDEN + row;
      float* y = (float*)out + row;
      const bool more = row + 8 < HIDDEN;
      const float a = scales.of(expert, at), b = more ? scales.of(expert, at + 8) : 0.0f;
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

#if QUANT == 2
// sum += dot · (scale of the input's block) · (scale of the weights' block), for one unit of k.
template <bool UP>
DEVICE void add_scaled(const Shared& s, const Scales& scales, int expert, int group, int strip,
                       int unit, int n, const float (&dot)[4], float (&sum)[4]) {
  constexpr int ACROSS = (Side<UP>::K + 127) / 128, DOWN = UP ? 2 * INNER / 128 : (HIDDEN + 127) / 128;
  const int row = UP ? group * 32 + strip * 8 : group * 64 + strip * 16;
  const float* w = scales.row + ((u64)expert * DOWN + row / 128) * ACROSS + unit / 2;
  const float first = w[0], second = UP ? w[INNER / 128 * ACROSS] : first;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = s.list[n * 8 + (lane_id() & 3) * 2 + i];
    if (pair < 0) continue;
    const float x = __ldcg(scales.x + (u64)(UP ? pair / K1 : pair) * ACROSS + unit / 2);
    sum[i] += dot[i] * (x * first), sum[2 + i] += dot[2 + i] * (x * second);
  }
}
#endif

// One strip of a unit times the block's tokens.
template <bool UP>
DEVICE void add_strip(const Shared& s, const Scales& scales, const u8* stage, int strip,
                      const uint4 (&x)[NT][2], int expert, int group, int unit,
                      float (&sums)[NT][4]) {
  u32 a[4][4];
  fragments(load_raw(stage + strip * STRIP, stage + 4 * STRIP + strip * SCALES), a);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#if QUANT == 2
    float dot[4] = {};
    multiply(dot, a, 0, x[n][0]);
    multiply(dot, a, 1, x[n][1]);
    add_scaled<UP>(s, scales, expert, group, strip, unit, n, dot, sums[n]);
#else
    multiply(sums[n], a, 0, x[n][0]);
    multiply(sums[n], a, 1, x[n][1]);
#endif
  }
}

template <bool UP>
DEVICE void stream(const u8* in, const int* ids, int tokens, const u8* w, const u8* block_scales,
                   const Scales& scales, void* out) {
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
  const u64 total = (u64)first[EXPERTS] * S::STEPS * 4;
  const int begin = (int)(total * blockIdx.x / gridDim.x);
  const int end = (int)(total * (blockIdx.x + 1) / gridDim.x);
  Feed<UP> feed;
  feed.w = w, feed.scales = block_scales, feed.end = end, feed.policy = evict_first_policy();
  feed.ring = memory + warp * DEPTH * STAGE;
  feed.full = barriers + warp * DEPTH;
  feed.start(s, begin);
  for (int i = 0; i < DEPTH; ++i) feed.next(s);
  if (!UP) wait_for_previous(), let_next_start();

  uint4 x[S::KU][NT][2];
  Piece piece;
  int expert = 0, block = -1, slot = 0, phase = 0, turn = 0;
#pragma unroll 1
  for (int place = begin; place < end; place += piece.to - piece.from, turn ^= 1) {
    piece.at<UP>(place, end);
    if (piece.block != block) {
      block = piece.block;
      expert = expert_of(s, block, expert);
      find_pairs(s, pairs, expert, (block - first[expert]) * COLS);
      load_tokens<UP>(s, in, x);
    }
    float sums[4][NT][4] = {};
    const int group = piece.step * S::WN + wn;
    const bool busy = S::GROUPS % S::WN == 0 || group < S::GROUPS;
#pragma unroll
    for (int u = 0; u < S::KU; ++u) {
      barrier_wait(feed.full + slot, phase);
      const u8* const stage = feed.ring + slot * STAGE;
      if (busy && piece.to - piece.from == 4) {
#pragma unroll
        for (int strip = 0; strip < 4; ++strip)
          add_strip<UP>(s, scales, stage, strip, x[u], expert, group, warp / S::WN * S::KU + u,
                        sums[strip]);
      } else if (busy) {
#pragma unroll
        for (int strip = 0; strip < 4; ++strip)
          if (strip >= piece.from && strip < piece.to)
            add_strip<UP>(s, scales, stage, strip, x[u], expert, group, warp / S::WN * S::KU + u,
                          sums[strip]);
      }
      __syncwarp();
      feed.next(s);
      if (++slot == DEPTH) slot = 0, phase ^= 1;
    }
    if (BUFFERS == 1) __syncthreads();
    float4* const mine = parts + (BUFFERS == 2 && turn ? PARTS : 0);
#pragma unroll
    for (int i = 0; i < 4 * NT; ++i) {
      const float(&d)[4] = sums[i / NT][i % NT];
      mine[(warp * 4 * NT + i) * 32 + lane] = make_float4(d[0], d[1], d[2], d[3]);
    }
    __syncthreads();
    finish<UP>(s, mine, expert, piece, scales, out);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    moe_up(const u8* x, const int* ids, const u8* w13, const u8* scale, const float* scale2,
           const float* given, const float* x_scales, void* h, int tokens CHUNK_ARG) {
  ids += (u64)chunk_start * K1;
  if (!QUANT) x += (u64)chunk_start * HIDDEN * 2;  // quantised, it is scratch memory
  stream<true>(x, ids, tokens, w13, scale, {scale2, given, x_scales}, h);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    moe_down(const u8* h, const int* ids, const u8* w2, const u8* scale, const float* scale2,
             const float* given, const float* h_scales, void* parts, int tokens CHUNK_ARG) {
  stream<false>(h, ids + (u64)chunk_start * K1, tokens, w2, scale, {scale2, given, h_scales}, parts);
}
