// One warp of a pair of attention_prefill_pair_mma.cu: scores of one half of a tile's keys, their
// softmax, sums of one half of the dimensions.
//
// A warp has 32 queries. The index of a 16-byte chunk is XOR-ed with its row, so a lane's addresses
// of matrices differ by XOR and by constants.
// Macros: those of attention_kv_pages.cuh.
#pragma once
#include "attention/attention_kv_pages.cuh"

constexpr int QUERIES = 64, IN_BLOCK = 2, PAIRS = 4, WARPS = 2 * PAIRS, THREADS = 32 * WARPS;
constexpr int KEYS = KV_FP8 ? 64 : 32, OWN = KEYS / 2;  // tokens of a tile, of a warp's scores
constexpr int HELD = 4;               // of a query's 16 pieces, the number in registers
constexpr float LAZY_RESCALE = 8.0f;  // sums are rescaled if a maximum rises by 2^8 or more
constexpr int LINE = 128;             // bytes of a row of 64 dimensions of a query, or of weights
constexpr int PANEL = IN_BLOCK * QUERIES * LINE, TILE = KEYS * ROW;
// Shared memory: panels of queries, keys, values. The first panel's queries are in registers, and
// the weights overwrite the panel.
constexpr int KEYS_AT = D / 64 * PANEL, VALUES_AT = KEYS_AT + TILE;
static_assert(D == 256 && PAGE % KEYS == 0 && GQA_GROUP % IN_BLOCK == 0, "unsupported sizes");
static_assert(HELD * 16 * 2 == LINE, "registers hold a panel of queries");

// One warp of a pair. Addresses of matrices are the lane's.
struct Warp {
  u32 queries, keys;  // the pair's first row; the first of the warp's keys
  u32 values[2];      // the warp's dimensions: of the keys it scores, of the other warp's keys
  u32 weights;        // the other warp's
  u8* shared;
  u32 mine;        // offset of the lane's first weights in `shared`
  float* tallies;  // [2][32] of the pair: maxima of each warp's keys; at the end their sums
  int lane, half, pair;
  int first;    // position of row g - position of the lane's first key of tile 0
  float scale;  // of a score, to base 2
  u32 held[HELD][2][4];
  float o[2][D / 16][4];
  float top[4], sum[4];  // of rows g, g + 8, g + 16, g + 24
};

// Fragments of a step of 16 dimensions. Two steps are in use: one is multiplied while the next is
// loaded and widened.
struct Step {
  u32 a[2][4], b[OWN / 8][2];
};

DEVICE void load_queries(Step& to, const Warp& x, int step) {
#pragma unroll
  for (int m = 0; m < 2; m++) {
    if (step < HELD) {
#pragma unroll
      for (int e = 0; e < 4; e++) to.a[m][e] = x.held[step < HELD ? step : 0][m][e];
    } else {
      load_matrix(to.a[m], (x.queries ^ step % 4 * 32) + step / 4 * PANEL + m * 16 * LINE);
    }
  }
}

// 32 bytes of the warp's keys.
DEVICE void load_keys(u32 (&r)[OWN / 16][4], const Warp& x, int chunk) {
#pragma unroll
  for (int n = 0; n < OWN / 16; n++) {
    load_matrix(r[n], (x.keys ^ chunk % 4 * 32) + chunk / 4 * 128 + n * 16 * ROW);
  }
}

// The step's operand of eight keys.
DEVICE void take_keys(Step& to, const u32 (&r)[OWN / 16][4], int step, int n) {
  if constexpr (KV_FP8) {  // (step 0, keys 0), (1, 0), (0, 8), (1, 8)
    widen(r[n / 2][n % 2 * 2 + step % 2], to.b[n][0], to.b[n][1]);
  } else {
    to.b[n][0] = r[0][n * 2], to.b[n][1] = r[0][n * 2 + 1];
  }
}

// s[i] += Q · K^T, twice 16 queries by the warp's keys.
DEVICE void scores(float (&s)[2][OWN / 8][4], const Warp& x) {
  constexpr int STEPS = D / 16, IN_CHUNK = KV_FP8 ? 2 : 1;
  Step step[2];
  u32 codes[2][OWN / 16][4];
  load_keys(codes[0], x, 0);
  load_queries(step[0], x, 0), load_queries(step[1], x, 1);
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) take_keys(step[0], codes[0], 0, n);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    const int chunk = i / IN_CHUNK + 1;
    if (i % IN_CHUNK == 0 && i + IN_CHUNK < STEPS) load_keys(codes[chunk % 2], x, chunk);
#pragma unroll
    for (int n = 0; n < OWN / 8; n++) {
      if (KV_FP8 && i + 1 < STEPS) {
        take_keys(step[(i + 1) % 2], codes[(i + 1) / IN_CHUNK % 2], i + 1, n);
      }
      mma16(s[0][n], step[i % 2].a[0], step[i % 2].b[n][0], step[i % 2].b[n][1]);
      mma16(s[1][n], step[i % 2].a[1], step[i % 2].b[n][0], step[i % 2].b[n][1]);
    }
    if (i + 2 < STEPS) load_queries(step[i % 2], x, i + 2);
    if (!KV_FP8 && i + 1 < STEPS) {
#pragma unroll
      for (int n = 0; n < OWN / 8; n++) take_keys(step[(i + 1) % 2], codes[(i + 1) % 2], i + 1, n);
    }
  }
}

