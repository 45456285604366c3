"""One client against a scripted server: times, counts, conversations, and what goes wrong."""

import asyncio
import itertools
import time
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="needs the extra `bench`")

from spark_engine.bench import client  # noqa: E402
from spark_engine.bench.load import Load, Script, Turn  # noqa: E402
from spark_engine.bench.timings import ClientShare, RequestTiming, Server  # noqa: E402
from tests.bench.scripted_server import (  # noqa: E402
    Answer,
    Part,
    Scripted,
    event,
    running,
    token,
)
from tests.lateness import Lateness  # noqa: E402

DONE = event("[DONE]")
GAP = 0.2  # seconds that a test can tell from none, in addition to those in which nothing ran


def ask(load: Load, *answers: list[Part], status: int = 200, width: int = 1) -> Any:
    """(what one process did, the server) for answers in turn; the last is said again and again."""
    left = list(answers)

    def post(body: dict[str, Any]) -> Answer:
        return status, left.pop(0) if len(left) > 1 else left[0]

    with running(Scripted({}, post)) as server:
        numbers = itertools.count()
        target = Server(server.url, "m", api_key="k", timeout_s=120)

        async def run() -> ClientShare:
            start = time.perf_counter() + 0.02
            return await client.run(target, load, lambda: next(numbers), width, start)

        with Lateness() as late:
            share = asyncio.run(run())
        server.late_s = late.seconds
    return share, server


def one(*turns: Turn, **more: Any) -> Load:
    return Load((Script(turns, more=more),), 1, "")


def only(share: ClientShare) -> RequestTiming:
    (took,) = share.took
    return took


def test_times_and_counts_are_those_of_the_events() -> None:
    whole = token("a", 1) + token("bc", 3) + token("", 3)  # the last brings nothing
    parts: list[Part] = [GAP, whole[:20], whole[20:], GAP, token("d", 4)[:-1], b"\n", DONE]
    share, server = ask(one(Turn([5, 6], 9), seed=4), parts)
    took = only(share)
    assert took.error == "" and took.counts == [1, 2, 1] and took.prompt_tokens == 3
    assert took.cached_tokens is None
    first, second, third = took.times
    least = 0.9 * GAP - server.late_s  # the second may have been read late
    assert first - took.start >= 0.9 * GAP and third - second >= least
    assert second - first < GAP / 2 + server.late_s
    assert took.due <= took.start <= first <= third <= took.end
    (body,) = server.asked
    assert body["prompt"] == [5, 6] and body["max_tokens"] == 9 and body["model"] == "m"
    assert body["seed"] == 4 and body["ignore_eos"] and body["stream"] and body["temperature"] == 0
    assert b"Bearer k" in server.headers[0] and b"POST /v1/completions" in server.headers[0]


def test_a_server_may_be_behind_a_path() -> None:
    numbers = itertools.count()
    with running(Scripted({}, lambda body: (200, [token("a", 1), DONE]))) as server:
        target = Server(server.url + "/team", "m", timeout_s=5)
        start = time.perf_counter()
        load = one(Turn([5], 1))
        share = asyncio.run(client.run(target, load, lambda: next(numbers), 1, start))
    assert only(share).error == "" and b"POST /team/v1/completions" in server.headers[0]


def test_a_server_that_counts_at_the_end_only() -> None:
    """One event may bring several tokens; only the usage at the end counts them."""
    events = [event({"choices": [{"text": t}]}) for t in ("a", "", "b")]
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {}}
    end = event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 4}}})
    took = only(ask(one(Turn("x", 5)), [*events, end, DONE])[0])
    assert took.counts == [1, 4] and len(took.times) == 2
    assert (took.prompt_tokens, took.cached_tokens) == (7, 4)


def test_events_that_end_their_lines_in_two_characters() -> None:
    text = (token("a", 1) + token("b", 2) + DONE).replace(b"\n", b"\r\n")
    for cut in range(1, len(text), 7):
        took = only(ask(one(Turn([1], 2)), [text[:cut], text[cut:]])[0])
        assert took.counts == [1, 1] and not took.error, cut


