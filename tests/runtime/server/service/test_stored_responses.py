"""Stored responses: how long, how many, and for which owner."""

import json
import time
from typing import Any

import pytest

from spark_engine.runtime.server.api import stored_items
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.api.stored_items import StoredItems, store_items
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.service import stored_responses
from spark_engine.runtime.server.service.stored_responses import (
    KEPT_S,
    OVERHEAD,
    ResponseStore,
    StoredResponse,
    UnknownResponse,
)
from tests.loop_watch import LIMIT_S

KIB = 1 << 10


def of_size(size: int) -> StoredItems:
    return StoredItems(b"x" * size, ())


def stop() -> None:
    """Of what is never cancelled here."""


def run(kept: ResponseStore, ident: str, size: int = 0, owner: str = "") -> StoredResponse:
    return kept.put({"id": ident, "output": []}, of_size(size), owner, stop)


def end(kept: ResponseStore, entry: StoredResponse) -> None:
    kept.update(entry, {"id": entry.ident, "output": []}, None)


def has(kept: ResponseStore, ident: str, owner: str = "") -> bool:
    try:
        kept.find(ident, owner)
    except UnknownResponse:
        return False
    return True


def _json(items: StoredItems) -> bytes:
    return b"".join(items.parts)


def test_what_is_kept_is_bounded_in_time_and_size() -> None:
    now = 0.0
    kept = ResponseStore(4 * KIB, lambda: now)
    one = run(kept, "a", 5 * KIB)
    for name in "bcd":
        end(kept, run(kept, name, KIB))
    assert kept.bytes <= 4 * KIB and has(kept, "d")
    assert has(kept, "a"), "what runs stays"
    assert not has(kept, "b")
    end(kept, run(kept, "e", OVERHEAD // 2))
    end(kept, one)
    assert not has(kept, "a"), "alone it is too large"
    now = KEPT_S - 1
    end(kept, run(kept, "f"))
    now = KEPT_S + 1
    assert not has(kept, "d") and has(kept, "f")
    now = 2 * KEPT_S
    assert has(kept, "f"), "it was asked for"
    now = 4 * KEPT_S
    assert not has(kept, "f") and kept.bytes == 0


def test_one_owner_takes_nothing_of_anothers() -> None:
    kept = ResponseStore(64 * KIB)
    end(kept, run(kept, "alices", 8 * KIB, "alice"))
    running = run(kept, "runs", 8 * KIB, "alice")
    for i in range(100):
        end(kept, run(kept, f"b{i}", 10 * KIB, "bob"))
    assert has(kept, "alices", "alice") and has(kept, "runs", "alice")
    assert has(kept, "b99", "bob") and not has(kept, "b0", "bob") and kept.bytes <= 64 * KIB
    end(kept, running)
    assert has(kept, "runs", "alice")
    for i in range(20):  # a later owner gets a fair share of it
        end(kept, run(kept, f"c{i}", 8 * KIB, "carol"))
    assert any(has(kept, f"b{i}", "bob") for i in range(100))
    assert sum(has(kept, f"c{i}", "carol") for i in range(20)) >= 2
    assert has(kept, "alices", "alice")


def test_a_new_one_is_there_however_full_it_is() -> None:
    kept = ResponseStore(KIB)
    cancelled: list[str] = []
    for name in "abc":
        kept.put({"id": name}, of_size(KIB), "", lambda name=name: cancelled.append(name))  # type: ignore[misc]
    for name in "abc":
        entry = kept.find(name)
        assert entry.stop is not None
        entry.stop()
    assert cancelled == ["a", "b", "c"]


def test_those_that_run_are_bounded_and_no_owner_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MOST_RUNNING_BYTES", 120 * KIB)
    monkeypatch.setattr(stored_responses, "MOST_RUNNING", 100)
    kept = ResponseStore()

    def fill(owner: str, size: int) -> int:
        for i in range(1000):
            try:
                run(kept, f"{owner}{i}", size, owner)
            except Busy:
                return i
        raise AssertionError("none was refused")

    assert fill("bob", 10 * KIB) == 5, "half of it: a second one may come"
    assert fill("alice", 10 * KIB) == 3
    assert fill("carol", 10 * KIB) >= 2
    kept.drop("bob0", "bob")
    run(kept, "more", KIB, "dave")
    kept = ResponseStore()
    assert fill("bob", 0) == 50
    assert fill("alice", 0) == 33


def test_one_that_is_too_large_to_be_stored_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MOST_ONE", KIB)
    with pytest.raises(BadField, match=r"send store: false") as caught:
        ResponseStore().check(of_size(KIB + 1))
    assert caught.value.param == "store"
    monkeypatch.setattr(stored_items, "MOST_ITEMS", 3)
    with pytest.raises(BadField, match="the input has 4 items; at most 3"):
        store_items([{}] * 4)


JUNK = {"x": "j" * 1000, "y": [["j" * 1000]], "z": {"j": 1}}


def test_items_are_stored_without_what_is_not_known() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    text = [{"type": "input_text", "text": "a", **JUNK}]
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hello", **JUNK},
        {"type": "message", "role": "user", "content": text},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x", **JUNK},
        {**call, "id": '"}]' * 99, **JUNK},
        {"type": "function_call_output", "call_id": "c", "output": text},
        {"type": "shell_call", "action": {"commands": ["ls"]}},
    ]
    stored = store_items(items)
    assert b"j" not in stored.data.replace(b'"object"', b"")
    found = json.loads(_json(stored))
    assert [item.pop("id").partition("_")[0] for item in found] == "msg msg rs fc item item".split()
    assert found[0] == {"type": "message", "role": "user", "content": "hello"}
    assert found[1]["content"] == [{"type": "input_text", "text": "a"}]
    assert found[3] == call
    assert found[5] == items[5], "of a type that is not known here all is kept"
    assert json.loads(_json(store_items(json.loads(_json(stored))))) == json.loads(_json(stored))


def page(stored: StoredItems, **query: Any) -> tuple[list[str], bool]:
    given: dict[str, Any] = {"limit": 20, "after": None, "ascending": False, **query}
    found = json.loads(b"".join(stored.page(**given)))
    names = [item["content"] for item in found["data"]]
    ids = [item["id"] for item in found["data"]]
    assert found["object"] == "list"
    ends = (ids[0], ids[-1]) if ids else (None, None)
    assert (found.get("first_id"), found.get("last_id")) == ends
    return names, found["has_more"]


def test_pages_go_over_all_items_in_both_orders() -> None:
    texts = [f'{i} {{"id":"msg_{i}"' for i in range(45)]  # which is no id
    stored = store_items(
        [{"role": "user", "content": text, "id": f"msg_{i}"} for i, text in enumerate(texts)]
    )
    assert page(stored) == (texts[:-21:-1], True)
    assert page(stored, ascending=True) == (texts[:20], True)
    assert page(stored, after="msg_20") == (texts[19::-1], False)
    assert page(stored, after="msg_19", ascending=True, limit=100) == (texts[20:], False)
    assert page(stored, after="msg_44", ascending=True) == ([], False)
    assert page(store_items([])) == ([], False)
    for wrong in ("", "msg_45", 'msg_1","', "é"):
        with pytest.raises(BadField, match="the id of no item"):
            page(stored, after=wrong)


def test_an_id_within_an_item_is_no_items() -> None:
    """Objects of unknown items are stored as they are."""
    rows = [{"type": "odd", "content": "first", "of": {"id": "msg_b"}}]
    rows += [{"role": "user", "content": name, "id": f"msg_{name}"} for name in "abc"]
    assert page(store_items(rows), after="msg_b", ascending=True) == (["c"], False)


@pytest.mark.parametrize("count", [1, 60_000])
def test_no_page_takes_long(count: int) -> None:
    """Of the largest that is stored, whatever it holds; it was made in a thread."""
    text = 'x{"id":"' * ((24 << 20) // count // 10)
    stored = store_items([{"role": "user", "content": text}] * count)
    last = json.loads(b"".join(stored.page(1, None, False)))["last_id"]
    for given in ((100, None, True), (100, None, False), (1, last, False), (1, last, True)):
        begin = time.thread_time()
        stored.page(*given)
        assert time.thread_time() - begin < LIMIT_S
