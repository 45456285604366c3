// Grouped GEMM of experts, few tokens: y = Σ_e weight_e · w2_e(silu(gate_e(x)) · up_e(x)). Two
// launches read the weights of each expert hit, once: `up` (gate and up rows interleaved by eights:
// a lane has both and applies SiLU·mul) and `down`; moe_combine adds a token's experts by index. A
// and B are swapped: weights are the A of mma.sync, tokens its B: 8 tokens cost what one costs.
// Layout (expert_layout.py): panels of 64 rows, in each k-slabs of 64 k, in each four m16 tiles.
// Eight warps split k (WK) and panels (WN) and keep their tokens' fragments in registers; weights
// come through a ring of each warp's own by cp.async, without block barriers.
// Work (stream-K): per expert ⌈tokens / BLOCK_M⌉ blocks of work x steps (WN panels) form a line,
// cut into gridDim.x pieces at m16 tiles; each block counts the pairs itself (experts_route.cuh). A
// dot product is PART_SLABS k-slabs in order, then WK parts in order: results depend on no other
// token. 256 experts, top 8, H200: 39.1 / 84.7 / 111 / 131 us at 8 / 32 / 64 / 128 tokens (floors
// 25 / 68 / - / 104; log/moe/experts_grouped_mma.md).
// Macros: experts_common.cuh's, NT (BLOCK_M / 8), DEPTH (stages of a ring), BUFFERS (of partial
// sums), RESIDENT (blocks a multiprocessor), QUANT (of experts_quantise.cuh).
#include "moe/experts/experts_route.cuh"

constexpr int STAGE = 4 * (M16_BYTES + M16_SCALES);
constexpr bool HINTED = FOUR_BITS && DEPTH == 4;  // forms with inspected machine code

// `h` as the second product takes it, or whole where it is still to be quantised.
DEVICE void put_inner(void* h, u64 at, float value) {
  if (QUANT) ((float*)h)[at] = value;
  else ((u16*)h)[at] = to_bf16(value);
}

// Fills a warp's ring, DEPTH stages ahead of its mma. A lane copies the weights that it reads
// itself, and scales that its neighbours read as well.
template <bool UP>
struct Producer {
  using S = Side<UP>;
  const u8 *w, *scales;  // the lane's, of the piece's first k-slab
  u32 ring, to;          // the lane's place in this warp's ring: of the first stage, of the next
  int expert;
  u32 m16_mask;  // a bit each
  u64 policy;
  Piece<UP> piece;

  DEVICE void locate(const Shared& s, const u8* all_w, const u8* all_scales) {
    m16_mask = 0;
    if (piece.over()) return;
    const int wk = (threadIdx.x >> 5) / S::WN,
              panel = piece.step * S::WN + (threadIdx.x >> 5) % S::WN;
    expert = expert_of(s, piece.block, expert);
    if (S::PANELS % S::WN == 0 || panel < S::PANELS) m16_mask = (1 << piece.to) - (1 << piece.from);
    const u64 at = (((u64)expert * S::PANELS + panel) * S::SLABS + wk * S::PART_SLABS) * 4;
    w = all_w + at * M16_BYTES + lane_id() * 16;
    if (M16_SCALES) scales = all_scales + at * M16_SCALES + lane_id() * 16;
  }
  DEVICE void copy(u32 to, const u8* from) {
    if (HINTED) copy_async_hinted(to, from, policy);
    else copy_async(to, from);
  }
  // Asks for a k-slab of the piece; after the last moves to the next piece.
  DEVICE void fetch(const Shared& s, const u8* all_w, const u8* all_scales, int slab) {
#pragma unroll
    for (int m16 = 0; m16 < 4; ++m16)
      if (m16_mask >> m16 & 1)
#pragma unroll
        for (int i = 0; i < M16_BYTES; i += 512)
          copy(to + m16 * M16_BYTES + i, w + (slab * 4 + m16) * M16_BYTES + i);
    if (M16_SCALES && m16_mask && lane_id() < 4 * M16_SCALES / 16)
      copy(to + 4 * M16_BYTES, scales + slab * 4 * M16_SCALES);
    commit_copies();
    to = to == ring + (DEPTH - 1) * STAGE ? ring : to + STAGE;
    if (slab < S::PART_SLABS - 1) return;
    if (SCARCE<UP>) piece.start(piece.place, piece.end);  // the rest is not held
    constexpr int STEP = S::WN * S::SLABS * 4;
    const bool whole = !piece.next() && piece.to == 4 && S::PANELS % S::WN == 0;
    if (whole) w += STEP * M16_BYTES, scales += STEP * M16_SCALES, m16_mask = 15;
    else locate(s, all_w, all_scales);
  }
};

