"""From checked bodies to requests in the engine: binds tokenizer, template, engine and deadlines.

Knows what a conversation and a prompt mean. Knows no HTTP and no API's form: those are in `api/`,
and come here with `ChatRequest` or with prompts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import Request, capacity
from spark_engine.runtime.server.api.allowed_token_ids import only_these_ids
from spark_engine.runtime.server.api.answers import Json, usage
from spark_engine.runtime.server.api.bad_words import bar
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.common import (
    MAX_CHOICES,
    Body,
    Defaults,
    check,
    check_together,
    fold_seed,
    room_after,
    sampling,
    scored,
)
from spark_engine.runtime.server.api.fields import BadField, UnknownModel, short, too_long
from spark_engine.runtime.server.assets import grammars_of
from spark_engine.runtime.server.client import Busy, EngineClient
from spark_engine.runtime.server.conversation import ChatOptions, Reader
from spark_engine.runtime.server.deadline import Deadline
from spark_engine.runtime.server.generation import Choice, Generation
from spark_engine.runtime.server.ipc import EngineInfo, Stats
from spark_engine.runtime.server.metrics import Metrics
from spark_engine.runtime.server.stored_responses import ResponseStore
from spark_engine.runtime.server.tokenising import ThreadPool, encode_within
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.runtime.text.turns import Turns

PROMPT_THREADS = 2
OTHER_THREADS = 1  # of /tokenize and /detokenize
LARGE = 256 << 10  # bytes of a body that is read and checked in a thread, which may take a second
MOST_CHARACTERS = 4 << 20  # of a text that is tokenised whole: a token of each takes some 300 bytes
T = TypeVar("T")


@dataclass(frozen=True)
class Conversation:
    """A chat that was read: its choices, what takes each answer apart, and whether thoughts are
    shown."""

    choices: tuple[Choice, ...]
    parsers: tuple[ReplyParser, ...]
    prompt_tokens: int
    shown: bool
    thinking: bool  # the prompt ends inside a thought


@dataclass(frozen=True)
class Running:
    """One request in flight."""

    generation: Generation
    choices: tuple[Choice, ...]
    body: Body
    prompt_tokens: int
    drafting: bool  # the engine makes drafts

    def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the choice, what a round brought it). Raises as `Generation.pieces` does."""
        return self.generation.pieces()

    def close(self) -> None:
        """Cancels what has not finished. May be called twice."""
        self.generation.close()

    def cancel(self) -> None:
        """Asks for the end of what has not finished; its last pieces still come."""
        self.generation.cancel()

    @property
    def usage(self) -> Json:
        """Tokens so far, and drafts where the engine makes any.

        A prompt counts once, however many choices are made of it: so do its cached tokens, which
        are the first choice's, since the others find what that one leaves.
        """
        streams = [choice.stream for choice in self.choices]
        cached = sum(s.cached for s in streams[:: self.body.n or 1])
        drafts = (sum(s.drafted for s in streams), sum(s.accepted for s in streams))
        tokens = sum(s.tokens for s in streams)
        return usage(self.prompt_tokens, tokens, cached, drafts if self.drafting else None)


