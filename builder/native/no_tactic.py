"""The error for nodes that no tactic runs: their values, the distinct reasons, what serves them.

Knows the contracts of ops and tactics; knows no single op.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from spark_engine.builder.graph.nodes import Ops, attrs_of, spec_of
from spark_engine.builder.native.program import BucketTactics
from spark_engine.builder.native.tactics import TacticChoice
from spark_engine.builder.plan.buckets import Size
from spark_engine.errors import OptionError
from spark_engine.kernel import TARGETS, Target
from spark_engine.operand import Role

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    Untaken = tuple[gs.Node, Size, TacticChoice]

NAMED = 3  # tactics named per reason
SHOWN = (Role.ACTIVATION, Role.WEIGHT, Role.SCALE)  # roles with shapes that the model decides


def check(buckets: Iterable[BucketTactics], target: Target, ops: Ops) -> None:
    """Raises OptionError naming every op that no tactic runs: its first node with attributes and
    matrices, then each distinct reason with its tactics."""
    missing: dict[str, list[Untaken]] = {}
    for bucket in buckets:
        for node, choice in bucket.nodes:
            if choice.tactic is None:
                missing.setdefault(node.op, []).append((node, bucket.size, choice))
    if missing:
        names = sorted(missing)
        lines = [line for name in names for line in _lines(missing[name], ops)]
        ends = [_served(missing[name][0], ops) for name in names]
        if fused := [name for name in names if name in ops and ops[name].fuses is not None]:
            ends.append(f"--no-fuse leaves {', '.join(fused)} in parts that may have one")
        raise OptionError(
            f"--target {target.name}: no CUDA tactic yet for {', '.join(names)}\n"
            + "\n".join([*lines, *ends])
        )


def _served(untaken: Untaken, ops: Ops) -> str:
    """Which target has kernels for the node, or that none has, and why the first tactic has not."""
    node, size, choice = untaken
    specs = tuple(spec_of(tensor).bind(size.dims) for tensor in node.inputs)
    if op := ops.get(node.op):
        attrs = attrs_of(node, op)
        for target in TARGETS.values():
            if any(t.refuse(attrs, specs, target) is None for t in op.cuda.tactics):
                return f"--target {target.name} has kernels for {node.op} of this size"
    reasons = [f": {reason}" for reason in choice.refused.values()] or [""]
    return f"no GPU target serves {node.op} of this size{reasons[0]}"


def _lines(untaken: Sequence[Untaken], ops: Ops) -> Iterator[str]:
    node, size, choice = untaken[0]
    nodes, buckets = ({n.name for n, _, _ in untaken}, {s.file for _, s, _ in untaken})
    where = f"{node.name} in {size.file.removesuffix('.engine')}"
    yield f"  {node.op}: {where} (nodes: {len(nodes)}, buckets: {len(buckets)})"
    yield f"    {', '.join(_values(node, size, ops))}"
    reasons: dict[str, list[str]] = {}
    for tactic, reason in choice.refused.items():
        reasons.setdefault(reason, []).append(tactic)
    for reason, tactics in reasons.items():
        more = f" and {len(tactics) - NAMED} more" if len(tactics) > NAMED else ""
        yield f"    {reason} ({', '.join(tactics[:NAMED])}{more})"


def _values(node: gs.Node, size: Size, ops: Ops) -> Iterator[str]:
    op = ops.get(node.op)
    attrs = attrs_of(node, op) if op else node.attrs
    yield from (f"{name} {value}" for name, value in attrs.items())
    given = op.given(attrs) if op else ()
    for i, tensor in enumerate(node.inputs):
        spec = spec_of(tensor).bind(size.dims)
        if len(spec.shape) > 1 and (not given or given[i].role in SHOWN):
            yield f"{given[i].name if given else spec.name} {spec.dtype} {list(spec.shape)}"
