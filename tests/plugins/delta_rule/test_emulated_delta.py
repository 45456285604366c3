"""The delta rule's prefill on the host, thread by thread, whenever copies arrive: by wgmma, and as
GB10 has it.

One launch holds sequences of several tiles, ragged ends, inert rows, a row without a token, states
that begin elsewhere and are saved; what is not read is NaN, outputs before the launch too.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Case
from spark_engine.plugins.ops.delta_rule import gated_delta
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated
from tests.plugins.cases.delta_rule.gated_delta import Launch
from tests.plugins.cases.seeded import seeded

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP = gated_delta.CHUNK
TACTICS = {t.name: t for t in OP.cuda.tactics}
WGMMA = TACTICS["wgmma"]
FEW = replace(GB10, card=replace(GB10.card, sms=1))  # where a block has a whole head
ROWS = ((3, 3, 3, -1, 1, 0, 0), (40, 104, 168, 1 << 30, 0, 40, 104), (64, 64, 2, 0, 1, 64, 0))
GIVEN = Launch(
    64, *ROWS, 1, 2, 128, 64, DType.BF16, units=9,
    sources=((3, 2), (0, 2)), saves=((0, 4), (2, 5), (4, 6), (6, 8)),
)  # fmt: skip
FORMS = {
    "f32": GIVEN,
    "bf16 state": replace(GIVEN, state=DType.BF16),
    "two blocks a head": replace(GIVEN, values=1, value_dim=128),
    "ring of 8": replace(GIVEN, ring=8),
    "drafts": replace(GIVEN, ring=8, drafts=3, state=DType.BF16),
    "f16 state, full": replace(GIVEN, state=DType.F16, loud=1e6),
    "drafts, f16 state": replace(GIVEN, ring=8, drafts=3, state=DType.F16),
    "strong decay": replace(GIVEN, speed=3.0),
    "nearly equal keys": replace(GIVEN, speed=-5.0, strength=6.0, same=True),
}
SMALL = {  # heads of small models, on any GPU
    "heads of 16": replace(GIVEN, key_dim=16, value_dim=16),
    "heads of 32 and 48": replace(GIVEN, key_dim=32, value_dim=48, ring=8),
    "heads of 64 and 32": replace(GIVEN, key_dim=64, value_dim=32, speed=-5.0, strength=6.0),
    "keys of 128, heads of 80": replace(GIVEN, value_dim=80),
}
# Relative, of outputs (bf16) and of the state.
LIMITS = {"nearly equal keys": (1e-2, 2e-5)}


TRIED = [(t, g, form) for t, g in (("wgmma", H200), ("warps", GB10)) for form in FORMS]
TRIED += [("warps", FEW, "two blocks a head"), ("warps", H200, "heads of 16")]
TRIED += [("warps", GB10, form) for form in SMALL]


def far(got: Array, want: Array) -> float:
    a, b = got.astype(np.float64), want.astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b)), "others were written, or something is not"
    there = ~np.isnan(b)
    return float(np.linalg.norm(a[there] - b[there]) / np.linalg.norm(b[there]))


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize(
    ("tactic", "target", "form"), TRIED, ids=[f"{t}-{g.sms}-{f}" for t, g, f in TRIED]
)
def test_it_is_the_reference(
    tactic: str, target: Target, form: str, late: bool, cache: Path
) -> None:
    given = {**FORMS, **SMALL}[form]
    arrays = given.inputs(np.random.default_rng(5))
    got = emulated.results(OP, tactic, given.attrs, arrays, target, cache, late)
    want = list(OP.reference(given.attrs, arrays))
    given.ignore(tuple(got))
    given.ignore(tuple(want))
    output, state = LIMITS.get(form, (5e-3, 1e-5 if given.state is DType.F32 else 3e-3))
    assert far(got[0], want[0]) < output
    assert far(got[1], want[1]) < state
    assert all(far(g, w) == 0 for g, w in zip(got[2:], want[2:], strict=True))


@pytest.mark.parametrize(
    "case", [c for c in seeded(gated_delta.STEP) if "f16 state, full" in c.label]
)
def test_steps_keep_states_of_f16_finite(case: Case, cache: Path) -> None:
    op, arrays = gated_delta.STEP, case.inputs(np.random.default_rng(5))
    got = emulated.results(op, "", case.attrs, arrays, GB10, cache)
    want = op.reference(case.attrs, arrays)
    assert case.ignore is not None
    case.ignore(tuple(got)), case.ignore(want)
    assert (np.abs(want[1]) == np.finfo(np.float16).max).any(), "none is full"
    assert far(got[0], want[0]) < 1e-3 and far(got[1], want[1]) < 1e-3


@pytest.mark.parametrize(("tactic", "target"), [("wgmma", H200), ("warps", GB10)])
def test_a_sequence_has_its_bits_in_any_company(tactic: str, target: Target, cache: Path) -> None:
    arrays = list(GIVEN.inputs(np.random.default_rng(5)))
    many = emulated.results(OP, tactic, GIVEN.attrs, arrays, target, cache)
    c, ba, *weights = arrays[:5]
    first = [a[5:] for a in arrays[5:]]  # slot 0 alone, which begins and saves as before
    own = (c[5 * 64 :], ba[5 * 64 :], *weights, *first)
    alone = emulated.results(OP, tactic, GIVEN.attrs, own, target, cache)
    assert alone[0].tobytes() == many[0][5 * 64 :].tobytes()
    assert alone[1][[0, 8]].tobytes() == many[1][[0, 8]].tobytes()


def test_what_it_refuses_is_named() -> None:
    arrays = GIVEN.inputs(np.random.default_rng(5))
    specs = cuda_node.specs_of(OP, GIVEN.attrs, arrays)
    assert WGMMA.refuse(GIVEN.attrs, specs, GB10) == "sm_121a has no wgmma"
    assert TACTICS["warps"].refuse(GIVEN.attrs, specs, H200) == "sm_90a has wgmma"
    small = replace(GIVEN, key_dim=64).attrs
    assert "heads of 64 and 64" in (WGMMA.refuse(small, specs, H200) or "")
