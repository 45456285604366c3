"""Lines of requests and of answers, whole, torn, foreign and too long."""

import json
from pathlib import Path
from typing import Any

import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.offline import batch_files
from spark_engine.runtime.offline.batch_files import AROUND, AnswerFile, BatchLine, read_lines

MOST = 1 << 10  # bytes of a body


def _row(custom_id: object = "a", **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/x", "body": {"n": 1}} | more


def _read(path: Path, *lines: bytes) -> list[BatchLine]:
    path.write_bytes(b"".join(lines))
    return list(read_lines(path, MOST))


def test_a_line_keeps_its_body_byte_by_byte(tmp_path: Path) -> None:
    body = b'{"a": 1.50, "b":  "\\ud83d\\ude42 \xc3\xa9"}'
    line = b'{"custom_id": "x", "body": %s, "url": "/v1/y", "other": [1]}' % body
    (one,) = _read(tmp_path / "in", b"\xef\xbb\xbf", line)  # no newline at the end, no method
    assert one == BatchLine(1, "x", "/v1/y", body)
    both = _read(tmp_path / "in", line, b"\r\n \n", line.replace(b'"x"', b'"y"'), b"\r\n")
    assert [(row.number, row.custom_id) for row in both] == [(1, "x"), (3, "y")]


@pytest.mark.parametrize(
    ("line", "custom_id", "words"),
    [
        (b"{", None, "malformed|truncated"),
        (b"[]", None, "Expected `object`"),
        (b'{"custom_id": "a", "url": "\xff"}', None, "utf-8"),
        (json.dumps(_row(7)).encode(), None, r"Expected `str \| null`"),
        (json.dumps(_row(None)).encode(), None, "Expected `str`"),
        (json.dumps(_row("i" * 513)).encode(), None, "custom_id has 513 characters; at most 512"),
        (json.dumps(_row(method="GET")).encode(), "a", "method is 'GET'; it must be 'POST'"),
        (json.dumps(_row(body=[])).encode(), "a", "Expected `object`"),
        (b'{"custom_id": "a", "url": "x"}', "a", "`body`"),
        (json.dumps(_row(body={"stream": True})).encode(), "a", "body.stream is on"),
        (json.dumps(_row(body={"background": True})).encode(), "a", "body.background is on"),
        (b'{"custom_id": "a", "body": ' + b"[" * 60_000, None, "recursion|truncated|depth"),
    ],
)
def test_a_bad_line_says_why_and_is_one_line(
    line: bytes, custom_id: str | None, words: str, tmp_path: Path
) -> None:
    good = json.dumps(_row("good")).encode()
    bad, after = _read(tmp_path / "in", line, b"\n", good, b"\n")
    assert bad.custom_id == custom_id and not bad.body and after.problem == ""
    with pytest.raises(AssertionError, match=f"line 1: .*({words})"):
        raise AssertionError(bad.problem)
    answer = json.loads(bad.answer(None, {"code": "c", "message": bad.problem}))
    assert answer["custom_id"] == custom_id and answer["error"]["message"] == bad.problem


def test_a_line_that_is_too_long_is_not_kept(tmp_path: Path) -> None:
    long = b'{"custom_id": "a", "x": "%s"}\n' % (b"y" * (MOST + AROUND))
    first, last = _read(tmp_path / "in", long, json.dumps(_row("good")).encode())
    assert "the line has 65 KiB; at most 65 KiB" in first.problem and last.custom_id == "good"


def test_a_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_files, "MOST_LINES", 2)
    with pytest.raises(OptionError, match="more than 2 lines: split it"):
        _read(tmp_path / "in", b"{}\n" * 3)


def test_ids_are_of_custom_ids_and_else_of_lines() -> None:
    rows = [BatchLine(1, "line 2"), BatchLine(2, None), BatchLine(3, None), BatchLine(3, "id 1")]
    assert len({row.ident for row in rows}) == 4
    assert BatchLine(1, "x").ident == BatchLine(2, "x", "/u", b"{}").ident
    assert BatchLine(1, "\ud800").ident != BatchLine(1, "\ud801").ident


ANSWERS = [BatchLine(n, f"r{n}").answer({"body": "x" * n}) for n in range(1, 5)]
IDS = [BatchLine(n, f"r{n}").ident for n in range(1, 5)]


def test_a_torn_line_is_cut_off_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for cut in range(len(ANSWERS[2])):
        path.write_bytes(ANSWERS[0] + ANSWERS[1] + ANSWERS[2][:cut])
        file = AnswerFile(path)
        assert file.done == set(IDS[:2])
        file.write(ANSWERS[3])
        file.close()
        assert path.read_bytes() == ANSWERS[0] + ANSWERS[1] + ANSWERS[3]


@pytest.mark.parametrize("foreign", [b"notes", b"notes\n", b'{"id":"batch_req_1"}\n', b"\n", b"{}"])
def test_a_foreign_file_is_not_touched(foreign: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out"
    for before in (b"", ANSWERS[0]):
        path.write_bytes(before + foreign)
        with pytest.raises(OptionError, match="is no answer of a batch: name another file"):
            AnswerFile(path)
        assert path.read_bytes() == before + foreign
    path.write_bytes(ANSWERS[0][:-2] + b"\n")
    with pytest.raises(OptionError, match="line 1 is no answer"):
        AnswerFile(path)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "out")
    with pytest.raises(OptionError, match="another spark-run writes it"):
        AnswerFile(tmp_path / "out")
    first.close()
    AnswerFile(tmp_path / "out").close()
