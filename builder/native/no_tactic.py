"""The error for nodes that no tactic runs: their values, the distinct reasons, the remedy.

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
from spark_engine.kernel import Target
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
        fused = [name for name in names if name in ops and ops[name].fuses is not None]
        parts = f"; --no-fuse leaves {', '.join(fused)} in parts that may have one" if fused else ""
        raise OptionError(
            f"--target {target.name}: no CUDA tactic yet for {', '.join(names)}\n"
            + "\n".join(lines)
            + f"\nuse --target cpu{parts}"
        )


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
