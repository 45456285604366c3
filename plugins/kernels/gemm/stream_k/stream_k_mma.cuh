// Consumers of stream_k_gemm.cuh by mma.sync: one stage of the ring into a warp's sums.
//
// With WARPS_M two warps share an m16 tile, each with its part of the tokens: of 128 x 128 x 128
// bytes eight warps have 32 x 64 each, two a scheduler, so that one decodes while the other
// multiplies; a fragment of activations that is read serves two products, one of weights eight.
// SASS of sm_121a, 128 rows: 64 products in some 250 instructions a warp and k-slab, no spills
// (benchmarks/log/gemm/stream_k_gemm.md).
// Formats with weights stored as fragments say so (FRAGMENTS) and have Scales, load_scales,
// load_x_scale and UNROLLED_STEPS; with SCALED both sides have scales along k, and multiply is of
// one step and takes them.
#pragma once

#ifdef SLAB_SCALES
// One stage by mma.sync: a k-slab's products in separate registers, then its scales.
DEVICE void consume(const Ring& r, const PipelineState& here, const Mine& mine, Sums& sums) {
  constexpr int PAIR = NJ > 1 ? 2 : 1;
  const u32 stage = r.stage(here.index);
  const int lane = threadIdx.x & 31, q = lane >> 3;
#pragma unroll
  for (int u = 0; u < STAGE_SLABS; ++u) {
    const SlabScales scales(stage, here, u);
    const u32 first = u * BLOCK_M + warp_m() + (lane & 7) + (NJ > 1 ? (q >> 1) * 8 : 0);
    u32 a[WARP_TILES][4][4];
#pragma unroll
    for (int mt = 0; mt < WARP_TILES; ++mt) decode(mine.part(stage, u * WARP_TILES + mt), a[mt]);
    const u32 piece = (stage + first * 128) ^ ((q & 1) ^ (lane & 7)) << 4;  // of step 0
#pragma unroll
    for (int j = 0; j < NJ; j += PAIR) {
      float part[WARP_TILES][PAIR][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        u32 b[4];  // two groups of columns
        load_matrix(b, piece + j * 1024 ^ step * 32);
#pragma unroll
        for (int c = 0; c < PAIR; ++c)
#pragma unroll
          for (int mt = 0; mt < WARP_TILES; ++mt)
            multiply(part[mt][c], a[mt][step], b[2 * c], b[2 * c + 1]);
      }
#pragma unroll
      for (int c = 0; c < PAIR; ++c) {
        const float2 factor = scales.factors(j + c);
#pragma unroll
        for (int mt = 0; mt < WARP_TILES; ++mt) fold(sums[mt][j + c], part[mt][c], factor);
      }
    }
  }
  __syncwarp();
  barrier_arrive_warp(r.empty + here.index * 8, lane);
}
#elif defined(SCALED) || defined(FRAGMENTS) && WARPS_M > 1
// One stage by mma.sync of weights that are stored as fragments. A step of all columns at a time:
// every product has a separate sum, and few fragments are held. A product that is many
// instructions (emulated FP4; e4m3 on sm_90a, widened to f16) waits for the one before, and steps
// are a loop: registers are short.
constexpr bool LONG_PRODUCT = UNROLLED_STEPS == 1;

#ifndef SCALED
// The same of e4m3 codes by f16 products: columns in fours, so that each product's eight sums are
// eight products apart.
DEVICE void consume_widened(const Ring& r, const PipelineState& here, const Mine& mine,
                            Sums& sums) {
  constexpr int FOUR = NJ < 4 ? NJ : 4;
  const u32 stage = r.stage(here.index);
  const int lane = threadIdx.x & 31, q = lane >> 3;
#pragma unroll
  for (int u = 0; u < STAGE_SLABS; ++u) {
    const u32 row = stage + (u * BLOCK_M + warp_m() + (lane & 7) + (q >> 1) * 8) * 128;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 a[2][WARP_TILES][4];  // k's pairs 0 and 2, … of each eight, then the others
#pragma unroll
      for (int mt = 0; mt < WARP_TILES; ++mt) {
        const u32 at = mine.place[mt] + u * mine.step;
        const uint4 v = load_shared16(stage + STAGE_X + at * KSLAB_W + lane * 16 + step * 512);
        widen(v.x, a[0][mt][0], a[1][mt][0]), widen(v.y, a[0][mt][1], a[1][mt][1]);
        widen(v.z, a[0][mt][2], a[1][mt][2]), widen(v.w, a[0][mt][3], a[1][mt][3]);
      }
      const u32 piece = ((2 * step + (q & 1)) ^ (lane & 7)) << 4;
#pragma unroll
      for (int j = 0; j < NJ; j += FOUR) {
        u32 b[2][FOUR][2];
#pragma unroll
        for (int c = 0; c < FOUR; c += 2) {
          u32 codes[4];
          load_matrix(codes, row + (j + c) * 1024 + piece);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            widen(codes[e], b[0][c + e / 2][e % 2], b[1][c + e / 2][e % 2]);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int c = 0; c < FOUR; ++c)
#pragma unroll
            for (int mt = 0; mt < WARP_TILES; ++mt)
              mma_f16(sums[mt][j + c], a[part][mt], b[part][c][0], b[part][c][1]);
      }
    }
  }
  __syncwarp();
  barrier_arrive_warp(r.empty + here.index * 8, lane);
}
#endif

