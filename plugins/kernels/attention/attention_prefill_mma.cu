// Prefill attention over paged keys and values: `paged_append` (norm, RoPE, append; queries to
// scratch memory), then `paged_prefill`, an online softmax over tiles of the pages
// (FlashAttention-2).
//
// A block has the 64 queries of one tile of one query head, 16 a warp; keys and values come in
// tiles of 32 tokens, two stages deep, by cp.async. Causal by absolute position; a warp skips tiles
// that none of its queries sees (benchmarks/log/attention/attention_prefill_mma.md).
// Macros: those of attention_kv_pages.cuh, SHARED_LIMIT (bytes of shared memory of a block).
#include "attention/attention_kv_pages.cuh"

constexpr int QUERIES = 64, KEYS = 32, THREADS = 128;
constexpr int Q_ROW = 2 * D, Q_TILE = QUERIES * Q_ROW, KV_TILE = KEYS * ROW;
constexpr int SHARED = Q_TILE + 4 * KV_TILE;
constexpr int BLOCKS = 2 * (SHARED + 1024) <= SHARED_LIMIT ? 2 : 1;  // of a multiprocessor
DYNAMIC_SHARED(paged_prefill, SHARED);
static_assert(PAGE >= 16 && (PAGE & (PAGE - 1)) == 0, "a page is a power of two of tokens");

// Grid: tokens. A block's warps take the token's heads in turn, AHEAD in flight for each.
constexpr int ITEMS = HEADS + 2 * KV_HEADS, AHEAD = 3;
extern "C" __global__ void __launch_bounds__(256, 3)
    paged_append(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                 const int* rope_offsets, const float* kv_scale, u8* keys, u8* values,
                 const int* page_table, const int* slots, const int* starts, const int* counts,
                 u16* queries, int most_pages) {
  int row = blockIdx.x / QUERIES, t = blockIdx.x % QUERIES;
  int slot = slots[row], at = starts[row] + t;
  if (slot < 0 || t >= counts[row]) return wait_for_previous();  // the next launch relies on it
  int warps = blockDim.x >> 5, lane = threadIdx.x & 31;
  wait_for_previous();
  const u16* token = qkv + (i64)blockIdx.x * WIDTH;
  const auto load = [&](RawHead& into, int item) {
    int from = item < HEADS ? item * 2 * D : Q_END + (item - HEADS) * D;
    if (item < ITEMS) into = load_raw(token + from, lane);
  };
  RawHead raw[AHEAD] = {};
  int item = threadIdx.x >> 5;
#pragma unroll
  for (int i = 0; i < AHEAD; i++) load(raw[i], item + i * warps);
  int page = page_table[(i64)slot * most_pages + at / PAGE];
  Rotation rotation = rotation_at(place_of<QUERIES>(rope_offsets, row, t, at), inv_freq, lane);
  float weight[2][VEC];
  load_floats(weight[0], q_norm + lane * VEC), load_floats(weight[1], k_norm + lane * VEC);
#pragma unroll 1
  for (; item < ITEMS; item += warps) {
    Head h = widened(raw[0]);
#pragma unroll
    for (int i = 0; i + 1 < AHEAD; i++) raw[i] = raw[i + 1];
    load(raw[AHEAD - 1], item + AHEAD * warps);
    if (item < HEADS + KV_HEADS) {
      if (item < HEADS) normalise(h, weight[0]);
      else normalise(h, weight[1]);
      rotate(h, rotation, lane);
    }
    if (item < HEADS) {
      put_query(queries + ((i64)blockIdx.x * HEADS + item) * D, h, lane);
    } else {
      int which = (item - HEADS) / KV_HEADS, head = (item - HEADS) % KV_HEADS;
      Stored s = encode(h, KV_FP8 ? kv_scale[which] : 1.0f);
      put((which ? values : keys) + page_offset(page, head, at), s, lane);
    }
  }
}

struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, end;
};

// The ids of the two pages (or one page twice) of the 32 tokens from `position`.
DEVICE int2 pages_at(const Source& s, int position) {
  int a = position < s.end ? s.pages[position / PAGE] : 0;
  int b = position + 16 < s.end ? s.pages[(position + 16) / PAGE] : a;
  return make_int2(a, b);
}

