"""Engines of every published layout against transformers over the numbers that the files encode.

Of formats that leave inputs alone, every log-probability is compared. Formats that round inputs
are discontinuous: a value near the border of two codes may fall on either side. Of some prompts
the one is taken on which transformers in f32 and in f64 differ least, and the error is measured
against what leaving out the rounding would change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.graph.lower import facts_of
from spark_engine.builder.plan.options import Options
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.load import load
from tests.published.checkpoint import Layout, Written, make
from tests.published.layouts import LAYOUTS
from tests.solo import Solo

pytest.importorskip("transformers")

from tests.published.truth import F64, Truth, log_probabilities  # noqa: E402

OPTIONS = Options(
    target="cpu", decode=(1,), prefill=(64,), max_context=64, max_seqs=2, debug=True, drafts=0
)
TOKENS, DECODED, PROMPTS = 20, 2, 4
TIE = 1e-3  # of log-probability: nearer tokens may change places
EXACT = 1e-3  # of log-probability
SHARE = 0.06  # of what the rounding changes


def _prompts(count: int) -> Iterator[list[int]]:
    for seed in range(count):
        yield [int(i) for i in np.random.default_rng(seed).integers(2, 499, TOKENS)]


def run(checkpoint: Path, ids: list[int]) -> tuple[F64, str]:
    """Log-probabilities [T, V] of an engine that is built from the folder, and its notes."""
    engine = checkpoint.with_name("engine")
    report = build(checkpoint, engine, OPTIONS, lambda text: None)
    solo = Solo(load(engine, threads=1))
    solo.prefill(ids[:-DECODED], rows=1)
    for token in ids[-DECODED:]:
        solo.decode(token)
    return log_probabilities(np.stack(solo.logits)), "\n".join(report.notes)


def agree(written: Written, checkpoint: Path) -> str:
    """Fails where the engine and transformers disagree; what the build said."""
    truth, rounded = Truth(written), written.rounds or written.kv
    found = [(ids, truth.of(ids)) for ids in _prompts(PROMPTS if rounded else 1)]
    if rounded:
        wide = Truth(written, wide=True)
        found.sort(key=lambda pair: float(np.abs(pair[1] - wide.of(pair[0])).mean()))
    ids, expected = found[0]
    ours, said = run(checkpoint, ids)
    error = np.abs(ours - expected)
    if rounded:
        changed = np.abs(Truth(written, exact=True).of(ids) - expected).mean()
        assert changed > 0.02, f"the rounding changes {changed:.2g} only: the test would not see it"
        assert error.mean() < SHARE * changed, f"{error.mean():.2g}, rounding changes {changed:.2g}"
    else:
        assert error.max() < EXACT, f"a log-probability differs by {error.max():.2g}"
    chosen = np.take_along_axis(expected, ours.argmax(-1)[:, None], -1)[:, 0]
    gap = (expected.max(-1) - chosen).max()
    assert gap < max(TIE, 2 * error.max()), f"a token is {gap:.2g} worse than transformers' choice"
    return said


def _params() -> Iterator[object]:
    for name, layout in LAYOUTS.items():
        marks = [pytest.mark.xfail(reason=layout.waits)] if layout.waits else []
        yield pytest.param(layout, id=name, marks=marks)


@pytest.mark.parametrize("layout", [*_params()])
def test_published(layout: Layout, tmp_path: Path) -> None:
    written = make(layout)
    checkpoint = written.write(tmp_path / "checkpoint")
    facts = facts_of(open_model(checkpoint))
    assert (facts.head is not None) == (layout.head is not None), facts.no_head
    agree(written, checkpoint)
