// Prefill attention over paged keys and values by mma.sync, behind `paged_append`
// (paged_prefill.cu): two heads of a group in a block, and two warps for each 32 of its queries.
//
// Both warps of a pair have the same 32 queries, so that a fragment of keys or values serves two
// products, and a code is widened for both at once. Each makes the scores of one half of a tile's
// keys and the sums of one half of the dimensions; maxima and weights cross through shared memory.
// One tile of keys and one of values are there: keys come while values are read, values while keys
// are. Tiles begin at multiples of KEYS: a query's bits do not depend on where its tile of queries
// begins.
// Figures: log/paged_prefill_pair.md.
// Macros: those of paged_kv.cuh.
#include "attention/paged_kv.cuh"

constexpr int QUERIES = 64, IN_BLOCK = 2, PAIRS = 4, WARPS = 2 * PAIRS, THREADS = 32 * WARPS;
constexpr int KEYS = KV_FP8 ? 64 : 32, OWN = KEYS / 2;  // tokens of a tile, of a warp's scores
constexpr int HELD = 4;    // of a query's 16 pieces, those in registers
constexpr int LINE = 128;  // bytes of a row of 64 dimensions of a query, or of weights
constexpr int PANEL = IN_BLOCK * QUERIES * LINE, TILE = KEYS * ROW;
// Shared memory: panels of queries, keys, values. The first panel's queries go to registers, and
// weights take their place.
constexpr int KEYS_AT = D / 64 * PANEL, VALUES_AT = KEYS_AT + TILE;
constexpr int PASS = THREADS * 16, PASS_ROWS = PASS / ROW;  // what a copy by each thread brings
static_assert(D == 256 && PAGE % KEYS == 0 && GQA_GROUP % IN_BLOCK == 0, "unsupported sizes");
static_assert(PASS_ROWS % 8 == 0 && HELD == 4, "a pass keeps the swizzle; a panel is held");

struct Barriers {
  u64 full[2], empty[2];  // of keys, of values
};

// The pages of one sequence and kv head; all threads bring a tile. `which`: 0 keys, 1 values.
struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, end;
  u32 to;  // this thread's place in the tile of keys
  Barriers& b;

  DEVICE int page(int tile) const { return tile * KEYS < end ? pages[tile * KEYS / PAGE] : 0; }
  DEVICE void fill(int which, int tile, int page) const {
    const int thread = threadIdx.x, left = end - tile * KEYS - thread / (ROW / 16);
    const u8* from = (which ? values : keys) + page_offset(page, head, tile * KEYS) + thread * 16;
#pragma unroll
    for (int n = 0; n < TILE / PASS; n++) {
      copy_async(to + which * TILE + n * PASS, from + n * PASS, n * PASS_ROWS < left ? 16 : 0);
    }
    barrier_arrive_after_copies(&b.full[which]);
  }
};

// One warp of a pair. Addresses of matrices are the lane's.
struct Warp {
  u32 queries, keys;  // of the pair's first row, of the first of its keys
  u32 values[2];      // of its dimensions, of its own keys and of the other warp's
  u32 weights;        // of the other warp
  u8* shared;
  u32 mine;        // where there the lane's first weights go
  float* tallies;  // [2][32] of the pair: maxima of each warp's keys; at last their sums
  int lane, half, pair;
  int first;    // position of row g, less that of the warp's first key of a tile and column
  float scale;  // of a score, to base 2
  u32 held[HELD][2][4];
  float o[2][D / 16][4];
  float top[4], sum[4];  // of rows g, g + 8, g + 16, g + 24
};

