"""Routing of requests: prefixes, loads, replicas that join and leave."""

import json
import time
import tracemalloc
from typing import Any

import pytest

from spark_engine.runtime.replicas.prompt_digests import (
    FIRST,
    GRID,
    LAST,
    MOST,
    MOST_MESSAGES,
    MOST_PARTS,
    Place,
    places,
)
from spark_engine.runtime.replicas.routing import HOLDERS, REQUEST, Policy, RouteChoice, Router
from tests.loop_watch import LIMIT_S

SYSTEM = {"role": "system", "content": "You are terse."}


def _body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def _chat(*contents: str, **fields: Any) -> tuple[Place, ...]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return places([_body(messages=[SYSTEM, *messages], **fields)])


def _shared(a: tuple[Place, ...], b: tuple[Place, ...]) -> int:
    return sum(x == y for x, y in zip(a, b, strict=False))


def test_a_conversation_continues_from_all_of_its_last_prompt() -> None:
    first = _chat("hi")
    next_ = _chat("hi", "hello", "and?")
    assert len(first) == 2 and next_[:2] == first and len(next_) == 4
    assert _shared(next_, _chat("hi", "HELLO", "and?")) == 2


@pytest.mark.parametrize(
    "fields",
    [{"tools": [{"type": "function"}]}, {"model": "other"}, {"system": "x"}, {"instructions": "x"}],
)
def test_what_comes_before_the_messages_parts_them(fields: dict[str, Any]) -> None:
    assert _shared(_chat("hi"), _chat("hi", **fields)) == 0


def test_sampling_does_not_part_them() -> None:
    assert _chat("hi", temperature=0.3, stream=True, max_tokens=4) == _chat("hi")


def test_messages_do_not_run_into_one_another() -> None:
    one, two = places([_body(prompt=["ab", "c"])]), places([_body(prompt=["a", "bc"])])
    assert len(one) == len(two) == 2 and one[-1].digest != two[-1].digest
    one = places([_body(instructions="a", input="b")])
    two = places([_body(input='{"instructions":"a"}b')])
    assert one[-1].digest != two[-1].digest
    one, two = places([_body(system="a", input="b")]), places([_body(instructions="a", input="b")])
    assert _shared(one, two) == 0


def test_prompts_of_different_salts_share_nothing() -> None:
    """As in the replicas' prefix caches."""
    plain, null = places([_body(prompt="a")]), places([_body(prompt="a", cache_salt=None)])
    one, two = (places([_body(prompt="a", cache_salt=salt)]) for salt in "xy")
    assert plain == null and _shared(plain, one) == _shared(one, two) == 0
    assert one == places([_body(prompt="a", cache_salt="x")])


def test_long_texts_part_on_a_grid() -> None:
    text = "x" * (5 * GRID)
    a, b = places([_body(prompt=text + "a")]), places([_body(prompt=text + "b")])
    assert len(a) == 6 and a[:5] == b[:5] and a[5].digest != b[5].digest
    assert a[4].length == 5 * GRID


