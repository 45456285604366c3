"""`LLM`: a scripted engine for what may go wrong, a real one for tokens equal to the server's."""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import spark_engine
from spark_engine import LLM, Completion, LLMClosed, SamplingParams
from spark_engine.errors import EngineError, OptionError, RequestError
from spark_engine.runtime.offline import service_thread
from spark_engine.runtime.offline.params import encode
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.prompts.contract import JobKind
from tests.repository import PATH
from tests.runtime import fake_engine, small_tokenizer

USER = [{"role": "user", "content": "What is 40 plus 2?"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {}}}
SHORT = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], LLM]]:
    folder = small_tokenizer.write(tmp_path_factory.mktemp("engine") / "tokenizer")
    command = (sys.executable, fake_engine.__file__, "worker", str(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PATH)

        def make() -> LLM:
            with patch.context() as once:
                once.setattr(service_thread, "prepare", lambda _, options: (command, options))
                return LLM(folder.parent)

        yield make


@pytest.fixture(scope="module")
def llm(opened: Callable[[], LLM]) -> Iterator[LLM]:
    with opened() as made:
        yield made


def test_many_prompts_keep_their_order_and_every_slot_busy(llm: LLM) -> None:
    asked: list[int] = []

    def prompts() -> Iterator[str]:
        for n in range(64):
            asked.append(n)
            yield f"{'SLOW ' if n == 0 else ''}ECHO {n}"

    client = llm._thread.answering.service.client
    most = 0

    def watch() -> None:
        nonlocal most
        while len(asked) < 64:
            most = max(most, client.stats.running)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    found = llm.generate(prompts(), SHORT)
    watcher.join()
    tokenizer = llm._thread.answering.service.tokenizer
    assert tokenizer is not None and most == fake_engine.SLOTS
    for n, one in enumerate(found):
        prompt = tokenizer.encode(f"{'SLOW ' if n == 0 else ''}ECHO {n}")
        assert list(one.token_ids) == (prompt * 12)[:12] and one.finish_reason == "length"
        assert one.usage.prompt_tokens == len(prompt) and one.usage.completion_tokens == 12
    assert client.in_flight == 0 and llm.generate([]) == []


def test_prompts_are_taken_as_the_engine_has_space(llm: LLM) -> None:
    taken = 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield "SLOW"

    def interrupt() -> None:
        while taken < 2 * fake_engine.SLOTS:
            time.sleep(0.001)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(), SamplingParams(max_tokens=400))
    assert taken <= 2 * fake_engine.SLOTS + 1
    _ended(llm)


def _ended(llm: LLM) -> None:
    end = time.monotonic() + 60
    while llm._thread.answering.service.client.in_flight:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_stream_is_the_whole_and_leaving_it_ends_the_request(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, stop=["42"], logprobs=2)
    for prompt, more in (("x", {}), (USER, {"enable_thinking": True})):
        (whole,) = llm.chat(prompt, params) if more else llm.generate("x", params)  # type: ignore[arg-type]
        chunks = list(llm.stream(prompt, params, **more))
        assert [c.completion for c in chunks[:-1]] == [None] * (len(chunks) - 1) and len(chunks) > 3
        assert chunks[-1].completion == whole and whole.finish_reason == "stop"
        assert "".join(c.text for c in chunks) == whole.text
        assert "".join(c.reasoning for c in chunks) == whole.reasoning
        assert sum((c.token_ids for c in chunks), ()) == whole.token_ids
        assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
        assert whole.logprobs[0].logprob == -0.5 and len(whole.logprobs[0].top) == 2
    assert whole.reasoning == "I add é 🙂." and whole.message is not None
    for _ in llm.stream("SLOW", SamplingParams(max_tokens=400)):
        break
    _ended(llm)


def test_a_chat_calls_tools_and_several_are_answered(llm: LLM) -> None:
    asked = [{"role": "user", "content": "TOOL"}]
    one, two = llm.chat([asked, USER], [SHORT, SamplingParams(max_tokens=200)], tools=[TOOL])
    assert one.finish_reason == "length" and two.text.startswith(fake_engine.ANSWER)
    (one,) = llm.chat(asked, tools=[TOOL])
    (call,) = one.tool_calls
    assert one.finish_reason == "tool_calls" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"} and one.text == ""