// s[i] += Q · K^T, twice 16 queries by the warp's keys, over the dimensions of some chunks.
template <int FROM, int TO>
DEVICE void scores(float (&s)[2][OWN / 8][4], const Warp& x) {
#pragma unroll
  for (int c = FROM; c < TO; c++) {
    constexpr int STEPS = KV_FP8 ? 2 : 1;
    u32 a[STEPS][2][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int step = STEPS * c + i;
#pragma unroll
      for (int m = 0; m < 2; m++) {
        if (step < HELD) {
#pragma unroll
          for (int e = 0; e < 4; e++) a[i][m][e] = x.held[step < HELD ? step : 0][m][e];
        } else {
          load_matrix(a[i][m], (x.queries ^ step % 4 * 32) + step / 4 * PANEL + m * 16 * LINE);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < OWN / 16; n++) {
      u32 r[4];
      load_matrix(r, (x.keys ^ c % 4 * 32) + c / 4 * 128 + n * 16 * ROW);
#pragma unroll
      for (int i = 0; i < (KV_FP8 ? 4 : 2); i++) {
        u32 low = r[2 * i % 4], high = r[(2 * i + 1) % 4];
        if constexpr (KV_FP8) widen(r[i], low, high);  // (step 0, keys 0), (1, 0), (0, 8), (1, 8)
        const int tile = 2 * n + (KV_FP8 ? i >> 1 : i);
        mma16(s[0][tile], a[i % STEPS][0], low, high);
        mma16(s[1][tile], a[i % STEPS][1], low, high);
      }
    }
  }
}

// o += P · V of one warp's keys: a[step] are the weights of 16.
DEVICE void weigh(Warp& x, const u32 (&a)[2][4], u32 values) {
#pragma unroll
  for (int c = 0; c < ROW / 64; c++) {
    u32 r[4];
    load_matrix_transposed(r, (values ^ c % 4 * 32) + c / 4 * 128);
    if constexpr (KV_FP8) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 e0, e1, o0, o1;
        widen_trans(r[2 * i], e0, o0), widen_trans(r[2 * i + 1], e1, o1);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          mma16(x.o[m][4 * c + 2 * i], a[m], e0, e1);
          mma16(x.o[m][4 * c + 2 * i + 1], a[m], o0, o1);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int m = 0; m < 2; m++) mma16(x.o[m][2 * c + i], a[m], r[2 * i], r[2 * i + 1]);
      }
    }
  }
}

DEVICE void meet_pair(const Warp& x) { meet(1 + x.pair, 64); }

// The warp's scores become weights, to the maximum of both warps' keys; older sums shrink where it
// rose. `own`: the weights as operands, also left for the other warp.
DEVICE void soften(Warp& x, float (&s)[2][OWN / 8][4], u32 (&own)[OWN / 16][2][4], int tile) {
  const int ahead = x.first - tile * KEYS, g = x.lane >> 2;
  if (ahead - g + 2 * (x.lane & 3) < OWN - 1) {  // the same for the whole warp
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int n = 0; n < OWN / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (8 * n + (i & 1) > ahead + 16 * m + 8 * (i >> 1)) s[m][n][i] = minus_infinity();
        }
      }
    }
  }
  float higher[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    higher[k] = minus_infinity();
#pragma unroll
    for (int n = 0; n < OWN / 8; n++) {
      const float* pair = &s[k >> 1][n][2 * (k & 1)];
      higher[k] = fmaxf(higher[k], fmaxf(pair[0], pair[1]));
    }
    higher[k] = fmaxf(higher[k], __shfl_xor_sync(~0u, higher[k], 1));
    higher[k] = fmaxf(higher[k], __shfl_xor_sync(~0u, higher[k], 2));
    if ((x.lane & 3) == 0) x.tallies[32 * x.half + 8 * k + g] = higher[k];
  }
  meet_pair(x);
  float shrink[4], base[4];
  bool rose = false;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    higher[k] = fmaxf(higher[k], x.tallies[32 * (x.half ^ 1) + 8 * k + g]);
    higher[k] = fmaxf(higher[k], x.top[k]);
    rose |= higher[k] != x.top[k];
    shrink[k] = exp2_fast((x.top[k] - higher[k]) * x.scale);
    x.top[k] = higher[k], base[k] = higher[k] * x.scale;
    x.sum[k] *= shrink[k];
  }
#pragma unroll
  for (int m = 0; m < 2; m++) {
#pragma unroll
    for (int n = 0; n < OWN / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int k = 2 * m + (i >> 1);
        s[m][n][i] = exp2_fast(fmaf(s[m][n][i], x.scale, -base[k]));
        x.sum[k] += s[m][n][i];
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const u32 pair = pack16(s[m][n][2 * j], s[m][n][2 * j + 1]);
        own[n >> 1][m][(n & 1) * 2 + j] = pair;
        const u32 to = (x.mine ^ n << 4) + (16 * m + 8 * j) * LINE;
        *reinterpret_cast<u32*>(x.shared + to) = pair;
      }
    }
  }
  if (__any_sync(~0u, rose)) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
      for (int n = 0; n < D / 16; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) x.o[m][n][i] *= shrink[2 * m + (i >> 1)];
      }
    }
  }
}

