// What the kernels of the gated delta net share: activation types, softplus, sums over lanes.
#pragma once
#include "common/numeric.cuh"

// --- Activations: bf16 in engines, f32 in tests of exactness -------------------------------
#if ACT_F32
using act = float;
DEVICE float widen(act x) { return x; }
DEVICE act narrow(float x) { return x; }
#else
using act = u16;
DEVICE float widen(act x) { return from_bf16(x); }
DEVICE act narrow(float x) { return to_bf16(x); }
#endif
DEVICE float rounded(float x) { return widen(narrow(x)); }

// --- States of 16 bits, two a word: f16 with STATE_F16, else bf16 ---------------------------
#if STATE_F16
DEVICE float2 state_pair(u32 word) { return {from_f16((u16)word), from_f16((u16)(word >> 16))}; }
DEVICE u32 state_word(float low, float high) { return pack_f16_finite(low, high); }
#else
DEVICE float2 state_pair(u32 word) { return {low_bf16(word), high_bf16(word)}; }
DEVICE u32 state_word(float low, float high) { return pack_bf16(low, high); }
#endif

struct alignas(4 * sizeof(act)) act4 {
  act v[4];
};

DEVICE float softplus(float x) { return fmaxf(x, 0.f) + log1pf(expf(-fabsf(x))); }
