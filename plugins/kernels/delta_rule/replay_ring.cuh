// Layout of a slot's replay ring (meaning: replay_ring.py): RECORDS records, each the delta
// [Hv,Dv], key [Hk,Dk] and logarithms of decays [Hv] of one token, f32. With drafts there are more
// records than value rows may lag, and a header after them. Macros: HK, R, KD, VD, RING, DRAFTS.
#pragma once
#include "common/numeric.cuh"

constexpr int HV = HK * R;  // value heads
constexpr int RECORDS = RING ? RING : 1;
constexpr int MAX_LAG = RECORDS - 1;  // records that may be live: of age 1 (the newest) to MAX_LAG
constexpr int FOLD_ROWS = 16;         // value rows that fold together
constexpr int KEYS_AT = HV * VD;
constexpr int DECAYS_AT = KEYS_AT + HK * KD;
constexpr int RECORD =
    (DECAYS_AT + HV + 1 + 15) / 16 * 16;    // floats; the last of record 0 is `base`
constexpr int KEPT = RECORDS + 2 * DRAFTS;  // records of a slot
constexpr int SLOT_RING = (KEPT + (DRAFTS > 0)) * RECORD;
// Offset of a position's record; a position may be negative, where no record is live.
constexpr int ABOVE = DRAFTS ? 16 * KEPT : KEPT;  // a multiple of KEPT
DEVICE int record_at(int position) { return (u32)(position + ABOVE) % KEPT * RECORD; }
