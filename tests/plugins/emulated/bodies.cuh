// What the instructions of this folder's headers do, compiled once for all kernels.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>

#include "common/ptx.cuh"

std::vector<BlockOnHost> blocks;

void fail(const char* what) {
  fprintf(stderr, "thread %d of block %d: %s\n", threadIdx.x, blockIdx.x, what);
  abort();
}

// ---- threads that meet -------------------------------------------------------------------------
void meet_at(Assembly& m) {
  const int turn = m.turn;
  if (++m.arrived == m.threads) {
    m.arrived = 0, ++m.turn;
    return;
  }
  self().turn = &m.turn, self().seen = turn;
  let_others();
  self().turn = nullptr;
}
void __syncthreads() {
  if (!here->all.arrived) here->met = self().met;
  check(!followed || here->met == self().met, "warps passed unequally many barriers");
  meet_at(here->all);
}
static Assembly& meeting_of(u32 name, u32 threads) {
  check(name < 16, "a barrier that no block has");
  Assembly& meeting = here->named[name];
  check(!meeting.arrived || meeting.threads == threads, "meeting meets differs");
  meeting.threads = threads, ++self().met;
  return meeting;
}
void meet(u32 name, u32 threads) { meet_at(meeting_of(name, threads)); }
bool meet_any(u32 name, u32 threads, bool mine) {
  Assembly& meeting = meeting_of(name, threads);
  const int turn = meeting.turn & 1;
  meeting.any[turn] |= mine;
  if (meeting.arrived + 1 == meeting.threads) meeting.any[!turn] = false;  // all have read it
  meet_at(meeting);
  return followed || meeting.any[turn];
}
void pass(u32 name, u32 threads) {
  Assembly& meeting = meeting_of(name, threads);
  if (++meeting.arrived == meeting.threads) meeting.arrived = 0, ++meeting.turn;
}
u32 __ballot_sync(u32, bool mine) {
  u32 all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= (u32)from_lane(mine, lane) << lane;
  return all;
}
u32 __reduce_max_sync(u32, u32 x) {
  return joined(x, [](u32 a, u32 b) { return max(a, b); });
}
int __reduce_max_sync(u32, int x) {
  return joined(x, [](int a, int b) { return max(a, b); });
}
int __reduce_add_sync(u32, int x) {
  return joined(x, [](int a, int b) { return a + b; });
}
u32 __reduce_or_sync(u32, u32 x) {
  return joined(x, [](u32 a, u32 b) { return a | b; });
}
bool __syncthreads_or(bool mine) {
  static bool any;
  if (mine) any = true;
  __syncthreads();
  const bool found = any;
  __syncthreads();
  any = false;
  __syncthreads();
  return found;
}
const u32 (*gathered(std::initializer_list<u32> words))[8] {
  std::copy(words.begin(), words.end(), exchange().words[lane_id()]);
  __syncwarp();
  return exchange().words;
}

