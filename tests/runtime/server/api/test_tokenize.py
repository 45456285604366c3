"""Bodies that need no engine: read and tokenised by the pool, within their limit."""

from __future__ import annotations

import pytest

from tests.runtime.server.api.api_client import ApiClient

HI = [{"role": "user", "content": "hi there"}]
BODIES = {
    "/tokenize": {"messages": HI},
    "/detokenize": {"tokens": [65, 66]},
    "/v1/messages/count_tokens": {"messages": HI},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_body_is_read_by_the_pool(path: str) -> None:
    """In the loop's thread one of 32 MB would delay the tokens of all requests for a second."""
    server = ApiClient()
    assert server.post(path, BODIES[path]).status_code == 200
    assert len(server.service._pool.jobs) == 1  # type: ignore[attr-defined]
    assert server.post(path, {"tokens": 3, "messages": 3}).status_code == 400


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_a_text_that_is_too_long_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_engine.runtime.server.prompts.preparer.MOST_CHARACTERS", 5)
    answer = ApiClient().post(path, {"messages": HI})
    assert answer.status_code == 400 and "at most 5 are tokenised" in answer.text


def test_an_error_holds_no_more_of_a_name_than_is_needed() -> None:
    body = {"messages": HI, "model": "m" * 100_000}
    answer = ApiClient("x").post("/v1/chat/completions", body)
    assert answer.status_code == 404 and len(answer.content) < 500
