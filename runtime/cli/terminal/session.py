"""Requests in this process, one after the other: `spark-run` without a server.

Knows the engine and the text of its answers. Knows no command line.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spark_engine.errors import InternalError, RequestError
from spark_engine.progress import Progress
from spark_engine.runtime.engine.draft_counts import BySource
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request, capacity
from spark_engine.runtime.engine.trace import ENGINE, trace_of
from spark_engine.runtime.server.api.answers import FINISH, usage
from spark_engine.runtime.server.api.common import Body, Defaults, capacity_after, check, sampling
from spark_engine.runtime.server.engine_client import engine_folder
from spark_engine.runtime.server.engine_client.ipc import Stats, summarise
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.conversation import ChatReader
from spark_engine.runtime.server.prompts.preparer import image_reader, reserve
from spark_engine.runtime.server.prompts.text_files import grammars_of, read_text
from spark_engine.runtime.text.image_parts import Marks
from spark_engine.runtime.text.messages import Message
from spark_engine.runtime.text.parts import text_of
from spark_engine.runtime.text.reply_parts import Delta
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.turns import Turns
from spark_engine.vision import Image


@dataclass
class Answer:
    """One answer as it grows. Times in seconds from the request's start, after the load.

    `cached`: the prompt's tokens from the prefix cache.
    """

    id: int
    prompt: tuple[int, ...]
    seed: int
    has_text: bool
    thinking: bool
    load_s: float
    events: list[Event] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    drafts: tuple[int, int] | None = None  # verified and accepted; None: the engine makes none
    by_source: BySource | None = None
    cached: int = 0
    stats: Stats = field(default_factory=Stats)
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first; None before there are two."""
        decoding = self.total_s - self.first_s
        return (len(self.events) - 1) / decoding if len(self.events) > 1 and decoding > 0 else None

    def to_json(self) -> dict[str, Any]:
        """`token_ids`, `text`, `logprobs`, `finish_reason`, `usage`, `drafts`, `timings`."""
        asked = any(e.logprob is not None for e in self.events)
        return {
            "token_ids": [e.token for e in self.events],
            "text": self.text if self.has_text else None,
            "logprobs": [e.logprob for e in self.events] if asked else None,
            "top_logprobs": [[list(t) for t in e.top] for e in self.events] if asked else None,
            "finish_reason": FINISH[self.finish] if self.finish else None,
            "seed": self.seed,
            "usage": usage(len(self.prompt), len(self.events), self.cached, self.drafts),
            "drafts": self._drafts_to_json(),
            "timings": {
                "load_s": self.load_s,
                "first_token_s": self.first_s,
                "total_s": self.total_s,
                "tokens_per_s": self.rate,
            },
        }

    def _drafts_to_json(self) -> dict[str, Any] | None:
        if self.drafts is None:
            return None
        stats = self.stats
        return {
            "verified": self.drafts[0],
            "accepted": self.drafts[1],
            "verified_by_position": stats.drafts_by_position,
            "accepted_by_position": stats.accepted_by_position,
            "rounds_by_k": stats.rounds_by_k,
            "tokens_per_round": stats.tokens_per_round,
            "by_source": {name: asdict(one) for name, one in (self.by_source or {}).items()},
        }


