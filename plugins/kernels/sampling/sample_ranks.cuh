// The exchange of a row between ranks that have the logits of SHARE ids each.
//
// Block b of every rank works on the same rows in sequence. It publishes its cells, its greatest
// logits and, if a few penalised logits decide, those: some 11 KB for 248,320 logits on two ranks.
// All ranks then have, to the bit, the cells of one rank with the whole row; a cell on the border
// of two ranks is published as logits and summarised again. A row that draws from all ids
// synchronises once more, for one cell's logits; other rules gather the whole row, MAIL vectors of
// each rank at a time. All ranks take the same branch, since it depends on exchanged values only.
//
// A launch counts as `syncs` launches (odd, the most of a block), so flags only rise.
// Synchronisations alternate between the two phases. A block does an odd number of them, so no rank
// reads the phase that the next launch writes first.
#pragma once
#include "ranks/peers.cuh"
#include "sampling/sample_draw.cuh"
#include "sampling/sample_summary.cuh"

static_assert(SHARE % 4 == 0 && SHARE >= CELL, "sample_kernels.py: refuse");
constexpr int EDGE = CELL / 4;                         // vectors of a cell
constexpr int BORDERS = SHARE % CELL ? RANKS - 1 : 0;  // between ranks that may share a cell
// Offsets in a block's mail, in vectors: the greatest raw logits; the few that decide, and their
// raw logits; the border cells at both ends of the share; its cells.
constexpr int RAWS = 1, FEWS = RAWS + SMALL / 2, LOGITS = FEWS + SMALL / 2;
constexpr int EDGES = LOGITS + SMALL / 4, CELLS_AT = EDGES + 2 * EDGE;
static_assert(CELLS_AT + SHARE / CELL + 2 <= MAIL, "sample_kernels.py: _mail");

DEVICE bool on_border(int c) {  // of two ranks
  const int next = (c * CELL / SHARE + 1) * SHARE;
  return next < WIDTH && next > c * CELL && next < (c + 1) * CELL;
}
DEVICE u32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A row's values that are not in use during the exchange: in shared memory, to save registers.
struct RowState {
  u64 tops[SMALL];    // the greatest raw logits, descending
  u64 few[SMALL];     // what decides, descending
  float raws[SMALL];  // their raw logits
  int n_tops, n_few;
  float first;          // the row's first logit
  float peak, log_sum;  // of the raw logits
  Rule rule;
  int slot;
  u32 block;  // blockIdx.x
  u32 position, seeds[2];
  bool emits;
};

struct Others {
  static constexpr bool MANY = true;
  const u64* peers;
  int rank;
  RowState& state;
  float* whole_rows;  // a row of logits for each block
  u32 phase;          // number of launches and synchronisations so far
  enum { FIRST_ID, OF_FEW, OF_WHOLE_ROW } from;

  DEVICE float* whole_row() const { return whole_rows + (i64)state.block * WIDTH; }
  DEVICE uint4* mail(int r, int i) const {
    return published(peers[r], (i64)state.block * MAIL + i, phase);
  }
  DEVICE uint4 from_mail(int r, int i) const { return load_published(mail(r, i)); }
  DEVICE void sync() { sync_ranks<RANKS>(peers, rank, phase); }

  DEVICE void put_pair(int at, int i, u64 pair) const {
    ((u64*)mail(rank, at + i / 2))[i & 1] = pair;
  }

