"""The agent's trace: engines that say a script, with drafts from a head and from the text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.steps import agent_trace, scripted
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from tests.models.test_synthetic import folder

EDIT = [*range(30, 60)]  # an answer that repeats what is in its prompt
TURNS = [([*range(5, 60), *range(3, 9)], EDIT), ([7] * 70, [9, 4, 8, 4, 9, 1])]
OPTIONS = Options(
    "cpu", decode=(1,), prefill=(64,), verify=((1, 7),), drafts=7, draft_suffix=6,
    max_context=128, max_seqs=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace")
    checkpoint = folder(path / "m", "bf16", False, head=True)
    build(checkpoint, path / "e", OPTIONS, lambda text: None)
    return path / "e"


@pytest.mark.parametrize(
    ("rates", "least", "a_round"),
    [((0.0,), 6, (1.2, 8)), ((0.5, 0.5), 6, (1.5, 8)), ((1.0,) * 7, 0, (2.5, 8))],
)
def test_an_engine_of_drawn_weights_says_its_script(
    engine: Path, rates: Sequence[float], least: int, a_round: tuple[float, float]
) -> None:
    """`run` raises where a token differs; tokens of a round are as few or many as the drafts."""
    found = agent_trace.run(engine, TURNS, scripted.Script(rates, least), fixed_drafts=True)
    assert found.tokens == sum(len(answer) - 1 for _, answer in TURNS)
    assert a_round[0] <= found.tokens / sum(found.by_k.values()) <= a_round[1], str(found)


def test_a_script_that_is_not_followed_is_an_error(engine: Path) -> None:
    class Other(scripted.Script):
        def round(self, count: int, k: int) -> tuple[np.ndarray, np.ndarray]:
            said, made = super().round(count, k)
            return said + (said > 0), made

    with pytest.raises(SystemExit, match="did not follow its script"):
        agent_trace.run(engine, TURNS, Other((0.0,), 6))


def test_rounds_of_a_script() -> None:
    script = scripted.Script((1.0, 0.0), 0)
    script.begin([1, 2], [3, 4, 5, 6])
    said, made = script.round(1, 2)
    assert said.tolist() == [4] and made[0] == 5 and made[1] != 6
    said, made = script.round(3, 2)  # the first of two drafts is right
    assert said.tolist() == [5, 6, -1] and script.at == 6 and (made == -1).all()
