"""The delta rule's prefill with its convolution on the host, thread by thread: the bits, and the
states, of the two ops that it replaces."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200, Target
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta, gdn_prefill
from spark_engine.tensors import Array
from tests.plugins import emulated
from tests.plugins.cases.delta_rule.gdn_prefill import Launch
from tests.plugins.delta_rule.test_emulated_delta import FORMS, SMALL, TRIED

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
ROWS = gdn_prefill.ROWS
# Also a sequence of one tile without a token, which begins elsewhere and saves; the last of another.
EMPTY = ((3, 3, -1, 1, 0), (40, 104, 0, 70, 0), (64, 0, 0, 0, 3))
EMPTY_SAVES = {"sources": ((3, 2), (1, 2)), "saves": ((1, 5), (3, 6))}


def launch_of(form: str) -> Launch:
    known = {**FORMS, **SMALL}
    taps = 2 if form == "two blocks a head" else 4
    if form.startswith("no token"):
        slots, starts, counts = EMPTY
        delta = replace(
            known["drafts" if "drafts" in form else "f32"],
            slots=slots, starts=starts, counts=counts, **EMPTY_SAVES,
        )  # fmt: skip
        return Launch(delta)
    return Launch(known[form], taps)


def one_by_one(launch: Launch, arrays: tuple[Array, ...], run: "Run") -> list[Array]:
    """o, conv_state', gdn_state', [gdn_ring'] of causal_conv and gated_delta_chunk."""
    qkvz, ba, weight, columns, *rest = arrays
    attrs = {n: launch.attrs[n] for n in ("tile", "drafts") if n in launch.attrs}
    c, conv = run(causal_conv.OP, "", attrs, (qkvz, weight, columns, *rest[-ROWS:]))
    o, *states = run(gated_delta.CHUNK, None, launch.attrs, (c, ba, *rest))
    return [o, conv, *states]


EXTRA = [(t, g, f) for t, g in {(t, g) for t, g, _ in TRIED} for f in ("no token", "no token, drafts")]


@pytest.mark.parametrize(("tactic", "target", "form"), TRIED)
def test_it_has_the_bits_of_the_two(
    tactic: str, target: Target, form: str, cache: Path
) -> None:
    launch = launch_of(form)
    arrays = launch.inputs(np.random.default_rng(5))
    fused = emulated.results(gdn_prefill.OP, tactic, launch.attrs, arrays, target, cache)
    def run(op, name, attrs, given):
        return emulated.results(op, tactic if name is None else name, attrs, given, target, cache)
    plain = one_by_one(launch, arrays, run)
    for outputs in (fused, plain):
        launch.ignore(tuple(outputs))
    for a, b in zip(fused, plain, strict=True):
        assert a.tobytes() == b.tobytes()