def test_each_turn_says_all_that_was_said_before() -> None:
    ids = token("", 2, token_ids=[8, 9])
    share, server = ask(one(Turn([1], 2), Turn([4, 5], 2), Turn([6], 2, [7])), [ids, DONE])
    assert [body["prompt"] for body in server.asked] == [
        [1],
        [1, 8, 9, 4, 5],
        [1, 8, 9, 4, 5, 8, 9, 6],
    ]
    assert all(body["return_token_ids"] for body in server.asked)
    assert [(t.script, t.turn) for t in share.took] == [(0, 0), (0, 1), (0, 2)]
    _, server = ask(one(Turn("a", 2), Turn("b", 2, "!"), Turn("c", 2)), [token("x", 1), DONE])
    assert [body["prompt"] for body in server.asked] == ["a", "axb", "axb!c"]


def test_a_chat_keeps_thoughts_and_calls() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    deltas = [{"role": "assistant"}, {"reasoning_content": "hm"}, {"content": "yes"}]
    parts: list[Part] = [
        event({"choices": [{"delta": d}], "usage": {"prompt_tokens": 3, "completion_tokens": i}})
        for i, d in enumerate([*deltas, {"tool_calls": [call]}])
    ]
    user, result = [{"role": "user", "content": "u"}], [{"role": "tool", "content": "r"}]
    recorded = [{"role": "assistant", "content": "as recorded"}]
    turns = Turn(user, 9), Turn(result, 9, recorded), Turn(user, 9)
    share, server = ask(one(*turns, tools=[1]), [*parts, DONE])
    own = {"role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": [call]}
    said = [body["messages"] for body in server.asked]
    assert said == [user, [*user, own, *result], [*user, own, *result, *recorded, *user]]
    assert all(body["tools"] == [1] for body in server.asked)
    assert b"/v1/chat/completions" in server.headers[0]
    assert [took.counts for took in share.took] == [[1, 1, 1]] * 3


WRONG: list[tuple[int, list[Part], str]] = [
    (503, [b'{"error": "full"}'], '503: {"error": "full"}'),
    (200, [token("a", 1), event({"error": {"message": "it broke"}})], "it broke"),
    (200, [token("a", 1)], "ended before it was done"),
    (200, [token("a", 1), b""], "Payload"),
    (200, [event("nonsense"), DONE], "not OpenAI's"),
    (200, [DONE], "no token"),
]


@pytest.mark.parametrize(("status", "parts", "words"), WRONG, ids=[w[2] for w in WRONG])
def test_what_goes_wrong_is_said_and_ends_the_conversation(
    status: int, parts: list[Part], words: str
) -> None:
    share, server = ask(one(Turn([1], 2), Turn([2], 2)), parts, status=status)
    assert words in only(share).error and len(server.asked) == 1


def test_a_closed_loop_keeps_its_width_and_a_pause_is_kept() -> None:
    scripts = tuple(Script((Turn([i], 1),)) for i in range(6))
    answer: list[Part] = [token("", 1, token_ids=[1]), GAP, DONE]
    share, _ = ask(Load(scripts, 2, ""), answer, width=2)
    assert sorted(took.script for took in share.took) == list(range(6))
    changes = sorted([(t.start, 1) for t in share.took] + [(t.end, -1) for t in share.took])
    assert max(itertools.accumulate(change for _, change in changes)) == 2
    share, server = ask(one(Turn([1], 1), Turn([2], 1, pause_s=2 * GAP)), answer)
    first, second = share.took
    assert second.start >= second.due >= first.end + 2 * GAP
    assert second.due - first.end < 2.5 * GAP + server.late_s


def test_scripts_with_a_time_do_not_wait_for_each_other() -> None:
    scripts = tuple(Script((Turn([i], 1),), at_s=i * GAP) for i in range(3))
    share, server = ask(Load(scripts, 3, ""), [token("", 1), 4 * GAP, DONE])
    late = server.late_s
    starts = [took.start for took in sorted(share.took, key=lambda t: t.script)]
    assert starts[2] - starts[0] == pytest.approx(2 * GAP, abs=GAP + late)
    assert max(starts) < min(took.end for took in share.took) + late
    assert all(0 <= took.start - took.due < GAP + late for took in share.took)
    assert 0 < share.busy_s < 1 and share.late_s and min(share.late_s) >= 0
