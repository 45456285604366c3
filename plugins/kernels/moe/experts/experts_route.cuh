// Which tokens an expert has, for experts_grouped_mma.cu: every block counts the pairs
// (token, expert) itself (few ids, in L2), which saves a launch. And their activations, which
// fp8_block and fp8_token quantise where they are loaded.
#pragma once
#include "moe/experts/experts_quantise.cuh"

constexpr int BLOCK_M = NT * 8;               // tokens of a block
constexpr bool BLOCKS = QUANT == 2;           // scales along k
constexpr bool CODES = BLOCKS || QUANT == 4;  // quantised here
// Where int4 leaves no registers for it, what follows from threadIdx.x or from a place on the line
// of work is computed again at each piece: held all along, it spilled.
template <bool UP>
constexpr bool SCARCE = WEIGHTS == 3 && RESIDENT > 1 && Side<UP>::PART_SLABS > 4;

struct Shared {
  int* first;  // [EXPERTS + 1] blocks before each expert
  int* list;   // [BLOCK_M] pairs of this block's tokens, -1 where there is none
  int* found;  // [WARPS]
  u16* ids;    // [pairs]
  // Of this block's tokens by row of the input (fp8_token): what each warp found, and the scales.
  float *most, *scales;  // [WK, BLOCK_M], [BLOCK_M]
  DEVICE float scale_of(int column) const { return QUANT == 4 ? scales[column] : 1.0f; }
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
  constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int own[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = threadIdx.x * EACH + i;
    own[i] = expert < EXPERTS ? (s.first[expert + 1] + BLOCK_M - 1) / BLOCK_M : 0;
    sum += own[i];
  }
  int before = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) s.found[warp] = before;
  __syncthreads();
  before -= sum;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) before += w < warp ? s.found[w] : 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = threadIdx.x * EACH + i;
    before += own[i];
    if (expert < EXPERTS) s.first[expert + 1] = before;
  }
  __syncthreads();
}

// The pairs of `expert` from its `rank`-th on, in order, into s.list.
template <bool UP>
DEVICE void find_pairs(const Shared& s, int pairs, int expert, int rank) {
  const u32 thread = SCARCE<UP> ? forget(threadIdx.x) : threadIdx.x;
  const int warp = thread >> 5, lane = thread & 31;
  const int chunk = (pairs + THREADS - 1) / THREADS * 32;
  const int begin = warp * chunk, end = min(begin + chunk, pairs);
  __syncthreads();
  if (threadIdx.x < BLOCK_M) s.list[threadIdx.x] = -1;
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
    if (mine && place >= 0 && place < BLOCK_M) s.list[place] = i;
    at += __popc(all);
  }
  __syncthreads();
}

// The expert of a block of work, not before `expert`; the whole warp searches.
DEVICE int expert_of(const Shared& s, int block, int expert) {
  constexpr int STRIDE = (EXPERTS + 31) / 32;
  if (expert == 0) {  // coarsely first
    const int last = min(((int)lane_id() + 1) * STRIDE, EXPERTS);
    expert = (__ffs(__ballot_sync(~0u, s.first[last] > block)) - 1) * STRIDE;
  }
  while (true) {
    const u32 beyond =
        __ballot_sync(~0u, s.first[min(expert + 1 + (int)lane_id(), EXPERTS)] > block);
    if (beyond) return expert + __ffs(beyond) - 1;
    expert += 32;
  }
}

// Where a block is on the line of work, in m16 tiles. A piece is a block's part of one step.
template <bool UP>
struct Piece {
  int place, end, step, block, from, to;  // m16 tiles from … to - 1 of the step

  DEVICE void start(int begin, int stop) {
    const int line = begin / 4;
    place = begin, end = stop, step = line % Side<UP>::STEPS, block = line / Side<UP>::STEPS;
    from = begin % 4, to = min(4, from + stop - begin);
  }
  DEVICE bool over() const { return place >= end; }
  DEVICE bool next() {  // to another block of work?
    place += to - from, from = 0, to = min(4, end - place);
    const bool leaves = ++step == Side<UP>::STEPS;
    if (leaves) step = 0, ++block;
    return leaves;
  }
};

