// Operands of mma.m16n8k16: bf16 tiles of 64 rows in shared memory, fragments by ldmatrix.
//
// A tile's row is PIECES pieces of 16 bytes, XOR-swizzled by the row, so that eight rows' pieces
// are in different banks.
#pragma once
#include "delta_rule/delta_rule.cuh"

constexpr int TILE = 64;

// Wider than 64 columns and not PACKED: panels of 64, as wgmma reads them
// (common/wgmma16_sm90.cuh).
template <int PIECES>
DEVICE u32 at(u32 row, u32 piece) {  // byte offset
  if (PIECES > 8 && !PACKED) return ((piece / 8 * TILE + row) * 8 + (piece % 8 ^ (row & 7))) * 16;
  u32 turn = PIECES >= 8 ? row & 7 : PIECES == 4 ? row >> 1 & 3 : row >> 2 & 1;
  return (row * PIECES + (piece ^ turn)) * 16;
}
// A fragments [16 rows, 16 columns] of a row-major tile.
template <int PIECES>
DEVICE void load_a(u32 (&a)[4], const char* tile, int row, int column, int lane) {
  load_matrix(a, tile + at<PIECES>(row + (lane & 15), column / 8 + (lane >> 4)));
}
// B fragments of 16 inner x 16 outer, two n-tiles: stored [outer][inner], and [inner][outer].
template <int PIECES>
DEVICE void load_b(u32 (&b)[4], const char* tile, int inner, int outer, int lane) {
  load_matrix(
      b, tile + at<PIECES>(outer + (lane & 7) + (lane >> 4 & 1) * 8, inner / 8 + (lane >> 3 & 1)));
}
template <int PIECES>
DEVICE void load_b_inner(u32 (&b)[4], const char* tile, int inner, int outer, int lane) {
  load_matrix_transposed(b, tile + at<PIECES>(inner + (lane & 15), outer / 8 + (lane >> 4)));
}
DEVICE void mma_pair(float (&d)[2][4], const u32 (&a)[4], const u32 (&b)[4]) {
  mma_bf16(d[0], a, b[0], b[1]);
  mma_bf16(d[1], a, b[2], b[3]);
}
// Two neighbouring f32 as high and low bf16 parts.
DEVICE void split(float x, float y, u32& high, u32& low) {
  high = pack_bf16(x, y);
  low = pack_bf16(x - low_bf16(high), y - high_bf16(high));
}
