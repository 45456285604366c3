"""Graphs with drafts against the independent float64 computation, round by round.

Every launch runs by the references of its ops, so nothing but the graphs, the weights and the
meaning of the ops is tried. A random head is hardly ever right: rounds in which drafts hold are
made by giving the row what the network will say.
"""

from pathlib import Path

import numpy as np
import pytest

from spark_engine.interface import Limits
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.open_model import open_model
from tests.checkpoints import write_checkpoint
from tests.models.draft_run import DraftRun, Round
from tests.models.reference_engine import ReferenceEngine
from tests.oracles import draft_truth

SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 64,
    "vocab_size": 160,
    "intermediate_size": 96,
    "mtp_num_hidden_layers": 1,
}
TOLERANCE = 1e-5  # of the range of the logits
CLEAR = 1e-4  # the least distance of two logits that decide on a draft
LENGTHS = {1: (), 5: (), 64: (), 65: (13,), 150: (37, 101)}  # prompt: where its chunks end


def _engine(path: Path, drafts: int, options: DraftOptions | None = None) -> ReferenceEngine:
    limits = Limits(2, 192, 8, 160, drafts=drafts, gdn_ring=4, bias_slots=4, top_logprobs=2)
    return ReferenceEngine(open_model(path), limits, options or DraftOptions())


def _prompt(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(0, 160, length)]


def _check(path: Path, run: DraftRun, made: Round, **variant: object) -> None:
    """What a round sampled, accepted and drafted is what the definition says."""
    counts = np.zeros(160, np.int32)
    np.add.at(counts, run.tokens[run.prompt : -1], 2)
    counts[run.tokens[: run.prompt]] |= 1
    assert np.array_equal(run.engine.states["token_counts"][run.slot], counts)
    drafts = len(made.drafts)
    truth = draft_truth.draft(path, run.tokens, max(drafts, 1), **variant)  # type: ignore[arg-type]
    assert draft_truth.near(made.logits, truth.target[-made.accepted :], TOLERANCE)
    chosen = truth.target.argmax(axis=1)[-made.accepted :]
    assert [*made.fed[1 : made.accepted], run.tokens[-1]] == chosen.tolist()
    if made.accepted < len(made.fed):
        assert made.fed[made.accepted] != run.tokens[-1]
    if drafts:
        assert truth.gap > CLEAR, "two ids draw level; take another seed"
        assert made.drafts == truth.tokens
        assert draft_truth.near(made.draft_logits, truth.logits, TOLERANCE)
    for name, held in (("mtp.k_pages", truth.keys), ("mtp.v_pages", truth.values)):
        assert draft_truth.near(run.pages_of(name)[: len(held)], held, TOLERANCE)


def _rounds(path: Path, run: DraftRun, drafts: int) -> list[Round]:
    """Rounds without drafts, with the head's own, and with some that hold; the sequence so far is
    checked behind each."""
    made = []
    for right in (None, None, drafts, 0, drafts - 1, None):
        given = None
        if right is not None:
            given = draft_truth.continuation(path, run.tokens, drafts)
            given[right:] = [(t + 1) % 160 for t in given[right:]]
        made.append(run.round(drafts, given))
        assert right is None or made[-1].accepted == right + 1
        _check(path, run, made[-1])
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ReferenceEngine]:
    """A checkpoint and its engine for up to four drafts."""
    path = tmp_path_factory.mktemp("drafts") / "checkpoint"
    write_checkpoint(path, SMALL, "f32", moe=request.param, seed=5)
    return path, _engine(path, 4)


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_rounds_are_the_definition(
    made: tuple[Path, ReferenceEngine], length: int, drafts: int
) -> None:
    path, engine = made
    engine.reset()
    run = DraftRun(engine)
    run.prefill(_prompt(length), LENGTHS[length])
    _rounds(path, run, drafts)


def _run(path: Path, drafts: int = 3, options: DraftOptions | None = None) -> DraftRun:
    """A prompt of 70 tokens in two chunks, and a first round."""
    run = DraftRun(_engine(path, drafts, options))
    run.prefill(_prompt(70), (41,))
    return run


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_known_mistakes_are_seen(tmp_path: Path, moe: bool) -> None:
    """Hidden taken before the final norm; a head with a cache that the prompt has not filled."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, SMALL, "f32", moe=moe, seed=5)
    run = _run(path)
    made = run.round(3)
    _check(path, run, made)
    for variant in ({"before_norm": True}, {"empty": 70}, {"empty": 1}):
        with pytest.raises(AssertionError):
            _check(path, run, made, **variant)


def test_decode_and_prefill_keep_the_heads_cache_filled(tmp_path: Path) -> None:
    """Rounds without drafts between rounds with them, and fewer than the state holds."""
    path = tmp_path / "checkpoint"
    write_checkpoint(path, SMALL, "f32", seed=5)
    run = _run(path)
    for drafts in (2, 0, 0, 3, 1, 0, 2):
        _check(path, run, run.round(drafts) if drafts else _decode(run))


def _decode(run: DraftRun) -> Round:
    made = run.round(0)
    assert made.accepted == 1 and not made.drafts
    return made
