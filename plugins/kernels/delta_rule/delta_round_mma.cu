// gdn_round in chunk form: a round's tokens at once, products of the state by mma.sync in tf32.
// Other sums than those of a round of one token: for builds that are not invariant.
#define CHUNKED 1
#include "delta_rule/delta_round_chunk.cuh"
#include "delta_rule/delta_round_kernel.cuh"
