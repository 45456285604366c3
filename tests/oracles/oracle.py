"""An independent float64 computation of a whole checkpoint, in numpy, to hold engines against.

Written from the published definition of the architecture and of the storage formats, with its
own reading and its own dequantisation, so that it shares no mistake with the package: it imports
nothing of it. Every position is computed with full attention and the token-by-token recurrence;
there are no pages, no chunks, no batches and no fusions.

Quantised activations make a computation discontinuous: an activation on the border of
two codes may fall on either side of it in float32. Decisions are therefore taken on float32
values, as an engine takes them, and `Result.margin` says how close the nearest one was to its
border, so that a test can choose inputs that have one right answer.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

F64 = NDArray[np.float64]
E4M3_MAX = 448.0
FINE = 3e-5
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = np.unique(
    np.abs(np.delete(np.arange(256, dtype=np.uint8), [127, 255]).view(ml_dtypes.float8_e4m3fn))
).astype(np.float64)
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}


@dataclass
class Result:
    """Everything an engine may be compared with, for one sequence of T tokens.

    `margin` is the distance of the nearest rounding or routing decision from its border, as a
    part of the largest magnitude of the row that it was taken in. Decisions between codes that
    differ by less than FINE of that magnitude do not count: an error there cannot be seen.
    """

    logits: F64 = field(default_factory=lambda: np.zeros((0, 0)))  # [T, V]
    hidden: F64 = field(default_factory=lambda: np.zeros((0, 0)))  # after the final norm, [T, H]
    layers: list[F64] = field(default_factory=list)  # residual stream after each, [T, H]
    conv: dict[int, F64] = field(default_factory=dict)  # layer -> [K-1, C], oldest first
    gdn: dict[int, F64] = field(default_factory=dict)  # layer -> [Hv, Dv, Dk]
    keys: dict[int, F64] = field(default_factory=dict)  # layer -> [T, kv_heads, D]
    values: dict[int, F64] = field(default_factory=dict)
    margin: float = np.inf


def forward(checkpoint: Path, ids: Sequence[int], fp8_kv: bool = False) -> Result:
    """Runs `ids` through the checkpoint folder. Raises KeyError when a tensor is missing.

    `fp8_kv`: keys and values are attended to as an FP8 cache gives them back.
    """
    return _Net(checkpoint, fp8_kv).forward(np.asarray(ids))


def _files(folder: Path) -> _Files:
    stats = ((p.name, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()))
    return _read(folder, tuple(stats))


@lru_cache(maxsize=1)
def _read(folder: Path, stats: object) -> _Files:
    return _Files(folder)


class _Files:
    """Tensors by name, and how each module is quantised."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, Any] = {}
        self.made: dict[str, F64] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, info in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
                flat = np.frombuffer(info["data"], DTYPES[info["dtype"]])
                self.tensors[name] = flat.reshape(info["shape"])
        stem = next(n for n in self.tensors if n.endswith("embed_tokens.weight"))
        self.prefix = stem.removesuffix("embed_tokens.weight")
        self.algorithms, self.default = self._algorithms(folder)

    def _algorithms(self, folder: Path) -> tuple[dict[str, str], str]:
        """modelopt's algorithm per module, and for modules that are not named."""
        quantisation = self.config.get("quantization_config", {})
        separate = folder / "hf_quant_config.json"
        if separate.exists():
            quantisation = json.loads(separate.read_text())["quantization"]
        layers = quantisation.get("quantized_layers", {})
        default = quantisation.get("quant_algo", "")
        return {name: row["quant_algo"] for name, row in layers.items()}, default

    def algorithm(self, module: str) -> str:
        """`FP8`, `NVFP4`, `W4A16_NVFP4` or empty, as modelopt names them."""
        experts = module.split(".experts.")[0] + ".experts"
        for name in (module, experts):
            for pattern, algorithm in self.algorithms.items():
                if name == pattern or fnmatch.fnmatch(name, pattern):
                    return algorithm
        return self.default

    def get(self, name: str) -> F64:
        return self.once(name, lambda: self.tensors[name].astype(np.float64))

    def once(self, name: str, make: Callable[[], F64]) -> F64:
        """What `make` returns, made once and read-only."""
        if name not in self.made:
            self.made[name] = np.asarray(make())
            self.made[name].flags.writeable = False
        return self.made[name]

    def scalar(self, name: str) -> float:
        return float(self.get(name).reshape(-1)[0])