def test_token_ids_part_on_a_grid() -> None:
    ids = list(range(10_000, 10_000 + 2 * GRID // 7 + 1))  # 7 bytes each
    a, b = places([_body(prompt=ids)]), places([_body(prompt=[*ids, 1 << 40])])
    assert len(a) == len(b) == 3 and a[:2] == b[:2] and a[2] != b[2]


def test_the_middle_of_the_longest_is_left_out() -> None:
    found = _chat(*(str(i) for i in range(1000)))
    assert len(found) == FIRST + LAST
    assert found[FIRST - 1].length < found[FIRST].length
    assert found[-1] == _chat(*(str(i) for i in range(1000)))[-1]


def _filled(before: bytes, part: bytes, after: bytes) -> bytes:
    """The largest body that is read, filled with such parts."""
    return before + part * ((MOST - len(before) - len(after)) // len(part)) + after


HOSTILE = {
    "empty messages": _filled(b'{"messages":[', b"{},", b"{}]}"),
    "empty prompts": _filled(b'{"prompt":[', b"[],", b"[]]}"),
    "ids": _filled(b'{"prompt":[1', b",1", b"]}"),
    "texts without end": _filled(b'{"input":[', b'"",', b'""]}'),
    "fields": _filled(b'{"a":1', b',"a":1', b"}"),
    "messages": _filled(b'{"a":1', b',"messages":[{},{}]', b"}"),
    "escapes": _filled(b'{"prompt":"', b"\\u00e4", b'"}'),
    "one message of many parts": _filled(b'{"messages":[{"content":[', b"{},", b"{}]}]}"),
    "as many as are taken apart": b'{"messages":[' + b"{}," * MOST_PARTS + b"{}]}",
    "blanks": _filled(b'{"messages":[', b" ", b"{}]}"),
    "nesting": _filled(b'{"messages":', b"[", b""),
    "tools": _filled(b'{"messages":[{}],"tools":[', b"{},", b"{}]}"),
    "text": _filled(b'{"messages":[{"content":"', b"word, ", b'"}]}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_costs_much(name: str) -> None:
    begin = time.thread_time()
    found = places([HOSTILE[name]])
    took = time.thread_time() - begin
    tracemalloc.start()
    places([HOSTILE[name]])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) <= FIRST + LAST
    assert took < LIMIT_S and peak < 8 * MOST, (took, peak)


def test_of_very_many_messages_the_first_are_places() -> None:
    found = _chat(*(str(i) for i in range(MOST_MESSAGES + 1)))
    assert len(found) == FIRST and found[:50] == _chat(*(str(i) for i in range(1000)))[:50]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": 3}', b"null"])
def test_what_is_not_understood_has_no_places(body: bytes) -> None:
    assert places([body]) == ()


def _router(*names: str, policy: Policy = Policy.PREFIX, **more: int) -> Router:
    router = Router(policy, **more)
    for name in names:
        router.add(name)
    return router


def _ask(router: Router, prompt: tuple[Place, ...]) -> str:
    choice = router.choose(prompt)
    assert choice is not None
    router.begin(choice, prompt)
    return choice.name


def test_a_conversation_returns_to_its_replica() -> None:
    router = _router("a", "b", "c")
    text = "x" * 3 * REQUEST
    where = {c: _ask(router, _chat(c + text)) for c in "xyz"}
    assert sorted(where.values()) == ["a", "b", "c"], "different prompts spread"
    for c, name in where.items():
        choice = router.choose(_chat(c + text, "yes", "more"))
        assert choice is not None and choice.name == name and choice.shared > 3 * REQUEST


def test_a_common_beginning_is_not_worth_a_queue() -> None:
    router = _router("a", "b")
    common = "s" * REQUEST
    assert [_ask(router, _chat(common, "ok", str(i)))[0] for i in range(6)].count("b") >= 2


def test_a_long_prefix_is_worth_a_short_queue_and_no_long_one() -> None:
    router = _router("a", "b")
    prompt = _chat("x" * 4 * REQUEST)
    router.end(router.begin(RouteChoice("a"), prompt))
    tickets = [router.begin(RouteChoice("a"), ()) for _ in range(4)]
    assert router.open == {"a": 4, "b": 0}
    assert router.choose(prompt) == RouteChoice("a", prompt[-1].length)
    tickets.append(router.begin(RouteChoice("a"), ()))
    assert router.choose(prompt) == RouteChoice("b")
    for ticket in tickets:
        router.end(ticket)
    assert router.choose(prompt) == RouteChoice("a", prompt[-1].length)


def test_what_is_still_to_be_computed_counts_until_the_first_token() -> None:
    router = _router("a", "b", policy=Policy.LEAST)
    long = router.begin(RouteChoice("a"), _chat("x" * 9 * REQUEST))
    short = [router.begin(RouteChoice("b"), ()) for _ in range(3)]
    assert router.choose(()) == RouteChoice("b")
    router.started(long)
    assert router.choose(()) == RouteChoice("a")
    router.started(long)
    for ticket in (*short, long):
        router.end(ticket)
    assert router.open == {"a": 0, "b": 0} and router._ahead == {"a": 0, "b": 0}


def test_what_is_held_there_is_not_to_be_computed() -> None:
    router = _router("a", "b", policy=Policy.LEAST)
    prompt = _chat("x" * 9 * REQUEST)
    router.begin(RouteChoice("a", prompt[-1].length), prompt)
    router.begin(RouteChoice("b"), prompt)
    assert router._ahead == {"a": 0, "b": prompt[-1].length}


def test_where_many_part_the_beginning_is_worth_little() -> None:
    router = _router("a", "b")
    common = "s" * 64 * REQUEST
    for i in range(40):
        router.end(router.begin(RouteChoice("a"), _chat(common, "ok", str(i))))
    kept = [router.begin(RouteChoice("a"), ()) for _ in range(2)]
    new = _chat(common, "ok", "new")
    assert router.choose(new) == RouteChoice("b"), "64 requests of value, 40 of them with a part"
    long = _chat(common, "ok", "x" * 9 * REQUEST)
    router.end(router.begin(RouteChoice("a"), long))
    assert router.choose(long) == RouteChoice("a", long[-1].length), "its own part counts fully"
    for ticket in kept:
        router.end(ticket)
    assert router.choose(new).name == "a"  # type: ignore[union-attr]


def test_the_least_loaded_holder_is_taken() -> None:
    router = _router("a", "b", "c")
    prompt = _chat("x" * 4 * REQUEST)
    for name in ("a", "b"):
        router.started(router.begin(RouteChoice(name), prompt))
    router.begin(RouteChoice("a"), ())
    assert router.choose(prompt) == RouteChoice("b", prompt[-1].length)


def test_a_replica_that_left_holds_nothing() -> None:
    router = _router("a", "b")
    prompt = _chat("x" * 9 * REQUEST)
    ticket = router.begin(RouteChoice("a"), prompt)
    router.started(ticket)
    assert router.choose(prompt, without={"a"}) == RouteChoice("b")
    router.remove("a")
    assert router.choose(prompt) == RouteChoice("b") and router.open == {"a": 1, "b": 0}
    router.end(ticket)
    assert router.open == {"b": 0}
    router.remove("b")
    assert router.choose(prompt) is None


def test_a_replica_that_returns_keeps_its_requests() -> None:
    router = _router("a", "b")
    ticket = router.begin(RouteChoice("a"), ())
    router.remove("a")
    router.add("a")
    assert router.open == {"a": 1, "b": 0}
    router.end(ticket)
    assert router.open == {"a": 0, "b": 0}


def test_memory_is_bounded_and_beginnings_stay_longest() -> None:
    router = _router("a", "b", places=4)
    prompt = _chat("1" * REQUEST, "2", "3", "4", "5", "6")
    router.end(router.begin(RouteChoice("a"), prompt))
    assert len(router._known) == 4
    assert router.choose(prompt).shared == prompt[3].length  # type: ignore[union-attr]


def test_few_holders_are_kept_of_a_place() -> None:
    names = [f"r{i}" for i in range(HOLDERS + 3)]
    router, prompt = _router(*names), _chat("x")
    for name in names:
        router.begin(RouteChoice(name), prompt)
    assert router._known[prompt[0].digest].names == tuple(names[-HOLDERS:])


def test_other_policies_ask_for_no_prefix() -> None:
    prompt = _chat("x" * 9 * REQUEST)
    turn = _router("a", "b", "c", policy=Policy.TURN)
    assert [_ask(turn, prompt) for _ in range(6)] == list("abcabc")
    least = _router("a", "b", policy=Policy.LEAST)
    least.begin(RouteChoice("a"), prompt)
    assert least.choose(prompt).name == "b"  # type: ignore[union-attr]
