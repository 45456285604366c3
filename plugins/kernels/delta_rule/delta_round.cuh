// delta_round_fma.cu: shared memory, and what of a round needs no state: the convolution, norms,
// rates, decays and the dot products of its keys and queries with the keys before them.
//
// All is by position, counted from `done` (docs/graph.md): entry i of a window is position
// done - MAX_LAG + i. Records are read before griddepcontrol.wait (PDL): none that this round
// writes is live. The order of every sum is that of delta_decode_fma.cu.
// Macros: those of delta_decode_parts.cuh, DRAFTS, TILE (most tokens of a row).
#pragma once
#include "delta_rule/delta_decode_parts.cuh"

constexpr int AHEAD = DRAFTS + TILE;  // positions from `done` on that a round may meet
constexpr int WINDOW = MAX_LAG + AHEAD;
constexpr int ROWS = G * VD;                   // value rows of this block
constexpr int LANE_ROWS = (ROWS + 127) / 128;  // of them fours that a lane has
constexpr int COLUMNS = TAPS + DRAFTS;         // of the convolution's state

#if CHUNKED
constexpr int KEY_TILES = (WINDOW + 15) / 16, PARTS_OF_TOKENS = (TILE + 3) / 4;
constexpr int STRIDE = ROWS + 8;  // of deltas: four entries of one row are in different banks
#else
constexpr int STRIDE = ROWS;
#endif
constexpr int AGES = (MAX_LAG + 3) / 4 * 4;
// Of a token and value head: its query (or key) times the key of so much age, with its decay.
// With those of the key: beta, and key times query.
struct alignas(16) Products {
  float by_age[AGES];
  float beta, dot, unused[2];
};

struct Round {
#if STAGES
  alignas(128) char state[WARPS][STAGES][CHUNK];
  u64 full[WARPS][STAGES];
#endif
  alignas(16) float deltas[WINDOW][STRIDE];
  float keys[WINDOW][KD];
  float c[TILE][LOCAL];  // q, k, v by token; then q and k normalised, and o where v was
#if FUSED
  float gate[TILE][ROWS];  // norm weight * silu(z)
#endif
  float g[G][WINDOW];  // logarithms of decays
#if CHUNKED
  // Keys and queries as operands, their high and low parts (delta_round_chunk.cuh).
  float4 operands[LANES / 4][EPL / 4][PARTS_OF_TOKENS][2][32];
  // Of a token the products of its key and of its query with the key of a window's entry, with the
  // decay since; zeros where the entry is behind the token or not live.
  float2 products[G][KEY_TILES * 16][PARTS_OF_TOKENS * 4];
  float decay[G][TILE][KEY_TILES * 16];  // over a token and all before it, from an entry on
  float beta[TILE][G];
  DEVICE float& beta_of(int j, int mine) { return beta[j][mine]; }
#else
  Products products[TILE][G][2];   // of the key, of the query
  float decay[AHEAD][G][RECORDS];  // over a position and the n before it
  DEVICE float& beta_of(int j, int mine) { return products[j][mine][0].beta; }
#endif
};

// A row's slot's ring, its first position and tokens, what is stored.
struct Place {
  const float* ring;
  float* ring_out;
  int start, tokens, done, base;
  DEVICE int behind() const { return start - done; }  // accepted tokens that are not folded
  DEVICE int entry(int position) const { return position - done + MAX_LAG; }
};

// The position before which the stored rows of a fold group are, and the group's phase at `done`.
DEVICE int phase_of(const Place& p, int head, int row) {
  return (u32)(p.done + (head * VD + row) / FOLD_ROWS) % RECORDS;
}
DEVICE int since_of(const Place& p, int head, int row) {
  return max(p.base, p.done - phase_of(p, head, row));
}

DEVICE Place place_of(const float* ring, float* ring_out, int start, int tokens, int head) {
  const float* header = ring + KEPT * RECORD;
  Place p = {ring, ring_out, start, tokens, start, 0};
  if (start > 0) {
    p.done = min(max((int)header[head], start - DRAFTS), start);
    p.base = (int)header[HV + head];
  }
  return p;
}

// Threads convolve four channels each: all of a round's tokens, or PART of them where a block has
// threads for PARTS times the channels.
constexpr int SHARE = LOCAL / 4;
constexpr int PARTS = QUADS > 1 ? 1 : THREADS / SHARE < TILE ? THREADS / SHARE : TILE;
constexpr int PART = (TILE + PARTS - 1) / PARTS;
DEVICE int channel_at(int t) {
  return 4 * (QUADS > 1 ? t * THREADS + threadIdx.x : threadIdx.x % SHARE);
}
DEVICE bool convolves(int t) {
  return QUADS > 1 ? channel_at(t) < LOCAL : threadIdx.x < PARTS * SHARE;
}

