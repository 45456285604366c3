"""Rounds of drafts on the host, thread by thread, against the reference and against single tokens;
what is not read is NaN, outputs before the launch too."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200, Tactic
from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins.ops.delta_rule import gdn_decode
from spark_engine.tensors import Array
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.delta_rule import gdn_decode as gdn_decode_cases
from tests.plugins.delta_rule import test_rounds as rounds

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP = gdn_decode.OP
TACTICS = {t.name: t for t in OP.cuda.tactics}


def run(tactic: Tactic, attrs: Attrs, arrays: tuple[Array, ...], cache: Path) -> list[Array]:
    specs = cuda_node.specs_of(OP, attrs, arrays)
    if (reason := tactic.refuse(attrs, specs, H200)) is not None:
        pytest.skip(reason)
    plan, outs = tactic.plan(attrs, specs, H200), OP.infer(attrs, specs)
    return emulated.run(plan, tactic.source, arrays, outs, cache, True, OP.aliases(attrs))


@pytest.mark.parametrize("tactic", TACTICS)
@pytest.mark.parametrize("case", [*gdn_decode_cases.ROUNDS[::9]], ids=lambda c: c.label)
def test_a_round(case: Case, tactic: str, cache: Path) -> None:
    arrays = case.inputs(np.random.default_rng(1))
    got = tuple(run(TACTICS[tactic], case.attrs, arrays, cache))
    want = tuple(o.copy() for o in OP.reference(case.attrs, arrays))
    assert case.ignore is not None
    for made in (got, want):
        case.ignore(made)
    limits, states = OP.tolerance(case.attrs), OP.aliases(case.attrs)
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        label = f"{tactic}/{case.label} output {index}"
        cuda_node.compare(label, g, w, limits, index not in states)


@dataclass(frozen=True)
class Emulated:
    """The fused op by a tactic, all else by the reference."""

    tactic: Tactic
    cache: Path

    def __call__(self, op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
        if op is not OP:
            return rounds.by_reference(op, attrs, operands)
        return run(self.tactic, attrs, tuple(operands.values()), self.cache)


@pytest.mark.parametrize(("tactic", "form"), [("registers", "f32"), ("wide grouped", "short ring")])
def test_rounds_give_the_bits_of_single_tokens(tactic: str, form: str, cache: Path) -> None:
    compute = Emulated(TACTICS[tactic], cache)
    rounds.check_rounds(rounds.FORMS[form], rounds.PROMPTS["from nothing"], compute, True)
