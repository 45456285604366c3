// What one warp of a pair does in paged_prefill_pair.cu: scores of one half of a tile's keys, their
// softmax, sums of one half of the dimensions.
//
// A warp has 32 queries. Chunks of 16 bytes are XOR-ed with their row, so that a lane's addresses
// of a matrix differ by XOR and by constants.
// Macros: those of paged_kv.cuh.
#pragma once
#include "attention/paged_kv.cuh"

constexpr int QUERIES = 64, IN_BLOCK = 2, PAIRS = 4, WARPS = 2 * PAIRS, THREADS = 32 * WARPS;
constexpr int KEYS = KV_FP8 ? 64 : 32, OWN = KEYS / 2;  // tokens of a tile, of a warp's scores
constexpr int HELD = 4;      // of a query's 16 pieces, those in registers
constexpr float FAR = 8.0f;  // powers of two that weights may be above 1
constexpr int LINE = 128;    // bytes of a row of 64 dimensions of a query, or of weights
constexpr int PANEL = IN_BLOCK * QUERIES * LINE, TILE = KEYS * ROW;
// Shared memory: panels of queries, keys, values. The first panel's queries go to registers, and
// weights take their place.
constexpr int KEYS_AT = D / 64 * PANEL, VALUES_AT = KEYS_AT + TILE;
static_assert(D == 256 && PAGE % KEYS == 0 && GQA_GROUP % IN_BLOCK == 0, "unsupported sizes");
static_assert(HELD * 16 * 2 == LINE, "a panel of queries is held");

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

// What the other warp has of each row; all lanes of a row have the same.
DEVICE void exchange(const Warp& x, const float (&mine)[4], float (&others)[4]) {
  const int t = x.lane & 3;
  x.tallies[x.half * 32 + x.lane] = t < 2 ? (t ? mine[1] : mine[0]) : t < 3 ? mine[2] : mine[3];
  meet_pair(x);
  const float4 v = reinterpret_cast<const float4*>(x.tallies)[(x.half ^ 1) * 8 + (x.lane >> 2)];
  others[0] = v.x, others[1] = v.y, others[2] = v.z, others[3] = v.w;
}

// The warp's scores become weights, relative to the maximum of both warps' keys, or to an older one
// that it is little above: then no sum has to shrink. `own`: the weights as operands, also left for
// the other warp.
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
  }
  float others[4], shrink[4], base[4];
  exchange(x, higher, others);
  bool rose = false;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float to = fmaxf(higher[k], others[k]), by = (x.top[k] - to) * x.scale;
    const bool far = by < -FAR;  // never for a maximum that is kept: the same in both warps
    rose |= far;
    shrink[k] = far ? exp2_fast(by) : 1.0f;
    x.top[k] = far ? to : x.top[k];
    base[k] = x.top[k] * x.scale;
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

// A row's total from those of its lanes and of both warps.
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
