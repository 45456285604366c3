// delta_decode_fma.cu: sizes, shared memory, and what needs no state: the convolution, norms,
// rates, decays and the dot products of a round's keys and queries with the keys before them. A
// round of an engine without drafts is one token, which shifts the convolution's state.
//
// All is by position, counted from `done` (docs/graph.md): entry i of a window is position
// done - MAX_LAG + i; of one token's keys and deltas start - MAX_LAG + i, and a fold from before
// reads the older ones in memory: it is rare, and shared memory bounds the blocks. Records are
// read before griddepcontrol.wait (PDL): none that this round writes is live. The order of every
// sum is that of a single token.
// Macros: those of delta_state.cuh, TAPS, FUSED, EPS (of the norm), TILE (most tokens of a row).
#pragma once
#include "delta_rule/delta_state.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int CHANNELS = 2 * HK * KD + HV * VD;
constexpr int LOCAL = 2 * KD + G * VD;  // channels of this block: q, k, then its value rows by head
constexpr int KEY_BLOCKS = R / G;       // blocks that read the same q and k

static_assert(VD % 4 == 0 && KD % 4 == 0 && R % G == 0 && G <= WARPS, "the plan must refuse");

constexpr int QUADS = (LOCAL + 4 * THREADS - 1) / (4 * THREADS);

// Channel of the model for a channel of this block; `head`: its first value head.
DEVICE int channel_of(int i, int head) {
  if (i < 2 * KD) return (i < KD ? 0 : HK * KD) + head / R * KD + i % KD;
  return 2 * HK * KD + head * VD + i - 2 * KD;
}

#if FUSED
// Four neighbouring channels of a thread: what the convolution needs, loaded before the launch
// before this one is over, and the token itself after.
struct Quad {
  act4 taps[TAPS];
  float w[4][TAPS];
  int channel;
};
DEVICE void load_weights(Quad& q, const float* weight) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float* w = weight + (q.channel + e) * TAPS;
    if constexpr (TAPS == 4) {
      float4 all = __ldg((const float4*)w);
      q.w[e][0] = all.x, q.w[e][1] = all.y, q.w[e][2] = all.z, q.w[e][3] = all.w;
    } else {
#pragma unroll
      for (int j = 0; j < TAPS; j++) q.w[e][j] = __ldg(w + j);
    }
  }
}
DEVICE void convolve(float* c, const Quad& q) {
  float made[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float y = 0.f;
#pragma unroll
    for (int j = 0; j < TAPS; j++) y = fmaf(q.w[e][j], widen(q.taps[j].v[e]), y);
    made[e] = rounded(silu(y));
  }
  *(float4*)c = {made[0], made[1], made[2], made[3]};
}
#endif

// N sums over the lanes up to FROM apart at once: afterwards v[0] is the sum of value number
// (lane's bits, high to low); halves are exchanged, so each step halves the values.
template <int N, int FROM = LANES / 2>
DEVICE float transposed_sum(float (&v)[N], int lane) {
  int n = N;
#pragma unroll
  for (int off = FROM; off; off /= 2) {
    if (n > 1) {
      n /= 2;
      bool upper = lane & off;
#pragma unroll
      for (int i = 0; i < N / 2; i++)
        if (i < n) {
          float send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
          v[i] = keep + __shfl_xor_sync(~0u, send, off);
        }
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], off);
    }
  }
  return v[0];
}

constexpr int AHEAD = DRAFTS + TILE;  // positions from `done` on that a round may meet
constexpr int WINDOW = MAX_LAG + AHEAD;
constexpr int NEAR = MAX_LAG + (TILE > 1 ? AHEAD : 1);      // entries of keys and deltas
constexpr int ROWS = G * VD;                                // value rows of this block
constexpr int LANE_ROWS = (ROWS + 127) / 128;               // of them fours that a lane has
constexpr int COLUMNS = DRAFTS ? TAPS + DRAFTS : TAPS - 1;  // of the convolution's state

// The most age of a record that a token's sums have: CHUNKED: no token of the round folds.
constexpr int MOST_AGE = CHUNKED ? WINDOW - 1 : MAX_LAG;
constexpr int AGES = MOST_AGE ? (MOST_AGE + 3) / 4 * 4 : 4;
// Of a token and value head: its query (or key) times the key of so much age, with its decay.
// With those of the key: beta, and key times query.
struct alignas(16) Products {
  float by_age[AGES];
  float beta, dot, unused[2];
};

