"""Build half of the `native` executor: a graph and a bucket become launches and cubins, as bytes.

Knows the place of every tensor and the order of launches (docs/engine_file.md specifies the bytes);
knows no single op and no CUDA binding but the compiler. Nodes are launched in graph order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spark_engine.builder.graph.memory import LiveBlock, lifetimes, owners, place
from spark_engine.builder.graph.nodes import Ops
from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.tactics import Chooser, TacticChoice
from spark_engine.builder.plan.buckets import Size
from spark_engine.device.buffers import aligned
from spark_engine.errors import InternalError
from spark_engine.interface import STATE_OUT
from spark_engine.kernel import NCCL, Arg, Launch, Pointer, Rank, Target
from spark_engine.manifest import Json
from spark_engine.progress import Advance, ignore
from spark_engine.weights_file import WeightEntry

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

Cubins = Mapping[tuple[str, nvrtc.Defines], nvrtc.Cubin]  # by source and macros


@dataclass(frozen=True)
class BucketTactics:
    """One bucket's graph with a tactic for each node, in launch order: the graph's, but for what
    `early.py` moves."""

    graph: gs.Graph
    size: Size
    nodes: tuple[tuple[gs.Node, TacticChoice], ...]

    @property
    def seconds(self) -> float:
        """Seconds of one launch of the bucket: the sum over its chosen tactics."""
        return sum(choice.seconds for _, choice in self.nodes)

    @property
    def complete(self) -> bool:
        """True if every node has a tactic."""
        return all(choice.tactic is not None for _, choice in self.nodes)


def decide(graph: gs.Graph, size: Size, chooser: Chooser) -> BucketTactics:
    return BucketTactics(graph, size, tuple((n, chooser.node(n, size)) for n in graph.nodes))


def check_across(buckets: Iterable[BucketTactics]) -> None:
    """Raises InternalError naming the ops that read memory of other ranks, which is impossible
    across hosts."""
    nodes = (pair for bucket in buckets for pair in bucket.nodes)
    reading = sorted({node.op for node, choice in nodes if choice.plan and choice.plan.symmetric})
    if reading:
        raise InternalError(f"--across-hosts: {', '.join(reading)} read memory of other ranks")


def jobs(buckets: Iterable[BucketTactics]) -> tuple[nvrtc.Job, ...]:
    pairs = []
    for bucket in buckets:
        for _, choice in bucket.nodes:
            assert choice.tactic is not None and choice.plan is not None
            pairs.append((choice.tactic.source, choice.plan))
    return nvrtc.jobs_of(pairs)


def compile_jobs(
    found: Sequence[nvrtc.Job], target: Target, cache: Path, workers: int, advance: Advance = ignore
) -> Cubins:
    made = nvrtc.compile_all(found, target, cache, workers, advance=advance)
    return {(job.source, job.defines): cubin for job, cubin in made.items()}


def encode(
    bucket: BucketTactics,
    weights: Mapping[str, WeightEntry],
    states: tuple[str, ...],
    ops: Ops,
    cubins: Cubins,
) -> tuple[bytes, dict[str, int]]:
    """The payload, and its scratch memory by the name of the manifest's `Bucket`."""
    places = _Places(bucket, weights, states, ops)
    kernels = _Kernels(cubins)
    launches: list[Json] = []
    operands: dict[tuple[Json, ...], int] = {}  # each once, with its number
    called = False
    for step, (node, choice) in enumerate(bucket.nodes):
        assert choice.tactic is not None and choice.plan is not None
        for launch in choice.plan.launches:
            if launch.source != NCCL:
                source = launch.source or choice.tactic.source
                launch = cubins[source, launch.defines].launched(launch)
            kernel = kernels.index(choice.tactic.source, launch)
            found = [tuple(_argument(places, step, node, a)) for a in launch.args]
            args = [operands.setdefault(one, len(operands)) for one in found]
            pdl = launch.pdl and not called  # a library's kernels do not trigger the next launch
            launches.append(_record(node, choice.tactic.name, kernel, launch, args, pdl))
            called = launch.source == NCCL
    table, images = kernels.table()
    memory = {
        "arena_bytes": places.arena.nbytes,
        "zeroed_bytes": places.zeroed_bytes,
        "symmetric_bytes": max((c.plan.symmetric for _, c in bucket.nodes if c.plan), default=0),
    }
    body = {
        **memory,
        "kernels": table,
        "cubins": [len(image) for image in images],
        "launches": launches,
        "operands": list(operands),
        "places": places.table(),
    }
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    payload = len(text).to_bytes(8, "little") + text + b"".join(images)
    return payload, memory


