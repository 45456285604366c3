"""Judges one node's results against its op's reference: takes the defined part, decodes, measures.

Knows what docs/graph.md leaves undefined, how quantised outputs are decoded, and the error of a
correct kernel; runs nothing. Two figures per output, since they show different faults:

    rel_l2   the worst row's distance: a value, a row, a tile that is wrong
    scale the relative error that 32 neighbouring columns share over all rows. Rounding errors
    cancel in it, so that it shows a weight scale that is off by 2 % even if every value is rounded
    to three bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.check.engines.reference import ReferenceStep
from spark_engine.check.verdicts.compare import Verdict
from spark_engine.check.verdicts.defined_values import EMITTED
from spark_engine.check.verdicts.metrics import distance, scale_error
from spark_engine.check.verdicts.thresholds import NodeLimits
from spark_engine.interface import STATE_OUT
from spark_engine.plugins.formats.numpy_codecs import FP8_BLOCK, NVFP4_BLOCK, nvfp4_decode
from spark_engine.tensors import Array

MOST_OTHER_EXPERTS = 0.01  # share of the tokens with a near tie of two experts
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class StateValue:
    """A value of the state `name`: the units `index` of its `count` units, without the scratch
    unit."""

    name: str
    index: NDArray[np.int64]
    count: int


@dataclass(frozen=True)
class Recorded:
    """One node with its operands and results in a launch of the reference.

    `states`: which of its tensors are states, or intermediate values of states, and their units.
    """

    step: ReferenceStep
    operands: tuple[NDArray[Any], ...]
    results: tuple[NDArray[Any], ...]
    states: Mapping[str, StateValue] = field(default_factory=dict)


def module_of(recorded: Recorded, weights: Collection[str]) -> str:
    """The module of the checkpoint that a node computes; `weights` are names.

    That of its largest weight. A node with states computes several modules: the common part of
    their names. A node without weights: the node's name.
    """
    step = recorded.step
    sizes: dict[str, int] = {}
    for name, array in zip(step.inputs, recorded.operands, strict=True):
        if name in weights:
            module = name.rpartition(".")[0]
            sizes[module] = sizes.get(module, 0) + array.nbytes
    if not sizes:
        return step.name.removesuffix(".y")
    largest = max(sizes, key=lambda module: sizes[module])
    if step.op is None or not step.op.stateful:
        return largest
    layer = ".".join(largest.split(".")[:2]) + "."
    parts = [module.split(".") for module in sizes if module.startswith(layer)]
    return ".".join(x[0] for x in takewhile(lambda x: len(set(x)) == 1, zip(*parts, strict=False)))


@dataclass(frozen=True)
class DefinedRows:
    """The rows and tokens of a launch with defined values."""

    rows: NDArray[np.bool_]
    tokens: NDArray[np.bool_]
    emitting: NDArray[np.bool_]

    @classmethod
    def of(cls, buffers: Mapping[str, NDArray[Any]], tile: int) -> DefinedRows:
        """From the launch's step inputs."""
        counts = buffers["counts"]
        tokens = np.asarray(np.arange(tile) < counts[:, None]).reshape(-1)
        rows = np.asarray(counts > 0)
        # without this input, every token is sampled after
        emitting = rows & np.asarray(buffers["emit"] == 1) if "emit" in buffers else tokens
        return cls(rows, tokens, emitting)


@dataclass(frozen=True)
class _Output:
    """An output's defined part on both sides. `coded`: the values were rounded to a few bits.

    `base`: the operand that the op adds its result to, if any; both sides contain it.
    """

    name: str
    got: Array
    want: Array
    coded: bool = False
    base: Array | None = None


def compare_node(
    recorded: Recorded, results: tuple[NDArray[Any], ...], masks: DefinedRows, limits: NodeLimits
) -> Iterator[Verdict]:
    """A verdict on each output of a node; a pair of codes and scales counts as one."""
    for output in _outputs(recorded, results, masks):
        if output.got.dtype.kind in "iub":
            most = MOST_OTHER_EXPERTS if recorded.step.kind == "moe_router" else 0.0
            yield _integers(output, most)
        else:
            yield _floats(output, limits)


def _outputs(
    recorded: Recorded, results: tuple[NDArray[Any], ...], masks: DefinedRows
) -> Iterator[_Output]:
    step, truth = recorded.step, recorded.results
    same = _same_experts(recorded, results)
    base = _base(recorded)
    scales: set[int] = set()
    for i, name in enumerate(step.outputs):
        got, want = results[i], truth[i]
        if i in scales:
            continue
        if name in recorded.states:
            before = recorded.operands[step.inputs.index(_before(step, i))]
            yield _state(name, got, want, before)
            continue
        pick = _mask(name, want, masks)
        if i + 1 < len(truth) and (decode := _decoder(want, truth[i + 1])):
            scales.add(i + 1)
            pair = decode(got[pick], results[i + 1][pick]), decode(want[pick], truth[i + 1][pick])
            yield _Output(name, pair[0], pair[1], True)
            continue
        if same is not None and want.dtype.kind == "f":
            pick = pick & same if pick.dtype == bool else same
        added = None if base is None or base[0] != i else base[1][pick]
        yield _Output(name, got[pick], want[pick], want.dtype == E4M3, added)


def _before(step: ReferenceStep, output: int) -> str:
    """The operand with the state before the node."""
    aliases = step.op.aliases(step.attrs) if step.op is not None else {}
    if output in aliases:
        return step.inputs[aliases[output]]
    return step.outputs[output].removesuffix(STATE_OUT)


