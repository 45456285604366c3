"""A native engine on a GPU of numpy: each node is computed by its reference from its places.

`build_fake` builds for a CUDA target without compiling anything, and remembers, for every bucket,
each node's op and the addresses of its operands, which the builder reports independently of the
payload's `places`.
`open_fake` lets the real native executor run that payload. What the fake kernels read is what is
in device memory; only weights that are packed for kernels are remembered as they were before.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder import build as straight_line
from spark_engine.builder.graph import packing
from spark_engine.builder.graph.nodes import attrs_of, spec_of
from spark_engine.builder.native import nvrtc, program
from spark_engine.builder.plan.options import Options
from spark_engine.kernel import Pointer
from spark_engine.models.open_model import open_model
from spark_engine.op import DOMAIN
from spark_engine.plugins.registry import REGISTRY
from spark_engine.runtime.engine import load as runtime_load
from spark_engine.runtime.executors import native as runtime_native
from spark_engine.runtime.executors.program import MemoryOperand
from spark_engine.tensors import TensorSpec
from tests.builder.empty_cubins import EmptyCubin
from tests.runtime.fake_gpu import FakeGpu

TARGET = "sm_90a"


@dataclass(frozen=True)
class Node:
    """A node, and (place, spec, packed weight's name) of its operands and results."""

    kind: str
    attrs: dict[str, Any]
    op: Any
    ins: list[tuple[MemoryOperand, TensorSpec]]
    outs: list[tuple[MemoryOperand, TensorSpec]]


@dataclass
class Fake:
    """What was built: nodes by name for each payload, and weights before they were packed."""

    nodes: dict[bytes, dict[str, Node]] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    blur: float = 0.0  # relative error of what kernels round to bf16
    idle: set[str] = field(default_factory=set)  # nodes with kernels that write nothing
    spoil: Callable[[str, list[Any]], None] | None = None  # (node, results) -> changed in place


def build_fake(checkpoint: Path, folder: Path, options: Options, patch: pytest.MonkeyPatch) -> Fake:
    """Builds `folder` with cubins that are names only."""
    fake, encode_one, pack = Fake(), program.encode, packing.pack

    def compile_jobs(found: Any, *rest: Any) -> dict[Any, nvrtc.Cubin]:
        return {(j.source, j.defines): EmptyCubin(repr(j).encode(), {}) for j in found}

    def encode(
        bucket: program.BucketTactics, weights: Any, states: Any, ops: Any, cubins: Any
    ) -> Any:
        payload, nbytes = encode_one(bucket, weights, states, ops, cubins)
        places = program._Places(bucket, weights, states, ops)
        fake.nodes[payload] = {
            node.name: _node(places, step, node, bucket.size.dims)
            for step, (node, _) in enumerate(bucket.nodes)
        }
        return payload, nbytes

    def remember(graph: Any, ops: Any) -> None:
        before = dict(graph.weights)
        pack(graph, ops)
        reader = open_model(checkpoint).checkpoint
        assert reader is not None
        for name in set(graph.weights) - set(before):
            fake.plain[name] = before[name.rpartition(":")[0]].evaluate(reader)

    with patch.context() as m:
        m.setattr(nvrtc, "compiler_version", lambda: "13.0")
        m.setattr(program, "compile_jobs", compile_jobs)
        m.setattr(program, "encode", encode)
        m.setattr(straight_line, "pack", remember)
        straight_line.build(checkpoint, folder, options, lambda text: None)
    return fake


def _node(places: Any, step: int, node: Any, dims: dict[str, int]) -> Node:
    def one(kind: Any, i: int, tensor: Any) -> tuple[MemoryOperand, TensorSpec]:
        return place_of(places.of(step, node, Pointer(kind, i))), spec_of(tensor).bind(dims)

    op = REGISTRY[node.op] if node.domain == DOMAIN else None
    attrs = dict(attrs_of(node, op)) if op else dict(node.attrs)
    ins = [one("input", i, t) for i, t in enumerate(node.inputs)]
    return Node(node.op, attrs, op, ins, [one("output", i, t) for i, t in enumerate(node.outputs)])


def open_fake(fake: Fake, patch: pytest.MonkeyPatch) -> None:
    """From here on a native engine of `fake` opens on a GPU of numpy."""
    patch.setattr(runtime_native, "Gpu", lambda: FakeGpu({}))
    patch.setattr(runtime_load, "runnable_targets", lambda hosts: ("cpu", TARGET))
    real = runtime_native.NativeExecutor.launches

    def launches(self: Any, payload: bytes) -> list[runtime_native.QueuedLaunch]:
        found = real(self, payload)
        last = {queued.node: i for i, queued in enumerate(found)}
        made = []
        for i, queued in enumerate(found):
            run = _kernel(fake, self, payload, queued.node) if last[queued.node] == i else _nothing
            made.append(runtime_native.QueuedLaunch(queued.node, queued.symbol, _queue(self, run)))
        return made

    patch.setattr(runtime_native.NativeExecutor, "launches", launches)


def _queue(executor: Any, run: Callable[[], None]) -> Callable[[], None]:
    gpu = executor.gpu
    return lambda: gpu._add(run) if gpu.recording is None else gpu.recording.append(run)


def _nothing() -> None:
    """All launches of a node but its last."""


def _kernel(fake: Fake, executor: Any, payload: bytes, name: str) -> Callable[[], None]:
    node = fake.nodes[payload][name]
    rng = np.random.default_rng(len(name))

    def run() -> None:
        def held(place: MemoryOperand, spec: TensorSpec) -> Any:
            if place.kind == "weight" and place.name in fake.plain:
                return fake.plain[place.name]
            return executor.gpu.view(executor.address(place), spec.dtype.numpy, spec.dims)

        fake.ran.append(name)
        if name in fake.idle:
            return
        operands = tuple(held(*one).copy() for one in node.ins)
        with np.errstate(all="ignore"):
            results = [np.array(r) for r in _compute(node, operands)]
        for i, result in enumerate(results):
            if fake.blur and result.dtype.itemsize == 2:
                noise = 1 + fake.blur * rng.standard_normal(result.shape)
                results[i] = (result.astype(np.float64) * noise).astype(result.dtype)
        if fake.spoil is not None:
            fake.spoil(name, results)
        for (place, spec), result in zip(node.outs, results, strict=True):
            held(place, spec)[...] = result

    return run


def _compute(node: Node, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    if node.op is not None:
        return tuple(node.op.reference(node.attrs, operands))
    if node.kind == "Add":
        wide = operands[0].astype(np.float64) + operands[1].astype(np.float64)
        return (wide.astype(operands[0].dtype),)
    return (np.concatenate(operands, axis=int(node.attrs["axis"])),)


def place_of(row: list[Any]) -> MemoryOperand:
    """[kind, name] or [kind, offset, bytes]."""
    return (
        MemoryOperand(row[0], row[1])
        if len(row) == 2
        else MemoryOperand(row[0], "", row[1], row[2])
    )


def places_of(payload: bytes) -> dict[str, MemoryOperand]:
    """The payload's `places`."""
    length = int.from_bytes(payload[:8], "little")
    found = json.loads(payload[8 : 8 + length])["places"]
    return {name: place_of(row) for name, row in found.items()}
