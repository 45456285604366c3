// PTX instructions by name: addresses, copies (cp.async, TMA bulk), mbarriers, clusters, mma.sync,
// programmatic dependent launch (PDL).
//
// A function is one instruction, or the loop that waits on it, for both targets unless stated.
// wgmma is in wgmma_sm90.cuh, the block-scaled FP4 mma in fp4_mma_sm120.cuh, conversions and bf16
// arithmetic in numeric.cuh.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// How much dynamic shared memory a kernel has, which builder/native/nvrtc.py reads from the cubin.
struct DynamicShared {
  char mark[16], kernel[44];
  u32 bytes;
};
#define DYNAMIC_SHARED(kernel, bytes) \
  extern "C" __constant__ const DynamicShared kernel##_shared = {"dynamic shared:", #kernel, bytes}

// ---- programmatic dependent launch (PDL) -------------------------------------------------------
// Returns after the previous launch has ended and its writes are visible.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch begin; before its wait that launch must not read later writes.
DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void wait_then_launch_dependents() { wait_for_previous(), launch_dependents(); }

// ---- addresses ---------------------------------------------------------------------------------
DEVICE u32 lane_id() { return threadIdx.x & 31; }
// True in one lane of a whole warp, always the same lane; the compiler sees that it is one lane.
DEVICE bool elect_one() {
  u32 mine;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(mine));
  return mine;
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 shared_address(u32 address) { return address; }
// Below, an `Address` in shared memory is a pointer or its 32-bit form.

// ---- global loads of data that is read once (weights) ------------------------------------------
DEVICE u64 evict_first_policy() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Non-coherent: only for memory that no launch writes.
DEVICE uint4 load_once(const void* p, u64 policy) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0,%1,%2,%3}, [%4], %5;"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "l"(policy));
  return v;
}
// Without a policy; volatile: the compiler does not move it.
DEVICE uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
DEVICE u32 load_once4(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// A word, or zero. Volatile: the compiler does not move it, so that many are in flight at once.
DEVICE u32 load_if(bool there, const u32* p) {
  u32 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.u32 %0, [%1]; }"
               : "=r"(v)
               : "l"(p), "r"((u32)there));
  return v;
}
DEVICE uint4 load_if16(bool there, const void* p) {
  uint4 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %4, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; "
      "mov.u32 %3, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%5]; }"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"((u32)there), "l"(p));
  return v;
}

// ---- shared memory -----------------------------------------------------------------------------
template <class Address>
DEVICE uint4 load_shared16(Address from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(from)));
  return v;
}
template <class Address>
DEVICE uint2 load_shared8(Address from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(shared_address(from)));
  return v;
}
template <class Address>
DEVICE u32 load_shared4(Address from) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(shared_address(from)));
  return v;
}
DEVICE void store_shared4(u32 to, u32 a) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(a) : "memory");
}
DEVICE void store_shared16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- cp.async: 16 bytes a thread; `bytes` < 16 fills the rest with zeros, 0 reads nothing ------
template <class Address>
DEVICE void copy_async(Address to, const void* from, u32 bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}
// 16 bytes that do not stay in L2. Every sum in `to` must depend on the lane: ptxas 13.0 emits an
// illegal instruction for a sum with a uniform register.
template <class Address>
DEVICE void copy_async_hinted(Address to, const void* from, u64 policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
      "l"(from), "l"(policy)
      : "memory");
}
// 4 or 8 bytes a thread, through L1.
template <int FEW, class Address>
DEVICE void copy_async_few(Address to, const void* from, u32 bytes = FEW) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(FEW), "r"(bytes)
               : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- mbarrier ----------------------------------------------------------------------------------