class Service:
    """One engine behind one or more names. All methods belong to one event loop.

    `timeout_s` limits a request, `queue_s` its wait for the engine; None for no limit. With
    `allow_priority` a request may go before others; without, one that asks for it is refused.
    `chat`: how conversations are taken.
    """

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        names: Sequence[str],
        timeout_s: float | None = None,
        allow_priority: bool = False,
        chat: ChatOptions | None = None,
        queue_s: float | None = None,
    ) -> None:
        self.client = client
        self.info = info
        self.names = tuple(names)
        self.created = self.now()
        self.responses = ResponseStore()
        self.metrics = Metrics(self.names[0], self._engine_state, info.limits, lambda: client.pid)
        self.tokenizer = tokenizer
        grammars = grammars_of(tokenizer, info)
        if grammars is not None:
            grammars.begin()
        self.reader = Reader(template, tokenizer, chat or ChatOptions(), grammars)
        self._turns = Turns(tokenizer)
        self._defaults = Defaults.of(info.generation)
        self._timeout_s, self._queue_s = timeout_s, queue_s
        self._allow_priority = allow_priority
        self._prompts = ThreadPool(PROMPT_THREADS)
        self._others = ThreadPool(OTHER_THREADS)  # of their own: no prompt waits for them

    def _engine_state(self) -> tuple[Stats, float]:
        return self.client.stats, self.client.step_age

    @property
    def open(self) -> int:
        """Requests that have not ended, those included whose prompts are still being read."""
        return self.client.in_flight + self._prompts.pending

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and answer together, that one request can reach."""
        return capacity(self.info.limits)

    def now(self) -> int:
        """Seconds since 1970, as answers say when they were made."""
        return int(time.time())

    def close(self) -> None:
        """Ends the threads."""
        self._prompts.close()
        self._others.close()

    # What an API does with one body, in this order.

    def deadline(self) -> Deadline:
        """The time that a request which begins now may take."""
        return Deadline(self._timeout_s, self._queue_s)

    async def checked(
        self, data: bytes, check: Callable[[], T], deadline: Deadline, more: int = 0
    ) -> T:
        """What `check` makes of the body `data`, and of so many bytes `more`."""
        if len(data) + more < LARGE:
            return check()
        return await self.read(check, deadline)

    async def converse(self, chat: ChatRequest, deadline: Deadline) -> Conversation:
        """Reads a conversation that was accepted. Raises RequestError, Busy, TimedOut."""

        def read() -> Conversation:
            reading = self.reader.read(chat)
            ids = self.ids_of(reading.text, chat.truncate_prompt_tokens)
            choices, parsers = [], []
            for choice in self.choices(chat, ids, reading.constraint):
                choice.stream.stop_behind(reading.parser)
                parsers.append(reading.parser())
                choices.append(replace(choice, ended=parsers[-1].has_ended))
            return Conversation(
                tuple(choices), tuple(parsers), len(ids), reading.shown, reading.thinking
            )

        return await self.read(read, deadline)

    async def count(self, to_chat_request: Callable[[], ChatRequest]) -> int:
        """Tokens of a conversation's prompt. Raises RequestError, Busy, TimedOut."""

        def read() -> int:
            chat = to_chat_request()
            check(chat)
            self.need_tokenizer()
            return len(self.encode(self.reader.read(chat).text, "messages"))

        return await self.aside(read)

    async def read(self, work: Callable[[], T], deadline: Deadline) -> T:
        """`work` in a thread. What waits for one counts like a request in the queue."""
        room = self.info.limits.max_seqs + self.client.max_queue - self.client.in_flight
        try:
            async with deadline.enforced():
                return await self._prompts.run(work, room)
        except Busy:
            self.metrics.refused()
            raise

    def submit(
        self, body: Body, choices: Sequence[Choice], prompt_tokens: int, deadline: Deadline
    ) -> Running:
        """Submits, as the last thing that can fail: an error leaves no request behind."""
        limits = self.info.limits
        try:
            generation = Generation(self.client, self.metrics, choices, limits.max_seqs, deadline)
        except Busy:
            self.metrics.refused()
            raise
        return Running(generation, tuple(choices), body, prompt_tokens, bool(limits.drafts))

    async def aside(self, work: Callable[[], T]) -> T:
        """`work` that needs no engine, in a thread of its own."""
        async with self.deadline().enforced():
            return await self._others.run(work, self.client.max_queue)

    # The parts of it, which may run in threads.

    def check(self, body: Body, count: int) -> None:
        """All that can be said of a body with `count` prompts before they are read."""
        check(body)
        self._check_model(body.model)
        n = body.n or 1
        most = min(MAX_CHOICES, self.info.limits.max_seqs + self.client.max_queue)
        if count * n > most:
            words = f"{count} prompts with n = {n} are {count * n} answers; at most {most}"
            raise BadField(f"{words} are allowed at once", "n" if n > 1 else "prompt")
        if body.priority and not self._allow_priority:
            words = f"priority is {body.priority}; this server answers in order of arrival"
            raise BadField(f"{words} (spark-run --allow-priority lets clients choose)", "priority")

    def accept(self, chat: ChatRequest) -> ChatRequest:
        """The same of a conversation, which is given back. Raises RequestError."""
        self.check(chat, 1)
        most = self.max_model_len
        if len(chat.messages) > most:  # none is shorter than a token
            raise too_long(f"{len(chat.messages)} messages", most, "messages")
        return chat

    def choices(
        self, body: Body, ids: Sequence[int], bound: ConstraintSpec | None = None
    ) -> list[Choice]:
        """The n choices of one prompt, with the seeds s, s+1, …; they share the prompt, and what
        binds their answers."""
        eos, limits, prompt = self.info.eos_token_ids, self.info.limits, tuple(ids)
        check_together(prompt, body.n or 1)
        params = sampling(body, self._defaults, self.info, room_after(prompt, limits))
        checked = Request(prompt, params)
        checked.check(limits, eos)
        if body.allowed_token_ids is not None:
            known, most = len(self.need_tokenizer()), params.max_tokens or 0
            bound = only_these_ids(body.allowed_token_ids, known, eos, most, bound)
        if body.bad_words:
            bound = bar(body.bad_words, self.need_tokenizer(), bound)
        marks = self._turns.marks(prompt)
        forced = prompt[1:] if body.scores_prompt() else ()
        if body.scores_prompt():
            params, bound = scored(body, params, len(forced)), bound or ConstraintSpec()
            bound = msgspec.structs.replace(bound, forced=forced)
            checked, marks = Request(prompt[:1]), ()
        tokenizer = None if body.detokenize is False else self.tokenizer
        skip, seed = body.skip_special_tokens is not False, params.seed or 0
        stops = bool(body.include_stop_str_in_output)
        shared = array("i", checked.packed)
        found = []
        for i in range(body.n or 1):
            own = replace(params, seed=fold_seed(seed + i))
            stream = TextStream(tokenizer, own, eos, skip, stops, len(forced))
            request = Request(shared, own, body.priority or 0, marks, bound)
            found.append(Choice(request, stream))
        return found

    def ids_of(self, prompt: str | list[int], last: int | None = None) -> list[int]:
        """A prompt's token ids, of which the `last` so many are taken; NO_LIMIT: as many as leave
        room for one token. Raises BadField for one that cannot fit."""
        most = self.max_model_len
        if last is None:
            if isinstance(prompt, str):
                return encode_within(self.need_tokenizer(), prompt, most)
            room_after(prompt, self.info.limits)
            return prompt
        if last >= most:
            words = f"truncate_prompt_tokens is {short(last)}; this engine holds {most} tokens"
            raise BadField(f"{words}, one of them new", "truncate_prompt_tokens")
        if isinstance(prompt, str):
            prompt = self.need_tokenizer().encode(prompt[-MOST_CHARACTERS:])
        return prompt[-(last if last > 0 else most - 1) :]

    def encode(self, text: str, field: str) -> list[int]:
        """All token ids of a text, which `field` brought. Raises BadField for one too long."""
        if len(text) > MOST_CHARACTERS:
            words = f"the text has {len(text)} characters; at most {MOST_CHARACTERS} are tokenised"
            raise BadField(words, field)
        return self.need_tokenizer().encode(text)

    def render(
        self, messages: list[Json], tools: list[Json] | None, options: dict[str, Any] | None
    ) -> str:
        """Messages as a prompt. Raises RequestError."""
        return self.reader.template.render(
            messages, tools, self.reader.thinking({}, options).options
        )

    def need_tokenizer(self) -> Tokenizer:
        """Raises RequestError where the engine has none."""
        if self.tokenizer is None:
            raise RequestError("this engine has no tokenizer; send token ids to /v1/completions")
        return self.tokenizer

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            words = f"model {short(name)} is not served here; there is {', '.join(self.names)}"
            raise UnknownModel(words, "model", "model_not_found")
