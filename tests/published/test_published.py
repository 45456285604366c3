"""Engines of every published layout against transformers over the numbers that the files encode.

Every log-probability is compared, so that greedy tokens are the same except at nearer ties, and
so that a wrong rope shows. Formats that round inputs are discontinuous: a value near the border of
two codes may fall on either side, and moves the rest. A right engine meets no such value on most
of the prompts; one that rounds otherwise differs on all of them.
"""

from collections.abc import Callable
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
    target="cpu", decode=(2,), prefill=(64,), max_context=64, max_seqs=2, debug=True, drafts=0
)
DRAFTING = replace(OPTIONS, decode=(ROWS,), prefill=(128,), max_seqs=ROWS, drafts=1)
TOKENS, DECODED, PROMPTS = 16, 2, 6
NEAR = 1e-3  # of log-probability
Compute = Callable[[list[int]], F64]


def agree(written: Written, ours: Compute, truth: Callable[[Truth, list[int]], F64]) -> None:
    """Fails where the engine and transformers differ on a prompt; where inputs are rounded, on
    every prompt."""
    rounded = bool(written.rounds or written.kv)
    theirs, errors = Truth(written), []
    for seed in range(PROMPTS if rounded else 1):
        ids = np.random.default_rng(seed).integers(2, 499, TOKENS).tolist()
        expected = truth(theirs, ids)
        errors.append(np.abs(ours(ids) - expected).max())
        if errors[-1] < NEAR:
            break
    assert min(errors) < NEAR, f"log-probabilities differ by {errors}"
    if rounded:
        unseen = np.abs(truth(Truth(written, exact=True), ids) - expected).max()
        assert unseen > 20 * NEAR, "the rounding changes next to nothing"


def follow(checkpoint: Path, written: Written) -> str:
    """Builds, and compares every token's log-probabilities; what the build said."""
    report = build(checkpoint, checkpoint.with_name("engine"), OPTIONS, lambda text: None)
    engine = load(checkpoint.with_name("engine"), threads=1)

    def run(ids: list[int]) -> F64:
        solo = Solo(engine)
        solo.prefill(ids[:-DECODED], rows=1)
        for token in ids[-DECODED:]:
            solo.decode(token, rows=2)
        return log_probabilities(np.stack(solo.logits))

    agree(written, run, Truth.of)
    return "\n".join(report.notes)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_published(layout: Layout, tmp_path: Path) -> None:
    written = make(layout)
    checkpoint = written.write(tmp_path / "checkpoint")
    facts = facts_of(open_model(checkpoint))
    assert (facts.head is not None) == (layout.head is not None), facts.no_head
    follow(checkpoint, written)


# With a head that is quantised, of another family, or in another file.
HEADS = [name for name, o in LAYOUTS.items() if o.head or o.head_file != SINGLE or o.kind == "next"]


@pytest.mark.parametrize("name", [*HEADS, "bf16 wrapper, fused experts"])
def test_drafts(name: str, tmp_path: Path) -> None:
    written = make(LAYOUTS[name])
    checkpoint = written.write(tmp_path / "checkpoint")
    build(checkpoint, tmp_path / "engine", DRAFTING, lambda text: None)
    engine = load(tmp_path / "engine", threads=1)

    def run(ids: list[int]) -> F64:
        drafts = DraftRun(OrtEngine(engine))
        drafts.prefill(ids)
        return log_probabilities(drafts.round(1).draft_logits[0])

    agree(written, run, _drafted)


def _drafted(truth: Truth, prompt: list[int]) -> F64:
    """Log-probabilities of the draft of the first round: prefill and round choose a token each."""
    ids = list(prompt)
    for _ in range(2):
        ids.append(int(truth.of(ids)[-1].argmax()))
    return truth.draft(ids)
