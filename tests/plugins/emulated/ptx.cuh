// What common/ptx.cuh and the PTX of common/numeric.cuh mean, for a compiler of the host: a block's
// threads are coroutines, and whatever a warp or a block does together is a place where they meet.
//
// Memory of a block is filled with 0xFF. Copies (cp.async) arrive at once, or as late as a wait
// lets them (`late`): a wait that is missing shows in the second, a place written too early in the
// first. Warps run in an order drawn again each time that all have run. Matrix instructions are the
// PTX manual's sums, in double precision. Left out is what the kernels that are tested here do not
// use. Blocks of a cluster run side by side (clusters.cuh), other blocks one after the other.
//
// Every kernel is compiled with these headers: what is no template and no line or two is in
// bodies.cuh and launches.cuh, which are compiled once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <vector>

#include "common/coroutines.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE inline
#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)
#define DYNAMIC_SHARED(kernel, bytes) static_assert(sizeof(#kernel) <= 44 && (bytes) > 0)
using std::max;
using std::min;
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }

struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct float2 {
  float x, y;
};
struct ulonglong2 {
  u64 x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline ulonglong2 make_ulonglong2(u64 x, u64 y) { return {x, y}; }
struct Dim {
  int x, y, z;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;

[[noreturn]] void fail(const char* what);
inline void check(bool fine, const char* what) {
  if (!fine) fail(what);
}

// ---- coroutines --------------------------------------------------------------------------------
struct Thread {
  HostStack place;
  bool done = false;
  const int* turn = nullptr;  // until this is no longer `seen` it waits
  int seen = 0;
  int met = 0;                                                    // named barriers that it passed
  std::vector<std::vector<std::function<void()>>> groups = {{}};  // copies; the last is open
};
struct Assembly {
  int threads, arrived = 0, turn = 0, gone = 0;
  bool any[2] = {};  // whether some thread said so, of even and odd turns
};
struct Exchange {
  u64 value[32];
  u32 words[32][8];
};
inline HostStack scheduler;
struct BlockOnHost {
  Dim index;
  u8* dynamic;
  int met = 0;
  Assembly all, named[16];
  std::vector<Thread> threads;
  std::vector<Assembly> warps;
  std::vector<Exchange> exchanges;
};
extern std::vector<BlockOnHost> blocks;  // of a cluster
inline BlockOnHost* here;                // the running thread's
inline bool late;
inline bool followed;  // whether the source is compiled for racecheck: its macro FOLLOWED
constexpr u32 SHARED_OF_BLOCK = 1 << 18;  // bytes of a block
inline u8* dynamic;

inline Thread& self() { return here->threads[threadIdx.x]; }
inline void let_others() { switch_to(self().place, scheduler); }
void meet_at(Assembly& m);
inline u32 lane_id() { return threadIdx.x & 31; }
inline bool elect_one() { return lane_id() == 0; }
void __syncthreads();
inline void __syncwarp() { meet_at(here->warps[threadIdx.x / 32]); }
inline void __nanosleep(u32) {}
inline void __threadfence() {}
inline void wait_until_equal(const u32* word, u32 value) {
  while (*word != value) let_others();
}
void meet(u32 name, u32 threads);
bool meet_any(u32 name, u32 threads, bool mine);
void pass(u32 name, u32 threads);
inline Exchange& exchange() { return here->exchanges[threadIdx.x / 32]; }

template <class T>
T from_lane(T value, u32 lane) {
  T found;
  memcpy(&exchange().value[lane_id()], &value, sizeof(T));
  __syncwarp();
  memcpy(&found, &exchange().value[lane & 31], sizeof(T));
  __syncwarp();
  return found;
}
template <class T>
T __shfl_xor_sync(u32, T value, int mask) {
  return from_lane(value, lane_id() ^ mask);
}
template <class T>
T __shfl_up_sync(u32, T value, int by) {
  return from_lane(value, (int)lane_id() < by ? lane_id() : lane_id() - by);
}
template <class T>
T __shfl_down_sync(u32, T value, int by) {
  return from_lane(value, min(31, (int)lane_id() + by));
}
template <class T>
T __shfl_sync(u32, T value, int lane, int width = 32) {
  return from_lane(value, (lane_id() & -width) | lane & width - 1);
}
u32 __ballot_sync(u32, bool mine);
template <class T, class Join>
T joined(T mine, const Join& join) {
  T all = from_lane(mine, 0);
  for (int lane = 1; lane < 32; ++lane) all = join(all, from_lane(mine, lane));
  return all;
}
u32 __reduce_max_sync(u32, u32 x);
int __reduce_max_sync(u32, int x);
template <class T>
T __reduce_min_sync(u32, T x) {
  return joined(x, [](T a, T b) { return min(a, b); });
}
int __reduce_add_sync(u32, int x);
u32 __reduce_or_sync(u32, u32 x);
inline bool __any_sync(u32, bool mine) { return __ballot_sync(~0u, mine) != 0; }
bool __syncthreads_or(bool mine);
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __ffs(u32 bits) { return __builtin_ffs(bits); }
// What every lane gave, seen by all; the caller meets again when it has read.
const u32 (*gathered(std::initializer_list<u32> words))[8];

// ---- scalars -----------------------------------------------------------------------------------
template <class To, class From>
To bits_of(From value) {
  To to;
  memcpy(&to, &value, sizeof(To));
  return to;
}
inline float __uint_as_float(u32 x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline u32 __float_as_uint(float x) { return bits_of<u32>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }
#define __expf exponential
#define __cosf std::cos
#define __sinf std::sin
using std::fma, std::rint;
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline u64 __float2ull_rn(float x) { return (u64)std::nearbyint(x); }
inline int __float2int_rn(float x) { return (int)std::nearbyint(x); }
inline u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
template <class T>
T atomic_join(T* p, T value) {
  const T was = *p;
  *p = value;
  return was;
}
inline unsigned long long atomicMax(unsigned long long* p, unsigned long long x) {
  return atomic_join(p, *p < x ? x : *p);
}
inline unsigned long long atomicExch(unsigned long long* p, unsigned long long x) {
  return atomic_join(p, x);
}
inline u32 atomicMax(u32* p, u32 x) { return atomic_join(p, max(*p, x)); }
inline int atomicMin(int* p, int x) { return atomic_join(p, min(*p, x)); }
inline u32 atomicOr(u32* p, u32 bits) { return atomic_join(p, *p | bits); }
inline u64 atomicAdd(u64* p, u64 by) { return atomic_join(p, *p + by); }
inline u32 atomicAdd(u32* p, u32 by) { return (*p += by) - by; }
inline int atomicAdd(int* p, int by) { return (*p += by) - by; }
inline int count_up(int* counter) { return atomicAdd(counter, 1); }
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}
#define __ldcs __ldcg
#define __stcs __stcg
inline void add_if(int lag, int n, float x, float y, float& sum) {  // of delta_decode_fma.cu
  if (lag > n) sum = fmaf(x, y, sum);
}
inline u32 __funnelshift_l(u32 low, u32 high, int by) {
  return by & 31 ? high << (by & 31) | low >> (32 - (by & 31)) : high;
}
u32 __byte_perm(u32 a, u32 b, u32 order);
inline float value_of_bf16(u32 bits) { return __uint_as_float(bits << 16); }
inline u32 bf16_of(float x) {
  const u32 bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
extern float values_of_e4m3[256], values_of_f16[65536];  // by code
inline float value_of_e4m3(u32 code) { return values_of_e4m3[code & 0xff]; }
inline float from_f16(u16 bits) { return values_of_f16[bits]; }
inline float value_of_e2m1(u32 code) {
  static const float sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}
u32 e4m3_of_value(float x);  // nearest, ties to even, saturating
inline u32 pack_bf16(float low, float high) { return bf16_of(low) | bf16_of(high) << 16; }
inline u32 mul_bf16x2(u32 a, u32 b) {
  return pack_bf16(value_of_bf16(a & 0xffff) * value_of_bf16(b & 0xffff),
                   value_of_bf16(a >> 16) * value_of_bf16(b >> 16));
}
inline u32 largest_bf16x2(u32 a, u32 b) {
  const float low = fmaxf(fabsf(value_of_bf16(a & 0xffff)), fabsf(value_of_bf16(b & 0xffff)));
  const float high = fmaxf(fabsf(value_of_bf16(a >> 16)), fabsf(value_of_bf16(b >> 16)));
  return pack_bf16(low, high) | (a ^ b) & 0x80008000;
}
inline u32 permuted(u32 a, u32 b, u32 order) { return __byte_perm(a, b, order); }
inline u32 kept_or(u32 word, u32 keep, u32 add) { return word & keep | add; }
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {  // by sums that are exact
  return pack_bf16(
      (double)value_of_bf16(a & 0xffff) * value_of_bf16(b & 0xffff) + value_of_bf16(c & 0xffff),
      (double)value_of_bf16(a >> 16) * value_of_bf16(b >> 16) + value_of_bf16(c >> 16));
}
inline u32 sub_bf16x2(u32 a, u32 b) { return fma_bf16x2(0xbf80bf80, b, a); }
inline u16 to_e4m3x2(float low, float high) {
  return e4m3_of_value(low) | e4m3_of_value(high) << 8;
}
inline u32 pack_f16(float low, float high) {
  return bits_of<u16>((_Float16)low) | (u32)bits_of<u16>((_Float16)high) << 16;
}
inline u32 pack_f16_finite(float low, float high) {
  auto finite = [](float x) { return x != x ? x : min(max(x, -65504.f), 65504.f); };
  return pack_f16(finite(low), finite(high));
}
inline u32 e4m3x2_to_f16x2(u16 pair) {
  return bits_of<u16>((_Float16)value_of_e4m3(pair & 0xff)) |
         (u32)bits_of<u16>((_Float16)value_of_e4m3(pair >> 8)) << 16;
}
inline void widen(u32 codes, u32& low, u32& high) {
  low = e4m3x2_to_f16x2(codes), high = e4m3x2_to_f16x2(codes >> 16);
}

// ---- shared memory and copies ------------------------------------------------------------------
inline void wait_for_previous() {}
inline void launch_dependents() {}
inline void wait_then_launch_dependents() {}
inline u32 shared_address(u32 at) { return at; }
inline u32 shared_address(const void* p) { return (u32)((const u8*)p - dynamic); }
inline u8* shared(u32 at, u32 bytes) {
  check(at % bytes == 0 && at < SHARED_OF_BLOCK,
        "an address is misaligned or not of shared memory");
  return dynamic + at;
}
template <class T, class Address>
T load_shared(Address from) {
  T v;
  memcpy(&v, shared(shared_address(from), sizeof v), sizeof v);
  return v;
}
template <class Address>
uint4 load_shared16(Address from) {
  return load_shared<uint4>(from);
}
template <class Address>
uint2 load_shared8(Address from) {
  return load_shared<uint2>(from);
}
template <class Address>
u32 load_shared4(Address from) {
  return load_shared<u32>(from);
}
void copy(u8* to, int size, const void* from, u32 bytes);
template <int BYTES, class Address>
void copy_async_few(Address to, const void* from, u32 bytes = BYTES) {
  copy(shared(shared_address(to), BYTES), BYTES, from, bytes);
}
template <class Address>
void copy_async(Address to, const void* from, u32 bytes = 16) {
  copy_async_few<16>(to, from, bytes);
}
inline u64 evict_first_policy() { return 0; }
template <class Address>
void copy_async_hinted(Address to, const void* from, u64) {
  copy_async(to, from);
}
inline u32 forget(u32 value) { return value; }
void commit_copies();
void wait_copies_but(size_t pending);
template <int PENDING>
void wait_copies() {
  wait_copies_but(PENDING);
}
inline u32 load_if(bool there, const u32* p) { return there ? *p : 0; }
inline uint4 load_if16(bool there, const void* p) { return there ? *(const uint4*)p : uint4{}; }
inline void store_shared4(u32 to, u32 a) { memcpy(shared(to, 4), &a, 4); }
inline void store_shared16(u32 to, u32 a, u32 b, u32 c, u32 d) {
  const uint4 v = {a, b, c, d};
  memcpy(shared(to, sizeof v), &v, sizeof v);
}

#include "common/barriers.cuh"
#include "common/clusters.cuh"
#include "common/matrices.cuh"
