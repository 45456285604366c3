"""How each published scheme stores one matrix, and how it rounds what the matrix multiplies.

Written from the formats' public definitions (compressed-tensors, ModelOpt, AutoAWQ, GPTQModel,
auto-round, transformers' FineGrainedFP8). Knows nothing of the package, and no file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from tests import quantisers
from tests.published.networks import BF16, F32, Array

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Round = Callable[[Any], Any]  # of a torch tensor [..., K]
# Leaves that read what another one of the same parent reads.
SHARED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "in_proj_qkv", "in_proj_z")


@dataclass(frozen=True)
class Packed:
    """Stored tensors by suffix, the numbers that they encode, and the rounding of the input."""

    stored: dict[str, Array]
    values: F32
    round: Round | None = None


def amax_of(module: str) -> float:
    """What a calibration may have seen of a module's input; equal for modules that share it."""
    parent, _, leaf = module.rpartition(".")
    return 5 + crc32(f"{parent}.{'' if leaf in SHARED else leaf}".encode()) % 16 / 8


def _f32(value: float, *shape: int) -> Array:
    return np.full(shape, value, np.float32)


def _e4m3(x: Any) -> Any:
    import torch

    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)


def fp8_static(scale: float) -> Round:
    return lambda x: _e4m3(x / scale) * scale


def fp8_dynamic(group: int | None) -> Round:
    """A scale for each row, or for each `group` of its columns."""

    def rounded(x: Any) -> Any:
        y = x if group is None else x.unflatten(-1, (-1, group))
        scale = (y.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp(min=1e-30)
        return (_e4m3(y / scale) * scale).reshape(x.shape)

    return rounded


def nvfp4_dynamic(scale: float) -> Round:
    """e2m1 by 16 columns, each 16 with an e4m3 scale, under one calibrated scale."""

    def rounded(x: Any) -> Any:
        import torch

        y = x.unflatten(-1, (-1, 16)) / scale
        block = _e4m3(y.abs().amax(-1, keepdim=True) / E2M1_MAX)
        unit = torch.where(block > 0, y / block, 0)
        codes = quantisers.e2m1(unit.numpy())
        values = torch.from_numpy(quantisers.e2m1_values(codes)).to(x.dtype)
        return (values * block * scale).reshape(x.shape)

    return rounded


def fp8_tensor(w: F32, module: str, dtype: Any = np.float32, shape: Sequence[int] = ()) -> Packed:
    """One scale for the weight and a calibrated one for the input."""
    scale = (np.abs(w).max() / E4M3_MAX).astype(dtype)
    given = np.asarray(amax_of(module) / E4M3_MAX).astype(dtype)
    codes = quantisers.e4m3(w / np.float32(scale))
    stored = {"weight": codes, "weight_scale": np.full(shape, scale)}
    stored["input_scale"] = np.full(shape, given)
    return Packed(stored, codes.astype(np.float32) * np.float32(scale), fp8_static(float(given)))


def fp8_rows(w: F32, flat: bool = False) -> Packed:
    """A scale for each row, bf16 [N, 1] (compressed-tensors) or f32 [N] (ModelOpt)."""
    scale = (np.abs(w).max(1, keepdims=True) / E4M3_MAX).astype(np.float32 if flat else BF16)
    codes = quantisers.e4m3(w / scale.astype(np.float32))
    stored = {"weight": codes, "weight_scale": scale[:, 0] if flat else scale}
    return Packed(stored, codes.astype(np.float32) * scale.astype(np.float32), fp8_dynamic(None))


def fp8_blocks(w: F32, name: str = "weight_scale_inv", dtype: Any = BF16, four: bool = False):
    """128 x 128 blocks, dynamic inputs by 128 columns; ModelOpt has scales of four dimensions."""
    q = quantisers.fp8_block(w)
    scale = q.scale.astype(dtype)
    stored = {"weight": q.codes, name: scale[:, None, :, None] if four else scale}
    return Packed(stored, q.values, fp8_dynamic(128))


def fp8_powers(w: F32, dtype: Any = E8M0) -> Packed:
    """The same with scales that are powers of two, as E8M0 or as its bytes."""
    scale = np.exp2(np.ceil(np.log2(quantisers.fp8_block(w).scale.astype(np.float32))))
    wide = scale.repeat(128, 0).repeat(128, 1)[: len(w), : w.shape[1]]
    codes = quantisers.e4m3(w / wide)
    stored = {"weight": codes, "weight_scale_inv": scale.astype(E8M0).view(dtype)}
    return Packed(stored, codes.astype(np.float32) * wide, fp8_dynamic(128))


def nvfp4(w: F32, module: str, inputs: bool = True) -> Packed:
    q = quantisers.nvfp4(w)
    assert q.scale2 is not None
    stored = {"weight": q.codes, "weight_scale": q.scale, "weight_scale_2": q.scale2}
    given = np.float32(amax_of(module) / (E2M1_MAX * E4M3_MAX))
    if not inputs:
        return Packed(stored, q.values)
    return Packed(stored | {"input_scale": _f32(given)}, q.values, nvfp4_dynamic(float(given)))


def ct_nvfp4(w: F32, module: str, inputs: bool = True) -> Packed:
    q = quantisers.nvfp4(w, divide=True)
    assert q.scale2 is not None
    stored = {"weight_packed": q.codes, "weight_scale": q.scale}
    stored["weight_global_scale"] = q.scale2.reshape(1)
    given = _f32(E2M1_MAX * E4M3_MAX / amax_of(module), 1)
    if not inputs:
        return Packed(stored, q.values)
    return Packed(
        stored | {"input_global_scale": given}, q.values, nvfp4_dynamic(float(1 / given[0]))
    )


def _pack8(codes: Array, order: Sequence[int] = range(8)) -> Array:
    """Eight codes of the last axis to an int32; code order[i] at bit 4 i."""
    wide = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    packed = sum(wide[..., o] << np.uint32(4 * i) for i, o in enumerate(order))
    return np.ascontiguousarray(packed).astype(np.uint32).view(np.int32)


def _int4(w: F32, group: int, zeros: bool, dtype: Any) -> tuple[Array, Array, Array, F32]:
    """Codes 0 to 15 [N, K], zeros and scales [N, K / group], and the numbers."""
    blocks = w.reshape(len(w), -1, group)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    scale = ((high - low) / 15 if zeros else np.abs(blocks).max(-1) / 7.5).astype(dtype)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-low / wide), 0, 15) if zeros else np.full(wide.shape, 8)
    codes = np.clip(np.rint(blocks / wide[..., None]) + zero[..., None], 0, 15)
    values = ((codes - zero[..., None]) * wide[..., None]).astype(np.float32)
    return codes.reshape(w.shape), zero, scale, values.reshape(w.shape)