def test_async_is_the_same_and_a_cancelled_call_ends_its_work(llm: LLM) -> None:
    async def run() -> None:
        many = [f"ECHO {n}" for n in range(20)]
        assert await llm.agenerate(iter(many), SHORT) == llm.generate(many, SHORT)
        assert await llm.achat(USER, SHORT) == llm.chat(USER, SHORT)
        chunks = [chunk async for chunk in llm.astream("ECHO", SHORT)]
        assert [chunks[-1].completion] == llm.generate("ECHO", SHORT)
        with pytest.raises(RequestError, match="prompt is too long"):
            await llm.agenerate("x " * 9000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await llm.agenerate(["SLOW"] * 30, SamplingParams(max_tokens=400))

    asyncio.run(run())
    _ended(llm)


BAD: list[tuple[Any, str]] = [
    ("x " * 9000, "prompt is too long"),
    ([1, 2, 10**6], "1000000"),
    ("", "prompt is empty"),
    ("\ud800", "cannot be written as JSON"),
]


def test_a_bad_prompt_raises_alone_and_is_one_of_many(llm: LLM) -> None:
    for prompt, words in BAD:
        with pytest.raises(RequestError, match=words):
            llm.generate(prompt, SHORT)
        with pytest.raises(RequestError, match=words):
            list(llm.stream(prompt, SHORT))
    mixed = [*(prompt for prompt, _ in BAD), b"x", None, [], "NAN", "ECHO"]
    found = llm.generate(mixed, SHORT)
    words = [*(words for _, words in BAD), "bytes b'x'", "NoneType", "list", "not finite"]
    for one, said in zip(found, words, strict=False):
        assert one.finish_reason == "error" and said in str(one.error) and one.text == ""
    assert found[-1] == llm.generate("ECHO", SHORT)[0] and found[-1].error is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate(b"x"), "a bytes is neither one prompt nor several: generate"),
        (lambda llm: llm.generate(None), "a NoneType is neither"),
        (lambda llm: llm.chat(USER[0]), "a dict is neither"),
        (lambda llm: llm.chat("hi"), "a str is neither"),
        (lambda llm: llm.generate("x", [SHORT]), "params is a list"),
        (lambda llm: llm.generate(["x"], [SHORT] * 2), "there are 1 prompts and 2 params"),
        (lambda llm: llm.generate("x", SamplingParams(temperature=-1)), "temperature is -1"),
        (lambda llm: llm.generate("x", SamplingParams(extra={"n": 2})), "n is not for the Python"),
        (lambda llm: llm.chat(USER, stream=True), "stream is not for the Python API"),
        (lambda llm: llm.chat(USER, tools=[object()]), "cannot be written as JSON"),
        (lambda llm: llm.generate("x", SamplingParams(extra={"suffix": "y"})), "suffix is not"),
        (lambda llm: llm.generate("x", SamplingParams(regex="(")), "regex"),
    ],
)
def test_what_is_wrong_is_named(call: Callable[[Any], Any], words: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=words):
        call(llm)


def test_parameters_are_fields_of_the_servers_bodies() -> None:
    params = SamplingParams(
        max_tokens=3, stop="x", logit_bias={5: 1.0}, logprobs=2, json_schema={"type": "object"}
    )
    form = {"name": "answer", "schema": {"type": "object"}}
    schema = {"response_format": {"type": "json_schema", "json_schema": form}}
    text = {"max_tokens": 3, "stop": "x", "logit_bias": {5: 1.0}, "logprobs": 2, **schema}
    assert params.fields(JobKind.COMPLETIONS) == text
    chat = params.fields(JobKind.CHAT)
    assert chat == {**text, "logprobs": True, "top_logprobs": 2}
    assert json.loads(encode(chat))["logit_bias"] == {"5": 1.0}
    more = SamplingParams(choice=["a"], extra={"drafts": 0, "max_tokens": 7})
    made = {"max_tokens": 7, "structured_outputs": {"choice": ["a"]}, "drafts": 0}
    assert more.fields(JobKind.COMPLETIONS) == made