// One tile: its values are asked for when half of the scores are there, the next one's keys when
// half of the sums are. SEEN: by some query of the pair.
template <bool SEEN>
DEVICE void attend(Warp& x, const Source& from, int tile, int tiles, int page, int next) {
  Barriers& b = from.b;
  const u32 turn = tile & 1;
  float s[2][OWN / 8][4] = {};
  u32 own[OWN / 16][2][4];
  barrier_wait(&b.full[0], turn);
  if constexpr (SEEN) scores<0, ROW / 64>(s, x);
  if (tile > 0) barrier_wait(&b.empty[1], turn ^ 1);
  from.fill(1, tile, page);
  if constexpr (SEEN) scores<ROW / 64, ROW / 32>(s, x);
  __syncwarp();
  barrier_arrive_warp(&b.empty[0], x.lane);
  if constexpr (SEEN) soften(x, s, own, tile);
  barrier_wait(&b.full[1], turn);
  if constexpr (SEEN) {
#pragma unroll
    for (int n = 0; n < OWN / 16; n++) weigh(x, own[n], x.values[0] + n * 16 * ROW);
  }
  if (tile + 1 < tiles) {
    barrier_wait(&b.empty[0], turn);
    from.fill(0, tile + 1, next);
  }
  if constexpr (SEEN) {
    meet_pair(x);
#pragma unroll
    for (int n = 0; n < OWN / 16; n++) {
      u32 a[2][4];
      load_matrix(a[0], x.weights ^ n * 32);
      load_matrix(a[1], (x.weights ^ n * 32) + 16 * LINE);
      weigh(x, a, x.values[1] + n * 16 * ROW);
    }
  }
  __syncwarp();
  barrier_arrive_warp(&b.empty[1], x.lane);
}

// The queries of both heads into the panels; those that are not there are zeros.
DEVICE void load_queries(u32 to, const u16* from, int count) {
  const int warp = threadIdx.x >> 5, c = lane_id();
  const u32 place = to + c / 8 * PANEL + swizzled<LINE>(warp, c % 8);
#pragma unroll 4
  for (int n = 0; n < IN_BLOCK * QUERIES / WARPS; n++) {
    const int r = n * WARPS + warp, head = r / QUERIES, t = r % QUERIES;
    copy_async(place + n * WARPS * LINE, from + ((i64)t * HEADS + head) * D + c * 8,
               t < count ? 16 : 0);
  }
}

// A row's total from those of its lanes and of both warps.
DEVICE void add_totals(Warp& x) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    x.sum[k] += __shfl_xor_sync(~0u, x.sum[k], 1);
    x.sum[k] += __shfl_xor_sync(~0u, x.sum[k], 2);
    if ((x.lane & 3) == 0) x.tallies[32 * x.half + 8 * k + (x.lane >> 2)] = x.sum[k];
  }
  meet_pair(x);
#pragma unroll
  for (int k = 0; k < 4; k++) x.sum[k] += x.tallies[32 * (x.half ^ 1) + 8 * k + (x.lane >> 2)];
}

// The warp's dimensions of row k * 8 + g.
DEVICE void store_row(u16* o, const Warp& x, int k, float scale) {
  const int t = x.lane & 3, m = k >> 1, j = 2 * (k & 1);
#pragma unroll
  for (int n = 0; n < D / 16; n += 2) {
    const float *e = &x.o[m][n][j], *f = &x.o[m][n + 1][j];
    if constexpr (KV_FP8) {  // even and odd dimensions in neighbouring tiles
      *reinterpret_cast<uint2*>(o + 8 * n + 4 * t) =
          make_uint2(pack_bf16(e[0] * scale, f[0] * scale), pack_bf16(e[1] * scale, f[1] * scale));
    } else {
      *reinterpret_cast<u32*>(o + 8 * n + 2 * t) = pack_bf16(e[0] * scale, e[1] * scale);
      *reinterpret_cast<u32*>(o + 8 * n + 8 + 2 * t) = pack_bf16(f[0] * scale, f[1] * scale);
    }
  }
}

