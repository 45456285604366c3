"""One request in this process, without a server: what `spark-run --prompt` does.

Knows the engine and the text of one answer. Knows no command line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spark_engine.errors import InternalError, RequestError
from spark_engine.progress import Progress
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Event, FinishReason, Request
from spark_engine.runtime.engine.trace import ENGINE, trace_of
from spark_engine.runtime.server.api.answers import FINISH, usage
from spark_engine.runtime.server.api.common import Body, Defaults, check, room_after, sampling
from spark_engine.runtime.server.assets import check_drafts, read_info, read_text
from spark_engine.runtime.server.ipc import Stats, summarise
from spark_engine.runtime.text.reply_parts import THINK
from spark_engine.runtime.text.text_stream import Piece, TextStream

REQUEST_ID = 0  # there is one


@dataclass
class Answer:
    """One answer as it grows. Times in seconds from the request's start, after the load."""

    prompt: tuple[int, ...]
    seed: int
    has_text: bool
    thinking: bool
    load_s: float
    events: list[Event] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    drafts: tuple[int, int] | None = None  # verified and kept; None: the engine makes none
    stats: Stats = field(default_factory=Stats)
    first_s: float = 0.0
    total_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """`token_ids`, `text`, `logprobs`, `finish_reason`, `usage`, `drafts`, `timings`."""
        asked = any(e.logprob is not None for e in self.events)
        decoding = self.total_s - self.first_s
        rate = (len(self.events) - 1) / decoding if decoding > 0 else None
        return {
            "token_ids": [e.token for e in self.events],
            "text": self.text if self.has_text else None,
            "logprobs": [e.logprob for e in self.events] if asked else None,
            "top_logprobs": [[list(t) for t in e.top] for e in self.events] if asked else None,
            "finish_reason": FINISH[self.finish] if self.finish else None,
            "seed": self.seed,
            "usage": usage(len(self.prompt), len(self.events), 0, self.drafts),
            "drafts": self._drafts_to_json(),
            "timings": {
                "load_s": self.load_s,
                "first_token_s": self.first_s,
                "total_s": self.total_s,
                "tokens_per_s": rate,
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
        }


class OneShot:
    """An engine folder for one request. The engine is opened when the request is known good."""

    def __init__(self, folder: Path, options: EngineOptions | None = None) -> None:
        """Of the options, a prefix cache is left out: nothing follows that could use it.

        Raises EngineError or OptionError.
        """
        self._folder = folder
        self._info = read_info(folder)
        self._options = replace(options or EngineOptions(), cache_bytes=0)
        check_drafts(self._options.drafts, self._info.limits)
        self._tokenizer, self._template = read_text(folder)
        self._engine: Engine | None = None
        self._trace = trace_of(self._options.profile, ENGINE)

    def encode(self, text: str) -> list[int]:
        """Raises RequestError when the engine has no tokenizer."""
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer; give --prompt-ids")
        return self._tokenizer.encode(text)

    def render(self, question: str, thinking: bool) -> str:
        """The prompt for one user message. Raises RequestError when there is no template."""
        if self._template is None:
            raise RequestError("this engine has no chat template; give --prompt or --prompt-ids")
        message = {"role": "user", "content": question}
        return self._template.render([message], options={"enable_thinking": thinking})

    def start(
        self,
        prompt: list[int],
        body: Body,
        logprobs: int | None = None,
        shown: Progress | None = None,
    ) -> Answer:
        """Checks the request, opens the engine (`shown` says how far that is), submits.

        Raises RequestError or BadField, then EngineError or CapacityError.
        """
        check(body)
        info, eos = self._info, self._info.eos_token_ids
        room = room_after(prompt, info.limits)
        params = sampling(body, Defaults.of(info.generation), info, room, logprobs)
        request = Request(tuple(prompt), params)
        request.check(info.limits, eos)
        begin = time.monotonic()
        self._engine = Engine.open(self._folder, self._options, shown, self._trace)
        self._start = time.monotonic()
        self._stream = TextStream(self._tokenizer, params, eos)
        self._engine.add(REQUEST_ID, request)
        tail = self._tokenizer.decode(prompt[-8:]) if self._tokenizer else ""
        thinking = tail.rstrip().endswith(THINK)
        has_text = self._tokenizer is not None
        return Answer(request.prompt, params.seed or 0, has_text, thinking, self._start - begin)

    def pieces(self, answer: Answer) -> Iterator[Piece]:
        """The answer's pieces as they come; `answer` grows with them.

        Raises InternalError when the engine gives the request up.
        """
        engine = self._opened()
        while answer.finish is None:
            if events := engine.step():
                yield self._take(answer, events)

    def close(self) -> None:
        """Frees the engine."""
        if self._engine is not None:
            self._engine.close()
        self._trace.save()

    def _opened(self) -> Engine:
        if self._engine is None:
            raise InternalError("pieces were asked for before start")
        return self._engine

    def _take(self, answer: Answer, events: list[Event]) -> Piece:
        if events[-1].finish is FinishReason.ERROR:
            raise InternalError(events[-1].message or "the engine gave the request up")
        piece = self._stream.push(events)
        answer.total_s = time.monotonic() - self._start
        if piece.tokens:
            answer.first_s = answer.first_s or answer.total_s
            answer.events += piece.tokens
        answer.text += piece.text
        answer.finish = piece.finish
        if self._info.limits.drafts:
            answer.drafts = self._stream.drafted, self._stream.accepted
            answer.stats = summarise(self._opened().stats())
        if piece.stop is not None:
            self._opened().cancel(REQUEST_ID)
        return piece
