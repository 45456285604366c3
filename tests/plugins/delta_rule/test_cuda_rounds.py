"""Rounds of drafts through the gated delta net's kernels: every token has the bits it has alone,
whatever tactic, and those of an engine without drafts. Needs a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.op import Attrs, Case, Op  # noqa: E402
from spark_engine.plugins.ops.delta_rule import gdn_decode  # noqa: E402
from spark_engine.tensors import Array, DType  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases
from tests.plugins.delta_rule.test_long_rounds import far, in_rounds, sequence_of
from tests.plugins.delta_rule.test_rounds import (  # noqa: E402
    PROMPTS,
    Sequence_,
    check_rounds,
    followed,
    one_by_one,
)

SERVED = gated_delta_cases.Launch(
    1, (), (), (), 1, 3, 128, 128, DType.BF16, DType.F32, ring=8, drafts=3
)
KERNELS = {
    "served heads": SERVED,
    "served heads, bf16 state": replace(SERVED, state=DType.BF16),
    "seven drafts": replace(SERVED, keys=2, values=4, key_dim=64, value_dim=64, drafts=7),
    "short ring": replace(SERVED, keys=2, values=2, key_dim=32, value_dim=64, ring=2),
    "long ring": replace(SERVED, keys=1, values=2, value_dim=64, ring=16, drafts=2),
}


class OnGpu:
    """The kernels; of ops that have it those of `tactic`, else the first that takes it."""

    def __init__(self, bench: cuda_node.Bench, tactic: str = "") -> None:
        self.bench, self.tactic = bench, tactic

    def __call__(self, op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
        arrays = tuple(operands.values())
        case = Case("", attrs, lambda _: arrays)
        works = list(cuda_node.planned(op, case, self.bench.target))
        names = {w.tactic.name: w for w in works}
        known = {t.name for t in op.cuda.tactics}
        if not works or (self.tactic in known and self.tactic not in names):
            pytest.skip(f"{self.tactic or 'every kernel'} refuses {op.name}")
        return cuda_node.run(self.bench, names.get(self.tactic, works[0]), arrays)


# Their rounds have the bits of single tokens; the others take a round's tokens at once.
ONE_BY_ONE = [t.name for t in gdn_decode.OP.cuda.tactics if "chunk" not in t.name]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["parts", "fused"])
@pytest.mark.parametrize("tactic", ONE_BY_ONE)
@pytest.mark.parametrize("form", KERNELS)
def test_kernels_give_the_bits_of_single_tokens(
    form: str, tactic: str, fused: bool, bench: cuda_node.Bench
) -> None:
    compute = OnGpu(bench, tactic)
    check_rounds(KERNELS[form], PROMPTS["prompts between"], compute, fused)


@pytest.mark.gpu
@pytest.mark.parametrize("tactic", ONE_BY_ONE)
@pytest.mark.parametrize("form", KERNELS)
def test_kernels_with_drafts_give_the_bits_of_those_without(
    form: str, tactic: str, bench: cuda_node.Bench
) -> None:
    """Single tokens behind a ring with drafts and behind a plain one, from position 0."""
    compute, launch = OnGpu(bench, tactic), KERNELS[form]
    drafted = Sequence_(launch, compute, True)
    plain = Sequence_(replace(launch, drafts=0), compute, True)
    plain.given = drafted.given
    y = [
        [part.tobytes() for _, part in followed(sequence, one_by_one(30, {}))]
        for sequence in (drafted, plain)
    ]
    assert y[0] == y[1]


@pytest.mark.gpu
@pytest.mark.parametrize("values", [2, 3])
def test_tokens_at_once_are_as_far_off_as_one_by_one(values: int, bench: cuda_node.Bench) -> None:
    """After 2,000 tokens: test_long_rounds.py has float64's figures; y is rounded to bf16."""
    launch = replace(SERVED, values=values)
    computes = [OnGpu(bench, name) for name in ("small registers", "chunk")]
    one, found = (in_rounds(sequence_of(launch, c, 2_000), 2_000) for c in computes)
    y, state = (far(*(x.astype(float) for x in xs)) for xs in zip(found, one, strict=True))
    assert y < 1e-3 and 0 < state < 1e-6