// The scales of a product with its weights.
struct Scales {
  const float* row;    // of a weight row; of fp8_block: f32 [E, ⌈N/128⌉, ⌈K/128⌉]
  const float* given;  // of an expert's input

  DEVICE float of(int expert, u64 at) const {
    if (WEIGHTS == 0 || BLOCKS) return 1.0f;
    return BY_PAIR ? row[at] * given[expert] : row[at];
  }
  // With BLOCKS, of a lane's rows g and g + 8 of a panel, by k-slab of its warp's part.
  template <bool UP>
  DEVICE void load(int expert, int panel, float2 (&to)[Side<UP>::PART_SLABS]) const {
    using S = Side<UP>;
    if (!BLOCKS || panel >= S::PANELS) return;
    constexpr int ACROSS = (S::K + 127) / 128, DOWN = UP ? 2 * INNER / 128 : (HIDDEN + 127) / 128;
    const int first = (threadIdx.x >> 5) / S::WN * S::PART_SLABS;
    const float* w = row + ((u64)expert * DOWN + panel / (UP ? 4 : 2)) * ACROSS;
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; ++u) {
      const int block = (first + u) / 2;
      if (S::PART_SLABS % 2 == 0 && u % 2) to[u] = to[u - 1];
      else
        to[u].x = __ldg(w + block),
        to[u].y = UP ? __ldg(w + INNER / 128 * ACROSS + block) : to[u].x;
    }
  }
};

// What a thread stores after a piece: of `up` one column of a fragment (the gate and up value of
// its row), of `down` the whole fragment (two rows, two columns).
template <bool UP>
struct Epilogue {
  using S = Side<UP>;
  static constexpr int SPLIT = UP ? 2 : 1;
  static constexpr int COUNT = S::WN * 4 * 32 * SPLIT * NT;
  static constexpr int EACH = (COUNT + THREADS - 1) / THREADS;
  static constexpr int ROWS = (S::WN * 128 * SPLIT + THREADS - 1) / THREADS;  // different ones
  float a[ROWS], b[ROWS];  // factors of the two rows
  u32 thread;              // with SCARCE

