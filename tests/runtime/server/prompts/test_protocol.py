"""Request bodies: defaults, forms, and that an invalid one only raises RequestError."""

import json
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from spark_engine.interface import Limits
from spark_engine.runtime.engine.draft_counts import DraftCounts
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.common import Body, Defaults, check, fold_seed, sampling
from spark_engine.runtime.server.api.completions import CompletionBody
from spark_engine.runtime.server.api.fields import BadField, decode
from spark_engine.runtime.server.api.unsupported_fields import UNSUPPORTED, UnsupportedFields
from spark_engine.runtime.server.engine_client import ipc
from spark_engine.runtime.structured.fields import StructuredFields

INFO = ipc.EngineInfo("m", Limits(max_seqs=4, max_context=256, pages=16, vocab=512), (1, 2))
DEFAULTS = Defaults.of({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True})
NONE = Defaults.of({})


def _params(body: Body, defaults: Defaults = DEFAULTS, available: int = 100) -> SamplingParams:
    check(body)
    return sampling(body, defaults, available)


def test_the_generation_config_holds_where_the_request_is_silent() -> None:
    silent = _params(Body())
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.6, 20, 0.95)
    loud = _params(Body(temperature=0.0, top_k=-1, top_p=1.0, min_p=0.1))
    assert (loud.temperature, loud.top_k, loud.top_p, loud.min_p) == (0.0, -1, 1.0, 0.1)
    assert _params(Body(), NONE).temperature == 1.0
    assert _params(Body(), Defaults.of({"do_sample": False, "temperature": 0.9})).temperature == 0.0
    assert _params(Body(temperature=1e-9)).temperature == 0.0


def test_how_many_tokens_come() -> None:
    message = [{"role": "user", "content": "x"}]
    assert _params(ChatRequest(messages=message)).max_tokens == 100
    assert _params(ChatRequest(messages=message, max_tokens=7)).max_tokens == 7
    both = ChatRequest(messages=message, max_tokens=7, max_completion_tokens=8)
    assert _params(both).max_tokens == 8
    assert _params(CompletionBody(prompt="x")).max_tokens == 16
    assert _params(CompletionBody(prompt="x", min_tokens=30)).max_tokens == 30
    assert _params(CompletionBody(prompt="x", max_tokens=200)).max_tokens == 100
    for most in (101, 300, 10**400, -1):
        assert _params(CompletionBody(prompt="x", max_tokens=most)).max_tokens == 100
        assert _params(ChatRequest(messages=message, max_completion_tokens=most)).max_tokens == 100
    for most in (0, -2):
        with pytest.raises(BadField, match=f"max_tokens is {most}; it must be at least"):
            _params(CompletionBody(prompt="x", max_tokens=most))
    with pytest.raises(BadField, match="min_tokens is 101"):
        _params(Body(min_tokens=101))


def test_seeds_are_drawn_when_absent_and_folded_when_given() -> None:
    drawn = {_params(Body()).seed for _ in range(20)}
    assert len(drawn) == 20 and None not in drawn
    assert _params(Body(seed=5)).seed == 5
    assert [fold_seed(s) for s in (2**63, 2**64 + 3, -1)] == [-(2**63), 3, -1]


def test_a_type_error_names_field_and_value() -> None:
    with pytest.raises(BadField, match=r"stop_token_ids\[1\].*int.*'x'"):
        decode(b'{"prompt": "a", "stop_token_ids": [1, "x"]}', CompletionBody)
    with pytest.raises(BadField) as caught:
        decode(b'{"max_tokens": 3}', CompletionBody)
    assert caught.value.param == "prompt"


def test_odd_but_legal_json_is_taken_as_it_is_meant() -> None:
    words = b'"max_tokens": 64.0, "n": "2", "seed": "7", "temperature": "0.5", "stream": "true"'
    for mark in (b"", b"\xef\xbb\xbf"):
        body = decode(mark + b'{"prompt": ["5", "6"], ' + words + b"}", CompletionBody)
        assert (body.max_tokens, body.n, body.seed, body.temperature) == (64, 2, 7, 0.5)
        assert body.stream is True and body.prompt == ["5", "6"]
    assert decode(b'{"prompt": [1.0, 2]}', CompletionBody).prompt == [1, 2]
    for wrong in (b'"max_tokens": 64.5', b'"n": "x"', b'"n": true', b'"stream": "yes"'):
        with pytest.raises(BadField, match="is not right"):
            decode(b'{"prompt": "a", ' + wrong + b"}", CompletionBody)


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud800", r"\ud800"),
        (rb"a\udC00b", r"\udC00"),
        (rb"\ud83d\ude42\ud83d", r"\ud83d"),
        (rb"\ud800\ud800\udc00", r"\ud800"),
        (rb"\\\ud800", r"\ud800"),
        (rb"\ud83d\ude42", None),
        (rb"\\ud800", None),
    ],
)
def test_half_a_character_is_named(text: bytes, half: str | None) -> None:
    data = b'{"prompt": "' + text + b'"}'
    if half is None:
        assert decode(data, CompletionBody).prompt
        data, half = data[:-1], "truncated"
    with pytest.raises(BadField) as caught:
        decode(data, CompletionBody)
    assert half in str(caught.value)
    assert ("one half of a character" in str(caught.value)) == (half != "truncated")


def test_messages_between_the_processes_survive_transport() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, stop=("x",), seed=-5)
    asked = Request((1, 248_000), params, 3, (1,), owner="key ann", salt=b"\0salt")
    commands = (ipc.Submit.of(7, asked), ipc.Submit.of(8, Request((1,))), ipc.Cancel(7))
    assert tuple(ipc.decode_command(ipc.encode(c)) for c in commands) == commands
    got = commands[0].request()
    assert tuple(got.prompt) == asked.prompt and replace(got, prompt=asked.prompt) == asked
    own = {"mtp": DraftCounts([3, 2], [2, 1])}
    ended = Event(2, finish=FinishReason.STOP, drafted=9, accepted=4, by_source=own)
    events = [Event(1, 5, -0.5, ((5, -0.5), (6, -1.0))), ended]
    drafts: Any = {"drafts_by_position": [3, 2], "rounds_by_k": {0: 4, 2: 3}, "by_source": own}
    stats = ipc.Stats(running=3, buckets={"decode_1": 2}, **drafts)
    reports = (ipc.StepReport(events, stats), ipc.Ready(INFO))
    assert tuple(ipc.decode_report(ipc.encode(r)) for r in reports) == reports


def test_what_is_not_known_is_not_built() -> None:
    data = b'{"prompt": "a", "x": [' + b"{}," * 300_000 + b"{}]}"
    tracemalloc.start()
    decode(data, CompletionBody)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000  # bytes; as objects they would be 20 MB


def test_what_would_change_an_answer_is_refused_unless_it_asks_for_nothing() -> None:
    own = set(UnsupportedFields.__struct_fields__) - set(StructuredFields.__struct_fields__)
    assert own == set(UNSUPPORTED)
    for name, (neutral, _) in UNSUPPORTED.items():
        for value in (None, *neutral):
            data = json.dumps({"prompt": "a", name: value}).encode()
            check(decode(data, CompletionBody))
        for value in ("x", 0.25, True, ["audio"], {"a": 1}, "y" * 9000):
            data = json.dumps({"prompt": "a", name: value}).encode()
            with pytest.raises(BadField, match=f"^{name} .* is not supported: ") as caught:
                check(decode(data, CompletionBody))
            assert caught.value.param == name and len(str(caught.value)) < 300