def _state(name: str, got: Array, want: Array, before: Array) -> _Output:
    """The units of a state that the node or the reference wrote. A launch writes few units of a
    large state; the others would hide any error."""
    flat = [np.ascontiguousarray(a).reshape(len(a), -1) for a in (got, want, before)]
    raw = [a.view(f"u{a.dtype.itemsize}") for a in flat]
    wrote = (raw[0] != raw[2]) | (raw[1] != raw[2])
    touched = wrote.any(axis=1)
    coded = want.dtype == np.uint8  # e4m3 codes of KV pages
    zero = np.zeros((), want.dtype)
    parts = [np.where(wrote[touched], a[touched], zero) for a in flat[:2]]
    if coded:
        parts = [a.view(E4M3).astype(np.float32) for a in parts]
    return _Output(name, parts[0], parts[1], coded)


def _mask(name: str, array: Array, masks: DefinedRows) -> NDArray[Any]:
    """Selects the defined part of an output: valid tokens, live rows."""
    if name in EMITTED:
        return masks.emitting
    if array.ndim and array.shape[0] == len(masks.tokens):
        return masks.tokens
    if array.ndim and array.shape[0] == len(masks.rows):
        return masks.rows
    return np.ones(array.shape[:1], np.bool_)


def _decoder(codes: Array, scale: Array) -> Any:
    """Decodes codes and the next output, their scales; None if they are no such pair."""
    if codes.ndim != 2 or scale.ndim != 2 or len(codes) != len(scale):
        return None
    width = codes.shape[1]
    if (
        codes.dtype == np.uint8
        and scale.dtype == E4M3
        and 2 * width == NVFP4_BLOCK * scale.shape[1]
    ):
        return nvfp4_decode
    blocks = -(-width // FP8_BLOCK)
    if codes.dtype == E4M3 and scale.dtype == np.float32 and scale.shape[1] in (1, blocks):
        return _fp8_decode
    return None


def _fp8_decode(codes: Array, scale: Array) -> Array:
    """By the scales of a row's blocks, or of the row."""
    each = codes.shape[1] if scale.shape[1] == 1 else FP8_BLOCK
    wide: Array = scale.repeat(each, axis=1)[:, : codes.shape[1]]
    return np.asarray(np.multiply(codes.astype(np.float32), wide))


def _same_experts(recorded: Recorded, results: tuple[NDArray[Any], ...]) -> Any:
    """bool [tokens] of a router: whether both sides chose the same experts. None for other
    nodes."""
    if recorded.step.kind != "moe_router":
        return None
    return np.asarray((results[0] == recorded.results[0]).all(axis=1))


def _base(recorded: Recorded) -> tuple[int, Array] | None:
    """(output, array) if a fused node adds its result to an operand."""
    op, attrs = recorded.step.op, recorded.step.attrs
    if op is None or op.fuses is None:
        return None
    chain = op.fuses(attrs)
    operands = dict(zip(op.names(attrs, len(recorded.operands)), recorded.operands, strict=True))
    for part in chain.parts:
        added = [name for name in part.inputs if name in operands]
        if part.op == "Add" and len(added) == 1 and part.outputs[0] in chain.results:
            return chain.results.index(part.outputs[0]), operands[added[0]]
    return None


def _integers(output: _Output, most: float) -> Verdict:
    wrong: NDArray[np.bool_] = np.asarray(output.got != output.want, np.bool_)
    wrong = wrong.reshape(output.got.shape[0], -1 if wrong.size else 0)
    part = float(wrong.mean()) if wrong.size else 0.0
    rows = wrong.any(axis=1)
    tolerated = int(rows.sum()) <= (max(1, most * rows.size) if most else 0)
    # Whether the difference is a near tie: one expert replaces another, or two swap places.
    pairs = zip(output.got[rows].tolist(), output.want[rows].tolist(), strict=True)
    tolerated = tolerated and all(len(set(want) - set(got)) <= 1 for got, want in pairs)
    reason = "" if tolerated else f"{part:.2%} of the values differ"
    return Verdict(output.name, reason, {"differ": part}, hard=bool(reason))


def _floats(output: _Output, limits: NodeLimits) -> Verdict:
    name, exact = output.name, output.want.dtype == np.float32 and not output.coded
    a, b = output.got.astype(np.float64), output.want.astype(np.float64)
    unread = np.isnan(a) & np.isnan(b) | np.isinf(a) & (a == b)
    if not np.isfinite(a[~unread]).all():
        return Verdict(name, "NaN or infinity where the reference has none", hard=True)
    if not np.isfinite(b[~unread]).all():
        return Verdict(name, "numbers where the reference is NaN or infinite", hard=True)
    a, b = np.where(unread, 0, a), np.where(unread, 0, b)
    d = distance(a, b)
    base = None if output.base is None else output.base.astype(np.float64)
    added = b if base is None else b - np.where(np.isfinite(base), base, 0)
    noise = limits.coded_noise if output.coded else limits.noise
    scale = scale_error(a - b, added, b, 0.0 if exact else noise)
    most = limits.coded if output.coded else limits.exact if exact else limits.rel_l2
    figures = {"rel_l2": d.rel_l2, "scale": scale, "max_abs": d.max_abs}
    complaints = [
        (
            value / limit,
            f"differs from its reference by {_percent(value)} (limit {_percent(limit)})",
        )
        for value, limit in ((d.rel_l2, most), (scale, limits.scale))
        if value > limit
    ]
    reason = max(complaints)[1] if complaints else ""
    return Verdict(name, reason, figures, hard=bool(reason))


def _percent(part: float) -> str:
    """`0.0204` -> `2.0 %`."""
    return f"{100 * part:#.2g} %" if part < 0.1 else f"{100 * part:.0f} %"
