"""Forms of answers, from a body to the engine's request."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from spark_engine.engine_file import has_text
from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.server.engine_client import worker
from tests.runtime import small_tokenizer
from tests.runtime.fake_client import FakeClient, service
from tests.runtime.server.api.api_client import CHAT, TEXT, ApiClient, tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def _bound(path: str = CHAT, **fields: Any) -> list[ConstraintSpec | None]:
    server = ApiClient("x")
    base = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {}
    answer = server.post(path, {**base, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return [request.constraint for request in server.client.submitted]


def test_a_chats_form_begins_behind_its_thought() -> None:
    [open_thought] = _bound(response_format=FORMAT)
    assert open_thought is not None and "%json" in open_thought.grammar
    assert open_thought.end_of_thought == tokenizer().id_of("</think>")
    [none] = _bound(response_format=FORMAT, enable_thinking=False)
    assert none is not None and none.end_of_thought == -1


def test_a_form_and_a_budget_go_together() -> None:
    [bound] = _bound(response_format=FORMAT, thinking_budget=5)
    assert bound is not None and bound.grammar and bound.budget == 5 and bound.close


def test_all_choices_and_prompts_are_bound() -> None:
    two = _bound(guided_regex="a+", n=2)
    assert len(two) == 2 and two[0] == two[1] and two[0] is not None
    four = _bound(TEXT, prompt=["a", "b<think>\n"], n=2, guided_choice=["x"])
    ends = [bound.end_of_thought for bound in four if bound is not None]
    assert ends == [-1, -1, tokenizer().id_of("</think>"), tokenizer().id_of("</think>")]


def test_an_engine_without_a_tokenizer_has_no_forms() -> None:
    client = FakeClient()
    body = {"prompt": [1, 2], "max_tokens": 2}
    asyncio.run(service(client, None).complete(json.dumps(body).encode()))
    assert client.submitted[0].constraint is None
    with pytest.raises(RequestError, match="no tokenizer"):
        formed = json.dumps({**body, "guided_regex": "a"}).encode()
        asyncio.run(service(client, None).complete(formed))


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