  DEVICE int item(int i) const { return i * THREADS + (SCARCE<UP> ? thread : threadIdx.x); }
  DEVICE int lane(int i) const { return item(i) / SPLIT % 32; }
  DEVICE int m16(int i) const { return item(i) / (32 * SPLIT) % 4; }
  DEVICE int wn(int i) const { return item(i) / (128 * SPLIT) % S::WN; }
  DEVICE int column(int i) const { return item(i) / (128 * SPLIT * S::WN) * 8 + (lane(i) & 3) * 2; }
  DEVICE int row(const Piece<UP>& p, int i) const {
    const int panel = p.step * S::WN + wn(i);
    return (UP ? panel * 32 + m16(i) * 8 : panel * 64 + m16(i) * 16) + (lane(i) >> 2);
  }
  DEVICE bool there(const Piece<UP>& p, int i) const {
    return (COUNT % THREADS == 0 || item(i) < COUNT) && m16(i) >= p.from && m16(i) < p.to &&
           row(p, i) < (UP ? INNER : HIDDEN);
  }
  // The factors, long before they are needed.
  DEVICE void load(const Scales& scales, int expert, const Piece<UP>& p) {
    if (SCARCE<UP>) thread = forget(threadIdx.x);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const u64 at = (u64)expert * (UP ? 2 * INNER : HIDDEN) + row(p, i);
      a[i] = b[i] = 0.0f;
      if (!there(p, i)) continue;
      a[i] = scales.of(expert, at);
      if (UP || row(p, i) + 8 < HIDDEN) b[i] = scales.of(expert, at + (UP ? INNER : 8));
    }
  }
  // Adds the WK parts in order and writes the rows.
  DEVICE void write(const Shared& s, const Scales& scales, const float4* parts, const Piece<UP>& p,
                    void* out) const {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (!there(p, i)) continue;
      constexpr int PART = S::WN * 4 * NT * 32;
      const int n = column(i) / 8;
      const float4* const from = parts + (wn(i) * 4 * NT + m16(i) * NT + n) * 32 + lane(i);
      const int* const pair = s.list + column(i);
      if (UP) {
        const int half = item(i) & 1;
        const float2* const mine = (const float2*)from + half;
        float2 v = mine[0];
#pragma unroll
        for (int k = 1; k < S::WK; ++k) {
          const float2 q = mine[k * PART * 2];
          v.x += q.x, v.y += q.y;
        }
        if (pair[half] >= 0)
          put_inner(out, (u64)pair[half] * INNER + row(p, i),
                    silu_mul(scaled(v.x, a[i % ROWS] * s.scale_of(column(i) + half)),
                             scaled(v.y, b[i % ROWS] * s.scale_of(column(i) + half))));
      } else {
        float4 v = from[0];
#pragma unroll
        for (int k = 1; k < S::WK; ++k) {
          const float4 q = from[k * PART];
          v.x += q.x, v.y += q.y, v.z += q.z, v.w += q.w;
        }
        const float low[2] = {v.x, v.z}, high[2] = {v.y, v.w};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (pair[c] < 0) continue;
          float* const y = (float*)out + (u64)pair[c] * HIDDEN + row(p, i);
          y[0] = scaled(low[c], a[i % ROWS] * s.scale_of(column(i) + c));
          if (HIDDEN % 16 == 0 || row(p, i) + 8 < HIDDEN)
            y[8] = scaled(high[c], b[i % ROWS] * s.scale_of(column(i) + c));
        }
      }
    }
  }
};

// One m16 tile of a k-slab times the block's tokens.
DEVICE void add_m16(const u8* stage, int m16, const Tokens& x, const float2& rows,
                    float (&sums)[NT][4]) {
  u32 a[4][4];
  fragments(load_raw(stage + m16 * M16_BYTES, stage + 4 * M16_BYTES + m16 / 2 * 2 * M16_SCALES),
            m16, a);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float dot[4] = {};
    float (&to)[4] = BLOCKS ? dot : sums[n];
    multiply(to, a, 0, x.values[n][0]);
    multiply(to, a, 1, x.values[n][1]);
    if (BLOCKS)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sums[n][i] +=
            dot[i] * ((i & 1 ? x.scales[n].y : x.scales[n].x) * (i & 2 ? rows.y : rows.x));
  }
}

template <bool UP>
DEVICE void stream(const u8* in, const int* ids, int tokens, const u8* w, const u8* block_scales,
                   const Scales& scales, void* out) {
  using S = Side<UP>;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ int first[EXPERTS + 1], list[BLOCK_M], found[WARPS];
  __shared__ float most[WARPS * BLOCK_M], of_columns[BLOCK_M];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, wn = warp % S::WN;
  float4* const parts = (float4*)(memory + WARPS * DEPTH * STAGE);
  constexpr int PARTS = WARPS * 4 * NT * 32;
  const Shared s = {first, list, found, (u16*)(parts + BUFFERS * PARTS), most, of_columns};
  const int pairs = tokens * K1;
  // `down` reads ids, which are older than the previous launch.
  if (UP) wait_for_previous(), launch_dependents();
  count_blocks(s, ids, pairs);
  const u64 total = (u64)first[EXPERTS] * S::STEPS * 4;
  const int begin = (int)(total * blockIdx.x / gridDim.x);
  const int end = (int)(total * (blockIdx.x + 1) / gridDim.x);
  Producer<UP> producer;
  producer.to = producer.ring = shared_address(memory) + warp * DEPTH * STAGE + lane * 16;
  producer.expert = 0, producer.policy = evict_first_policy();
  producer.piece.start(begin, end);
  producer.locate(s, w, block_scales);
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) producer.fetch(s, w, block_scales, i % S::PART_SLABS);
  if (!UP) wait_for_previous(), launch_dependents();

  Tokens x[S::PART_SLABS];
  float2 rows[S::PART_SLABS] = {};
  Piece<UP> piece;
  int expert = 0, block = -1, turn = 0;
  u32 slot = 0;
