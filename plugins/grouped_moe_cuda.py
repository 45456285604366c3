"""The CUDA side of `grouped_moe`: packed experts, and a tactic for few and one for more tokens.

Knows how the kernels' work is cut; the layout of weights is expert_tiles'. Knows no model.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from spark_engine.kernel import (
    Arg,
    Attrs,
    Cuda,
    Launch,
    Pack,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins import expert_tiles as et
from spark_engine.tensors import Array, DType, TensorSpec

WARPS = 8
THREADS = WARPS * 32
FEW = 4  # tokens that run pair by pair
SERVED = ("nvfp4", "dense")

# ---- packing ---------------------------------------------------------------------------------


def _apply(attrs: Attrs, array: Array, up: bool, scale: bool) -> Array:
    pack = et.pack_scales if scale else et.pack_codes
    if attrs["format"] == "dense":
        pack = et.pack_dense
    out = np.empty(_shape(attrs, array.shape, up, scale), np.uint8 if scale else array.dtype)
    for packed, rows in zip(out, array, strict=True):
        whole = np.ascontiguousarray(et.arranged(rows, up))
        packed[...] = pack(whole.view(np.uint8)).view(out.dtype)
    return out


def _infer(attrs: Attrs, spec: TensorSpec, up: bool, scale: bool) -> TensorSpec:
    dtype = DType.U8 if scale else spec.dtype
    return dataclasses.replace(spec, dtype=dtype, shape=_shape(attrs, spec.dims, up, scale))


def _shape(attrs: Attrs, dims: tuple[int, ...], up: bool, scale: bool) -> tuple[int, int, int]:
    experts, n, width = dims
    k_each = 16 if scale else 1 if attrs["format"] == "dense" else 2
    return experts, et.rows_of(n, up), et.padded(width, et.UNIT // k_each)


def _pack(operand: str) -> Pack:
    """The pack of an operand by its name in docs/graph.md, where the format is served."""
    up, scale = operand.startswith("w13"), operand.endswith("scale")

    def infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
        return _infer(attrs, spec, up, scale) if _packs(attrs, spec, scale) else spec

    def apply(attrs: Attrs, array: Array) -> Array:
        spec = TensorSpec(operand, DType.of(array.dtype), array.shape)
        return _apply(attrs, array, up, scale) if _packs(attrs, spec, scale) else array

    return Pack(infer, apply)


def _packs(attrs: Attrs, spec: TensorSpec, scale: bool) -> bool:
    want = {"nvfp4": DType.F8E4M3 if scale else DType.U8, "dense": DType.BF16}
    ragged = attrs["format"] == "dense" and spec.dims[2] % 16
    return not ragged and want.get(str(attrs["format"])) is spec.dtype


# Operand index -> pack, by format: the third input on is w13, its scale …
_BY_FORMAT = {
    "nvfp4": {3: _pack("w13"), 4: _pack("w13_scale"), 6: _pack("w2"), 7: _pack("w2_scale")},
    "dense": {3: _pack("w13"), 4: _pack("w2")},
}


def _either(index: int) -> Pack:
    def chosen(attrs: Attrs) -> Pack | None:
        return _BY_FORMAT.get(str(attrs["format"]), {}).get(index)

    def infer(attrs: Attrs, spec: TensorSpec) -> TensorSpec:
        pack = chosen(attrs)
        return pack.infer(attrs, spec) if pack else spec

    def apply(attrs: Attrs, array: Array) -> Array:
        pack = chosen(attrs)
        return pack.apply(attrs, array) if pack else array

    return Pack(infer, apply)


# ---- planning --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """The sizes of one node."""

    tokens: int
    chosen: int  # experts a token, the shared one included
    experts: int
    hidden: int
    inner: int
    dense: bool

    @property
    def pairs(self) -> int:
        return self.tokens * self.chosen

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner * (2.0 if self.dense else 0.5625)

    @property
    def hit(self) -> float:
        """Experts that uniform routing hits."""
        return self.experts * (1 - (1 - self.chosen / self.experts) ** self.tokens)


def problem(attrs: Attrs, specs: Specs) -> Problem:
    """The sizes, from packed specs. A dense I counts with its padding, which holds zeros."""
    x, ids = specs[:2]
    dense = attrs["format"] == "dense"
    hidden = x.dims[1]
    experts, _, width = specs[4 if dense else 6].dims
    if dense:
        return Problem(x.dims[0], ids.dims[1], experts, hidden, specs[3].dims[1] // 2, dense)
    return Problem(x.dims[0], ids.dims[1], experts, hidden, specs[5].dims[1] // 2, dense)


def split(k: int) -> int:
    """Warps that share a dot product of k: two units each where there are as many."""
    units = -(-k // 64)
    ways = math.gcd(units, WARPS)
    return ways // 2 if ways > 1 and units == ways else ways


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    kind = str(attrs["format"])
    if kind not in SERVED:
        return f"format {kind} has no CUDA kernel yet; the formats are {', '.join(SERVED)}"
    if specs[0].dtype is not DType.BF16 or attrs["dtype"] != "bf16":
        return f"x is {specs[0].dtype} and dtype {attrs['dtype']}; only bf16 is served"
    if kind == "dense" and not all(s.dtype is DType.BF16 for s in specs[3:5]):
        return f"w13 is {specs[3].dtype}; only bf16 experts are served: cast them when lowering"
    p = problem(attrs, specs)
    if p.dense and (specs[3].dims[2], specs[4].dims[2]) != (
        et.padded(p.hidden, et.UNIT),
        et.padded(p.inner, et.UNIT),
    ):
        return f"H = {p.hidden} and I; both must be multiples of 16"
    if p.hidden % 16 or p.inner % 16:
        return f"H = {p.hidden} and I = {p.inner}; both must be multiples of 16"
    for k in (p.hidden, p.inner):
        if -(-k // 64) // split(k) > 4:
            return f"a row of {k} weights is more than the fragments that fit in registers"
    return None


def refuse_grouped(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what `up` and `down` cannot hold."""
    reason = _refuse(attrs, specs, target)
    if reason:
        return reason
    p = problem(attrs, specs)
    need = _shared(p, target, _columns(p))
    if need + 8192 > target.shared_bytes:
        return f"{p.tokens} tokens need {need} bytes of shared memory; split the launch"
    return None


