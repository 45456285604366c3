"""The limits of comparisons: the table in `thresholds.json`, and the choice of its row.

The row is bf16 if activations, states or KV pages have 16 bits, else f32. `quantised` is added if
activations or KV pages have fewer, because one different rounding then moves a value by a whole
step of the grid: such engines are similar, not equal.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spark_engine.errors import InternalError
from spark_engine.manifest import Manifest
from spark_engine.tensors import DType

PATH = Path(__file__).with_name("thresholds.json")
ROUNDS_ACTIVATIONS = ("fp8", "fp8_channel", "fp8_block", "nvfp4_a4", "nvfp4_a8")


@dataclass(frozen=True)
class Thresholds:
    """Limits for the worst row of a tensor."""

    name: str  # the row of the table
    cosine: float  # at least this
    rel_l2: float  # at most this part of the reference row's length
    kl: float  # nats, at most, from the reference's next-token distribution
    tie: float  # logits closer than this part of the row's range may change places
    # This part of all rows may be beyond the limits. Zero unless values are rounded: then a router
    # may choose another expert for a token, which is a large but harmless difference.
    outliers: float


@dataclass(frozen=True)
class NodeLimits:
    """Limits for the outputs of one node alone, with the reference's operands."""

    name: str  # the row of the table
    exact: float  # of the worst row's relative L2 distance, for an f32 output
    rel_l2: float  # the same, for an output in 16 bits
    coded: float  # the same, for an output in 8 or 4 bits, decoded
    scale: float  # common relative error of columns (`metrics.scale_error`)
    # noise and coded_noise: relative error of a value that rounding explains.
    noise: float
    coded_noise: float


def node_limits(activation: DType) -> NodeLimits:
    """The limits of an engine with this activation dtype."""
    name = f"{activation.value} node"
    return NodeLimits(name, **_row(name))


def thresholds_for(manifests: Iterable[Manifest]) -> Thresholds:
    """The row for a comparison of these engines: the coarsest of them decides."""
    all_of = tuple(manifests)
    halves = any({DType.F16, DType.BF16} & {*vars(m.dtypes).values()} for m in all_of)
    dtype = "bf16" if halves else "f32"
    rounded = any(_rounds(m) for m in all_of)
    return load(f"{dtype} quantised" if rounded else dtype)


def load(name: str) -> Thresholds:
    """One row of the table. Raises InternalError when there is none of this name."""
    return Thresholds(name, **_row(name))


def _row(name: str) -> dict[str, float]:
    table: dict[str, dict[str, float]] = json.loads(PATH.read_text())
    if name not in table:
        raise InternalError(f"{PATH.name} has no row {name!r}; it has {sorted(table)}")
    return table[name]


def _rounds(manifest: Manifest) -> bool:
    formats = {q.format for q in manifest.quantisation}
    return bool(formats & {*ROUNDS_ACTIVATIONS}) or manifest.dtypes.kv is DType.F8E4M3
