"""The delta rule's prefill with its convolution on the host, thread by thread: outputs and states
have the bits of the two ops that it replaces, of which one is held to its reference next to this.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Attrs, Op
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta, gdn_prefill
from spark_engine.tensors import Array
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.delta_rule.gdn_prefill import Launch
from tests.plugins.delta_rule.test_emulated_delta import FORMS, SMALL, TRIED

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP, ROWS = gdn_prefill.OP, gdn_prefill.ROWS
# A last tile without a token that saves; sequences without a token: from another's state, fresh.
EMPTY = replace(
    FORMS["f32"],
    slots=(3, 3, -1, 1, 0), starts=(40, 104, 0, 70, 0), counts=(64, 0, 0, 0, 0),
    sources=((3, 2), (1, 2)), saves=((1, 5), (3, 6), (4, 7)),
)  # fmt: skip
FIRST = 5  # tile of a sequence of two in FORMS
LAUNCHES = {form: Launch(delta) for form, delta in (FORMS | SMALL).items()} | {
    "no token": Launch(EMPTY),
    "no token, drafts": Launch(replace(EMPTY, ring=8, drafts=3)),
    "two taps": Launch(FORMS["f32"], 2),
    "three taps, drafts": Launch(FORMS["drafts"], 3),
}
BOTH = [("wgmma", H200), ("warps", GB10)]
MORE = [(t, g, form) for t, g in BOTH for form in LAUNCHES if form not in FORMS | SMALL]


@pytest.mark.parametrize(
    ("tactic", "target", "form"),
    [*TRIED, *MORE],
    ids=[f"{t}-{g.sms}-{f}" for t, g, f in (*TRIED, *MORE)],
)
def test_it_has_the_bits_of_the_two_ops(
    tactic: str, target: Target, form: str, cache: Path
) -> None:
    launch = LAUNCHES[form]
    arrays = launch.inputs(np.random.default_rng(5))

    def run(op: Op, chosen: str, attrs: Attrs, given: Sequence[Array]) -> list[Array]:
        return emulated.results(op, chosen, attrs, given, target, cache)

    got = run(OP, tactic, launch.attrs, arrays)
    qkvz, ba, weight, columns, *rest = arrays
    attrs = {n: launch.attrs[n] for n in ("tile", "drafts") if n in launch.attrs}
    c, conv = run(causal_conv.OP, "", attrs, (qkvz, weight, columns, *rest[-ROWS:]))
    o, *states = run(gated_delta.CHUNK, tactic, launch.attrs, (c, ba, *rest))
    for name, a, b in zip(OP.made(launch.attrs), got, [o, conv, *states], strict=True):
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize(("tactic", "target"), BOTH)
def test_a_sequence_has_its_bits_in_any_company(tactic: str, target: Target, cache: Path) -> None:
    launch = LAUNCHES["f32"]
    arrays = launch.inputs(np.random.default_rng(5))
    many = emulated.results(OP, tactic, launch.attrs, arrays, target, cache)
    qkvz, ba, *others = arrays
    others[-ROWS:] = [a[FIRST:] for a in others[-ROWS:]]
    own = (qkvz[FIRST * 64 :], ba[FIRST * 64 :], *others)
    alone = emulated.results(OP, tactic, launch.attrs, own, target, cache)
    assert alone[0].tobytes() == many[0][FIRST * 64 :].tobytes()
    for a, b in zip(alone[1:], many[1:], strict=True):
        assert a[[0, 8]].tobytes() == b[[0, 8]].tobytes()  # its slot, and the row that it saves to


def test_a_projection_of_odd_width_is_refused() -> None:
    launch = LAUNCHES["f32"]
    qkvz, *rest = launch.inputs(np.random.default_rng(5))
    specs = cuda_node.specs_of(OP, launch.attrs, (qkvz[:, :-1], *rest))
    (wgmma, _) = OP.cuda.tactics
    assert "columns are not read four at a time" in (wgmma.refuse(launch.attrs, specs, H200) or "")