def refuse_each(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses more than a few tokens."""
    reason = _refuse(attrs, specs, target)
    if reason:
        return reason
    p = problem(attrs, specs)
    if p.tokens > FEW or p.dense:
        return f"{p.tokens} tokens of format {attrs['format']}; up to {FEW} of nvfp4 are served"
    turns = -(-p.chosen // (WARPS // split(p.inner))) * (-(-p.inner // 64) // split(p.inner))
    if turns > 10:
        return f"{p.chosen} experts a token of {p.inner} do not fit in registers"
    return None


def _columns(p: Problem) -> int:
    """Columns of 8 tokens that a block of work has."""
    return 1 if p.tokens <= 128 or p.dense else 2


def _depth(p: Problem, target: Target) -> int:
    if p.dense:
        return 2 if target.hopper else 1
    return 4 if target.hopper else 3


def _buffers(p: Problem, nt: int) -> int:
    return 2 if nt == 1 and not p.dense else 1


def _resident(p: Problem, target: Target, nt: int) -> int:
    return (
        2 if target.hopper and not p.dense and 2 * (_shared(p, target, nt) + 4096) < 230_000 else 1
    )


def _shared(p: Problem, target: Target, nt: int) -> int:
    stage = 4 * (2048 if p.dense else 576)
    parts = WARPS * 4 * nt * 512
    return WARPS * _depth(p, target) * stage + _buffers(p, nt) * parts + et.padded(2 * p.pairs, 16)


def _defines(p: Problem, target: Target, nt: int) -> tuple[tuple[str, str], ...]:
    sizes = {
        "HIDDEN": p.hidden,
        "INNER": p.inner,
        "EXPERTS": p.experts,
        "K1": p.chosen,
        "UP_WK": split(p.hidden),
        "DOWN_WK": split(p.inner),
        "NT": nt,
        "DEPTH": _depth(p, target),
        "BUFFERS": _buffers(p, nt),
        "RESIDENT": _resident(p, target, nt),
        "DENSE": int(p.dense),
    }
    return tuple((name, str(value)) for name, value in sizes.items())


def _input(*indices: int) -> tuple[Arg, ...]:
    return tuple(Pointer("input", i) for i in indices)


def _operands(p: Problem) -> tuple[tuple[Arg, ...], tuple[Arg, ...]]:
    """Weight, scale and scale2 of w13 and of w2. Dense weights have no scales: any pointer."""
    if p.dense:
        return _input(3, 3, 3), _input(4, 4, 4)
    return _input(3, 4, 5), _input(6, 7, 8)


def plan_grouped(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """up, down, combine."""
    p = problem(attrs, specs)
    nt = _columns(p)
    defines, shared = _defines(p, target, nt), _shared(p, target, nt)
    w13, w2 = _operands(p)
    h, parts, tokens = Pointer("scratch", 0), Pointer("scratch", 1), Scalar("i32", p.tokens)
    grid = (target.sms * _resident(p, target, nt), 1, 1)
    block = (THREADS, 1, 1)
    up = Launch("moe_up", grid, block, (*_input(0, 1), *w13, h, tokens), shared, defines=defines,
                overlaps=True)  # fmt: skip
    down = Launch("moe_down", grid, block, (h, *_input(1), *w2, parts, tokens), shared,
                  defines=defines, overlaps=True)  # fmt: skip
    threads = min(256, max(32, et.padded(p.hidden // 4, 32)))
    combine = Launch("moe_combine", (p.tokens, 1, 1), (threads, 1, 1),
                     (*_input(1, 2), parts, Pointer("output", 0)), defines=defines,
                     overlaps=True)  # fmt: skip
    scratch = (Scratch(p.pairs * p.inner * 2), Scratch(p.pairs * p.hidden * 4))
    return Plan((up, down, combine), scratch)


def plan_each(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """each_up, each_down."""
    p = problem(attrs, specs)
    defines = _defines(p, target, 1)
    w13, w2 = _operands(p)
    h = Pointer("scratch", 0)
    groups = et.padded(p.inner, 32) // 32
    steps = -(-groups // (WARPS // split(p.hidden)))
    up = Launch("each_up", (2 * steps, p.pairs, 1), (THREADS, 1, 1), (*_input(0, 1), *w13, h),
                defines=defines, overlaps=True)  # fmt: skip
    down = Launch("each_down", (-(-p.hidden // 16), p.tokens, 1), (THREADS, 1, 1),
                  (h, *_input(1, 2), *w2, Pointer("output", 0)), defines=defines,
                  overlaps=True)  # fmt: skip
    return Plan((up, down), (Scratch(p.pairs * p.inner * 2),))


def cost_grouped(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Experts hit, read once, and the latency of three launches."""
    p = problem(attrs, specs)
    return 1.15 * p.hit * p.expert_bytes / target.bandwidth + 9e-6


def cost_each(attrs: Attrs, specs: Specs, target: Target) -> float:
    """Every pair's expert, read again where it is shared, and two launches."""
    p = problem(attrs, specs)
    return 1.15 * p.pairs * p.expert_bytes / target.bandwidth + 4e-6


CUDA = Cuda(
    tactics=(
        Tactic("each", "grouped_moe.cu", refuse_each, plan_each, cost_each),
        Tactic("grouped", "grouped_moe.cu", refuse_grouped, plan_grouped, cost_grouped),
    ),
    packs={i: _either(i) for i in (3, 4, 6, 7)},
)