// The warp's dimensions of a tile's values, in steps of 16 keys: the warp's own, then the other
// warp's. 32 bytes are in use, 32 in flight.
struct Values {
  static constexpr int CHUNKS = ROW / 64, ALL = KEYS / 16 * CHUNKS;
  u32 r[2][4];

  DEVICE void load(const Warp& x, int i) {
    const int n = i / CHUNKS, c = i % CHUNKS, other = n / (OWN / 16);
    const u32 from = (x.values[other] ^ c % 4 * 32) + c / 4 * 128;
    if (i < ALL) load_matrix_transposed(r[i % 2], from + n % (OWN / 16) * 16 * ROW);
  }
};

// o += P · V over 16 keys, the n-th of `Values`; `a`: their weights.
template <int N>
DEVICE void add_values(Warp& x, const u32 (&a)[2][4], Values& v) {
#pragma unroll
  for (int c = 0; c < Values::CHUNKS; c++) {
    const int i = N * Values::CHUNKS + c;
    const u32(&r)[4] = v.r[i % 2];
    v.load(x, i + 1);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if constexpr (KV_FP8) {
        u32 e0, e1, o0, o1;
        widen_trans(r[2 * j], e0, o0), widen_trans(r[2 * j + 1], e1, o1);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          mma16(x.o[m][4 * c + 2 * j], a[m], e0, e1);
          mma16(x.o[m][4 * c + 2 * j + 1], a[m], o0, o1);
        }
      } else {
#pragma unroll
        for (int m = 0; m < 2; m++) mma16(x.o[m][2 * c + j], a[m], r[2 * j], r[2 * j + 1]);
      }
    }
  }
}

DEVICE void sync_pair(const Warp& x) { meet(1 + x.pair, 64); }

// The other warp's value of each row; all lanes of a row have equal values.
DEVICE void exchange(const Warp& x, const float (&mine)[4], float (&others)[4]) {
  const int t = x.lane & 3;
  x.tallies[x.half * 32 + x.lane] = t < 2 ? (t ? mine[1] : mine[0]) : t < 3 ? mine[2] : mine[3];
  sync_pair(x);
  const float4 v = reinterpret_cast<const float4*>(x.tallies)[(x.half ^ 1) * 8 + (x.lane >> 2)];
  others[0] = v.x, others[1] = v.y, others[2] = v.z, others[3] = v.w;
}

// The maxima that weights are relative to: those of both warps' keys, or earlier ones if these are
// less than LAZY_RESCALE below. Sums shrink where a maximum rises. Scores of keys that a query does
// not see become minus infinity.
DEVICE void update_maxima(Warp& x, float (&s)[2][OWN / 8][4], int tile) {
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
  float higher[4], others[4], shrink[4];
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
  }
  exchange(x, higher, others);
  bool rose = false;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float to = fmaxf(higher[k], others[k]), by = (x.top[k] - to) * x.scale;
    const bool far = by < -LAZY_RESCALE;  // the same in both warps
    rose |= far;
    shrink[k] = far ? exp2_fast(by) : 1.0f;
    x.top[k] = far ? to : x.top[k];
    x.sum[k] *= shrink[k];
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

// Weights of 16 of the warp's keys, as operands and in shared memory for the other warp.
DEVICE void softmax_weights(Warp& x, const float (&s)[2][OWN / 8][4], u32 (&own)[2][4], int step) {
#pragma unroll
  for (int m = 0; m < 2; m++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int k = 2 * m + (i & 1), n = 2 * step + (i >> 1);
      const float base = x.top[k] * x.scale, *pair = &s[m][n][2 * (i & 1)];
      const float low = exp2_fast(fmaf(pair[0], x.scale, -base));
      const float high = exp2_fast(fmaf(pair[1], x.scale, -base));
      x.sum[k] += low, x.sum[k] += high;
      own[m][i] = pack16(low, high);
      const u32 to = (x.mine ^ n << 4) + (16 * m + 8 * (i & 1)) * LINE;
      *reinterpret_cast<u32*>(x.shared + to) = own[m][i];
    }
  }
}

// o += P · V of a tile after its values have arrived.
DEVICE void sums(Warp& x, const float (&s)[2][OWN / 8][4]) {
  constexpr int STEPS = OWN / 16;
  Values v;
  u32 own[STEPS][2][4], others[STEPS][2][4];
  v.load(x, 0);
  softmax_weights(x, s, own[0], 0);
  if constexpr (STEPS > 1) softmax_weights(x, s, own[1], 1);
  add_values<0>(x, own[0], v);
  sync_pair(x);
#pragma unroll
  for (int n = 0; n < STEPS; n++) {
    load_matrix(others[n][0], x.weights ^ n * 32);
    load_matrix(others[n][1], (x.weights ^ n * 32) + 16 * LINE);
  }
  if constexpr (STEPS > 1) add_values<1>(x, own[1], v);
  add_values<STEPS>(x, others[0], v);
  if constexpr (STEPS > 1) add_values<STEPS + 1>(x, others[1], v);
}

// A row's total: the sum over its lanes and both warps.
DEVICE void add_totals(Warp& x) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    x.sum[k] += __shfl_xor_sync(~0u, x.sum[k], 1);
    x.sum[k] += __shfl_xor_sync(~0u, x.sum[k], 2);
  }
  float others[4];
  exchange(x, x.sum, others);
#pragma unroll
  for (int k = 0; k < 4; k++) x.sum[k] += others[k];
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

// Initialises a warp, except its queries. `position`: of the pair's first query.
DEVICE void set_up(Warp& x, u32 base, int position, float key_scale) {
  // Eight lanes have the rows of a matrix; chunks are XOR-ed with the row.
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