// With one block an SM and bf16 (sm_121a) the addresses of all copies do not fit in registers.
DEVICE void load_tile(const Source& s, u32 to, int position, int2 ids) {
  i64 low = page_offset(ids.x, s.head, position);
  i64 high = page_offset(ids.y, s.head, position + 16) - 16 * ROW;
#pragma unroll(BLOCKS == 1 && !KV_FP8 ? 2 : KV_TILE)
  for (int n = 0; n < (KV_TILE / 16 + THREADS - 1) / THREADS; n++) {
    int at = n * THREADS + threadIdx.x, r = at / (ROW / 16), c = at % (ROW / 16);
    if (KV_TILE / 16 < THREADS && r >= KEYS) break;
    bool there = position + r < s.end;
    i64 from = (r < 16 ? low : high) + at * 16;
    copy_async(to + swizzled<ROW>(r, c), s.keys + from, there ? 16 : 0);
    copy_async(to + KV_TILE + swizzled<ROW>(r, c), s.values + from, there ? 16 : 0);
  }
}

struct Softmax {
  float o[D / 8][4];
  float top[2], sum[2];  // of rows g and g + 8
};

// s[n] += Q · K^T, 16 queries by 32 keys.
DEVICE void scores(float (&s)[KEYS / 8][4], u32 queries, u32 keys, int lane) {
  int q_row = lane & 15, q_half = lane >> 4;
  int k_row = (lane & 7) + ((lane >> 4) << 3), k_half = (lane >> 3) & 1;
#pragma unroll
  for (int c = 0; c < ROW / 32; c++) {
    u32 a[KV_FP8 ? 2 : 1][4];
#pragma unroll
    for (int i = 0; i < (KV_FP8 ? 2 : 1); i++) {
      int step = KV_FP8 ? 2 * c + i : c;
      load_matrix(a[i], queries + swizzled<Q_ROW>(q_row, 2 * step + q_half));
    }
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 r[4];
      load_matrix(r, keys + swizzled<ROW>(16 * n + k_row, 2 * c + k_half));
      if constexpr (KV_FP8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {  // (step 0, keys 0), (1, 0), (0, 8), (1, 8)
          u32 low, high;
          widen(r[i], low, high);
          mma16(s[2 * n + (i >> 1)], a[i & 1], low, high);
        }
      } else {
        mma16(s[2 * n], a[0], r[0], r[1]);
        mma16(s[2 * n + 1], a[0], r[2], r[3]);
      }
    }
  }
}

// o += P · V.
DEVICE void add_values(float (&o)[D / 8][4], const float (&p)[KEYS / 8][4], u32 values, int lane) {
  int row = lane & 15, half = lane >> 4;
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* pair = &p[2 * n + (i >> 1)][(i & 1) * 2];
      a[i] = pack16(pair[0], pair[1]);
    }
#pragma unroll
    for (int c = 0; c < ROW / 32; c++) {
      u32 r[4];
      load_matrix_transposed(r, values + swizzled<ROW>(16 * n + row, 2 * c + half));
      if constexpr (KV_FP8) {
        u32 e0, e1, o0, o1;
        widen_trans(r[0], e0, o0), widen_trans(r[1], e1, o1);
        mma16(o[4 * c], a, e0, e1), mma16(o[4 * c + 1], a, o0, o1);
        widen_trans(r[2], e0, o0), widen_trans(r[3], e1, o1);
        mma16(o[4 * c + 2], a, e0, e1), mma16(o[4 * c + 3], a, o0, o1);
      } else {
        mma16(o[2 * c], a, r[0], r[1]);
        mma16(o[2 * c + 1], a, r[2], r[3]);
      }
    }
  }
}