#pragma unroll 1
  for (piece.start(begin, end); !piece.over(); piece.next(), turn ^= 1) {
    Epilogue<UP> epilogue;
    if (piece.block != block) {
      block = piece.block;
      expert = expert_of(s, block, expert);
      scales.load<UP>(expert, piece.step * S::WN + wn, rows);
      find_pairs<UP>(s, pairs, expert, (block - first[expert]) * BLOCK_M);
      load_tokens<UP>(s, in, x);
    }
    constexpr bool FEW = Epilogue<UP>::ROWS == 1 && S::PART_SLABS <= (RESIDENT > 1 ? 4 : 8);
    constexpr bool EARLY = NT == 1 && FEW;  // more leave no registers for it
    if (EARLY) epilogue.load(scales, expert, piece);
    float sums[4][NT][4] = {};
    const int panel = piece.step * S::WN + wn;
    const bool busy = S::PANELS % S::WN == 0 || panel < S::PANELS;
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; ++u) {
      wait_copies<DEPTH - 1>();
      __syncwarp();
      const u8* const stage = memory + warp * DEPTH * STAGE + slot;
      if (busy && piece.to - piece.from == 4) {
#pragma unroll
        for (int m16 = 0; m16 < 4; ++m16) add_m16(stage, m16, x[u], rows[u], sums[m16]);
      } else if (busy) {
#pragma unroll
        for (int m16 = 0; m16 < 4; ++m16)
          if (m16 >= piece.from && m16 < piece.to) add_m16(stage, m16, x[u], rows[u], sums[m16]);
      }
      __syncwarp();
      producer.fetch(s, w, block_scales, (u + DEPTH) % S::PART_SLABS);
      slot = slot == (DEPTH - 1) * STAGE ? 0 : slot + STAGE;
    }
    scales.load<UP>(expert, panel + S::WN, rows);  // of the next step, if it is this expert's
    if (BUFFERS == 1) __syncthreads();
    float4* const mine = parts + (BUFFERS == 2 && turn ? PARTS : 0);
#pragma unroll
    for (int i = 0; i < 4 * NT; ++i) {
      const float (&d)[4] = sums[i / NT][i % NT];
      mine[(warp * 4 * NT + i) * 32 + lane] = make_float4(d[0], d[2], d[1], d[3]);
    }
    __syncthreads();
    if (!EARLY) epilogue.load(scales, expert, piece);
    epilogue.write(s, scales, mine, piece, out);
  }
}

// And the pairs' ids.
constexpr int SHARED = WARPS * (DEPTH * STAGE + BUFFERS * 4 * NT * 512);
DYNAMIC_SHARED(moe_up, SHARED);
DYNAMIC_SHARED(moe_down, SHARED);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    moe_up(const u8* x, const int* ids, const u8* w13, const u8* scale, const float* scale2,
           const float* given, void* h, int tokens CHUNK_ARG) {
  ids += (u64)chunk_start * K1;
  // Quantised rows are in scratch memory, which has one chunk.
  if (QUANT == 0 || CODES) x += (u64)chunk_start * HIDDEN * 2;
  stream<true>(x, ids, tokens, w13, scale, {scale2, given}, h);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    moe_down(const u8* h, const int* ids, const u8* w2, const u8* scale, const float* scale2,
             const float* given, void* parts, int tokens CHUNK_ARG) {
  stream<false>(h, ids + (u64)chunk_start * K1, tokens, w2, scale, {scale2, given}, parts);
}
