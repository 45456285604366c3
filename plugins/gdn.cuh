// What the kernels of the gated delta net share: activation types, sums over groups of lanes,
// clusters.
#pragma once
#include "numeric.cuh"

// --- Activations: bf16 in engines, f32 in tests of exactness -------------------------------
#if ACT_F32
typedef float act;
DEVICE float widen(act x) { return x; }
DEVICE act narrow(float x) { return x; }
#else
typedef u16 act;
DEVICE float widen(act x) { return from_bf16(x); }
DEVICE act narrow(float x) { return to_bf16(x); }
#endif
DEVICE float rounded(float x) { return widen(narrow(x)); }

struct alignas(4 * sizeof(act)) act4 {
  act v[4];
};

DEVICE float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }

// Sum over groups of LANES neighbouring lanes; every lane gets it.
template <int LANES>
DEVICE float lane_sum(float x) {
#pragma unroll
  for (int off = LANES / 2; off; off /= 2) x += __shfl_xor_sync(~0u, x, off);
  return x;
}

// --- Clusters ------------------------------------------------------------------------------
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// A float of the same shared variable in block `rank` of the cluster.
DEVICE float load_cluster(const float* mine, u32 rank) {
  u32 there;
  float r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(r) : "r"(there) : "memory");
  return r;
}