  // Publishes this rank's part of the row and reads the others': w.raw, w.keys, sums and weights of
  // all cells; to w.sorted and `state` the greatest raw logits, up to `k_list`; to `state` the few
  // that decide, up to `k`.
  DEVICE void exchange(RowMemory& w, Row& r, int k_list, int k, u32 raw_most, u32 most, float heat,
                       float* sums, float* weights, bool& bad) {
    const int me = thread(), own_raws = greatest<true>(w, r, k_list, raw_most);
    for (int i = me; i < SMALL; i += THREADS) put_pair(RAWS, i, i < own_raws ? w.sorted[i] : 0);
    __syncthreads();
    const int own_few = k && most ? greatest<false>(w, r, k, most) : 0;
    for (int i = me; i < SMALL; i += THREADS) {
      const u64 pair = i < own_few ? w.sorted[i] : 0;
      put_pair(FEWS, i, pair);
      ((float*)mail(rank, LOGITS + i / 4))[i & 3] = pair ? clean(r.logits[id_of(pair)]) : 0.0f;
    }
    const int cell0 = r.ids.first_cell();
    for (int c = cell0 + me; c < r.ids.cells_end(); c += THREADS)
      *mail(rank, CELLS_AT + c - cell0) =
          make_uint4(w.raw[c], w.keys[c], __float_as_uint(sums[c]),
                     heat > 0.0f ? __float_as_uint(weights[c]) : 0u);
    publish_edges(r);
    if (me == 0)
      *mail(rank, 0) = make_uint4(__float_as_uint(clean(r.logits[r.ids.begin])), 0u, 0u, 0u);
    sync();
    const int n_few = k ? merge(w, FEWS, k, state.few, state.raws) : 0;
    const int n_tops = merge(w, RAWS, k_list, state.tops, nullptr);
    if (me == 0) {
      state.n_few = n_few, state.n_tops = n_tops;
      state.first = __uint_as_float(from_mail(0, 0).x);
    }
    for (int i = me; i < n_tops; i += THREADS) w.sorted[i] = state.tops[i];
    for (int other = 0; other < RANKS; ++other) {
      const Ids its = ids_of(other);
      for (int c = its.first_cell() + me; c < its.cells_end(); c += THREADS) {
        if (other == rank || on_border(c)) continue;
        const uint4 v = from_mail(other, CELLS_AT + c - its.first_cell());
        w.raw[c] = v.x, w.keys[c] = v.y, sums[c] = __uint_as_float(v.z);
        if (heat > 0.0f) weights[c] = __uint_as_float(v.w);
        bad |= __uint_as_float(v.z) < 0.0f;
      }
    }
    take_borders(w, r, heat, sums, weights, bad);
    ++phase, from = FIRST_ID;
    __syncthreads();
  }

  // Publishes the logits of the share's first and last cell.
  DEVICE void publish_edges(const Row& r) const {
    for (int i = thread(); i < (SHARE % CELL ? 2 * EDGE : 0); i += THREADS) {
      const int cell = i < EDGE ? r.ids.first_cell() : r.ids.cells_end() - 1;
      const int id = cell * CELL + i % EDGE * 4;
      if (r.ids.has(id)) *mail(rank, EDGES + i) = *(const uint4*)(r.logits + id);
    }
  }
  DEVICE void take_borders(RowMemory& w, const Row& r, float heat, float* sums, float* weights,
                           bool& bad) {
    for (int i = thread(); i < BORDERS * EDGE; i += THREADS) {
      const int left = i / EDGE, border = (left + 1) * SHARE, cell = border / CELL;
      const int id = cell * CELL + i % EDGE * 4;
      if (on_border(cell))
        *(uint4*)(whole_row() + id) = id < border ? from_mail(left, EDGES + EDGE + i % EDGE)
                                                  : from_mail(left + 1, EDGES + i % EDGE);
    }
    __syncthreads();
    const Row whole = whole_of(r);
    for (int left = thread() / 32; left < BORDERS; left += WARPS) {
      const int cell = (left + 1) * SHARE / CELL;
      if (!on_border(cell)) continue;
      bool its_bad;
      const Cell s = summarise(whole, cell, heat, its_bad);
      bad |= its_bad;
      if (lane()) continue;
      w.raw[cell] = s.raw, w.keys[cell] = s.key, sums[cell] = its_bad ? -s.sum : s.sum;
      if (heat > 0.0f) weights[cell] = s.weight;
    }
  }

