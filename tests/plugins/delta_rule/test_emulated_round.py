"""Decode rows on the host, thread by thread: single tokens of engines without drafts and rounds of
drafts against the reference, rounds against single tokens too. What is not read is NaN, outputs
before the launch too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200, Tactic
from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins.ops.delta_rule import gated_delta, gdn_decode
from spark_engine.tensors import Array
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.delta_rule import gdn_decode as gdn_decode_cases
from tests.plugins.cases.seeded import seeded
from tests.plugins.delta_rule import test_rounds as rounds

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP = gdn_decode.OP
TACTICS = {t.name: t for t in OP.cuda.tactics}
AT_ONCE = [name for name in TACTICS if "chunk" in name]  # a round's tokens; the others one by one
ROUNDS = gdn_decode_cases.ROUNDS
# Without drafts: rings of 0, 2, 8 and 16 records, of both ops; states of f32, bf16 and f16.
FORMS = [f"{ring}{form}" for ring in ("", "ring of 8, ") for form in ("rows", "bf16", "f16 state")]
FORMS += ["ring of 2, rows", "ring of 16, rows"]
SINGLE = [(op, c) for op in (OP, gated_delta.STEP) for c in seeded(op) if c.label in FORMS]
TRIED = [(OP, n, case) for n in TACTICS for case in (ROUNDS if n in AT_ONCE else ROUNDS[::9])]
TRIED += [(o, t.name, c) for o, c in SINGLE for t in o.cuda.tactics if t.name not in AT_ONCE]


def run(
    tactic: Tactic, attrs: Attrs, arrays: tuple[Array, ...], cache: Path, op: Op = OP
) -> list[Array]:
    specs = cuda_node.specs_of(op, attrs, arrays)
    if (reason := tactic.refuse(attrs, specs, H200)) is not None:
        pytest.skip(reason)
    return emulated.results(op, tactic.name, attrs, arrays, H200, cache)


def name_of(x: Op | Case | str) -> str:
    return x if isinstance(x, str) else x.label if isinstance(x, Case) else x.name


@pytest.mark.parametrize(("op", "tactic", "case"), TRIED, ids=name_of)
def test_it_is_the_reference(op: Op, tactic: str, case: Case, cache: Path) -> None:
    arrays = case.inputs(np.random.default_rng(1))
    found = next(t for t in op.cuda.tactics if t.name == tactic)
    got = tuple(run(found, case.attrs, arrays, cache, op))
    want = tuple(o.copy() for o in op.reference(case.attrs, arrays))
    assert case.ignore is not None
    for made in (got, want):
        case.ignore(made)
    limits, states = op.tolerance(case.attrs), op.aliases(case.attrs)
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        label = f"{tactic}/{case.label} output {index}"
        cuda_node.compare(label, g, w, limits, index not in states)


@dataclass(frozen=True)
class Emulated:
    """The fused op by a tactic, of tokens one by one only if it takes them so; all else by the
    reference."""

    tactic: Tactic
    cache: Path

    def __call__(self, op: Op, attrs: Attrs, operands: dict[str, Array]) -> Sequence[Array]:
        if op is not OP or (self.tactic.name in AT_ONCE and attrs.get("tile", 1) == 1):
            return rounds.by_reference(op, attrs, operands)
        return run(self.tactic, attrs, tuple(operands.values()), self.cache)


@pytest.mark.parametrize(("tactic", "form"), [("registers", "f32"), ("grouped", "short ring")])
def test_rounds_give_the_bits_of_single_tokens(tactic: str, form: str, cache: Path) -> None:
    compute = Emulated(TACTICS[tactic], cache)
    rounds.check_rounds(rounds.FORMS[form], rounds.PROMPTS["from nothing"], compute, True)


@pytest.mark.parametrize("tactic", AT_ONCE)
@pytest.mark.parametrize("form", ["f32", "short ring"])
def test_tokens_at_once_follow_the_reference(form: str, tactic: str, cache: Path) -> None:
    """However many tokens of each round were kept, y and the states are those of single tokens."""
    launch, where = rounds.FORMS[form], rounds.PROMPTS["prompts between"]
    single = rounds.Sequence_(launch, rounds.by_reference, True)
    want, states = [], {}
    for end, y in rounds.followed(single, rounds.one_by_one(rounds.TOKENS - 8, where)):
        want.extend(y)
        states[end] = dict(single.states)
    for tile in (3, 4):
        parts = rounds.in_rounds(rounds.TOKENS - 8, tile, where, np.random.default_rng(tile))
        compute = Emulated(TACTICS[tactic], cache)
        drafted = rounds.Sequence_(replace(launch, tile=tile), compute, True)
        for end, y in rounds.followed(drafted, parts):
            np.testing.assert_allclose(y, want[end - len(y) : end], rtol=1e-3, atol=1e-4)
        mine = drafted.after_one_more(end, drafted.states)
        theirs = single.after_one_more(end, states[end])
        for pair in zip(mine, theirs, strict=True):
            got, true = (np.frombuffer(x, np.float32) for x in pair)
            np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-5)
