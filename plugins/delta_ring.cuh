// Where a replay ring's numbers stand (delta_ring.py says what they mean). Needs HV, HK, KD, VD.
#pragma once

#define RECORDS (RING ? RING : 1)
#define AGES (RECORDS - 1)  // records that may be live: of age 1 (the newest) to AGES
#define FOLDS 16            // value rows that fold together
#define KEYS_AT (HV * VD)
#define DECAYS_AT (KEYS_AT + HK * KD)
#define RECORD ((DECAYS_AT + HV + 1 + 15) / 16 * 16)  // floats; the last of record 0 is `base`
