"""What comes back from reading a body is bounded, whatever the body asks for."""

import json
from typing import Any

import pytest

from spark_engine.runtime.server.prompts import handler, preparer
from spark_engine.runtime.server.prompts.contract import BodyRefused, JobKind, Prepared
from tests.runtime.server.api.api_client import USER, ApiClient

IDS = [65, 66, 67, 68]


def _do(kind: JobKind, **body: Any) -> Any:
    pool: Any = ApiClient().service._pool
    return pool.do(kind, [[json.dumps({"max_tokens": 2, **body}).encode()]])


@pytest.mark.parametrize(
    ("name", "most", "body", "words"),
    [
        ("MOST_TOKENS", 7, {"prompt": IDS, "n": 2}, "4 prompt tokens with n = 2 are 8; at most 7"),
        ("MOST_TOKENS", 7, {"prompt": [IDS, IDS]}, "8 prompt tokens with n = 1 are 8; at most 7"),
        ("MOST_SHOWN", 7, {"prompt": IDS, "n": 2, "return_token_ids": True}, "repeats them"),
        ("MOST_SHOWN", 7, {"prompt": IDS, "n": 2, "prompt_logprobs": 1}, "repeats them"),
        ("MOST_SHOWN", 0, {"prompt": "abc", "echo": True, "n": 1}, "repeat 3 characters"),
        ("MOST_TEXT", 3, {"prompt": ["ab", "cd"]}, "4 characters together; at most 3"),
    ],
)
def test_prompts_are_bounded_together(
    name: str, most: int, body: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(_do(JobKind.COMPLETIONS, **body)[0], Prepared)
    monkeypatch.setattr(preparer, name, most)
    monkeypatch.setattr(preparer.Preparer, "max_model_len", 0 if "echo" in body else 5)
    if isinstance(body["prompt"], str):
        monkeypatch.setattr(preparer.Preparer, "ids_of", lambda *_: IDS)
    found, _ = _do(JobKind.COMPLETIONS, **body)
    assert isinstance(found, BodyRefused) and words in found.message


def test_the_names_of_tools_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    function = {"name": "f", "parameters": {"properties": {f"p{i}": {} for i in range(99)}}}
    tools = [{"type": "function", "function": function}]
    monkeypatch.setattr(preparer, "MOST_TYPES", 300)
    found, _ = _do(JobKind.CHAT, messages=USER, tools=tools)
    assert isinstance(found, BodyRefused) and "tools' parameters are" in found.message
    assert found.param == "tools"


def test_all_else_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "MOST_HEADER", 2000)
    assert isinstance(_do(JobKind.CHAT, messages=USER)[0], Prepared)
    found, _ = _do(JobKind.CHAT, messages=USER, stop=["s" * 3000])
    assert isinstance(found, BodyRefused) and "next to its prompt has" in found.message


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_text_that_is_too_long_is_not_counted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer, "MOST_CHARACTERS", 1)
    answer = ApiClient().post(path, {"messages": USER})
    assert answer.status_code == 400 and "at most 1 are tokenised" in answer.text


def test_an_error_is_short_and_has_words() -> None:
    found, _ = _do(JobKind.CHAT, messages=USER, tool_choice="x" * 100_000)
    assert isinstance(found, BodyRefused) and 0 < len(found.message) <= 2001


def test_nothing_of_a_body_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pool: Any = ApiClient().service._pool
    body = {"messages": USER, "guided_json": {"type": "object"}}
    pool.do(JobKind.CHAT, [[json.dumps(body).encode()]])
    pool.do(JobKind.CHAT, [[json.dumps({**body, "temperature": -1}).encode()]])
    assert pool.handler.preparer.reader.take() == {}
    assert pool.handler.grammars._known == {}