DEVICE void consume(const Ring& r, const PipelineState& here, const Mine& mine, Sums& sums) {
  static_assert(NJ % 2 == 0 || NJ == 1, "columns in pairs");
#ifndef SCALED
  if constexpr (WIDENED) return consume_widened(r, here, mine, sums);
#endif
  constexpr int PAIR = NJ > 1 ? 2 : 1;
  const u32 stage = r.stage(here.index);
  const int lane = threadIdx.x & 31, q = lane >> 3;
#pragma unroll
  for (int u = 0; u < STAGE_SLABS; ++u) {
    const u32 first = u * BLOCK_M + warp_m();  // row of the stage
    const u32 row = stage + (first + (lane & 7) + (NJ > 1 ? (q >> 1) * 8 : 0)) * 128;
    const u32 x_scales = stage + STAGE - STAGE_XS + first * X_SCALE_BYTES;
    u32 w[WARP_TILES], scales[WARP_TILES], x_scale[NJ];
    Scales w_scale[WARP_TILES];
#pragma unroll
    for (int mt = 0; mt < WARP_TILES; ++mt) {
      const u32 at = mine.place[mt] + u * mine.step;
      w[mt] = stage + STAGE_X + at * KSLAB_W + lane * 16;
      scales[mt] = stage + STAGE_X + STAGE_W + at * SCALE_BYTES;
      w_scale[mt] = load_scales(scales[mt]);
    }
#pragma unroll
    for (int j = 0; j < NJ; ++j) x_scale[j] = load_x_scale(x_scales + j * 8 * X_SCALE_BYTES);
#pragma unroll UNROLLED_STEPS
    for (int step = 0; step < 4; ++step) {
      u32 a[WARP_TILES][4];
#pragma unroll
      for (int mt = 0; mt < WARP_TILES; ++mt) {
        const uint4 v = load_shared16(w[mt] + step * 512);
        a[mt][0] = v.x, a[mt][1] = v.y, a[mt][2] = v.z, a[mt][3] = v.w;
      }
      const u32 piece = ((2 * step + (q & 1)) ^ (lane & 7)) << 4;
#pragma unroll
      for (int j = 0; j < NJ; j += PAIR) {
        u32 b[4];  // of a step, two groups of columns
        load_matrix(b, row + j * 1024 + piece);
#pragma unroll
        for (int c = 0; c < PAIR; ++c)
#pragma unroll
          for (int mt = 0; mt < WARP_TILES; ++mt) {
            if (LONG_PRODUCT) {
              __syncwarp();
              w_scale[mt] = load_scales(scales[mt]);
              x_scale[j + c] = load_x_scale(x_scales + (j + c) * 8 * X_SCALE_BYTES);
            }
#ifdef SCALED
            multiply(sums[mt][j + c], a[mt], b[2 * c], b[2 * c + 1], w_scale[mt], x_scale[j + c],
                     step);
#else
            multiply(sums[mt][j + c], a[mt], b[2 * c], b[2 * c + 1]);
#endif
          }
      }
    }
  }
  __syncwarp();
  barrier_arrive_warp(r.empty + here.index * 8, lane);
}
#else
// One stage; raw weights are fetched a k-slab ahead.
DEVICE void consume(const Ring& r, const PipelineState& here, const Mine& mine, Sums& sums) {
  const u32 stage = r.stage(here.index);
  const int lane = threadIdx.x & 31;
  Raw raw[WARP_TILES];
#pragma unroll
  for (int mt = 0; mt < WARP_TILES; ++mt) raw[mt] = mine.part(stage, mt);
#pragma unroll
  for (int u = 0; u < STAGE_SLABS; ++u) {
#if WARPS_M > 1  // half a k-slab is decoded at a time: registers are short
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half) __syncwarp();
      u32 a[WARP_TILES][4][4];
#pragma unroll
      for (int mt = 0; mt < WARP_TILES; ++mt) {
        decode(raw[mt], a[mt]);
        if (half && u + 1 < STAGE_SLABS) raw[mt] = mine.part(stage, (u + 1) * WARP_TILES + mt);
      }
      const u32 row = stage + (u * BLOCK_M + warp_m() + (lane & 7)) * 128;
#pragma unroll
      for (int j = 0; j < NJ; ++j) {
        u32 b[4];
        load_matrix(b, row + j * 1024 + (((half * 4 + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int mt = 0; mt < WARP_TILES; ++mt)
            multiply(sums[mt][j], a[mt][half * 2 + step], b[2 * step], b[2 * step + 1]);
      }
    }
#else
    u32 a[WARP_TILES][4][4];
#pragma unroll
    for (int mt = 0; mt < WARP_TILES; ++mt) {
      decode(raw[mt], a[mt]);
      if (u + 1 < STAGE_SLABS) raw[mt] = mine.part(stage, (u + 1) * WARP_TILES + mt);
    }
    const u32 row = stage + u * BLOCK_M * 128 + (lane & 7) * 128;
#pragma unroll
    for (int j = 0; j < NJ; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 b[4];
        load_matrix(b, row + j * 1024 + (((half * 4 + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
        for (int mt = 0; mt < WARP_TILES; ++mt) {
          multiply(sums[mt][j], a[mt][half * 2], b[0], b[1]);
          multiply(sums[mt][j], a[mt][half * 2 + 1], b[2], b[3]);
        }
      }
#endif
  }
  __syncwarp();
  barrier_arrive_warp(r.empty + here.index * 8, lane);
}
#endif
