"""`LLM`: an engine in a Python program, without a server.

Knows how prompts and conversations become the bodies that a server would get, and how their
answers are waited for, with an event loop and without. It reads the environment, as commands do:
which GPUs are visible, and where the embedded engine is kept.
"""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

from spark_engine.device.choice import ORDER, VISIBLE, choose
from spark_engine.engine_file import read_manifest
from spark_engine.errors import OptionError, RequestError, SparkError
from spark_engine.runtime.engine.detect import needs_gpu
from spark_engine.runtime.engine.options import EngineOptions
from spark_engine.runtime.offline.answering import Take
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from spark_engine.runtime.offline.params import NOTHING, SamplingParams, encode
from spark_engine.runtime.offline.results import Completion, CompletionChunk
from spark_engine.runtime.offline.service_thread import LLMClosed as LLMClosed
from spark_engine.runtime.offline.service_thread import ServiceThread, wait
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.prompts.contract import JobKind

GIB = 1 << 30
Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
Work: TypeAlias = Callable[[Take | None], Coroutine[Any, Any, Completion]]


class LLM:
    """An engine folder, opened; `LLM()` opens the embedded model, which is built if it is missing.

    Answers come in a list, in the order of what was asked. A single prompt that cannot be answered
    raises an error, RequestError where it is at fault, before the engine works. Of many (any
    iterable, read while the engine can take more) each has its own `error`, and the others are not
    touched. All methods may be called from any thread. Use it in a `with`, or `close` it.
    """

    def __init__(
        self,
        engine: str | os.PathLike[str] | None = None,
        *,
        device: int | None = None,
        drafts: int | None = None,
        cache_gib: float | None = None,
        host_gib: float | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Waits until the engine is loaded. The arguments are options of `spark-run`: the GPU, the
        drafts of a round, GiB of the prefix cache and of memory left to the host, tokens of a
        request. Raises EngineError, CapacityError or OptionError."""
        for name, gib in (("cache_gib", cache_gib), ("host_gib", host_gib)):
            if gib is not None and not 0 <= gib <= 1 << 20:
                raise OptionError(f"{name} is {gib}; give GiB from 0 up, e.g. 8")
        folder = _folder(engine)
        if device is not None and not needs_gpu(target := read_manifest(folder).target):
            raise OptionError(f"device is {device}, and {folder} is for the {target}: leave it out")
        sizes = [None if gib is None else int(gib * GIB) for gib in (cache_gib, host_gib)]
        own = EngineOptions(drafts=drafts, cache_bytes=sizes[0], host_bytes=sizes[1])
        options = ServerOptions(engine=own, max_model_len=max_model_len)
        self._thread = ServiceThread(folder, options, _environment(device))

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine; calls that wait raise LLMClosed. May be called twice."""
        self._thread.close()

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None
    ) -> list[Completion]:
        """Continues a text, or token ids; or each of many, with the same parameters or with those
        at the same place of a list."""
        return self._all(self._works(self._prompt, _is_prompt(prompts), prompts, params))

    async def agenerate(
        self, prompts: Prompt | Iterable[Prompt], params: Params = None
    ) -> list[Completion]:
        """`generate` for a program with an event loop. A call that is cancelled ends its work."""
        return await self._aall(self._works(self._prompt, _is_prompt(prompts), prompts, params))

    def chat(
        self, messages: Messages | Iterable[Messages], params: Params = None, **more: Any
    ) -> list[Completion]:
        """Answers a conversation, messages in OpenAI's form; or each of many.

        `more`: `tools` and `tool_choice` in OpenAI's form, `enable_thinking`, and other fields of a
        body of /v1/chat/completions.
        """
        single = _is_conversation(messages)
        return self._all(self._works(self._conversation, single, messages, params, more))

    async def achat(
        self, messages: Messages | Iterable[Messages], params: Params = None, **more: Any
    ) -> list[Completion]:
        """`chat` for a program with an event loop."""
        single = _is_conversation(messages)
        return await self._aall(self._works(self._conversation, single, messages, params, more))

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **more: Any
    ) -> Iterator[CompletionChunk]:
        """The parts of one answer, to a prompt or to a conversation with `more` as for `chat`, as
        they are generated. Leaving the loop ends the request."""
        box = queue.SimpleQueue[CompletionChunk | None]()
        future = self._streamed(box.put, prompt, params, more)
        try:
            while (chunk := box.get()) is not None:
                yield chunk
            wait(future)
        finally:
            future.cancel()

    async def astream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, **more: Any
    ) -> AsyncIterator[CompletionChunk]:
        """`stream` for a program with an event loop."""
        loop, box = asyncio.get_running_loop(), asyncio.Queue[CompletionChunk | None]()

        def put(chunk: CompletionChunk | None) -> None:
            loop.call_soon_threadsafe(box.put_nowait, chunk)

        future = self._streamed(put, prompt, params, more)
        try:
            while (chunk := await box.get()) is not None:
                yield chunk
            wait(future)
        finally:
            future.cancel()

    def _streamed(
        self,
        put: Callable[[CompletionChunk | None], None],
        prompt: Prompt | Messages,
        params: SamplingParams | None,
        more: Mapping[str, Any],
    ) -> Future[Completion]:
        """Starts an answer with its parts, and a None after them, going to `put`."""
        if _is_conversation(prompt):
            work = self._conversation(prompt, params, more)
        else:
            work = self._prompt(prompt, params, more)
        future = self._thread.start(work(put))
        future.add_done_callback(lambda _: put(None))
        return future

    def _prompt(
        self, prompt: Any, params: SamplingParams | None, more: Mapping[str, Any] = NOTHING
    ) -> Work:
        if not _is_prompt(prompt):
            words = f"the prompt is {type(prompt).__name__} {prompt!r:.80}"
            raise RequestError(f"{words}; it must be a text or a list of token ids, not empty")
        own = prompt if isinstance(prompt, str) else list(prompt)
        return self._work(JobKind.COMPLETIONS, {"prompt": own, **more}, params)

    def _conversation(
        self, messages: Any, params: SamplingParams | None, more: Mapping[str, Any]
    ) -> Work:
        return self._work(JobKind.CHAT, {"messages": messages, **more}, params)

    def _work(self, kind: JobKind, own: Mapping[str, Any], params: SamplingParams | None) -> Work:
        """What answers one body, in the thread. Raises RequestError."""
        body = encode({**(params or SamplingParams()).fields(kind), **own})
        return lambda take: self._thread.answering.answer(kind, body, take)

    def _works(
        self, make: Callable[..., Work], single: bool, given: Any, params: Params, *more: Any
    ) -> Iterable[Work]:
        """The work of each that was given; one of many ends with its error as its result."""
        text = isinstance(given, str | bytes | bytearray | Mapping) and not single
        if text or not isinstance(given, Iterable):
            words = f"a {type(given).__name__} is neither one prompt nor several"
            raise RequestError(f"{words}: generate takes texts or token ids, chat messages")
        alike = params is None or isinstance(params, SamplingParams)
        each: Any = repeat(params) if alike else params
        if single:
            if not alike:
                raise RequestError("params is a list, and there is one prompt: give one")
            return [make(given, params, *more)]
        if not alike and isinstance(given, Sequence) and len(given) != len(each):
            raise RequestError(f"there are {len(given)} prompts and {len(each)} params")
        return (_kept(make, one, own, *more) for one, own in zip(given, each, strict=False))

    def _all(self, works: Iterable[Work]) -> list[Completion]:
        free, futures = threading.Semaphore(self._thread.answering.most), list[Future[Completion]]()
        try:
            for work in works:
                free.acquire()
                futures.append(self._thread.start(work(None)))
                futures[-1].add_done_callback(lambda _: free.release())
            return [wait(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _aall(self, works: Iterable[Work]) -> list[Completion]:
        free, tasks = asyncio.Semaphore(self._thread.answering.most), list[Any]()
        try:
            for work in works:
                await free.acquire()
                tasks.append(asyncio.wrap_future(self._thread.start(work(None))))
                tasks[-1].add_done_callback(lambda _: free.release())
            return [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()


def _kept(make: Callable[..., Work], *given: Any) -> Work:
    """The work of one of many: an error is its result."""

    async def run(take: Take | None) -> Completion:
        try:
            return await make(*given)(take)
        except SparkError as error:
            return Completion.failed(error)

    return run


def _is_prompt(given: Any) -> bool:
    """A text, or token ids. An empty list is many prompts, and none."""
    if isinstance(given, str):
        return True
    ids = isinstance(given, Sequence) and not isinstance(given, bytes | bytearray)
    return ids and bool(given) and isinstance(given[0], int)


def _is_conversation(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)


def _folder(engine: str | os.PathLike[str] | None) -> Path:
    if engine is not None:
        return Path(engine)
    return embedded_engine(cache_folder(os.environ), lambda text: print(text, file=sys.stderr))


def _environment(device: int | None) -> tuple[str, ...]:
    """The start of a command that sees the GPU `device` only. Raises OptionError."""
    if device is None:
        return ()
    seen = dict(os.environ)
    choose(seen, device)
    return ("/usr/bin/env", *(f"{name}={seen[name]}" for name in (VISIBLE, ORDER) if name in seen))
