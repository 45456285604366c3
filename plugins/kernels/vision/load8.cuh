// Eight f32 of a weight, at a multiple of 16 bytes.
#pragma once
#include "common/numeric.cuh"

DEVICE void load8(const float* from, float (&v)[8]) {
  const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
