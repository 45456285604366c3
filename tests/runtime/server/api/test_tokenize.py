"""Bodies that need no engine: read and tokenised beside the event loop, within their limit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from spark_engine.runtime.server.api import fields, messages, tokenize
from tests.runtime.server.api.api_client import ApiClient

HI = [{"role": "user", "content": "hi there"}]
BODIES = {
    "/tokenize": (tokenize, {"messages": HI}),
    "/detokenize": (tokenize, {"tokens": [65, 66]}),
    "/v1/messages/count_tokens": (messages, {"messages": HI}),
}


@pytest.mark.parametrize("path", BODIES)
def test_a_body_is_read_beside_the_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 32 MB would hold up everybody's tokens for a second."""
    module, body = BODIES[path]
    on_loop: list[bool] = []

    def decode(data: bytes, kind: Any, **more: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return fields.decode(data, kind)

    monkeypatch.setattr(module, "decode", decode)
    server = ApiClient()
    assert server.post(path, body).status_code == 200
    assert on_loop == [False]
    assert server.post(path, {"tokens": 3, "messages": 3}).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_text_that_is_too_long_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_engine.runtime.server.service.MOST_CHARACTERS", 5)
    answer = ApiClient().post(path, {"messages": HI})
    assert answer.status_code == 400 and "at most 5 are tokenised" in answer.text


def test_an_error_holds_no_more_of_a_name_than_is_needed() -> None:
    body = {"messages": HI, "model": "m" * 100_000}
    answer = ApiClient("x").post("/v1/chat/completions", body)
    assert answer.status_code == 404 and len(answer.content) < 500
