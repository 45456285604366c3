// The PTX that several kernels need, one function an instruction; no layout, no op.
//
// Shared-memory addresses are 32-bit (`shared_address`). Everything here exists on sm_90a and on
// sm_121a.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEV __device__ __forceinline__

DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// --- Barriers in shared memory -------------------------------------------------------------

DEV void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to the copy engine; a block barrier must follow.
DEV void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and announces `bytes` that bulk copies will bring.
DEV void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives once this thread's copies (copy16) so far are done.
DEV void barrier_arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity is over.
DEV void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// A barrier among `threads` threads of the block, not all of it. Id 0 is __syncthreads'.
DEV void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- Copies --------------------------------------------------------------------------------

DEV u64 evict_first() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Global to shared by the copy engine; sizes and addresses are multiples of 16.
DEV void bulk_load(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// 16 bytes, global to shared; zeros where `valid` is false.
DEV void copy16(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEV void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
// Orders this thread's accesses to shared memory before those of copy engine and wgmma.
DEV void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEV uint4 load_shared16(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from));
  return v;
}
DEV uint2 load_shared8(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}
// Four 8x8 matrices of b16; lanes 8i…8i+7 give the row addresses of matrix i.
DEV void load_matrices(u32 (&r)[4], u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
// The transpose of an 8x8 matrix of b16 held one pair a lane.
DEV u32 transpose_matrix(u32 pair) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// --- Matrix products -----------------------------------------------------------------------

// D[16, 8] += A[16, 16] · B[16, 8], bf16.
DEV void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// D[16, 8] += A[16, 32] · B[32, 8], e4m3. One instruction on sm_121a, an emulation on sm_90a.
DEV void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- Between blocks ------------------------------------------------------------------------

// Returns once the word is `value`, and with it what was written before that. After 2^26 looks it
// writes to address 0, so that a launch that cannot go on fails. (A trap costs registers.)
DEV void wait_until_equal(const u32* word, u32 value) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 seen, tries;\n.reg .u64 nowhere;\n"
      "mov.u32 tries, 0;\nmov.u64 nowhere, 0;\n"
      "look: ld.acquire.gpu.global.u32 seen, [%0];\nadd.u32 tries, tries, 1;\n"
      "setp.eq.u32 p, tries, 0x4000000;\n@p st.global.u32 [nowhere], tries;\n"
      "setp.ne.u32 p, seen, %1;\n@p bra look;\n}" ::"l"(word),
      "r"(value)
      : "memory");
}
// The value, of which the compiler knows nothing.
DEV u32 forget(u32 value) {
  asm volatile("" : "+r"(value));
  return value;
}

// --- Numbers -------------------------------------------------------------------------------

DEV u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Two f32 as bf16, `low` in the low half.
DEV u32 pack_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// --- Registers between warpgroups (the kernel needs a register cap at entry) ----------------

template <int N>
DEV void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DEV void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// --- Launches that overlap -----------------------------------------------------------------

// Returns once the launch before this one is over and its writes are seen.
DEV void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch begin; it may not rely on anything written after.
DEV void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }
