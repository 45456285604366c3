"""A schema's file becomes the field that a client would send."""

from pathlib import Path

import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.cli.options.answer_options import ANSWER

[ROW] = [row for row in ANSWER if row.flag == "--json-schema"]


def test_a_file_is_a_response_format(tmp_path: Path) -> None:
    assert ROW.turn is not None and ROW.turn(None) is None
    (tmp_path / "one.json").write_text('{"type": "null"}')
    inner = {"name": "one", "schema": {"type": "null"}}
    wanted = {"type": "json_schema", "json_schema": inner}
    assert ROW.turn(str(tmp_path / "one.json")) == wanted


@pytest.mark.parametrize(
    ("text", "words"), [("{", "is not JSON: Expecting"), (None, "cannot be read: No such file")]
)
def test_a_file_that_is_none_is_named(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    if text is not None:
        path.write_text(text)
    assert ROW.turn is not None
    with pytest.raises(OptionError, match=f"--json-schema {path} {words}"):
        ROW.turn(str(path))