def _argument(places: _Places, step: int, node: gs.Node, arg: Arg) -> Json:
    match arg:
        case Pointer("peers"):
            return ["peers"]
        case Pointer():
            return places.of(step, node, arg)
        case Rank():
            return ["rank"]
    return [arg.kind, arg.value]


class _Places:
    """The place of each operand of each node."""

    def __init__(
        self,
        bucket: BucketTactics,
        weights: Mapping[str, WeightEntry],
        states: tuple[str, ...],
        ops: Ops,
    ) -> None:
        graph = bucket.graph
        self._owners = owners(graph, ops)
        self._kinds = {t.name: "output" for t in graph.outputs}
        for tensor in graph.inputs:
            kind = "weight" if tensor.name in weights else "input"
            self._kinds[tensor.name] = "state" if tensor.name in states else kind
        self._written = [tensor for node in graph.nodes for tensor in node.outputs]
        order = [node for node, _ in bucket.nodes]
        blocks = list(lifetimes(graph, ops, bucket.size.dims, order))
        self._zeroed: dict[tuple[int, int], Json] = {}
        self.zeroed_bytes = 0
        for step, (node, choice) in enumerate(bucket.nodes):
            blocks += self._take_scratch(step, node, choice)
        self.arena = place(blocks)
        self._sizes = {block.name: block.nbytes for block in blocks}

    def of(self, step: int, node: gs.Node, pointer: Pointer) -> Json:
        if pointer.kind == "scratch":
            zeroed = self._zeroed.get((step, pointer.index))
            return zeroed or self._inside(_scratch_name(node, pointer.index))
        tensors = node.inputs if pointer.kind == "input" else node.outputs
        owner = self._owners.get(id(tensors[pointer.index]), tensors[pointer.index])
        if owner.name in self._kinds:
            return [self._kinds[owner.name], owner.name]
        return self._inside(owner.name)

    def _inside(self, name: str) -> Json:
        return ["arena", self.arena.offsets[name], self._sizes[name]]

    def table(self) -> dict[str, Json]:
        """The places of the tensors that nodes write, by name, without those that are an output or
        a state of the same name."""
        found: dict[str, Json] = {}
        for tensor in self._written:
            owner = self._owners.get(id(tensor), tensor)
            if owner.name not in self._kinds:
                found[tensor.name] = self._inside(owner.name)
            elif tensor.name not in (owner.name, owner.name + STATE_OUT):
                found[tensor.name] = [self._kinds[owner.name], owner.name]
        return found

    def _take_scratch(self, step: int, node: gs.Node, choice: TacticChoice) -> list[LiveBlock]:
        """Scratch is in the arena while the node runs. Every node leaves zeroed scratch zero, so
        all nodes share it."""
        assert choice.plan is not None
        blocks, zeroed = [], 0
        for i, need in enumerate(choice.plan.scratch):
            nbytes = aligned(need.nbytes)
            if need.zeroed:
                self._zeroed[step, i] = ["zeroed", zeroed, nbytes]
                zeroed += nbytes
            else:
                blocks.append(LiveBlock(_scratch_name(node, i), nbytes, step, step))
        self.zeroed_bytes = max(self.zeroed_bytes, zeroed)
        return blocks


def _scratch_name(node: gs.Node, index: int) -> str:
    return f"{node.name}:scratch{index}"


class _Kernels:
    """The bucket's kernels, numbered in order of first use."""

    def __init__(self, cubins: Cubins) -> None:
        self._cubins = cubins
        self._found: dict[tuple[str, nvrtc.Defines, str], int] = {}
        self._shared: list[int] = []

    def index(self, source: str, launch: Launch) -> int:
        """The kernel's number; records the most shared memory that a launch needs."""
        key = (launch.source or source, launch.defines, launch.symbol)
        number = self._found.setdefault(key, len(self._found))
        if number == len(self._shared):
            self._shared.append(0)
        self._shared[number] = max(self._shared[number], launch.shared)
        return number

    def table(self) -> tuple[list[Json], list[bytes]]:
        """(kernel records, distinct cubin images); a library has no image."""
        images: dict[bytes, int] = {}
        table = []
        for (source, defines, symbol), shared in zip(self._found, self._shared, strict=True):
            cubin = None
            if source != NCCL:
                cubin = images.setdefault(self._cubins[source, defines].code, len(images))
            row = {"cubin": cubin, "symbol": symbol, "shared": shared, "source": source}
            table.append(row)
        return table, list(images)


def _record(
    node: gs.Node, tactic: str, kernel: int, launch: Launch, args: list[int], pdl: bool
) -> Json:
    return {
        "node": node.name,
        "op": node.op,
        "tactic": tactic,
        "kernel": kernel,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "shared": launch.shared,
        "pdl": pdl,
        "resident": launch.resident,
        "args": args,
    }
