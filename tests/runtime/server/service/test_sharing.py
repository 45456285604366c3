"""The owner of a request, and which requests share the prefix cache, from HTTP to the engine."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.server.api.common import Body, check
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.operation import http_request
from spark_engine.runtime.server.operation.http_request import HttpRequest
from spark_engine.runtime.server.operation.keys import Account, Key
from spark_engine.runtime.server.prompts.contract import Asked
from spark_engine.runtime.server.service import service as module
from spark_engine.runtime.server.service.generation import CompletionChoice


@pytest.fixture(autouse=True)
def _no_request() -> Iterator[None]:
    token = http_request._CURRENT.set(None)
    yield
    http_request._CURRENT.reset(token)


def ask(key: Key | None = None, client: str = "10.0.0.1:4000") -> None:
    account = None if key is None else Account(key)
    http_request._CURRENT.set(HttpRequest("1", "POST", "/", client, {}, account=account))


def salt(key: str | None, given: str | None) -> bytes:
    ask(Key(name="ann", key="k", salt=key))
    return module._salt(given)


def test_an_owner_is_a_key_or_else_a_connection() -> None:
    assert http_request.owner() == ""
    found = set()
    for client in ("10.0.0.1:4000", "10.0.0.1:4001", "10.0.0.2:4000"):
        ask(client=client)
        found.add(http_request.owner())
        ask(Key(name="ann", key="k"), client=client)
        found.add(http_request.owner())
    assert len(found) == 4, "two programs of one host are two owners, and a key is one"


def test_salts_are_equal_where_both_are() -> None:
    assert module._salt(None) == salt(None, None) == b""
    pairs = [(k, g) for k in (None, "a", "ab", "b", "é") for g in (None, "a", "b", "\ud800")]
    found = {salt(*pair) for pair in pairs}
    assert len(found) == len(pairs) and {len(one) for one in found} == {0, 16}
    assert salt("a", "b") == salt("a", "b")
    ask()
    assert module._salt("a") == salt(None, "a"), "without a key as with one that has no salt"


def test_a_salt_has_a_length() -> None:
    for length in (1, 256):
        check(Body(cache_salt="é" * length))
    for length in (0, 257):
        with pytest.raises(BadField, match=f"cache_salt has {length} characters; it must have 1"):
            check(Body(cache_salt="é" * length))


def test_a_choice_gets_them_when_it_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[CompletionChoice] = []
    monkeypatch.setattr(module, "Generation", lambda _, __, choices, *more: sent.extend(choices))
    limits = SimpleNamespace(max_seqs=1, drafts=0)
    service: Any = SimpleNamespace(info=SimpleNamespace(limits=limits), client=None, metrics=None)
    ask(Key(name="ann", key="k", salt="s"))
    choice: Any = CompletionChoice(Request((1, 2)), SimpleNamespace())  # type: ignore[arg-type]
    found = module.PreparedChoices(Asked(cache_salt="x"), (choice, choice), (), (), 2, ())
    running = module.Service.submit(service, found, None)  # type: ignore[arg-type]
    assert {(c.request.owner, c.request.salt) for c in sent} == {("ann", salt("s", "x"))}
    assert running.choices == tuple(sent)
