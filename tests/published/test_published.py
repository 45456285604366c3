"""Engines of every published layout against transformers over the numbers that the files encode.

Of formats that leave inputs alone, every log-probability is compared. Formats that round inputs
are discontinuous: a value near the border of two codes may fall on either side. Of some prompts
the one is taken on which transformers in f32 and in f64 differ least, and the error is measured
against what leaving out the rounding would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.graph.lower import facts_of
from spark_engine.builder.plan.options import Options
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.load import load
from tests.models.draft_run import ROWS, DraftRun
from tests.models.test_draft_engines import OrtEngine
from tests.published.checkpoint import SINGLE, Layout, Written, make
from tests.published.layouts import LAYOUTS
from tests.solo import Solo

pytest.importorskip("transformers")

from tests.published.truth import F64, Truth, log_probabilities  # noqa: E402

OPTIONS = Options(
    target="cpu", decode=(1,), prefill=(64,), max_context=64, max_seqs=2, debug=True, drafts=0
)
DRAFTING = replace(OPTIONS, decode=(ROWS,), prefill=(128,), max_seqs=ROWS, drafts=1)
TOKENS, DECODED, PROMPTS = 20, 2, 4
TIE = 1e-3  # of log-probability: nearer tokens may change places
EXACT = 1e-3  # of log-probability
SHARE = 0.06  # of what the rounding changes


def steadiest(
    written: Written, compute: Callable[[Truth, list[int]], F64]
) -> tuple[list[int], F64]:
    """A prompt and what `compute` makes of it by transformers: of some, the one on which f32 and
    f64 differ least."""
    truth, wide = Truth(written), Truth(written, wide=True)
    count = PROMPTS if written.rounds or written.kv else 1
    drawn = (np.random.default_rng(seed).integers(2, 499, TOKENS) for seed in range(count))
    found = [(ids.tolist(), compute(truth, ids.tolist())) for ids in drawn]
    return min(found, key=lambda pair: float(np.abs(pair[1] - compute(wide, pair[0])).mean()))


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
    ids, expected = steadiest(written, Truth.of)
    ours, said = run(checkpoint, ids)
    error = np.abs(ours - expected)
    if written.rounds or written.kv:
        changed = np.abs(Truth(written, exact=True).of(ids) - expected).mean()
        assert changed > 0.02, f"the rounding changes {changed:.2g} only: the test would not see it"
        assert error.mean() < SHARE * changed, f"{error.mean():.2g}, rounding changes {changed:.2g}"
    else:
        assert error.max() < EXACT, f"a log-probability differs by {error.max():.2g}"
    chosen = np.take_along_axis(expected, ours.argmax(-1)[:, None], -1)[:, 0]
    gap = (expected.max(-1) - chosen).max()
    assert gap < max(TIE, 2 * error.max()), f"a token is {gap:.2g} worse than transformers' choice"
    return said


def _params(names: Iterable[str]) -> Iterator[object]:
    for name in names:
        waits = LAYOUTS[name].waits
        marks = [pytest.mark.xfail(reason=waits)] if waits else []
        yield pytest.param(LAYOUTS[name], id=name, marks=marks)


@pytest.mark.parametrize("layout", [*_params(LAYOUTS)])
def test_published(layout: Layout, tmp_path: Path) -> None:
    written = make(layout)
    checkpoint = written.write(tmp_path / "checkpoint")
    facts = facts_of(open_model(checkpoint))
    assert (facts.head is not None) == (layout.head is not None), facts.no_head
    agree(written, checkpoint)


# With a head that is quantised, of another family, or in another file.
HEADS = [name for name, o in LAYOUTS.items() if o.head or o.head_file != SINGLE or o.kind == "next"]


@pytest.mark.parametrize("layout", [*_params([*HEADS, "bf16 wrapper, fused experts"])])
def test_drafts(layout: Layout, tmp_path: Path) -> None:
    written = make(layout)
    checkpoint = written.write(tmp_path / "checkpoint")
    build(checkpoint, tmp_path / "engine", DRAFTING, lambda text: None)
    drafts = DraftRun(OrtEngine(load(tmp_path / "engine", threads=1)))
    prompt, expected = steadiest(written, _drafted)
    drafts.prefill(prompt)
    error = np.abs(log_probabilities(drafts.round(1).draft_logits[0]) - expected).mean()
    changed = np.abs(_drafted(Truth(written, exact=True), prompt) - expected).mean()
    assert error < EXACT + SHARE * changed, f"{error:.2g}, rounding changes {changed:.2g}"


def _drafted(truth: Truth, prompt: list[int]) -> F64:
    """Log-probabilities of the draft of the first round: prefill and round choose a token each."""
    ids = list(prompt)
    for _ in range(2):
        ids.append(int(truth.of(ids)[-1].argmax()))
    return truth.draft(ids)
