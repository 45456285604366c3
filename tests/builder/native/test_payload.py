"""A native bucket's payload from invented tactics: places, sizes, launches."""

from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc, program  # noqa: E402
from spark_engine.builder.native.tactics import TacticChoice  # noqa: E402
from spark_engine.builder.plan.buckets import Size  # noqa: E402
from spark_engine.kernel import DECLARED, Launch, Plan, Pointer, Scalar, Scratch, Tactic  # noqa: E402
from spark_engine.runtime.executors.program import (
    LaunchRecord,
    MemoryOperand,
    Program,
    ScalarOperand,
)  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from spark_engine.weights_file import WeightEntry  # noqa: E402
from tests.builder.toy import OPS, toy_graph  # noqa: E402

IN, OUT = Pointer("input", 0), Pointer("output", 0)
WAITING = Launch("b", (7, 2, 1), (32, 1, 1), (IN, OUT, Pointer("scratch", 0), Pointer("scratch", 1),
                 Pointer("scratch", 2)), shared=DECLARED, resident=True)  # fmt: skip
FREE = Launch("a", (3, 1, 1), (64, 1, 1), (IN, OUT, Scalar("f32", 0.5)), pdl=True)


def compiled() -> tuple[Program, dict[str, int]]:
    """The toy graph with a plain launch a node, and in the first one that waits before it."""
    tactic = Tactic("t", "t.cu", lambda *_: None, lambda *_: Plan(()), lambda *_: 1.0)
    waiting = Plan((WAITING, FREE), (Scratch(700), Scratch(5, True), Scratch(300, True)))
    plans = [waiting, Plan((FREE,)), Plan((FREE,))]
    graph = toy_graph()
    choices = [TacticChoice(tactic, plan, 1.0, {}) for plan in plans]
    bucket = program.BucketTactics(
        graph, Size("decode", 2), tuple(zip(graph.nodes, choices, strict=True))
    )
    weights = {"w": WeightEntry(TensorSpec("w", DType.F32, (2, 3)), 64)}
    usage = {symbol: nvrtc.KernelUsage(1, 0, 0, 0, own) for symbol, own in (("a", 0), ("b", 99))}
    cubins = {("t.cu", ()): nvrtc.Cubin(b"code", usage)}
    payload, memory = program.encode(bucket, weights, ("total",), OPS, cubins)
    return Program.read(payload), memory


def test_a_launch_is_recorded_as_it_was_planned() -> None:
    program, _ = compiled()
    found = [(r.node, program.kernels[r.kernel].symbol, r.shape, r.resident)
             for r in program.launches]  # fmt: skip
    waiting, free = (w.shape._replace(kinds=()) for w in (replace(WAITING, shared=99), FREE))
    assert found == [
        ("h", "b", waiting, True),
        *((node, "a", free, False) for node in ("h", "sum.out", "last")),
    ]
    kinds = [tuple(program.kinds[i] for i in r.args) for r in program.launches]
    assert kinds == [WAITING.shape.kinds, *[FREE.shape.kinds] * 3]
    assert [(k.symbol, k.shared, k.cubin) for k in program.kernels] == [
        ("b", 99, b"code"), ("a", 0, b"code")
    ]  # fmt: skip


def test_operands_have_a_place_and_a_size() -> None:
    program, memory = compiled()
    (x, h, scratch, *zeroed), *rest = (places(program, r) for r in program.launches)
    assert x == MemoryOperand("input", "x")
    assert (h.kind, h.nbytes) == ("arena", 256) and (scratch.kind, scratch.nbytes) == ("arena", 768)
    assert scratch.offset >= h.offset + h.nbytes or h.offset >= scratch.offset + scratch.nbytes
    assert zeroed == [MemoryOperand("zeroed", "", 0, 256), MemoryOperand("zeroed", "", 256, 512)]
    assert rest[1][0] == h, "the next node reads what this one wrote"
    assert rest[2][1] == MemoryOperand("state", "total"), "an output that shares a state's memory"
    assert program.operands[program.launches[1].args[2]] == ScalarOperand("f32", 0.5)
    assert memory == {"arena_bytes": 1024, "zeroed_bytes": 768, "symmetric_bytes": 0}
    assert (program.arena_bytes, program.zeroed_bytes) == (1024, 768)


def places(program: Program, record: LaunchRecord) -> list[MemoryOperand]:
    args = (program.operands[i] for i in record.args)
    return [arg for arg in args if isinstance(arg, MemoryOperand)]