class Session:
    """An engine folder. The engine is opened at its first use, and stays open."""

    def __init__(
        self, folder: Path, options: EngineOptions | None = None, chat: ChatOptions | None = None
    ) -> None:
        """Raises EngineError or OptionError."""
        self._folder = folder
        self.info = engine_folder.read_info(folder)
        self._options = options or EngineOptions()
        engine_folder.check_ranks(folder, self._options)
        engine_folder.check_drafts(self._options.drafts, self.info.limits)
        engine_folder.check_cache(self._options.cache_bytes, folder)
        tokenizer, self._template = read_text(folder)
        self._tokenizer = reserve(tokenizer, self.info.vision)
        chat = chat or ChatOptions()
        self._images = image_reader(self.info.vision, chat)
        grammars = grammars_of(self._tokenizer, self.info)
        self._options = replace(self._options, grammars=grammars)
        self._reader = ChatReader(self._template, self._tokenizer, chat, grammars)
        self._turns = Turns(self._tokenizer)
        self._engine: Engine | None = None
        self._trace = trace_of(self._options.profile, ENGINE)
        self._next_id = 0

    def encode(self, text: str) -> list[int]:
        """Raises RequestError when the engine has no tokenizer."""
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer; give --prompt-ids")
        return self._tokenizer.encode(text)

    @property
    def thinks(self) -> bool:
        """True if a chat starts with a thought by default."""
        return self._reader.default.enabled is not False

    def prompt(
        self, messages: Sequence[Message], thinking: bool | None = None, chat: bool = True
    ) -> tuple[list[int], tuple[Image, ...]]:
        """The ids and images of a chat, or of its texts alone. Raises RequestError."""
        messages, images = deepcopy(messages), self._images({}, ())
        if images is not None:
            images.take(messages, "messages")
        elif any(isinstance(message["content"], list) for message in messages):
            raise RequestError("this engine reads no images: leave them out")
        marks = None if images is None else images.marks
        text = "".join(text_of(message["content"]) for message in messages)
        text = self.render(messages, thinking, marks) if chat else text
        if images is None or self._tokenizer is None:
            return self.encode(text), ()
        return images.tokens(text, self._tokenizer, capacity(self.info.limits))

    def render(
        self, messages: Sequence[Message], thinking: bool | None = None, marks: Marks | None = None
    ) -> str:
        """The prompt for a chat; `thinking` None: the default of the session's options.

        Raises RequestError when there is no template, or it refuses.
        """
        if self._template is None:
            raise RequestError("this engine has no chat template; give --prompt or --prompt-ids")
        wanted = self.thinks if thinking is None else thinking
        options = self._reader.thinking({"enable_thinking": wanted}).options
        return self._template.render(messages, options=options, marks=marks)

    def open(self, shown: Progress | None = None) -> float:
        """Opens the engine if it is not open yet; `shown` shows the progress. Returns seconds.

        Raises EngineError or CapacityError.
        """
        begin = time.monotonic()
        if self._engine is None:
            self._engine = Engine.open(self._folder, self._options, shown, self._trace)
        return time.monotonic() - begin

    def start(
        self,
        prompt: list[int],
        body: Body,
        logprobs: int | None = None,
        shown: Progress | None = None,
        chat: bool = False,
        images: tuple[Image, ...] = (),
    ) -> Answer:
        """Checks the request, opens the engine if needed, submits. One answer at a time. In a
        `chat` stop strings apply after the thought.

        Raises RequestError or BadField, then what `open` raises.
        """
        check(body)
        info, eos = self.info, self.info.eos_token_ids
        available = capacity_after(prompt, info.limits)
        body.return_draft_counts = True
        params = sampling(body, Defaults.of(info.generation), available, logprobs)
        thinking = self._reader.opens_thought(prompt)
        bound = self._reader.bound(thinking, body)
        marks = self._turns.marks(prompt)
        request = Request(tuple(prompt), params, marks=marks, constraint=bound, images=images)
        request.check(info.limits, eos, info.vision)
        load_s = self.open(shown)
        self._start = time.monotonic()
        self._stream = TextStream(self._tokenizer, params, eos)
        if chat:
            self._stream.stop_behind(lambda: self._reader.parser(thinking))
        number, self._next_id = self._next_id, self._next_id + 1
        self._opened().add(number, request)
        has_text = self._tokenizer is not None
        return Answer(number, tuple(prompt), params.seed or 0, has_text, thinking, load_s)

    def pieces(
        self, answer: Answer, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Piece]:
        """The answer's pieces; `answer` grows with them. Once `stopped`, it ends.

        Raises InternalError when the engine aborts the request.
        """
        engine = self._opened()
        while answer.finish is None:
            if stopped():
                engine.cancel(answer.id)
            if events := [e for e in engine.step() if e.request_id == answer.id]:
                yield self._take(answer, events)

    def deltas(
        self, answer: Answer, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Delta]]:
        """The same for a chat: thoughts and content of each piece, and what is left at the end."""
        parser = self._reader.parser(answer.thinking)
        for piece in self.pieces(answer, stopped):
            yield parser.push(piece.text, piece.marks)
        yield parser.flush()

    def stats(self) -> Stats:
        return summarise(self._opened().stats())

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._trace.save()

    def _opened(self) -> Engine:
        if self._engine is None:
            raise InternalError("an answer was asked of an engine that is not open")
        return self._engine

    def _take(self, answer: Answer, events: list[Event]) -> Piece:
        if events[-1].finish is FinishReason.ERROR:
            raise InternalError(events[-1].message or "the engine aborted the request")
        piece = self._stream.push(events)
        answer.total_s = time.monotonic() - self._start
        if piece.tokens:
            answer.first_s = answer.first_s or answer.total_s
            answer.events += piece.tokens
        answer.text += piece.text
        answer.finish = piece.finish
        answer.cached = self._stream.cached
        if self.info.limits.drafts:
            answer.drafts = self._stream.drafted, self._stream.accepted
            answer.by_source = self._stream.by_source
            answer.stats = self.stats()
        if piece.stop is not None:
            self._opened().cancel(answer.id)
        return piece
