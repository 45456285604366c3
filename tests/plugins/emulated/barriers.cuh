// mbarriers as the PTX manual says: a phase ends when all arrivals came, and the next one begins.
// In the eight bytes: arrivals that are left, arrivals of a phase, the phase's parity and the bytes
// of TMA bulk copies that it waits for. These arrive at once, or (`late`) when a thread waits for
// them. Included by the ptx.cuh of this folder.
#pragma once

struct Arrivals {
  u16 left, all;
  u32 parity : 1;
  int bytes : 31;
};
static_assert(sizeof(Arrivals) == 8);

inline void barrier_init(u64* bar, u32 arrivals) {
  *bar = bits_of<u64>(Arrivals{(u16)arrivals, (u16)arrivals, 0, 0});
}
inline void barrier_init_fence() {}
inline void fence_async() {}
inline std::vector<std::pair<u64*, std::function<void()>>> bulk_copies;  // in flight
inline void change_phase(u64* bar, int arrivals, int bytes) {
  Arrivals a = bits_of<Arrivals>(*bar);
  check(a.left >= arrivals && a.left <= a.all, "an arrival that no phase has");
  a.left -= arrivals, a.bytes += bytes;
  if (a.left == 0 && a.bytes == 0) a.left = a.all, a.parity ^= 1;
  *bar = bits_of<u64>(a);
}
inline void barrier_arrive(u64* bar) { change_phase(bar, 1, 0); }
inline void barrier_arrive_warp(u64* bar, int lane) {
  __syncwarp();  // lanes of a warp run apart here
  if (lane == 0) barrier_arrive(bar);
}
constexpr u32 WARP_ARRIVALS = 1;
inline void barrier_expect(u64* bar, u32 bytes) { change_phase(bar, 1, bytes); }
inline void barrier_wait(u64* bar, u32 parity) {
  while (bits_of<Arrivals>(*bar).parity == parity) {
    auto copies = std::exchange(bulk_copies, {});
    for (auto& [of, copy] : copies)
      if (of == bar) copy();
      else bulk_copies.emplace_back(of, std::move(copy));
    let_others();
  }
}
// An arrival that copies (cp.async) of this thread come before.
inline void barrier_arrive_after_copies(u64* bar) {
  const auto arrive = [bar, copies = copies_so_far()] {
    for (const auto& copy : copies) copy();
    change_phase(bar, 1, 0);
  };
  if (late) bulk_copies.emplace_back(bar, arrive);
  else arrive();
}
inline void bulk_load(u8* to, const void* from, u32 bytes, u64* bar) {
  check((u64)from % 16 == 0 && bytes % 16 == 0, "a bulk copy is misaligned");
  const auto copy = [=] {
    memcpy(to, from, bytes);
    change_phase(bar, 0, -(int)bytes);
  };
  if (late) bulk_copies.emplace_back(bar, copy);
  else copy();
}
inline void bulk_load(u8* to, const void* from, u32 bytes, u64* bar, u64) {
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