def nibbles(words: NDArray[np.int32], places: Sequence[int] = range(8)) -> F64:
    """i32 [R, C] -> the codes [R, 8C]; code j of eight is nibble places[j] of a word."""
    parts = [words.view(np.uint32) >> np.uint32(4 * place) & np.uint32(15) for place in places]
    return np.stack(parts, axis=-1).reshape(len(words), -1).astype(np.float64)


def e2m1_values(packed: NDArray[np.uint8]) -> F64:
    """u8 [N, K/2] -> [N, K]; the low nibble comes first, bit 3 is the sign."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return np.asarray(np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7])


def spread(scale: F64, rows: int, columns: int, shape: tuple[int, int]) -> F64:
    """Each scale repeated over its block of `rows` x `columns`, cut to `shape`."""
    tiled = np.kron(scale, np.ones((rows, columns)))
    return np.asarray(tiled[: shape[0], : shape[1]], np.float64)


class _Rounder:
    """Rounds activations as float32 hardware does, and remembers the closest decision."""

    def __init__(self) -> None:
        self.margin = np.inf

    def note(self, distance: F64, size: F64) -> None:
        """`distance` from a border, in the unit of `size`, the largest magnitude of its row."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(size > 0, distance / size, np.inf)
        self.margin = min(self.margin, float(ratio.min(initial=np.inf)))

    def nearest(self, x: NDArray[Any], grid: F64, size: F64) -> F64:
        """`x` on the symmetric `grid`, ties to the even code, beyond its end to its end."""
        magnitude = np.abs(x.astype(np.float64))
        middle = (grid[1:] + grid[:-1]) / 2
        below = np.searchsorted(middle, magnitude, side="left")
        tie = magnitude == middle[np.minimum(below, len(middle) - 1)]
        code = below + (tie & (below % 2 == 1))
        borders = np.concatenate([[-np.inf], middle, [np.inf]])
        gap = np.minimum(magnitude - borders[below], borders[below + 1] - magnitude)
        steps = np.concatenate([np.diff(grid), [np.inf]])
        self.note(np.where(steps[below] < FINE * size, np.inf, gap), size)
        return np.asarray(np.sign(x) * grid[np.minimum(code, len(grid) - 1)], np.float64)

    def fp8(self, x: F64, scale: float) -> F64:
        """Static e4m3: the values that are multiplied, before `scale` is applied again."""
        y = x.astype(np.float32) / np.float32(scale)
        return self.nearest(y, E4M3, _row_size(y))

    def fp8_blocks(self, x: F64, block: int = 128) -> F64:
        """e4m3 with one scale per token and so many columns; dequantised."""
        out = np.zeros_like(x)
        for start in range(0, x.shape[1], block):
            part = x[:, start : start + block].astype(np.float32)
            amax = np.abs(part).max(axis=1, keepdims=True)
            scale = np.where(amax > 0, amax / np.float32(E4M3_MAX), np.float32(1))
            y = part / scale
            out[:, start : start + block] = self.nearest(y, E4M3, _row_size(y)) * scale
        return out

    def nvfp4(self, x: F64, scale: float) -> F64:
        """e2m1 with an e4m3 scale per token and 16 columns; before `scale` is applied again."""
        y = x.astype(np.float32).reshape(x.shape[0], -1, 16) / np.float32(scale)
        block = np.minimum(np.abs(y).max(axis=2, keepdims=True) / np.float32(6), E4M3_MAX)
        block = block.astype(np.float32)
        s = self.nearest(block, E4M3, np.maximum(block.max(axis=1, keepdims=True), 1e-30))
        with np.errstate(divide="ignore", invalid="ignore"):
            unit = np.where(s > 0, y / s.astype(np.float32), 0).astype(np.float32)
        # The error of one element is as large as its row is, whatever its own block holds.
        size = np.where(s > 0, _row_size(y.reshape(x.shape))[..., None] / np.maximum(s, 1e-30), 0)
        return (self.nearest(unit, E2M1, size) * s).reshape(x.shape)