// All of a warp but its queries. `position`: of the pair's first query.
DEVICE void set_up(Warp& x, u32 base, int position, float key_scale) {
  // A matrix's rows are eight lanes'; chunks are XOR-ed with the row.
  const u32 line = x.lane & 15, chunk = (x.lane >> 4 ^ x.lane & 7) << 4;
  const u32 key = (x.lane & 7) + (x.lane >> 4) * 8, part = ((x.lane >> 3 & 1) ^ x.lane & 7) << 4;
  const int g = x.lane >> 2, t = x.lane & 3;
  x.queries = base + (32 * x.pair + line) * LINE + chunk;
  x.keys = base + KEYS_AT + (x.half * OWN + key) * ROW + part;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    x.values[i] = base + VALUES_AT + ((x.half ^ i) * OWN + line) * ROW + x.half * (ROW / 2) + chunk;
  }
  x.weights = x.queries ^ (x.half ^ 1) * (OWN * 2);
  x.mine = (32 * x.pair + g) * LINE + ((x.half * (OWN / 8) ^ g) << 4) + 4 * t;
  x.first = position + g - x.half * OWN - 2 * t;
  x.scale = 1.44269504f * rsqrtf((float)D) * key_scale;
#pragma unroll
  for (int k = 0; k < 4; k++) x.top[k] = minus_infinity(), x.sum[k] = 0.0f;
#pragma unroll
  for (int m = 0; m < 2; m++) {
#pragma unroll
    for (int n = 0; n < D / 16; n++) x.o[m][n][0] = x.o[m][n][1] = x.o[m][n][2] = x.o[m][n][3] = 0;
  }
}

// Grid: (pairs of heads, rows), the last rows first: in one long sequence they have the most to
// read.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill_pair(const u16* queries, const float* kv_scale, const u8* keys, const u8* values,
                       const int* page_table, const int* slots, const int* starts,
                       const int* counts, u16* o, int most_pages) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Barriers barriers;
  __shared__ float tallies[PAIRS][2][32];
  const int row = gridDim.y - 1 - blockIdx.y, head = blockIdx.x * IN_BLOCK, slot = slots[row];
  const int count = slot >= 0 ? counts[row] : 0, start = count > 0 ? starts[row] : 0;
  const int warp = threadIdx.x >> 5, lane = lane_id(), pair = warp >> 1, half = warp & 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(&barriers.full[i], THREADS);
      barrier_init(&barriers.empty[i], WARPS * WARP_ARRIVALS);
    }
  }
  __syncthreads();
  wait_for_previous();
  const int t = pair % 2 * 32;  // the pair's first query of its head
  u16* const to = o + (((i64)row * QUERIES + t) * HEADS + head + pair / 2) * D + half * (D / 2);
  if (count > 0) {
    const u32 base = shared_address(shared);
    const u32 here = threadIdx.x / (ROW / 16) % 8;  // of eight rows
    const Source from{keys,
                      values,
                      page_table + (i64)slot * most_pages,
                      head / GQA_GROUP,
                      start + count,
                      base + KEYS_AT + ((threadIdx.x * 16) ^ (here << 4)),
                      barriers};
    const int tiles = (from.end + KEYS - 1) / KEYS;
    const int seen = min(tiles, (start + t + 31) / KEYS + 1);
    int page = from.page(0);
    load_queries(base, queries + ((i64)row * QUERIES * HEADS + head) * D, count);
    from.fill(0, 0, page);
    Warp x;
    x.shared = shared, x.tallies = tallies[pair][0], x.lane = lane, x.half = half, x.pair = pair;
    set_up(x, base, start + t, KV_FP8 ? kv_scale[0] : 1.0f);
    barrier_wait(&barriers.full[0], 0);  // also of the queries: they were asked for before
#pragma unroll
    for (int step = 0; step < HELD; step++) {
#pragma unroll
      for (int m = 0; m < 2; m++) {
        load_matrix(x.held[step][m], (x.queries ^ step * 32) + m * 16 * LINE);
      }
    }
    int i = 0;
#pragma unroll 1
    for (; i < seen; i++) {
      const int next = from.page(i + 1);
      attend<true>(x, from, i, tiles, page, next);
      page = next;
    }
#pragma unroll 1
    for (; i < tiles; i++) {
      const int next = from.page(i + 1);
      attend<false>(x, from, i, tiles, page, next);
      page = next;
    }
    add_totals(x);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int r = 8 * k + (lane >> 2);
      if (t + r >= count) continue;
      store_row(to + (i64)r * HEADS * D, x, k, (KV_FP8 ? kv_scale[1] : 1.0f) / x.sum[k]);
    }
  }
  for (int at = lane; at < 32 * (D / 16); at += 32) {
    const int r = at / (D / 16);
    if (t + r < count) continue;
    reinterpret_cast<uint4*>(to + (i64)r * HEADS * D)[at % (D / 16)] = make_uint4(0, 0, 0, 0);
  }
}