template <class Address>
DEVICE void barrier_init(Address bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals));
}
// Makes initialised mbarriers visible to TMA bulk copies; a block barrier must follow.
DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives and expects `bytes` of TMA bulk copies.
template <class Address>
DEVICE void barrier_expect(Address bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
               "r"(bytes)
               : "memory");
}
template <class Address>
DEVICE void barrier_arrive(Address bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
// FOLLOWED: a form for compute-sanitizer's racecheck (benchmarks/rehearsal/sanitized.py), which
// does not track the order of __syncwarp() and another lane's arrival, nor barriers with a run-time
// name.
#ifndef FOLLOWED
#define FOLLOWED 0
#endif
constexpr u32 WARP_ARRIVALS = FOLLOWED ? 32 : 1;
// A warp's arrival: by one lane, or with FOLLOWED by all; WARP_ARRIVALS of a barrier's count.
template <class Address>
DEVICE void barrier_arrive_warp(Address bar, int lane) {
  if (FOLLOWED || lane == 0) barrier_arrive(bar);
}
// This thread's arrival after its copies (copy_async) so far have completed.
template <class Address>
DEVICE void barrier_arrive_after_copies(Address bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(bar))
               : "memory");
}
// Waits until the phase of this parity has completed.
template <class Address>
DEVICE void barrier_wait(Address bar, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(bar)), "r"(parity)
        : "memory");
}
// barrier_wait with the loop inside the asm, opaque to the compiler. The choice changes a kernel's
// registers (sm_90a: with this one fp8_linear takes 20 more at BLOCK_M 8, nvfp4_linear 1 fewer), so
// each kernel uses the one with which it was measured.
template <class Address>
DEVICE void barrier_wait_whole(Address bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// ---- TMA bulk copies (cp.async.bulk), by one thread; sizes and addresses are multiples of 16 ---
template <class To, class Address>
DEVICE void bulk_load(To to, const void* from, u32 bytes, Address bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(bar))
      : "memory");
}
template <class To, class Address>
DEVICE void bulk_load(To to, const void* from, u32 bytes, Address bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(policy)
      : "memory");
}
// Async proxy fence: orders this thread's earlier accesses to shared memory before later ones of
// TMA bulk copies and wgmma.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- named barriers of `threads` threads of a block; name 0 is __syncthreads' ------------------
template <int NAME>
DEVICE void meet_named(u32 name, u32 threads) {
  if (name == NAME) asm volatile("bar.sync %0, %1;" ::"n"(NAME), "r"(threads) : "memory");
  else if constexpr (NAME < 15) meet_named<NAME + 1>(name, threads);
}
DEVICE void meet(u32 name, u32 threads) {
  if constexpr (FOLLOWED) meet_named<0>(name, threads);
  else asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// Counts as one of those that meet, and does not wait.
DEVICE void pass(u32 name, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
// More or fewer registers for a warpgroup; the kernel needs launch bounds that cap them, and the
// block's sum may not exceed that at entry.
template <int N>
DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- clusters ----------------------------------------------------------------------------------
// Arrive and wait; a block that only arrives may exit.
DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_meet() {
  cluster_arrive();
  cluster_wait();
}
// The address of `place` in the shared memory of another block of the cluster.
template <class Address>
DEVICE u32 address_in_block(Address place, u32 block) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(there)
      : "r"(shared_address(place)), "r"(block));
  return there;
}
DEVICE int load_of_block(const int* p, u32 block) {
  int v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];"
               : "=r"(v)
               : "r"(address_in_block(p, block))
               : "memory");
  return v;
}
DEVICE float4 load_of_block(const float4* p, u32 block) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address_in_block(p, block))
               : "memory");
  return v;
}
DEVICE void store_in_block(float4* p, u32 block, const float4& v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address_in_block(p, block)),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// ---- between blocks of a grid ------------------------------------------------------------------
// Adds one and returns the old value. Acquire and release: threads that count later see the earlier
// writes of this thread.
DEVICE int count_up(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
// Returns when the word is `value`; earlier writes of its writer are then visible (acquire). After
// 2^26 polls it writes to address 0, so that a stuck launch fails; a trap would cost registers.
DEVICE void wait_until_equal(const u32* word, u32 value) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 seen, tries;\n.reg .u64 nowhere;\n"
      "mov.u32 tries, 0;\nmov.u64 nowhere, 0;\n"
      "look: ld.acquire.gpu.global.u32 seen, [%0];\nadd.u32 tries, tries, 1;\n"
      "setp.eq.u32 p, tries, 0x4000000;\n@p st.global.u32 [nowhere], tries;\n"
      "setp.ne.u32 p, seen, %1;\n@p bra look;\n}" ::"l"(word),
      "r"(value)
      : "memory");
}

// ---- optimisation barriers ---------------------------------------------------------------------
// The value, opaque to the compiler.
DEVICE u32 forget(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}
// The compiler does not move later reads of d before this point.
template <int N>
DEVICE void keep_order(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// ---- matrix instructions: fragments as in the PTX manual ---------------------------------------
// Matrices of 8 x 8 b16; lanes 8i…8i+7 give the row addresses of matrix i.
template <class Address>
DEVICE void load_matrix(u32 (&r)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
template <class Address>
DEVICE void load_matrix_transposed(u32 (&r)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
// Stores the transposes of four such matrices; lanes 8i…8i+7 give the row addresses of matrix i.
template <class Address>
DEVICE void store_matrix_transposed(Address row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
// The transpose of an 8 x 8 matrix of b16, a pair a lane. STAYS: volatile; else the compiler may
// move it.
template <bool STAYS = false>
DEVICE u32 transpose_matrix(u32 pair) {
  u32 r;
  if (STAYS) asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  else asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
// D[16, 8] += A[16, 16] · B[16, 8].
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// D[16, 8] += A[16, 32] · B[32, 8]; native on sm_121a, two f16 products and conversions on sm_90a.
DEVICE void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// D[16, 8] += A[16, 8] · B[8, 8] of tf32: f32 of which the last 13 bits are not read.
DEVICE void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
