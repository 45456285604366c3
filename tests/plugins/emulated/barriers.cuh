// mbarriers as the PTX manual says: a phase ends when all arrivals came, and the next one begins.
// TMA bulk copies arrive at once, or (`late`) when a thread waits for them. Included by the ptx.cuh
// of this folder.
#pragma once

void barrier_init(u64* bar, u32 arrivals);
inline void barrier_init_fence() {}
inline void fence_async() {}
void barrier_arrive(u64* bar);
void barrier_arrive_warp(u64* bar, int lane);
constexpr u32 WARP_ARRIVALS = 1;
void barrier_expect(u64* bar, u32 bytes);
void barrier_wait(u64* bar, u32 parity);
void barrier_arrive_after_copies(u64* bar);
void bulk_load(void* to, const void* from, u32 bytes, u64* bar);
inline void bulk_load(void* to, const void* from, u32 bytes, u64* bar, u64) {
  bulk_load(to, from, bytes, bar);
}
// The same by their addresses in dynamic shared memory.
inline u64* barrier_at(u32 at) { return (u64*)shared(at, 8); }
inline void barrier_init(u32 at, u32 arrivals) { barrier_init(barrier_at(at), arrivals); }
inline void barrier_arrive(u32 at) { barrier_arrive(barrier_at(at)); }
inline void barrier_arrive_warp(u32 at, int lane) { barrier_arrive_warp(barrier_at(at), lane); }
inline void barrier_arrive_after_copies(u32 at) { barrier_arrive_after_copies(barrier_at(at)); }
inline void barrier_expect(u32 at, u32 bytes) { barrier_expect(barrier_at(at), bytes); }
inline void barrier_wait(u32 at, u32 parity) { barrier_wait(barrier_at(at), parity); }
inline void barrier_wait_whole(u32 at, u32 parity) { barrier_wait(at, parity); }
inline void bulk_load(u32 to, const void* from, u32 bytes, u32 bar, u64) {
  bulk_load(shared(to, 16), from, bytes, barrier_at(bar));
}
