"""The router's tactics on the GPU at the sizes of the served models, with ties and NaN."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS, Target  # noqa: E402
from spark_engine.op import Case  # noqa: E402
from spark_engine.plugins.ops.moe import moe_router  # noqa: E402
from spark_engine.tensors import Array, DType  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402

OP = moe_router.OP
BF16 = DType.BF16.numpy


def case(tokens: int, experts: int, hidden: int, top_k: int, gated: bool = True) -> Case:
    """Drawn logits but for the rows 1 (all equal), 2 (NaN), 3 (each twice)."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = rng.standard_normal((tokens, hidden)).astype(np.float32)
        w = rng.standard_normal((experts, hidden)).astype(np.float32) * 2 * hidden**-0.5
        if tokens > 3:
            x[1], x[2] = 0, np.nan
            x[3] = 0
            x[3, 0], w[:, 0] = 1, np.arange(experts) // 2 % 64
        gate = rng.standard_normal((1, hidden)).astype(np.float32) * hidden**-0.5
        return tuple(a.astype(BF16) for a in ((x, w, gate) if gated else (x, w)))

    label = f"{tokens} tokens, {top_k} of {experts}, {hidden} wide{' gate' if gated else ''}"
    return Case(label, {"top_k": top_k}, make, 1e-4, 1e-6)


CASES = [
    *(case(n, 256, 2048, 8) for n in (1, 7, 8, 9, 64, 130)),
    *(case(n, 512, 2048, 10) for n in (1, 9, 130)),  # the 80B's
    *(case(n, 256, 3072, 8) for n in (1, 9, 70, 130)),
    *(case(n, 512, 4096, 10) for n in (1, 9, 130)),
    case(97, 256, 2048, 8, gated=False),
    case(200, 256, 2048, 8, gated=False),
    case(260, 72, 200, 9),  # of wgmma odd slabs and a partial one, a last cluster of 4 tokens
    case(70, 31, 200, 4),
    case(65, 300, 72, 16),
    case(20, 256, 2048, 8, gated=False),
    case(20, 144, 1024, 31),
    case(20, 128, 192, 1),
    case(20, 32, 64, 32, gated=False),
]


def tactics(target: Target, tokens: int) -> list[str]:
    """Those that take so many tokens of the served sizes."""
    wgmma = ["wgmma"] * (target.wgmma and tokens >= 128)
    wide = ["wide_96"] * (tokens >= 96)
    return ["cluster"] * target.clusters + wgmma + wide + ["last"]


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [1, 96, 128])
@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize("hidden", [2048, 3072, 4096])
def test_served_sizes_compile_without_spills(
    hidden: int, target: Target, tokens: int, cache: Path
) -> None:
    experts, top_k = (512, 10) if hidden == 4096 else (256, 8)
    works = list(cuda_node.planned(OP, case(tokens, experts, hidden, top_k), target))
    few = ["last"]  # of 512 experts
    assert [w.tactic.name for w in works] == (tactics(target, tokens) if experts == 256 else few)
    for work in works:
        for job in nvrtc.jobs_of([(work.tactic.source, work.plan)]):
            assert all(u.spills == 0 for u in nvrtc.compile(job, target, cache).usage.values())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("one", CASES, ids=lambda c: c.label)
def test_tactics_choose_as_the_reference_does(one: Case, bench: cuda_node.Bench) -> None:
    arrays = one.inputs(np.random.default_rng(5))
    works = list(cuda_node.planned(OP, one, bench.target))
    (tokens, hidden), (experts, _) = arrays[0].shape, arrays[1].shape
    if (experts, hidden) == (256, 2048):
        assert [w.tactic.name for w in works] == tactics(bench.target, tokens)
    made = [cuda_node.run(bench, work, arrays) for work in works]
    ids, weights = OP.reference(one.attrs, arrays)
    finite = np.arange(len(ids)) != 2 if len(ids) > 3 else np.ones(len(ids), bool)
    for work, (got_ids, got) in zip(works, made, strict=True):
        np.testing.assert_array_equal(got_ids, ids, err_msg=work.tactic.name)
        # The tensor cores cut off what they add, and `wide` adds all of k in one sum: of 2,048 some
        # 128 times up to 2^-23 of sums of about 20, and a weight differs as its logits do.
        np.testing.assert_allclose(got[finite], weights[finite], 5e-4, 1e-6)


@pytest.mark.gpu
def test_a_tokens_bits_do_not_depend_on_its_company(bench: cuda_node.Bench) -> None:
    x, *rest = case(150, 256, 2048, 8).inputs(np.random.default_rng(6))
    order = np.random.default_rng(7).permutation(150)

    def outputs(rows: Array) -> dict[str, list[tuple[Array, ...]]]:
        """By reduction key, what each tactic of that order gives."""
        one = Case("", {"top_k": 8}, lambda rng: (rows, *rest))
        made: dict[str, list[tuple[Array, ...]]] = {}
        for work in cuda_node.planned(OP, one, bench.target):
            key = work.tactic.reduction_key(one.attrs, (), bench.target)
            made.setdefault(str(key), []).append(cuda_node.run(bench, work, (rows, *rest)))
        return made

    whole, mixed, few = outputs(x), outputs(x[order]), outputs(x[10:110])
    assert {"wide_96", "last"} <= set(whole) and {"wide_96", "last"} <= set(few)
    assert ("halves" in whole) == bench.target.wgmma
    for key, made in whole.items():
        a = made[0]
        for b in (*made, *([y[np.argsort(order)] for y in m] for m in mixed[key])):
            assert all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)), key
        for c in few.get(key, []):
            assert all(x[10:110].tobytes() == y.tobytes() for x, y in zip(a, c, strict=True)), key