def _row_size(x: NDArray[Any]) -> F64:
    return np.asarray(np.abs(x).max(axis=-1, keepdims=True), np.float64)


class _Net:
    """The network of one checkpoint; `forward` fills a `Result`."""

    def __init__(self, folder: Path, fp8_kv: bool = False) -> None:
        self.files, self.fp8_kv = _files(folder), fp8_kv
        self.c: dict[str, Any] = self.files.config.get("text_config", self.files.config)
        self.eps = float(self.c.get("rms_norm_eps", 1e-6))
        self.rounder = _Rounder()
        self.result = Result()

    def linear(self, x: F64, module: str) -> F64:
        """x [T, K] through a module of any format -> [T, N]; the format shows in its tensors."""
        tensors = self.files.tensors
        if f"{module}.qweight" in tensors or f"{module}.weight_zero_point" in tensors:
            return np.asarray(x @ self.files.once(module, lambda: self._int4(module)).T)
        if f"{module}.weight_packed" in tensors:
            return self._compressed(x, module)
        weight = tensors[f"{module}.weight"]
        if weight.dtype == np.uint8:
            return self._modelopt_nvfp4(x, module)
        if f"{module}.weight_scale_inv" in tensors:
            w = self.files.once(module, lambda: self._blocks(module))
            return np.asarray(self.rounder.fp8_blocks(x) @ w.T)
        if f"{module}.weight_scale" in tensors:
            rows = self.files.get(f"{module}.weight_scale").reshape(-1, 1)
            w = self.files.once(module, lambda: weight.astype(np.float64) * rows)
            if f"{module}.input_scale" not in tensors:
                return np.asarray(self.rounder.fp8_blocks(x, x.shape[1]) @ w.T)
            scale_in = self.files.scalar(f"{module}.input_scale")
            return np.asarray(self.rounder.fp8(x, scale_in) @ w.T * scale_in)
        return np.asarray(x @ self.files.get(f"{module}.weight").T)

    def _blocks(self, module: str) -> F64:
        weight = self.files.tensors[f"{module}.weight"]
        scale = self.files.get(f"{module}.weight_scale_inv")
        return np.asarray(weight.astype(np.float64) * spread(scale, 128, 128, weight.shape))

    def _int4(self, module: str) -> F64:
        """W [N, K] of GPTQ (first version), AWQ, or compressed-tensors with zero points."""
        tensors = self.files.tensors
        if f"{module}.qweight" not in tensors:
            codes = nibbles(tensors[f"{module}.weight_packed"])
            zeros = nibbles(tensors[f"{module}.weight_zero_point"].T).T[: len(codes)]
            scales = self.files.get(f"{module}.weight_scale")
        else:
            words, zero_words = tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"]
            scales = self.files.get(f"{module}.scales").T
            if words.shape[1] == len(scales):
                codes, zeros = nibbles(words.T), (nibbles(zero_words) + 1).T % 16
            else:
                codes, zeros = (nibbles(w, (0, 4, 1, 5, 2, 6, 3, 7)).T for w in (words, zero_words))
        columns = codes.shape[1] // scales.shape[1]
        return (codes - np.repeat(zeros, columns, 1)) * np.repeat(scales, columns, 1)

    def _e2m1(self, module: str, stem: str, scale: float) -> F64:
        blocks = np.repeat(self.files.get(f"{module}.weight_scale"), 16, axis=1)
        return e2m1_values(self.files.tensors[f"{module}.{stem}"]) * blocks * scale

    def _modelopt_nvfp4(self, x: F64, module: str) -> F64:
        whole = self.files.scalar(f"{module}.weight_scale_2")
        w = self.files.once(module, lambda: self._e2m1(module, "weight", whole))
        if self.files.algorithm(module) != "NVFP4":
            return x @ w.T
        scale = self.files.scalar(f"{module}.input_scale")
        return self.rounder.nvfp4(x, scale) @ w.T * scale

    def _compressed(self, x: F64, module: str) -> F64:
        whole = 1 / self.files.scalar(f"{module}.weight_global_scale")
        w = self.files.once(module, lambda: self._e2m1(module, "weight_packed", whole))
        if f"{module}.input_global_scale" not in self.files.tensors:
            return x @ w.T
        scale = 1 / self.files.scalar(f"{module}.input_global_scale")
        return self.rounder.nvfp4(x, scale) @ w.T * scale

    def forward(self, ids: NDArray[np.int64]) -> Result:
        p = self.files.prefix
        embedding = self.files.get(f"{p}embed_tokens.weight")
        x = embedding[ids]
        for i, kind in enumerate(self.c["layer_types"]):
            mixer = self.delta_net if kind == "linear_attention" else self.attention
            x = x + mixer(self.norm(x, f"{p}layers.{i}.input_layernorm"), i)
            y = self.norm(x, f"{p}layers.{i}.post_attention_layernorm")
            x = x + self.mlp(y, f"{p}layers.{i}.mlp")
            self.result.layers.append(x)
        self.result.hidden = self.norm(x, f"{p}norm")
        self.result.logits = self.head(self.result.hidden)
        self.result.margin = self.rounder.margin
        return self.result

    def head(self, x: F64) -> F64:
        """Logits of values after the final norm; a tied head is the embedding."""
        if any(n.startswith("lm_head.weight") for n in self.files.tensors):
            return self.linear(x, "lm_head")
        return np.asarray(x @ self.files.get(f"{self.files.prefix}embed_tokens.weight").T)

    def norm(self, x: F64, module: str) -> F64:
        """Zero-centred RMS norm over the last axis."""
        return _unit(x, self.eps) * (1 + self.files.get(f"{module}.weight"))

    def delta_net(self, x: F64, i: int) -> F64:
        """The gated-delta-net mixer: x [T, H] -> [T, H]; leaves its states in the result."""
        c, m = self.c, f"{self.files.prefix}layers.{i}.linear_attn"
        hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        raw = self.linear(x, f"{m}.in_proj_qkv")
        z = self.linear(x, f"{m}.in_proj_z").reshape(-1, hv, dv)
        beta = _sigmoid(self.linear(x, f"{m}.in_proj_b"))
        alpha = self.linear(x, f"{m}.in_proj_a") + self.files.get(f"{m}.dt_bias")
        decay = np.exp(-np.exp(self.files.get(f"{m}.A_log")) * np.logaddexp(0, alpha))
        mixed = self._conv(raw, i, self.files.get(f"{m}.conv1d.weight")[:, 0])
        q, k, v = np.split(mixed, [hk * dk, 2 * hk * dk], axis=1)
        q, k = (_direction(a.reshape(-1, hk, dk)).repeat(hv // hk, axis=1) for a in (q, k))
        state, out = np.zeros((hv, dv, dk)), np.zeros((len(x), hv, dv))
        for t, value in enumerate(v.reshape(-1, hv, dv)):
            state *= decay[t, :, None, None]
            delta = beta[t, :, None] * (value - np.einsum("hvk,hk->hv", state, k[t]))
            state += np.einsum("hv,hk->hvk", delta, k[t])
            out[t] = np.einsum("hvk,hk->hv", state, q[t]) / np.sqrt(dk)
        self.result.gdn[i] = state
        y = _unit(out, self.eps) * self.files.get(f"{m}.norm.weight") * z * _sigmoid(z)
        return self.linear(y.reshape(len(x), -1), f"{m}.out_proj")

    def _conv(self, raw: F64, i: int, weight: F64) -> F64:
        """Causal depthwise convolution and SiLU; the last tap is the current token's."""
        taps = weight.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, raw.shape[1])), raw])
        self.result.conv[i] = padded[len(padded) - (taps - 1) :]
        y = sum(padded[j : j + len(raw)] * weight[:, j] for j in range(taps))
        return np.asarray(y * _sigmoid(np.asarray(y)))

    def attention(self, x: F64, i: int) -> F64:
        """Gated softmax attention: x [T, H] -> [T, H]; leaves keys and values in the result."""
        y, keys, values = self.attend(x, f"{self.files.prefix}layers.{i}.self_attn")
        self.result.keys[i], self.result.values[i] = keys, values
        return y

    def attend(self, x: F64, m: str, empty: int = 0) -> tuple[F64, F64, F64]:
        """(the mixer's result, keys, values) of module `m`. The cache holds zeros for the `empty`
        first positions."""
        c, length = self.c, len(x)
        nq, nkv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, gate = np.split(self.linear(x, f"{m}.q_proj").reshape(length, nq, 2 * d), 2, axis=2)
        k = self.linear(x, f"{m}.k_proj").reshape(length, nkv, d)
        v = self.linear(x, f"{m}.v_proj").reshape(length, nkv, d)
        q = self._rope(self.norm(q, f"{m}.q_norm"))
        k = self._rope(self.norm(k, f"{m}.k_norm"))
        if self.fp8_kv:
            k, v = self._cached(k, m, "k"), self._cached(v, m, "v")
        k[:empty] = v[:empty] = 0
        shared = nq // nkv
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(shared, axis=1)) / np.sqrt(d)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        o = np.einsum("hqk,khd->qhd", _softmax(scores), v.repeat(shared, axis=1))
        return self.linear((o * _sigmoid(gate)).reshape(length, -1), f"{m}.o_proj"), k, v

    def _cached(self, x: F64, m: str, side: str) -> F64:
        """k or v through e4m3 codes, by modelopt's scale, compressed-tensors', or 1."""
        names = (f"{m}.{side}_proj.{side}_scale", f"{m}.{side}_scale")
        found = [self.files.scalar(n) for n in names if n in self.files.tensors]
        scale = found[0] if found else 1.0
        return self.rounder.fp8(x, scale) * scale

    def _rope(self, x: F64) -> F64:
        """Rotates the first `rotary` dimensions of x [T, heads, D], pairing i with i + half."""
        rope = self.c.get("rope_parameters") or self.c
        part = rope.get("partial_rotary_factor", self.c.get("partial_rotary_factor", 0.25))
        half = int(x.shape[2] * part) // 2
        angle = np.arange(len(x))[:, None] * rope["rope_theta"] ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half : 2 * half]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], axis=2)

    def mlp(self, x: F64, m: str) -> F64:
        """The feed-forward half of a layer, dense or a mixture."""
        if f"{m}.gate.weight" not in self.files.tensors:
            return self._swiglu(x, m)
        out = self._swiglu(x, f"{m}.shared_expert")
        out *= _sigmoid(self.linear(x, f"{m}.shared_expert_gate"))
        p = _softmax(self.linear(x, f"{m}.gate"))
        k = self.c["num_experts_per_tok"]
        order = np.argsort(-p, axis=1, kind="stable")
        ranked = np.take_along_axis(p, order, axis=1)
        if k < p.shape[1]:
            self.rounder.note(ranked[:, k - 1] - ranked[:, k], ranked[:, 0])
        for t, chosen in enumerate(order[:, :k]):
            for e in chosen:
                weight = p[t, e] / p[t, chosen].sum()
                out[t] += weight * self._expert(x[t : t + 1], m, int(e))[0]
        return out

    def _expert(self, x: F64, m: str, e: int) -> F64:
        fused = self.files.tensors.get(f"{m}.experts.gate_up_proj")
        if fused is None:
            return self._swiglu(x, f"{m}.experts.{e}")
        gate, up = np.split(x @ fused[e].astype(np.float64).T, 2, axis=1)
        down = self.files.tensors[f"{m}.experts.down_proj"][e].astype(np.float64)
        return np.asarray((gate * _sigmoid(gate) * up) @ down.T)

    def _swiglu(self, x: F64, m: str) -> F64:
        gate = self.linear(x, f"{m}.gate_proj")
        return self.linear(gate * _sigmoid(gate) * self.linear(x, f"{m}.up_proj"), f"{m}.down_proj")


def _unit(x: F64, eps: float) -> F64:
    return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def _direction(x: F64) -> F64:
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6))


def _sigmoid(x: F64) -> F64:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))
