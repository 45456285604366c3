"""The memory plan: the arena's bytes, and each tensor's offset in it.

Knows lifetimes, sizes and aliases; knows no executor. The `ort` executor keeps its own arena and
the plan is only reported; an executor that owns its memory places tensors by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_engine.builder.graph.nodes import Ops, aliases, spec_of
from spark_engine.device.buffers import aligned

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs


@dataclass(frozen=True)
class LiveBlock:
    """A block of memory needed from step `first` to step `last`, both inclusive."""

    name: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Arena:
    """Offsets of the blocks by name, and the bytes that hold them all."""

    offsets: Mapping[str, int]
    nbytes: int


def lifetimes(
    graph: gs.Graph, ops: Ops, dims: dict[str, int], order: Iterable[gs.Node] | None = None
) -> tuple[LiveBlock, ...]:
    """One block per group of aliased inner tensors; `order` is that of execution, by default the
    graph's.

    A tensor that shares memory with a graph input or output is in the caller's buffers and has no
    block. `dims` binds the named dimensions.
    """
    found = owners(graph, ops)
    outside = {id(found[id(t)]) for t in (*graph.inputs, *graph.outputs) if id(t) in found}
    spans: dict[int, list[int]] = {}
    members: dict[int, gs.Tensor] = {}
    for step, node in enumerate(graph.nodes if order is None else order):
        for tensor in (*node.inputs, *node.outputs):
            owner = found.get(id(tensor))
            if owner is not None and id(owner) not in outside:
                spans.setdefault(id(owner), []).append(step)
                members[id(owner)] = owner
    return tuple(
        LiveBlock(t.name, aligned(spec_of(t).bind(dims).nbytes), min(spans[key]), max(spans[key]))
        for key, t in members.items()
    )


def place(blocks: Sequence[LiveBlock]) -> Arena:
    """Offsets such that no two blocks alive together overlap: largest first, lowest gap."""
    offsets: dict[str, int] = {}
    placed: dict[int, set[tuple[int, int]]] = {}  # by step: offsets and bytes of its blocks
    for block in sorted(blocks, key=lambda b: (-b.nbytes, b.first, b.name)):
        alive = [placed.setdefault(step, set()) for step in range(block.first, block.last + 1)]
        offsets[block.name] = offset = _lowest_gap(block.nbytes, set().union(*alive))
        for step in alive:
            step.add((offset, block.nbytes))
    return Arena(offsets, max((offsets[b.name] + b.nbytes for b in blocks), default=0))


def owners(graph: gs.Graph, ops: Ops) -> dict[int, gs.Tensor]:
    """The first tensor of each tensor's chain of aliases: it owns their memory."""
    found = {id(t): t for t in (*graph.inputs, *graph.outputs)}
    for node in graph.nodes:
        shared = {id(out): source for out, source in aliases(node, ops)}
        for tensor in node.outputs:
            source = shared.get(id(tensor), tensor)
            found[id(tensor)] = found.get(id(source), source)
    return found


def _lowest_gap(nbytes: int, taken: Iterable[tuple[int, int]]) -> int:
    start = 0
    for offset, taken_bytes in sorted(taken):
        if offset - start >= nbytes:
            break
        start = max(start, offset + taken_bytes)
    return start
