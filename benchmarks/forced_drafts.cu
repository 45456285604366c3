// What a sequence's next round begins with, overwritten: its certain token and its drafts.
//
// One thread a slot. `path` i32 [slots, length]: the tokens that the slot's sequence says from
// position `firsts` [slots] on; a slot with a negative one is left alone, and so is what lies
// behind the path. The draft at place i is the path's token with probability shares[i] / 2^32, else
// another one: the coin is a hash of seed, slot and position. forced_drafts.py has the same.

__device__ unsigned coin(unsigned seed, unsigned slot, unsigned position) {
  unsigned h = seed * 0x9E3779B1u ^ slot * 0x85EBCA77u ^ position * 0xC2B2AE3Du;
  h = (h ^ h >> 16) * 0x7FEB352Du;
  h = (h ^ h >> 15) * 0x846CA68Bu;
  return h ^ h >> 16;
}

extern "C" __global__ void force_drafts(const int* positions, int* last_tokens, int* drafts,
                                        const int* path, const int* firsts, const unsigned* shares,
                                        const unsigned* seed, int slots, int length, int most,
                                        int vocab) {
  int slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot >= slots || firsts[slot] < 0) return;
  int position = positions[slot], at = position - firsts[slot];
  if (at < 0 || at >= length) return;
  const int* mine = path + (long long)slot * length;
  last_tokens[slot] = mine[at];
  for (int i = 0; i < most && at + 1 + i < length; ++i) {
    int right = mine[at + 1 + i];
    bool kept = coin(*seed, slot, position + 1 + i) < shares[i];
    drafts[(long long)slot * most + i] = kept ? right : (right + 1) % vocab;
  }
}
