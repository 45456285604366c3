// Clusters: their blocks run side by side and reach each other's dynamic shared memory. What a
// kernel declares by itself (`__shared__`) all blocks have in common here, so a kernel of clusters
// must have none. Included by the ptx.cuh of this folder.
#pragma once

inline Assembly cluster;

inline void cluster_meet() { meet_at(cluster); }
// The same place in the shared memory of another block.
template <class T>
T* in_block(T* place, u32 other) {
  const u32 at = shared_address(place);
  check(other < blocks.size(), "a block that the cluster has not");
  check(at % sizeof(T) == 0 && at < SHARED_OF_BLOCK,
        "an address is misaligned or not of shared memory");
  check(!blocks[other].all.gone, "a block's shared memory is used after its end");
  return (T*)(blocks[other].dynamic + at);
}
template <class T>
T load_of_block(const T* place, u32 other) {
  return *in_block(place, other);
}
inline void store_in_block(float4* place, u32 other, const float4& value) {
  *in_block(place, other) = value;
}
