"""Kernels over several ranks compile for every target; an op's own cases have one rank alone."""

import math
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import H200, TARGETS, Plan, Specs, Target  # noqa: E402
from spark_engine.op import Attrs, Op  # noqa: E402
from spark_engine.plugins.kernels.ranks import collectives_kernels
from spark_engine.plugins.ops.ranks import all_reduce, gather_logits, reduce_norm_quant
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.repository import ROOT  # noqa: E402

QUANT: Attrs = {"eps": 1e-6, "keep": 1, "quant": "nvfp4", "n": 4}


def nodes(rows: int, ranks: int) -> list[tuple[Op, Attrs, Specs]]:
    """A decode step's, of the wider of the served models."""
    x = TensorSpec("x", DType.BF16, (rows, 5120))
    norm = (x, TensorSpec("w", DType.F32, (5120,)), x, TensorSpec("s", DType.F32, (4,)))
    logits = (TensorSpec("x", DType.F32, (rows, 248_320 // ranks)),)
    return [
        (all_reduce.OP, {"ranks": ranks}, (x,)),
        (gather_logits.OP, {"ranks": ranks}, logits),
        (reduce_norm_quant.OP, {"ranks": ranks, **QUANT}, norm),
    ]


def plans(rows: int, ranks: int, target: Target) -> list[tuple[str, str, Plan]]:
    """(op and tactic, source, plan) of every tactic that takes them."""
    return [
        (f"{op.name}/{tactic.name}", tactic.source, tactic.plan(attrs, specs, target))
        for op, attrs, specs in nodes(rows, ranks)
        for tactic in op.cuda.tactics
        if tactic.refuse(attrs, specs, target) is None
    ]


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_kernel_compiles_without_spills(ranks: int, target: Target, cache: Path) -> None:
    made = plans(4, ranks, target)
    sums = [name for name, _, _ in made if not name.startswith("gather")]
    assert len(sums) == (5 if ranks == 2 else 7)
    for name, source, plan in made:
        for launch in plan.launches:
            job = nvrtc.Job(launch.source or source, launch.defines, (launch.symbol,))
            usage = nvrtc.compile(job, target, cache).usage[launch.symbol]
            assert usage.spills == 0 and usage.stack == 0, (name, usage)
            assert launch.block[0] * usage.registers <= 65536, (name, usage)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 37, 128, 512, 8192])
def test_all_blocks_are_resident_and_meet_at_separate_flags(rows: int, ranks: int) -> None:
    for name, _, plan in plans(rows, ranks, H200):
        for launch in plan.launches:
            peers = any(getattr(arg, "kind", "") == "peers" for arg in launch.args)
            assert launch.resident is peers, name
            if peers:
                assert math.prod(launch.grid) <= min(H200.sms, 252), name


def test_what_is_pushed_has_an_end() -> None:
    """By the bytes that peers.cuh has for it: two turns of every rank's, twice as large."""
    text = (ROOT / "plugins/kernels/ranks/peers.cuh").read_text()
    assert f"#define PUSHED_BYTES {collectives_kernels.PUSHED_BYTES} " in text
    assert f"#define PUSHED {collectives_kernels.PUSHED} " in text
    for ranks in range(2, 9):
        most = collectives_kernels.most_pushed(ranks)
        assert (
            2 * ranks * 2 * most <= collectives_kernels.PUSHED_BYTES < 2 * ranks * 2 * (most + 512)
        )
        assert collectives_kernels.refuse_algorithm("push", ranks, most) is None
        assert "are pushed" in str(collectives_kernels.refuse_algorithm("push", ranks, most + 16))
    assert "no other" in str(collectives_kernels.refuse_algorithm("push", 1, 16))
    assert "second shot" in str(collectives_kernels.refuse_algorithm("two_shot", 2, 1 << 20))


def test_every_tactic_has_one_order() -> None:
    """An invariant build may choose any of them for each bucket by itself."""
    for op, attrs, specs in nodes(4, 4):
        taken = [t for t in op.cuda.tactics if t.refuse(attrs, specs, H200) is None]
        keys = {t.reduction_key(attrs, specs, H200) for t in taken}
        assert keys == ({"one_shot"} if op is gather_logits.OP else {"ranks"})
