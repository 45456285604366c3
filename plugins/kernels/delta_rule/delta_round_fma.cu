// gdn_round token by token: the bits of a round of one token, whatever the round.
// Winner: the builder times the variants by rows. 4 tokens, 27B, H200: 6.4 / 53 / 210 us at
// 1 / 32 / 128 rows (benchmarks/log/delta_rule/delta_round_fma.md).
#define CHUNKED 0
#include "delta_rule/delta_round_tokens.cuh"
#include "delta_rule/delta_round_kernel.cuh"