  // The greatest k of all ranks' lists, to `pairs` in descending order; returns their number.
  DEVICE int merge(RowMemory& w, int at, int k, u64* pairs, float* raws) const {
    for (int i = thread(); i < RANKS * SMALL / 2; i += THREADS) {
      const uint4 v = from_mail(i / (SMALL / 2), at + i % (SMALL / 2));
      w.held[2 * i] = (u64)v.y << 32 | v.x, w.held[2 * i + 1] = (u64)v.w << 32 | v.z;
    }
    if (thread() == 0) w.count = 0;
    __syncthreads();
    for (int i = thread(); i < RANKS * SMALL; i += THREADS) {
      const u64 mine = w.held[i];
      if (!mine) continue;
      int place = 0;
#pragma unroll 4
      for (int j = 0; j < RANKS * SMALL; ++j) place += w.held[j] > mine;
      atomicAdd(&w.count, 1);
      if (place >= k) continue;
      pairs[place] = mine;
      const int from = i % SMALL;
      if (raws)
        raws[place] = __uint_as_float(word_of(from_mail(i / SMALL, LOGITS + from / 4), from & 3));
    }
    __syncthreads();
    const int found = min(w.count, k);
    __syncthreads();
    return found;
  }

  DEVICE Row whole_of(const Row& r) const {
    Row whole = r;
    whole.logits = whole_row(), whole.ids = {0, WIDTH};
    return whole;
  }

  // Gathers the logits of ids part(r) of each rank r, up to MAIL vectors, in whole_row().
  template <class Part>
  DEVICE void bring(const Row& own, const Part& part) {
    const Ids mine = part(rank);
    for (int i = mine.begin / 4 + thread(); i < mine.end / 4; i += THREADS)
      *mail(rank, i - mine.begin / 4) = *(const uint4*)(own.logits + i * 4);
    sync();
    for (int other = 0; other < RANKS; ++other) {
      const Ids its = part(other);
      for (int i = its.begin / 4 + thread(); i < its.end / 4; i += THREADS)
        *(uint4*)(whole_row() + i * 4) = from_mail(other, i - its.begin / 4);
    }
    ++phase, from = OF_WHOLE_ROW;
    __syncthreads();
  }
  // Afterwards `r` reads from whole_row(), which has one cell, or with bring_all all of them.
  DEVICE void bring_cell(Row& r, int cell) {
    bring(r, [&](int other) {
      const Ids its = ids_of(other);
      const int begin = max(its.begin, cell * CELL);
      return Ids{begin, max(begin, min(its.end, (cell + 1) * CELL))};
    });
    r = whole_of(r);
  }
  DEVICE void bring_all(Row& r) {
    for (int at = 0; at < SHARE; at += MAIL * 4)
      bring(r, [&](int other) {
        const int begin = other * SHARE + at;
        return Ids{begin, min(begin + MAIL * 4, (other + 1) * SHARE)};
      });
    r = whole_of(r);
  }

  // The k greatest penalised logits, in w.sorted; returns their number.
  DEVICE int few(RowMemory& w, const Row& r, int k, u32 most) {
    for (int i = thread(); i < state.n_few; i += THREADS) w.sorted[i] = state.few[i];
    from = OF_FEW;
    __syncthreads();
    return min(state.n_few, k);
  }
  DEVICE float logit(const Row& r, int token) const {
    if (from == OF_WHOLE_ROW) return clean(r.logits[token]);
    if (from == OF_FEW)
      for (int i = 0; i < state.n_few; ++i)
        if (id_of(state.few[i]) == token) return state.raws[i];
    return state.first;
  }

  // Ends the launch, which counts as `syncs` launches.
  DEVICE void leave(int syncs) {
    const u32 launch = launches_so_far(peers, rank);  // without this one
    if (!(phase - launch & 1)) sync();
    __syncthreads();
    if (thread()) return;
    u32* counters = (u32*)peers[rank];
    if (atomicAdd(counters + 1, 1) == gridDim.x - 1) counters[1] = 0, counters[0] = launch + syncs;
  }
};