struct Shared {
#if STAGES
  alignas(128) char state[WARPS][STAGES][CHUNK];
  u64 full[WARPS][STAGES];
#endif
  alignas(16) float deltas[NEAR][ROWS];
  float keys[NEAR][KD];
  float c[TILE][LOCAL];  // q, k, v by token; then q and k normalised, and o where v was
#if FUSED
  float gate[TILE][ROWS];  // norm weight * silu(z)
#endif
  Products products[TILE][G][2];  // of the key, of the query
#if CHUNKED
  float operands[LANES / 4][2][32][EPL];  // of the keys and queries: delta_round_chunk.cuh
#endif
  float g[G][WINDOW];                   // logarithms of decays
  float decay[AHEAD][G][MOST_AGE + 1];  // over a position and the n before it
  int last;  // whether this block shifts q's and k's part of the convolution's state
};

// A row's slot's ring, its first position and tokens, what is stored.
struct Place {
  const float* ring;
  float* ring_out;
  int start, tokens, done, base;
  DEVICE int behind() const { return start - done; }  // accepted tokens that are not folded
  DEVICE int entry(int at) const { return at - (TILE > 1 ? done : start) + MAX_LAG; }
};

// The position before which the stored rows of a fold group are, and the group's phase at `done`.
DEVICE int phase_of(const Place& p, int head, int row) {
  return (u32)(p.done + (head * VD + row) / FOLD_ROWS) % RECORDS;
}
DEVICE int since_of(const Place& p, int head, int row) {
  return max(p.base, p.done - phase_of(p, head, row));
}