// ---- scalars -----------------------------------------------------------------------------------
u32 __byte_perm(u32 a, u32 b, u32 order) {
  u32 found = 0;
  for (int i = 0; i < 4; ++i) {
    check(!(order >> 4 * i & 8), "a sign is asked of __byte_perm");
    found |= (u32)(((u64)b << 32 | a) >> 8 * (order >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return found;
}
static float e4m3_from_its_bits(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float size = std::ldexp((float)(exponent ? 8 + mantissa : mantissa), max(exponent, 1) - 10);
  return code & 0x80 ? -size : size;
}
float values_of_e4m3[256], values_of_f16[65536];
static const bool values_are_there = [] {
  for (u32 code = 0; code < 256; ++code) values_of_e4m3[code] = e4m3_from_its_bits(code);
  for (u32 bits = 0; bits < 65536; ++bits) values_of_f16[bits] = bits_of<_Float16>((u16)bits);
  return true;
}();
u32 e4m3_of_value(float x) {
  if (x != x) return 0x7f;
  u32 best = 0;
  for (u32 code = 1; code < 0x7f; ++code) {
    const float nearer = std::fabs(value_of_e4m3(best) - std::fabs(x)) -
                         std::fabs(value_of_e4m3(code) - std::fabs(x));
    if (nearer > 0 || (nearer == 0 && !(code & 1))) best = code;
  }
  return best | (std::signbit(x) ? 0x80 : 0);
}

// ---- copies ------------------------------------------------------------------------------------
void copy(u8* to, int size, const void* from, u32 bytes) {
  check(!bytes || (u64)from % size == 0, "a copy's source is misaligned");
  const auto copy = [=] {
    memset(to, 0, size);
    memcpy(to, from, bytes);
  };
  const auto once = [copy, left = std::make_shared<bool>(true)] {  // for the first wait only
    if (*left) copy();
    *left = false;
  };
  if (late) self().groups.back().push_back(once);
  else copy();
}
void commit_copies() { self().groups.emplace_back(); }
void wait_copies_but(size_t pending) {
  auto& groups = self().groups;
  for (; groups.size() > pending + 1; groups.erase(groups.begin()))
    for (const auto& copy : groups.front()) copy();
}
static std::vector<std::function<void()>> copies_so_far() {  // of this thread
  std::vector<std::function<void()>> found;
  for (const auto& group : self().groups) found.insert(found.end(), group.begin(), group.end());
  return found;
}

// ---- mbarriers ---------------------------------------------------------------------------------
// In the eight bytes: arrivals that are left, arrivals of a phase, the phase's parity and the bytes
// of TMA bulk copies that it waits for.
struct Arrivals {
  u16 left, all;
  u32 parity : 1;
  int bytes : 31;
};
static_assert(sizeof(Arrivals) == 8);

void barrier_init(u64* bar, u32 arrivals) {
  *bar = bits_of<u64>(Arrivals{(u16)arrivals, (u16)arrivals, 0, 0});
}
static std::vector<std::pair<u64*, std::function<void()>>> bulk_copies;  // in flight
static void change_phase(u64* bar, int arrivals, int bytes) {
  Arrivals a = bits_of<Arrivals>(*bar);
  check(a.left >= arrivals && a.left <= a.all, "an arrival that no phase has");
  a.left -= arrivals, a.bytes += bytes;
  if (a.left == 0 && a.bytes == 0) a.left = a.all, a.parity ^= 1;
  *bar = bits_of<u64>(a);
}
void barrier_arrive(u64* bar) { change_phase(bar, 1, 0); }
void barrier_arrive_warp(u64* bar, int lane) {
  __syncwarp();  // lanes of a warp run apart here
  if (lane == 0) barrier_arrive(bar);
}
void barrier_expect(u64* bar, u32 bytes) { change_phase(bar, 1, bytes); }
void barrier_wait(u64* bar, u32 parity) {
  while (bits_of<Arrivals>(*bar).parity == parity) {
    auto copies = std::exchange(bulk_copies, {});
    for (auto& [of, copy] : copies)
      if (of == bar) copy();
      else bulk_copies.emplace_back(of, std::move(copy));
    let_others();
  }
}
// An arrival that copies (cp.async) of this thread come before.
void barrier_arrive_after_copies(u64* bar) {
  const auto arrive = [bar, copies = copies_so_far()] {
    for (const auto& copy : copies) copy();
    change_phase(bar, 1, 0);
  };
  if (late) bulk_copies.emplace_back(bar, arrive);
  else arrive();
}
void bulk_load(void* to, const void* from, u32 bytes, u64* bar) {
  check((u64)from % 16 == 0 && bytes % 16 == 0, "a bulk copy is misaligned");
  const auto copy = [=] {
    memcpy(to, from, bytes);
    change_phase(bar, 0, -(int)bytes);
  };
  if (late) bulk_copies.emplace_back(bar, copy);
  else copy();
}

// ---- matrices, in double precision -------------------------------------------------------------
void load_matrices(u32 (&r)[4], u32 row, bool transposed) {
  const auto all = gathered({row});
  const int first = lane_id() / 4, pair = lane_id() % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = 0;
    for (int i = 0; i < 2; ++i) {
      const int line = transposed ? pair + i : first, column = transposed ? first : pair + i;
      u16 value;
      memcpy(&value, shared(all[matrix * 8 + line][0], 16) + column * 2, 2);
      r[matrix] |= (u32)value << 16 * i;
    }
  }
  __syncwarp();
}
u32 transpose_pair(u32 pair) {
  const auto all = gathered({pair});
  const int row = lane_id() / 4, column = lane_id() % 4 * 2;
  u32 found = 0;
  for (int i = 0; i < 2; ++i)
    found |= (all[(column + i) * 4 + row / 2][0] >> row % 2 * 16 & 0xffff) << 16 * i;
  __syncwarp();
  return found;
}
void store_matrices_transposed(u32 row, const u32 (&r)[4]) {
  const auto all = gathered({r[0], r[1], r[2], r[3], row});
  for (int matrix = 0; lane_id() == 0 && matrix < 4; ++matrix)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i) {
        const u16 value = all[lane][matrix] >> 16 * i;
        u8* const to = shared(all[matrix * 8 + lane % 4 * 2 + i][4], 16);
        memcpy(to + lane / 4 * 2, &value, 2);
      }
  __syncwarp();
}
// d += Σ a(row, k) b(column, k) of an m16n8 instruction.
template <int DEPTH, class A, class B>
static void add_products(float (&d)[4], const A& a, const B& b) {
  double rows[2][DEPTH], columns[2][DEPTH];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < DEPTH; ++k) {
      rows[i][k] = a(lane_id() / 4 + 8 * i, k);
      columns[i][k] = b(lane_id() % 4 * 2 + i, k);
    }
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < DEPTH; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] = (float)sum;
  }
  __syncwarp();
}
template <class Value>
static void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const Value& value) {
  const auto all = gathered({a[0], a[1], a[2], a[3], b0, b1});
  const auto of_a = [&](int row, int k) -> double {
    return value(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16 & 0xffff);
  };
  const auto of_b = [&](int column, int k) -> double {
    return value(all[column * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16 & 0xffff);
  };
  add_products<16>(d, of_a, of_b);
}
void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_halves(d, a, b0, b1, value_of_bf16);
}
void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_halves(d, a, b0, b1, from_f16);
}
void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
  const float mine[] = {a[0], a[1], a[2], a[3], b0, b1};
  u32 bits[6];
  memcpy(bits, mine, sizeof bits);
  const auto all = gathered({bits[0], bits[1], bits[2], bits[3], bits[4], bits[5]});
  const auto value = [](u32 x) -> double { return __uint_as_float(x & 0xffffe000u); };
  const auto of_a = [&](int row, int k) {
    return value(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]);
  };
  const auto of_b = [&](int column, int k) { return value(all[column * 4 + k % 4][4 + k / 4]); };
  add_products<8>(d, of_a, of_b);
}
void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto all = gathered({a[0], a[1], a[2], a[3], b0, b1});
  const auto of_a = [&](int row, int k) -> double {
    return value_of_e4m3(all[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8);
  };
  const auto of_b = [&](int column, int k) -> double {
    return value_of_e4m3(all[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8);
  };
  add_products<32>(d, of_a, of_b);
}
void mma_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b) {
  const auto all = gathered({a[0], a[1], a[2], a[3], b0, b1, scale_a, scale_b});
  const auto of_a = [&](int row, int k) {
    const u32 x = all[row % 8 * 4 + k % 32 / 8][row / 8 + k / 32 * 2] >> k % 8 * 4 & 15;
    const u32 by = all[row % 8 * 4 + row / 8][6] >> k / 16 * 8 & 0xff;
    return (double)value_of_e2m1(x) * value_of_e4m3(by);  // exact
  };
  const auto of_b = [&](int column, int k) {
    const u32 x = all[column * 4 + k % 32 / 8][4 + k / 32] >> k % 8 * 4 & 15;
    const u32 by = all[column * 4][7] >> k / 16 * 8 & 0xff;
    return (double)value_of_e2m1(x) * value_of_e4m3(by);
  };
  add_products<64>(d, of_a, of_b);
}
