"""Collectives of ranks on several hosts: which tactics, what they ask of NCCL, and the kernels that
lay out what it has gathered."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.builder.native.tactics import TacticChoice, Work, choose  # noqa: E402
from spark_engine.device.gpu import Gpu, architecture, present  # noqa: E402
from spark_engine.kernel import GB10, H200, NCCL, TARGETS, Pointer, Target  # noqa: E402
from spark_engine.op import Op  # noqa: E402
from spark_engine.plugins.kernels.ranks import nccl_kernels  # noqa: E402
from spark_engine.plugins.ops.ranks import all_reduce, gather_logits  # noqa: E402
from spark_engine.tensors import Array, DType, TensorSpec  # noqa: E402

BF16, F32 = DType.BF16, DType.F32


def chosen(op: Op, dims: tuple[int, int], target: Target = H200, **attrs: int) -> TacticChoice:
    spec = TensorSpec("x", BF16 if op is all_reduce.OP else F32, dims)
    work = Work(op.name, op, {"across": 0, **attrs}, (spec,), op.infer(attrs, (spec,)), frozenset())
    return choose(op.cuda, work, target)


@pytest.mark.parametrize("target", [H200, GB10], ids=lambda t: t.name)
def test_each_place_has_its_tactics(target: Target) -> None:
    for op in (all_reduce.OP, gather_logits.OP):
        here, there = (chosen(op, (4, 512), target, ranks=2, across=n) for n in (0, 1))
        assert not [name for name in here.candidates if "nccl" in name]
        assert here.plan and here.plan.symmetric and "--across-hosts" in str(here.refused)
        assert all("nccl" in name for name in there.candidates)
        assert there.plan and not there.plan.symmetric and "several hosts" in str(there.refused)
    two, four = (chosen(all_reduce.OP, (4, 512), ranks=n, across=1) for n in (2, 4))
    assert set(two.candidates) == {"nccl_sum", "nccl_parts"}
    assert set(four.candidates) == {"nccl_parts"}, "the order of more than two is NCCL's own"


def test_every_tactic_has_one_order_of_sums() -> None:
    """So that an invariant build may take another in each bucket."""
    spec = (TensorSpec("x", BF16, (4, 512)),)
    for tactic in (t for t in all_reduce.OP.cuda.tactics if t.name.startswith("nccl")):
        for ranks in (2, 4):
            attrs = {"ranks": ranks, "across": 1}
            assert tactic.reduction_key(attrs, spec, H200) == "ranks"


def test_what_nccl_is_asked_for() -> None:
    plan = chosen(all_reduce.OP, (4, 512), ranks=2, across=1).plan
    assert plan is not None
    (call,) = plan.launches
    assert (call.source, call.symbol, call.args[2].value) == (NCCL, "all_reduce", 4 * 512 * 2)  # type: ignore[union-attr]
    plan = chosen(all_reduce.OP, (4, 512), ranks=4, across=1).plan
    assert plan is not None
    call, add = plan.launches
    assert (call.symbol, call.args[1]) == ("all_gather", Pointer("scratch", 0))
    assert plan.scratch[0].nbytes == 4 * call.args[2].value == 4 * 4 * 512 * 2  # type: ignore[union-attr]
    assert add.symbol == "sum_parts" and not add.pdl and not add.resident
    plan = chosen(gather_logits.OP, (1, 512), ranks=4, across=1).plan
    assert plan is not None and [n.args[1] for n in plan.launches] == [Pointer("output", 0)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_the_kernels_compile(target: Target, cache: Path) -> None:
    for op, dims, ranks in ((all_reduce.OP, (4, 512), 4), (gather_logits.OP, (4, 512), 2)):
        plan = chosen(op, dims, target, ranks=ranks, across=1).plan
        assert plan is not None
        _, launch = plan.launches
        job = nvrtc.Job(nccl_kernels.SOURCE, launch.defines, (launch.symbol,))
        assert nvrtc.compile(job, target, cache).usage[launch.symbol].spills == 0
        assert nvrtc.jobs_of([(nccl_kernels.SOURCE, plan)]) == (job,), "NCCL's own is not compiled"


def gathered_by_hand(op: Op, parts: list[Array], cache: Path) -> bytes:
    """The output behind what NCCL would have left in scratch, over a poisoned place."""
    target = present()
    assert target is not None
    plan = chosen(op, parts[0].shape, target, ranks=len(parts), across=1).plan
    assert plan is not None
    _, launch = plan.launches
    assert [(a.kind, a.index) for a in launch.args[:2] if isinstance(a, Pointer)] == [
        ("scratch", 0),
        ("output", 0),
    ]
    code = nvrtc.compile(
        nvrtc.Job(nccl_kernels.SOURCE, launch.defines, (launch.symbol,)), target, cache
    ).code
    (out,) = op.infer(
        {"ranks": len(parts)}, (TensorSpec("x", DType.of(parts[0].dtype), parts[0].shape),)
    )
    gpu = Gpu()
    try:
        scratch, y = gpu.allocate(plan.scratch[0].nbytes), gpu.allocate(out.nbytes)
        gpu.upload(scratch, np.stack(parts))
        gpu.fill(y, 0xFF, out.nbytes)
        function = gpu.load(code, [launch.symbol])[launch.symbol]
        gpu.launch(function, launch, (scratch, y, launch.args[2].value))  # type: ignore[union-attr]
        found = np.empty(out.nbytes, np.uint8)
        gpu.download(found, y)
        gpu.wait()
        gpu.free(y)
        gpu.free(scratch)
    finally:
        gpu.close()
    return found.tobytes()


@pytest.mark.gpu
@pytest.mark.skipif(architecture() is None, reason="needs a GPU of a target")
@pytest.mark.parametrize("ranks", [3, 4])
def test_gathered_parts_are_laid_as_the_reference_has_them(ranks: int, cache: Path) -> None:
    rng = np.random.default_rng(ranks)
    for rows in (1, 5, 300):
        wide = [rng.standard_normal((rows, 5120)) for _ in range(ranks)]
        parts: list[Any] = [p.astype(ml_dtypes.bfloat16) for p in wide]
        found = gathered_by_hand(all_reduce.OP, parts, cache)
        assert found == all_reduce.summed(tuple(parts)).tobytes(), rows
    for rows, columns in ((2, 68), (5, 4096)):
        parts = [rng.standard_normal((rows, columns)).astype(np.float32) for _ in range(ranks)]
        found = gathered_by_hand(gather_logits.OP, parts, cache)
        assert found == gather_logits.gathered(tuple(parts)).tobytes(), (rows, columns)