DEVICE Place place_of(const float* ring, float* ring_out, int start, int tokens, int head) {
  Place p = {ring, ring_out, start, tokens, start, 0};
  if (start > 0 && RING) {
    const float* header = ring + KEPT * RECORD;
    if (DRAFTS) p.done = min(max((int)header[head], start - DRAFTS), start);
    p.base = (int)(DRAFTS ? header[HV + head] : ring[RECORD - 1]);
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

// Without drafts: the last block that has read the convolution's state of q and k shifts it.
constexpr bool SHIFTS = FUSED && !DRAFTS && KEY_BLOCKS > 1;
#if FUSED
DEVICE void leave(const Quad& q, act* state) {
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) *(act4*)(state + j * CHANNELS + q.channel) = q.taps[j];
}
#endif

// The live records before `start`.
DEVICE void fetch_records(Shared& s, const Place& p, int head) {
  const int oldest = p.done - MAX_LAG, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int since[LANE_ROWS];
#pragma unroll
  for (int u = 0; u < LANE_ROWS; u++) since[u] = since_of(p, head, (u * 32 + lane) * 4);
#pragma unroll
  for (int n = 0; n < (MAX_LAG + DRAFTS + WARPS - 1) / WARPS; n++) {  // a warp has a record
    const int i = n * WARPS + warp, position = oldest + i;
    if (i >= MAX_LAG + DRAFTS || position < p.base || position >= p.start) continue;
    const int entry = p.entry(position);
    if (entry < 0) continue;
    const float* record = p.ring + record_at(position);
#pragma unroll
    for (int e = lane * 4; e < KD; e += 128)
      copy_async(&s.keys[entry][e], record + KEYS_AT + head / R * KD + e);
#pragma unroll
    for (int u = 0; u < LANE_ROWS; u++) {
      const int row = (u * 32 + lane) * 4;
      if (row < ROWS && position >= since[u])
        copy_async(&s.deltas[entry][row], record + head * VD + row);
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
DEVICE void make_rates(Shared& s, const Place& p, const act* ba, const float* a_log,
                       const float* dt_bias, int head) {
  for (int i = THREADS - 1 - threadIdx.x; i < p.tokens * G; i += THREADS) {
    const int j = i / G, mine = i % G, h = head + mine;
    const float b = widen(ba[(i64)j * 2 * HV + h]), a = widen(ba[(i64)j * 2 * HV + HV + h]);
    const float g = __fmul_rn(-expf(a_log[h]), softplus(a + dt_bias[h]));
    s.g[mine][MAX_LAG + p.behind() + j] = g;
    s.products[j][mine][0].beta = sigmoid(b);
    if (RING) p.ring_out[record_at(p.start + j) + DECAYS_AT + h] = g;
  }
}

#if CHUNKED
// What tf32 has of x; it has as many bits again of the rest.
DEVICE float tf32_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }
// A lane's elements of a key or query as column `n` of the right operand, in two parts.
DEVICE void put_operand(Shared& s, int n, const float (&x)[EPL], int lane) {
  float high[EPL], low[EPL];
#pragma unroll
  for (int e = 0; e < EPL; e++) high[e] = tf32_part(x[e]), low[e] = x[e] - high[e];
  put(s.operands[lane / 4][0][4 * n + lane % 4], high);
  put(s.operands[lane / 4][1][4 * n + lane % 4], low);
}
#endif
// A token's unit key and scaled unit query, their product, and the key's record.
DEVICE void make_units(Shared& s, const Place& p, int j, int head, int lane) {
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
  dot = lane_sum<LANES>(dot);
  __syncwarp();
  if (lane < G) s.products[j][lane][0].dot = dot;
  if (lane >= LANES) return;
#if CHUNKED
  put_operand(s, 2 * j, k, lane), put_operand(s, 2 * j + 1, q, lane);
#endif
  float* record = p.ring_out + record_at(p.start + j) + KEYS_AT + head / R * KD + at;
#pragma unroll
  for (int e = 0; e < EPL; e += 4) {
    const float4 key = {k[e], k[e + 1], k[e + 2], k[e + 3]};
    *(float4*)&s.keys[p.entry(p.start + j)][at + e] = key;
    *(float4*)&s.c[j][at + e] = {q[e], q[e + 1], q[e + 2], q[e + 3]};
    *(float4*)&s.c[j][KD + at + e] = key;
    if (RING && head % R == 0) *(float4*)(record + e) = key;
  }
}
// Of the i-th position from `done`: the decay over it and the n before it, n up to MOST_AGE.
DEVICE void sum_decays(Shared& s, int i, int mine, int lane) {
  const int most = CHUNKED ? MAX_LAG + i : MAX_LAG;
  float since = lane >= 1 && lane <= most ? s.g[mine][MAX_LAG + i - lane] : 0.f;
#pragma unroll
  for (int off = 1; off <= MOST_AGE; off *= 2) {
    float before = __shfl_up_sync(~0u, since, off);
    if (lane >= off) since += before;
  }
  if (lane <= MOST_AGE) s.decay[i][mine][lane] = expf(__fadd_rn(s.g[mine][MAX_LAG + i], since));
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
// The products of a token's key and query with the keys before it, LANES lanes a token; ages come
// SIDE at a time, so that they are summed as rows of a chunk are.
constexpr int SIDE = ACCESSES < 8 ? ACCESSES : 8;
DEVICE void dot_keys(Shared& s, const Place& p, int warp, int lane) {
  const int in = lane % LANES;
#pragma unroll 1
  for (int t = warp * ACCESS_ROWS; t < p.tokens; t += WARPS * ACCESS_ROWS) {
    const int j = min(t + lane / LANES, p.tokens - 1), here = p.entry(p.start + j);
    const int most = CHUNKED ? here : MAX_LAG;
    float k[EPL], q[EPL];
    take(k, &s.c[j][KD + in * EPL]), take(q, &s.c[j][in * EPL]);
#pragma unroll
    for (int first = 1; first <= MOST_AGE; first += SIDE) {
      float v[2 * SIDE];
#pragma unroll
      for (int u = 0; u < SIDE; u++) {
        float key[EPL], kk = 0.f, qk = 0.f;
        if (first + u <= most) {
          take(key, &s.keys[here - first - u][in * EPL]);
#pragma unroll
          for (int e = 0; e < EPL; e++) kk = fmaf(k[e], key[e], kk), qk = fmaf(q[e], key[e], qk);
        }
        v[u] = kk, v[SIDE + u] = qk;
      }
      const float sum = transposed_sum<2 * SIDE>(v, lane);
      constexpr int COPIES_OF = LANES / (2 * SIDE);  // neighbours that hold the same sum
      const int value = in / COPIES_OF, age = first + value % SIDE;
      if (age <= most)
        for (int mine = in % COPIES_OF; mine < G; mine += COPIES_OF)
          s.products[j][mine][value / SIDE].by_age[age - 1] =
              s.decay[p.behind() + j][mine][age - 1] * sum;
    }
  }
}
