// Shared by the attention kernels over pages: a head's norm and rotation, the values of a page, and
// tiles of pages as mma operands.
//
// A warp holds a head as VEC consecutive dimensions a lane. Products run in bf16 over bf16 pages
// and in f16 over e4m3 pages: a code is exact in f16, and so is nearly every softmax weight. A tile
// in shared memory has a row for each token. The index of a 16-byte chunk is XOR-ed with the row,
// so eight rows of one column are in eight bank groups.
// Macros: HEADS, KV_HEADS, HEAD_DIM, HALF (rotary pairs), PAGE (tokens, a power of two), KV_FP8
// (pages hold e4m3 codes of value / scale, else bf16), EPS; if given, HEAD_GROUPS: groups of query
// heads that are computed apart, several of a kv head; ROPE_HEIGHT, ROPE_WIDTH: pairs these turn.
#pragma once
#include "common/numeric.cuh"

#ifndef HEAD_GROUPS
#define HEAD_GROUPS KV_HEADS
#endif
#ifndef ROPE_HEIGHT
#define ROPE_HEIGHT 0
#define ROPE_WIDTH 0
#endif
constexpr int GROUPS_OF_KV = HEAD_GROUPS / KV_HEADS;  // that share a kv head
constexpr int D = HEAD_DIM, VEC = D / 32, GQA_GROUP = HEADS / HEAD_GROUPS;
constexpr int ROW = D * (KV_FP8 ? 1 : 2);  // bytes of one token of one kv head
constexpr int Q_END = 2 * HEADS * D, K_END = Q_END + KV_HEADS * D, WIDTH = K_END + KV_HEADS * D;
static_assert(D % 32 == 0 && HALF % VEC == 0 && 2 * HALF <= D, "rotary pairs split across lanes");

// --- Instructions ----------------------------------------------------------------------------

// Two f32 as the products' 16-bit type, `low` in the low half.
DEVICE u32 pack16(float low, float high) {
  return KV_FP8 ? pack_f16(low, high) : pack_bf16(low, high);
}
// D[16, 8] += A[16, 16] · B[16, 8] in the products' type.
DEVICE void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (!KV_FP8) {
    mma_bf16(d, a, b0, b1);
  } else {
    mma_f16(d, a, b0, b1);
  }
}
// `widen` after a transposing load: codes of (token, token + 1) by (d, d + 1), pairs by token.
DEVICE void widen_trans(u32 codes, u32& even, u32& odd) {
  widen(__byte_perm(codes, 0, 0x3120), even, odd);
}

// --- One head in a warp ----------------------------------------------------------------------

template <int BYTES>
struct Raw;
template <>
struct Raw<2> {
  typedef u16 type;
};
template <>
struct Raw<4> {
  typedef u32 type;
};
template <>
struct Raw<8> {
  typedef uint2 type;
};
template <>
struct Raw<16> {
  typedef uint4 type;
};

struct Head {
  float x[VEC];
};

DEVICE void load_floats(float (&x)[VEC], const float* from) {
  if constexpr (VEC % 4 == 0) {
#pragma unroll
    for (int e = 0; e < VEC; e += 4) {
      float4 v = *reinterpret_cast<const float4*>(from + e);
      x[e] = v.x, x[e + 1] = v.y, x[e + 2] = v.z, x[e + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int e = 0; e < VEC; e++) x[e] = from[e];
  }
}

// A lane's part of a head in bf16: half the registers of a Head.
union RawHead {
  typename Raw<2 * VEC>::type raw;
  u16 bits[VEC];
};

DEVICE RawHead load_raw(const u16* from, int lane) {
  RawHead h;
  h.raw = reinterpret_cast<const typename Raw<2 * VEC>::type*>(from)[lane];
  return h;
}
DEVICE Head widened(const RawHead& in) {
  Head h;
#pragma unroll
  for (int e = 0; e < VEC; e++) h.x[e] = from_bf16(in.bits[e]);
  return h;
}
DEVICE Head load_head(const u16* from, int lane) { return widened(load_raw(from, lane)); }

// The positions that turn a token.
struct Place {
  float time, height, width;
};

// `at`: the token's position. `offsets`: in prefill three a token, else one a row.
template <int TILE>
DEVICE Place place_of(const int* offsets, int row, int t, int at) {
  if constexpr (TILE == 64) {
    const int* own = offsets + ((i64)row * TILE + t) * 3;
    return Place{(float)(at + own[0]), (float)(at + own[1]), (float)(at + own[2])};
  } else {
    float same = (float)(at + offsets[row]);
    return Place{same, same, same};
  }
}

// Time, height and width alternate over the rotary pairs, while each has some; then time.
DEVICE float position_of(const Place& place, int pair) {
  int axis = pair % 3;
  if (axis == 1 && pair < 3 * ROPE_HEIGHT) return place.height;
  return axis == 2 && pair < 3 * ROPE_WIDTH ? place.width : place.time;
}

// The rotation of one token for NeoX pairs (i, i + HALF): the lane's cosines and signed sines.
struct Rotation {
  float cos[VEC], sin[VEC];
};

// The angle is the f32 product.
DEVICE Rotation rotation_at(const Place& place, const float* inv_freq, int lane) {
  Rotation rotation;
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    int d = lane * VEC + e;
    rotation.cos[e] = 1.0f, rotation.sin[e] = 0.0f;
    if (d < 2 * HALF) {
      int pair = d < HALF ? d : d - HALF;
      float r = reduced_angle(__fmul_rn(position_of(place, pair), inv_freq[pair]));
      rotation.cos[e] = __cosf(r), rotation.sin[e] = d < HALF ? -__sinf(r) : __sinf(r);
    }
  }
  return rotation;
}