def gptq(
    w: F32, group: int = 128, index: bool = True, zeros: bool = False, less: int = 1
) -> Packed:
    """K packed by eight in qweight, N in qzeros, where a zero is `less` than it means."""
    codes, zero, scale, values = _int4(w, group, zeros, np.float16)
    stored = {"qweight": _pack8(codes).T, "qzeros": _pack8(zero.T - less), "scales": scale.T}
    if index:
        stored["g_idx"] = (np.arange(w.shape[1]) // group).astype(np.int32)
    return Packed(stored, values)


def awq(w: F32, group: int = 128) -> Packed:
    """N packed by eight, in AutoAWQ's order of nibbles, in both; zeros as they are."""
    codes, zero, scale, values = _int4(w, group, True, np.float16)
    rows = {"qweight": _pack8(codes.T, AWQ_ORDER), "qzeros": _pack8(zero.T, AWQ_ORDER)}
    return Packed(rows | {"scales": scale.T}, values)


def ct_int4(w: F32, group: int, zeros: bool) -> Packed:
    """K packed by eight; zeros packed by eight of N."""
    codes, zero, scale, values = _int4(w, group, zeros, BF16)
    stored = {"weight_packed": _pack8(codes), "weight_scale": scale}
    stored["weight_shape"] = np.array(w.shape, np.int64)
    if zeros:
        stored["weight_zero_point"] = _pack8(zero.T).T
    return Packed(stored, values)


def mxfp4(w: F32) -> Packed:
    """32 columns to an e8m0 scale."""
    blocks = w.reshape(len(w), -1, 32)
    scale = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1))) - 2)
    codes = quantisers.e2m1((blocks / scale[..., None]).astype(np.float32)).reshape(w.shape)
    stored = {"weight_packed": quantisers.pack(codes), "weight_scale": scale.astype(E8M0)}
    return Packed(stored, w)


def int8_rows(w: F32) -> Packed:
    scale = (np.abs(w).max(1, keepdims=True) / 127).astype(BF16)
    codes = np.rint(w / scale.astype(np.float32)).astype(np.int8)
    return Packed({"weight": codes, "weight_scale": scale}, w)


# A matrix and its module's name to what is stored.
SCHEMES: dict[str, Callable[[F32, str], Packed]] = {
    "fp8": fp8_tensor,
    "ct_fp8": lambda w, module: fp8_tensor(w, module, BF16, (1,)),
    "fp8_rows": lambda w, module: fp8_rows(w),
    "fp8_pcpt": lambda w, module: fp8_rows(w, flat=True),
    "fp8_block": lambda w, module: fp8_blocks(w),
    "fp8_block_f32": lambda w, module: fp8_blocks(w, dtype=np.float32),
    "fp8_block_e8m0": lambda w, module: fp8_powers(w),
    "fp8_block_bytes": lambda w, module: fp8_powers(w, np.uint8),
    "fp8_pb": lambda w, module: fp8_blocks(w, "weight_scale", np.float32, four=True),
    "ct_block": lambda w, module: fp8_blocks(w, "weight_scale"),
    "nvfp4": nvfp4,
    "nvfp4_a16": lambda w, module: nvfp4(w, module, inputs=False),
    "ct_nvfp4": ct_nvfp4,
    "ct_nvfp4_a16": lambda w, module: ct_nvfp4(w, module, inputs=False),
    "gptq": lambda w, module: gptq(w),
    "auto_round": lambda w, module: gptq(w, index=False),
    "gptq_v2": lambda w, module: gptq(w, 32, zeros=True, less=0),
    "gptq_v2_g128": lambda w, module: gptq(w, zeros=True, less=0),
    "awq": lambda w, module: awq(w),
    "int4_g32": lambda w, module: ct_int4(w, 32, zeros=True),
    "int4_g128": lambda w, module: ct_int4(w, 128, zeros=False),
    "mxfp4": lambda w, module: mxfp4(w),
    "int8": lambda w, module: int8_rows(w),
}