def test_a_process_that_ends_costs_no_answer(llm: LLM) -> None:
    """One of a stream cannot be repeated, and says so."""
    client = llm._thread.answering.service.client
    with pytest.raises(Exception, match="the engine stopped") as caught:
        for n, _ in enumerate(llm.stream("SLOW", SamplingParams(max_tokens=400))):
            if n == 2:
                os.kill(client.pid or 0, signal.SIGKILL)
    assert "InternalError" in {kind.__name__ for kind in type(caught.value).__mro__}

    def kill() -> None:
        while client.stats.running < 2 or client.pid is None:
            time.sleep(0.001)
        os.kill(client.pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    found = llm.generate([f"SLOW ECHO {n}" for n in range(12)], SHORT)
    assert [one.error for one in found] == [None] * 12 and client.restarts >= 2


def test_closing_ends_what_runs_and_a_fork_has_no_engine(opened: Callable[[], LLM]) -> None:
    one = opened()
    worker = one._thread.answering.service.client.pid
    ends: list[BaseException] = []

    def wait() -> None:
        for call in (one.generate, lambda *given: list(one.stream(*given))):
            try:
                call("SLOW", SamplingParams(max_tokens=500))
            except BaseException as error:
                ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    client = one._thread.answering.service.client
    while not client.stats.running:
        time.sleep(0.001)
    if not (child := os.fork()):
        code = 1
        try:
            one.generate("x")
        except OptionError as error:
            one.close()
            code = 0 if "after the fork" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.stats.running and client.running, "the child closed its parent's engine"

    async def close() -> None:
        one.close()

    asyncio.run(close())  # also where an event loop runs
    thread.join()
    assert [type(error) for error in ends] == [LLMClosed, LLMClosed]
    assert worker is not None and not Path(f"/proc/{worker}").exists()
    one.close()
    with pytest.raises(LLMClosed, match="closed: open another"):
        one.generate("x")


def test_an_engine_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(EngineError, match="there is no engine folder"):
        LLM(tmp_path / "none")
    with pytest.raises(OptionError, match="cache_gib is -1; give GiB from 0"):
        LLM(tmp_path, cache_gib=-1)
    assert threading.active_count() <= before, "others' may end meanwhile"
    with pytest.raises(AttributeError, match="no attribute 'LLN'"):
        spark_engine.LLN  # noqa: B018


def test_tokens_are_the_servers(embedded: Path, llm: LLM) -> None:
    """Greedy and seeded, of texts, ids and chats, with a schema; next to another LLM. At the end it
    is dropped."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    cases: list[tuple[Any, SamplingParams]] = [
        ("Once upon a time", SamplingParams(max_tokens=12, temperature=0, logprobs=2)),
        ([5, 6, 7], SamplingParams(max_tokens=12, seed=7)),
        (USER, SamplingParams(max_tokens=24, seed=9, temperature=1.5)),
        (USER, SamplingParams(max_tokens=60, seed=3, json_schema=schema, extra={"think": False})),
    ]
    with pytest.raises(OptionError, match="device is 0, and .* is for the cpu"):
        LLM(embedded, device=0)
    real = LLM(embedded, max_model_len=200)
    app = create_app(Endpoints(real._thread.answering.service))

    async def ask(path: str, body: bytes) -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.post(path, content=body, timeout=60)).json()

    answers = list[Completion]()
    for prompt, params in cases:
        chat = prompt is USER
        (mine,) = real.chat(prompt, params) if chat else real.generate(prompt, params)
        kind = JobKind.CHAT if chat else JobKind.COMPLETIONS
        own = {"messages" if chat else "prompt": prompt, "return_token_ids": True}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = encode({**params.fields(kind), **own})
        theirs = service_thread.wait(real._thread.start(ask(path, body)))
        (choice,) = theirs["choices"]
        assert list(mine.token_ids) == choice["token_ids"]
        assert mine.text == (choice["message"]["content"] if chat else choice["text"])
        assert mine.finish_reason == choice["finish_reason"]
        assert mine.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
        if mine.logprobs is not None:
            shown = choice["logprobs"]["token_logprobs"]
            assert [one.logprob for one in mine.logprobs] == shown
        answers.append(mine)
    assert isinstance(json.loads(answers[-1].text)["a"], bool)
    assert llm.generate("ECHO", SHORT)[0].error is None
    with pytest.raises(RequestError, match="maximum context length is 200 tokens"):
        real.generate([5] * 200)
    client = real._thread.answering.service.client
    worker = Path(f"/proc/{client.pid}")
    assert worker.exists()
    del real
    gc.collect()
    assert not worker.exists(), "an LLM that is dropped ends its engine"
