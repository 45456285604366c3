"""A model's own answers, through the engine: complete answers fit their schemas."""

from pathlib import Path

from spark_engine.runtime.engine.request import FinishReason
from tests.runtime.structured.embedded import run


def test_answers_of_the_embedded_model_are_of_their_schemas(tmp_path: Path) -> None:
    ends = run(tmp_path / "engine", schemas=4, prompts=3, most=64)
    assert ends.total() == 12 and set(ends) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert ends[FinishReason.STOP] >= 4