// One tile of keys. `ahead`: position of row g minus that of the tile's first key.
DEVICE void attend(Softmax& x, u32 queries, u32 tile, int ahead, float log2_scale, int lane) {
  float s[KEYS / 8][4] = {};
  scores(s, queries, tile, lane);
  int t = lane & 3;
  float higher[2] = {x.top[0], x.top[1]};
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      bool seen = 8 * n + 2 * t + (i & 1) <= ahead + (i >> 1) * 8;
      s[n][i] = seen ? s[n][i] * log2_scale : minus_infinity();
      higher[i >> 1] = fmaxf(higher[i >> 1], s[n][i]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    higher[j] = fmaxf(higher[j], __shfl_xor_sync(~0u, higher[j], 1));
    higher[j] = fmaxf(higher[j], __shfl_xor_sync(~0u, higher[j], 2));
    float shrink = exp2_fast(x.top[j] - higher[j]);
    x.top[j] = higher[j], x.sum[j] *= shrink;
#pragma unroll
    for (int n = 0; n < D / 8; n++) x.o[n][2 * j] *= shrink, x.o[n][2 * j + 1] *= shrink;
  }
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s[n][i] = exp2_fast(s[n][i] - x.top[i >> 1]);
      x.sum[i >> 1] += s[n][i];
    }
  }
  add_values(x.o, s, tile + KV_TILE, lane);
}

DEVICE void store_row(u16* o, const Softmax& x, int j, float scale, int t) {
  if constexpr (KV_FP8) {
#pragma unroll
    for (int c = 0; c < D / 16; c++) {  // even and odd dimensions in neighbouring tiles
      const float *e = &x.o[2 * c][2 * j], *f = &x.o[2 * c + 1][2 * j];
      *reinterpret_cast<uint2*>(o + 16 * c + 4 * t) =
          make_uint2(pack_bf16(e[0] * scale, f[0] * scale), pack_bf16(e[1] * scale, f[1] * scale));
    }
  } else {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      *reinterpret_cast<u32*>(o + 8 * n + 2 * t) =
          pack_bf16(x.o[n][2 * j] * scale, x.o[n][2 * j + 1] * scale);
    }
  }
}

// Grid: (rows, heads), the last rows first: in a long sequence these read the most keys.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_prefill(const u16* queries, const float* kv_scale, const u8* keys, const u8* values,
                  const int* page_table, const int* slots, const int* starts, const int* counts,
                  u16* o, int most_pages) {
  extern __shared__ __align__(128) u8 shared[];
  int row = gridDim.x - 1 - blockIdx.x, head = blockIdx.y;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int slot = slots[row], count = slot >= 0 ? counts[row] : 0, start = count > 0 ? starts[row] : 0;
  wait_for_previous();
  u32 q_tile = shared_address(shared), ring = q_tile + Q_TILE;
  const u16* first = queries + ((i64)row * QUERIES * HEADS + head) * D;
  for (int at = threadIdx.x; at < Q_TILE / 16; at += THREADS) {
    int r = at / (Q_ROW / 16), c = at % (Q_ROW / 16);
    copy_async(q_tile + swizzled<Q_ROW>(r, c), first + (i64)r * HEADS * D + c * 8,
               r < count ? 16 : 0);
  }
  Source source{keys, values, page_table + (i64)max(slot, 0) * most_pages, head / GQA_GROUP,
                start + count};
  int tiles = count > 0 ? (source.end + KEYS - 1) / KEYS : 0;
  if (tiles > 0) load_tile(source, ring, 0, pages_at(source, 0));
  commit_copies();
  int2 ids = pages_at(source, KEYS);
  Softmax x = {};
  x.top[0] = x.top[1] = minus_infinity();
  float log2_scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
  int first_query = start + 16 * warp;  // position of this warp's first query
  for (int i = 0; i < tiles; i++) {
    if (i + 1 < tiles) load_tile(source, ring + ((i + 1) & 1) * 2 * KV_TILE, (i + 1) * KEYS, ids);
    commit_copies();
    ids = pages_at(source, (i + 2) * KEYS);
    wait_copies<1>();
    __syncthreads();
    if (i * KEYS <= first_query + 15) {
      attend(x, q_tile + 16 * warp * Q_ROW, ring + (i & 1) * 2 * KV_TILE,
             first_query + (lane >> 2) - i * KEYS, log2_scale, lane);
    }
    __syncthreads();
  }
  wait_copies<0>();
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float sum = x.sum[j];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    int t = 16 * warp + (lane >> 2) + 8 * j;
    u16* to = o + (((i64)row * QUERIES + t) * HEADS + head) * D;
    if (t < count) {
      store_row(to, x, j, (KV_FP8 ? kv_scale[1] : 1.0f) / sum, lane & 3);
    } else {
      for (int d = lane & 3; d < D / 4; d += 4) reinterpret_cast<uint2*>(to)[d] = uint2{};
    }
  }
}
