"""Forms of answers, from a body to the engine's request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from spark_engine.engine_file import has_text
from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.engine_client import worker
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer
from tests.runtime.fake_client import FakeClient, service

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
END = (Event(0, 40, finish=FinishReason.LENGTH),)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.write(tmp_path))


def _chat(tokenizer: Tokenizer, **fields: Any) -> list[ConstraintSpec | None]:
    """What binds each choice of a chat."""
    client = FakeClient(END)
    template = ChatTemplate(small_tokenizer.TEMPLATE)
    served = service(client, tokenizer, template=template, context=512)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **fields}
    asyncio.run(served.chat(json.dumps(body).encode()))
    return [request.constraint for request in client.submitted]


def _complete(tokenizer: Tokenizer | None, **fields: Any) -> list[ConstraintSpec | None]:
    client = FakeClient(END)
    served = service(client, tokenizer, context=512)
    asyncio.run(served.complete(json.dumps({"max_tokens": 2, **fields}).encode()))
    return [request.constraint for request in client.submitted]


def test_a_chats_form_begins_behind_its_thought(tokenizer: Tokenizer) -> None:
    [open_thought] = _chat(tokenizer, response_format=FORMAT)
    assert open_thought is not None and "%json" in open_thought.grammar
    assert open_thought.end_of_thought == tokenizer.id_of("</think>")
    [none] = _chat(tokenizer, response_format=FORMAT, enable_thinking=False)
    assert none is not None and none.end_of_thought == -1


def test_a_form_and_a_budget_go_together(tokenizer: Tokenizer) -> None:
    [bound] = _chat(tokenizer, response_format=FORMAT, thinking_budget=5)
    assert bound is not None and bound.grammar and bound.budget == 5 and bound.close


def test_all_choices_and_prompts_are_bound(tokenizer: Tokenizer) -> None:
    two = _chat(tokenizer, guided_regex="a+", n=2)
    assert len(two) == 2 and two[0] == two[1] and two[0] is not None
    four = _complete(tokenizer, prompt=["a", "b<think>\n"], n=2, guided_choice=["x"])
    ends = [bound.end_of_thought for bound in four if bound is not None]
    assert ends == [-1, -1, tokenizer.id_of("</think>"), tokenizer.id_of("</think>")]


def test_tools_are_called_as_the_choice_says(tokenizer: Tokenizer) -> None:
    assert _chat(tokenizer, tools=[TOOL]) == [None]
    assert _chat(tokenizer, tools=[TOOL], tool_choice="none") == [None]
    named = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        [bound] = _chat(tokenizer, tools=[TOOL], tool_choice=choice)
        assert bound is not None and "<function=look>" in bound.grammar
    [several] = _chat(tokenizer, tools=[TOOL], tool_choice="required")
    [single] = _chat(tokenizer, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert several is not None and single is not None and several.grammar != single.grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "x"}}, "guided_json", "guided_json.type cannot be enforced"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"structured_outputs": 5}, "structured_outputs", "structured_outputs"),
        ({"response_format": "json"}, "response_format", "response_format"),
        (
            {"guided_whitespace_pattern": "(", "guided_json": {}},
            "guided_json",
            "cannot be enforced",
        ),
    ],
)
def test_a_form_that_cannot_be_is_the_requests_error(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        _chat(tokenizer, **fields)
    assert caught.value.param == param


def test_an_engine_without_a_tokenizer_has_no_forms() -> None:
    assert _complete(None, prompt=[1, 2]) == [None]
    with pytest.raises(RequestError, match="no tokenizer"):
        _complete(None, prompt=[1, 2], guided_regex="a")


def test_the_engines_process_has_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Stop(Exception):
        pass

    def opened(folder: Path, options: Any, *others: Any) -> None:
        seen.append(options.grammars)
        raise Stop

    info = service(FakeClient(), None).info
    monkeypatch.setattr(worker, "read_info", lambda folder: info)
    monkeypatch.setattr(worker.Engine, "open", opened)
    for text in (False, True):
        if text:  # once: the engine's process reads it in a thread
            small_tokenizer.write(tmp_path / "tokenizer")
        assert has_text(tmp_path) is text
        with pytest.raises(Stop):
            worker.open_engine(tmp_path, worker.EngineOptions(), worker.NoTrace())
    assert seen[0] is None and seen[1]('start: "a"').done is False