// The activations of this block's tokens of a k-slab: lane (g, t) holds k 16t … 16t + 15 of column
// g, with CODES as f16, and then the scales of columns 2t and 2t + 1.
struct Tokens {
  uint4 values[NT][2];
  float2 scales[NT];
};

// Eight k from `k` on of a column's pair, or zeros.
template <bool UP>
DEVICE void load_column(const void* in, int pair, int k, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = 0.0f;
  if (pair >= 0 && (Side<UP>::K % 128 == 0 || k < Side<UP>::K))
    load8<UP>(in, (u64)(UP ? pair / K1 : pair) * Side<UP>::K + k, v);
}

// The largest of a column in its whole row: lanes of every warp have parts of it.
template <bool UP>
DEVICE float most_of_row(const Shared& s, int n, float most) {
  using S = Side<UP>;
  const int warp = threadIdx.x >> 5, column = n * 8 + (lane_id() >> 2);
  if (warp % S::WN == 0 && (lane_id() & 3) == 0) s.most[warp / S::WN * BLOCK_M + column] = most;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < S::WK; ++k) most = fmaxf(most, s.most[k * BLOCK_M + column]);
  return most;
}

// Quantises n8 tile n of COUNT k-slabs from `slab` on: of fp8_block a whole block of 128 k or half
// of one, of fp8_token the warp's part of the row.
template <bool UP, int COUNT>
DEVICE void quantise_part(const Shared& s, const void* in, int pair, int slab, int n, Tokens* x) {
  const int k = slab * 64 + (lane_id() & 3) * 16;
  float v[COUNT * 2][8], most = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT * 2; ++i) {
    load_column<UP>(in, pair, k + i / 2 * 64 + i % 2 * 8, v[i]);
    most = fmaxf(most, most_of<1>(v[i]));
  }
  if (BLOCKS && COUNT == 1)  // the other half is another warp's
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float other[8];
      load_column<UP>(in, pair, (k ^ 64) + i * 8, other);
      most = fmaxf(most, most_of<1>(other));
    }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
  if (!BLOCKS) most = most_of_row<UP>(s, n, most);
  const float scale = block_scale(most);
  if (!BLOCKS && (threadIdx.x & ~28) == 0) s.scales[n * 8 + (lane_id() >> 2)] = scale;
  const float2 two = {__shfl_sync(~0u, scale, (lane_id() & 3) * 8),
                      __shfl_sync(~0u, scale, (lane_id() & 3) * 8 + 4)};
#pragma unroll
  for (int i = 0; i < COUNT * 2; ++i) {
    x[i / 2].values[n][i % 2] = f16_codes(v[i], scale);
    x[i / 2].scales[n] = two;
  }
}

template <bool UP>
DEVICE void load_tokens(const Shared& s, const u8* in, Tokens (&x)[Side<UP>::PART_SLABS]) {
  using S = Side<UP>;
  constexpr int COUNT = !CODES || BLOCKS && S::PART_SLABS % 2 ? 1 : BLOCKS ? 2 : S::PART_SLABS;
  const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) / S::WN * S::PART_SLABS;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int pair = s.list[n * 8 + (lane >> 2)];
    const u64 row = UP && !BY_PAIR ? pair / K1 : pair;
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; u += COUNT) {
      if (CODES) {
        quantise_part<UP, COUNT>(s, in, pair, first + u, n, x + u);
        continue;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int k = (first + u) * 64 + (lane & 3) * 16 + h * 8;
        const bool inside = pair >= 0 && (S::K % 64 == 0 || k < S::K);
        x[u].values[n][h] = make_uint4(0, 0, 0, 0);
        if (inside) x[u].values[n][h] = __ldcg((const uint4*)(in + (row * S::K + k) * 2));
      }
    }
  }
  // Waits here: else later loads would be waited for with these.
#pragma unroll
  for (int i = 0; i < S::PART_SLABS * NT * 2; ++i) {
    uint4& v = x[i / (2 * NT)].values[i / 2 % NT][i % 2];
    v.x = forget(v.x), v.y = forget(v.y), v.z = forget(v.z), v.w = forget(v.w);
  }
}