// `weight`: the lane's VEC values.
DEVICE void normalise(Head& h, const float (&weight)[VEC]) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < VEC; e++) sum = fmaf(h.x[e], h.x[e], sum);
  float scale = rsqrtf(warp_sum(sum) / D + (float)EPS);
#pragma unroll
  for (int e = 0; e < VEC; e++) h.x[e] *= scale * weight[e];
}

DEVICE void rotate(Head& h, const Rotation& rotation, int lane) {
  constexpr int STEP = HALF / VEC;
  int partner = lane < STEP ? lane + STEP : lane < 2 * STEP ? lane - STEP : lane;
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    float other = __shfl_sync(~0u, h.x[e], partner);
    h.x[e] = fmaf(h.x[e], rotation.cos[e], other * rotation.sin[e]);
  }
}

// The lane's VEC values as a page stores them: the low bytes of one or two words.
constexpr int STORED = ROW / 32;
struct Stored {
  u64 words[2];
};

// `scale` is for e4m3 only.
DEVICE Stored encode(const Head& h, float scale) {
  Stored s = {};
#pragma unroll
  for (int e = 0; e < VEC; e++) {
    if constexpr (KV_FP8) {
      float x = divide(h.x[e], scale) + 0.0f;  // −0 becomes +0
      s.words[0] |= (u64)to_e4m3(x) << 8 * e;
    } else {
      s.words[e / 4] |= (u64)(u16)pack_bf16(h.x[e], 0.0f) << 16 * (e % 4);
    }
  }
  return s;
}

DEVICE void put(u8* row, const Stored& s, int lane) {
  u8* to = row + lane * STORED;
  if constexpr (STORED == 1) *to = (u8)s.words[0];
  if constexpr (STORED == 2) *reinterpret_cast<u16*>(to) = (u16)s.words[0];
  if constexpr (STORED == 4) *reinterpret_cast<u32*>(to) = (u32)s.words[0];
  if constexpr (STORED == 8) *reinterpret_cast<u64*>(to) = s.words[0];
  if constexpr (STORED == 16) {
    *reinterpret_cast<ulonglong2*>(to) = make_ulonglong2(s.words[0], s.words[1]);
  }
}

// The column of dimension d of a query. Over e4m3 pages each 16 dimensions are in the order of a
// lane's codes; any order that both operands share is legal.
DEVICE int slot_of(int d) {
  if constexpr (!KV_FP8) return d;
  int t = (d & 15) >> 2, r = d & 3;
  return (d & ~15) + (r < 2 ? 2 * t + r : 8 + 2 * t + r - 2);
}

DEVICE void put_query(u16* to, const Head& h, int lane) {
  if constexpr (VEC == 1) {
    to[slot_of(lane)] = (u16)pack16(h.x[0], 0.0f);
  } else {
#pragma unroll
    for (int e = 0; e < VEC; e += 2) {
      *reinterpret_cast<u32*>(to + slot_of(lane * VEC + e)) = pack16(h.x[e], h.x[(e + 1) % VEC]);
    }
  }
}

// --- Pages and tiles -------------------------------------------------------------------------

// Byte offset of (page, kv head, position within the page).
DEVICE i64 page_offset(int page, int head, int position) {
  return (((i64)page * KV_HEADS + head) * PAGE + (position & (PAGE - 1))) * ROW;
}

// Byte offset of chunk `c` of row `r` in a tile with rows of BYTES bytes.
template <int BYTES>
DEVICE u32 swizzled(int r, int c) {
  constexpr int SHARE = BYTES >= 128 ? 1 : 128 / BYTES;  // rows in one line of all banks
  constexpr int MASK = BYTES >= 128 ? 7 : BYTES / 16 - 1;
  return r * BYTES + ((c ^ ((r / SHARE) & MASK)) << 4);
}