// The live records before `start`.
DEVICE void fetch_records(Round& s, const Place& p, int head) {
  const int oldest = p.done - MAX_LAG, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int since[LANE_ROWS];
#pragma unroll
  for (int u = 0; u < LANE_ROWS; u++) since[u] = since_of(p, head, (u * 32 + lane) * 4);
#pragma unroll
  for (int n = 0; n < (MAX_LAG + DRAFTS + WARPS - 1) / WARPS; n++) {  // a warp has a record
    const int i = n * WARPS + warp, position = oldest + i;
    if (i >= MAX_LAG + DRAFTS || position < p.base || position >= p.start) continue;
    const float* record = p.ring + record_at(position);
#pragma unroll
    for (int e = lane * 4; e < KD; e += 128)
      copy_async(&s.keys[i][e], record + KEYS_AT + head / R * KD + e);
#pragma unroll
    for (int u = 0; u < LANE_ROWS; u++) {
      const int row = (u * 32 + lane) * 4;
      if (row < ROWS && position >= since[u])
        copy_async(&s.deltas[i][row], record + head * VD + row);
    }
  }
  commit_copies();
#pragma unroll
  for (int t = 0; t < (MAX_LAG + DRAFTS) * G; t += THREADS) {
    const int i = t + threadIdx.x, position = oldest + i / G;
    if (i < (MAX_LAG + DRAFTS) * G && position < p.start)
      s.g[i % G][i / G] =
          position >= p.base ? p.ring[record_at(position) + DECAYS_AT + head + i % G] : 0.f;
  }
}

// beta and the decay's logarithm of every token and head, from the last thread down: the first are
// those that convolve.
DEVICE void make_rates(Round& s, const Place& p, const act* ba, const float* a_log,
                       const float* dt_bias, int head) {
  for (int i = THREADS - 1 - threadIdx.x; i < p.tokens * G; i += THREADS) {
    const int j = i / G, mine = i % G, h = head + mine;
    const float b = widen(ba[(i64)j * 2 * HV + h]), a = widen(ba[(i64)j * 2 * HV + HV + h]);
    const float g = __fmul_rn(-expf(a_log[h]), softplus(a + dt_bias[h]));
    s.g[mine][p.entry(p.start + j)] = g;
    s.beta_of(j, mine) = sigmoid(b);
    p.ring_out[record_at(p.start + j) + DECAYS_AT + h] = g;
  }
}

#if CHUNKED
// The part that a product of tf32 takes exactly; x less it is taken to as many bits again.
DEVICE float tf32_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
// A lane's elements of a key or query as column `n` of the right operands.
DEVICE void put_operand(Round& s, int n, const float (&x)[EPL], int lane) {
  const int to = n % 8 * 4 + lane % 4;
#pragma unroll
  for (int e = 0; e < EPL; e += 4) {
    float high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) high[i] = tf32_part(x[e + i]), low[i] = x[e + i] - high[i];
    auto& part = s.operands[lane / 4][e / 4][n / 8];
    part[0][to] = {high[0], high[1], high[2], high[3]};
    part[1][to] = {low[0], low[1], low[2], low[3]};
  }
}
#endif
// A token's unit key and scaled unit query, their product, and the key's record.
DEVICE void make_units(Round& s, const Place& p, int j, int head, int lane) {
  float k[EPL], q[EPL], kk = 0.f, qq = 0.f, dot = 0.f;
  const int at = lane % LANES * EPL;
#pragma unroll
  for (int e = 0; e < EPL; e++) {
    q[e] = s.c[j][at + e], k[e] = s.c[j][KD + at + e];
    kk = fmaf(k[e], k[e], kk), qq = fmaf(q[e], q[e], qq);
  }
  kk = 1.f / sqrtf(lane_sum<LANES>(kk) + 1e-6f);
  qq = 1.f / sqrtf(lane_sum<LANES>(qq) + 1e-6f) * (1.f / sqrtf((float)KD));
#pragma unroll
  for (int e = 0; e < EPL; e++) k[e] *= kk, q[e] *= qq, dot = fmaf(k[e], q[e], dot);
#if !CHUNKED
  dot = lane_sum<LANES>(dot);
  __syncwarp();
  if (lane < G) s.products[j][lane][0].dot = dot;
#endif
  if (lane >= LANES) return;
#if CHUNKED
  put_operand(s, 2 * j, k, lane), put_operand(s, 2 * j + 1, q, lane);
#endif
  float* record = p.ring_out + record_at(p.start + j) + KEYS_AT + head / R * KD + at;
#pragma unroll
  for (int e = 0; e < EPL; e += 4) {
    const float4 key = {k[e], k[e + 1], k[e + 2], k[e + 3]};
    *(float4*)&s.keys[p.entry(p.start + j)][at + e] = key;
#if !CHUNKED
    *(float4*)&s.c[j][at + e] = {q[e], q[e + 1], q[e + 2], q[e + 3]};
    *(float4*)&s.c[j][KD + at + e] = key;
#endif
    if (head % R == 0) *(float4*)(record + e) = key;
  }
}
// The numbers at `from`, a multiple of four of them.
template <int N>
DEVICE void take(float (&x)[N], const float* from) {
#pragma unroll
  for (int e = 0; e < N; e += 4) {
    const float4 four = *(const float4*)(from + e);
    x[e] = four.x, x[e + 1] = four.y, x[e + 2] = four.z, x[e + 3] = four.w;
  }
}
