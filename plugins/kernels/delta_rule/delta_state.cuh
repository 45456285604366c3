// How a decode step's state is stored: f32, bf16, f16, [slot][Hv][Dv][Dk], Dk contiguous, alone or
// with RING behind a replay ring (replay_ring.cuh). How a block reads and writes it.
//
// LANES lanes hold one value row, 16 bytes each; ACCESSES of a warp are a chunk of CHUNK_ROWS rows
// (4 KB at 8 accesses). A warp has every WARPS-th chunk of its block's G heads.
// Macros: HK, R (key heads, value heads of each), KD, VD (dimensions of a key and a value), G,
// WARPS, STAGES (chunks that a warp has in flight to shared memory; 0: through registers),
// STATE_BYTES (of a state element), STATE_F16, RING, DRAFTS.
#pragma once
#include "delta_rule/delta_rule.cuh"
#include "delta_rule/replay_ring.cuh"

constexpr int LANES = KD * STATE_BYTES / 16;
constexpr int EPL = 16 / STATE_BYTES;    // elements per lane of a row
constexpr int ACCESS_ROWS = 32 / LANES;  // rows of one 16-byte access of a warp
constexpr int ACCESSES = CHUNKED || LANES < 16 ? LANES / 2 : STATE_BYTES == 4 ? 8 : 4;
constexpr int CHUNK_ROWS = ACCESSES * ACCESS_ROWS;
constexpr int CHUNK = ACCESSES * 512;  // bytes
constexpr int CHUNKS = G * VD / CHUNK_ROWS;
static_assert(VD % CHUNK_ROWS == 0 && (!RING || VD % FOLD_ROWS == 0 && FOLD_ROWS % CHUNK_ROWS == 0),
              "sizes the plan must refuse");

DEVICE void unpack(float (&s)[EPL], uint4 raw) {
#if STATE_BYTES == 4
  s[0] = __uint_as_float(raw.x), s[1] = __uint_as_float(raw.y);
  s[2] = __uint_as_float(raw.z), s[3] = __uint_as_float(raw.w);
#else
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = state_pair(words[i]);
    s[2 * i] = pair.x, s[2 * i + 1] = pair.y;
  }
#endif
}
DEVICE uint4 packed(const float (&s)[EPL]) {
#if STATE_BYTES == 4
  return {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
          __float_as_uint(s[3])};
#else
  return {state_word(s[0], s[1]), state_word(s[2], s[3]), state_word(s[4], s[5]),
          state_word(s[6], s[7])};
#endif
}
// The lane's i-th 16 bytes of a chunk. CHUNKED: of rows lane / 4 and lane / 4 + 8 in turn, so that
// four neighbours have columns of a left operand.
DEVICE int place_in_chunk(int i, int lane) {
  return CHUNKED ? (lane / 4 + i % 2 * 8) * LANES + i / 2 * 4 + lane % 4 : lane + 32 * i;
}
DEVICE void store_chunk(char* to, const uint4 (&raw)[ACCESSES], int lane) {
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) __stcs((uint4*)to + place_in_chunk(i, lane), raw[i]);
}
// Accesses FROM … TO - 1.
template <int FROM = 0, int TO = ACCESSES>
DEVICE void load_chunk(uint4 (&raw)[ACCESSES], const char* chunk, int lane) {
#pragma unroll
  for (int i = FROM; i < TO; i++) raw[i] = __ldcs((const uint4*)chunk + place_in_chunk(i, lane));
}
// N numbers, a multiple of four.
template <int N>
DEVICE void put(float* to, const float (&x)[N]) {
#pragma unroll
  for (int e = 0; e < N; e += 4) *(float4*)(to + e) = {x[e], x[e + 1], x[e + 2], x[e + 3]};
}
