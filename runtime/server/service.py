"""From request bodies to answers: binds tokenizer, template, engine and JSON forms.

Knows what the endpoints mean. Knows no HTTP: bodies come in as bytes, answers leave as JSON values
or as a stream of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.request import FinishReason, Request, capacity
from spark_engine.runtime.server.client import Busy, EngineClient
from spark_engine.runtime.server.deadline import Deadline
from spark_engine.runtime.server.generation import Choice, Generation
from spark_engine.runtime.server.ipc import EngineInfo, Stats
from spark_engine.runtime.server.metrics import Metrics
from spark_engine.runtime.server.protocol import (
    MAX_CHOICES,
    BadField,
    Body,
    ChatBody,
    CompletionBody,
    Defaults,
    DetokenizeBody,
    TokenizeBody,
    check,
    decode,
    fold_seed,
    prompts,
    room_after,
    sampling,
)
from spark_engine.runtime.server.responses import ChatForm, Form, Json, TextForm, new_id, usage
from spark_engine.runtime.server.tokenising import Threads, encode_within
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import THINK
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.runtime.text.turns import Turns

PROMPT_THREADS = 2
OTHER_THREADS = 1  # of /tokenize and /detokenize
LARGE = 256 << 10  # bytes of a body that is read and checked in a thread, which may take a second
TOKENIZED = 4 << 20  # characters that /tokenize takes: a token of each takes some 300 bytes
T = TypeVar("T")


class UnknownModel(BadField):
    """The request names a model that is not served here."""

    status = 404


@dataclass(frozen=True)
class InFlight:
    """One request in flight with all that its answer needs."""

    generation: Generation
    choices: tuple[Choice, ...]
    forms: tuple[Form, ...]
    header: Json  # id, created, model
    kind: str  # "chat.completion" or "text_completion"
    body: Body
    prompt_tokens: int
    drafting: bool  # the engine makes drafts

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

    @property
    def chunk_kind(self) -> str:
        """The `object` of a streamed chunk."""
        return self.kind + ".chunk" if self.kind == "chat.completion" else self.kind


class Service:
    """One engine behind one or more names. All methods belong to one event loop.

    `timeout_s` limits a request; None for no limit. With `allow_priority` a request may go before
    others; without, one that asks for it is refused.
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
    ) -> None:
        self.client = client
        self.info = info
        self.names = tuple(names)
        self.metrics = Metrics(self.names[0], self._engine_state, info.limits, lambda: client.pid)
        self._tokenizer = tokenizer
        self._template = template
        self._turns = Turns(tokenizer)
        self._defaults = Defaults.of(info.generation)
        self._timeout_s = timeout_s
        self._allow_priority = allow_priority
        self._prompts = Threads(PROMPT_THREADS)
        self._others = Threads(OTHER_THREADS)  # of their own: no prompt waits for them

    def _engine_state(self) -> tuple[Stats, float]:
        return self.client.stats, self.client.step_age

    async def chat(self, data: bytes) -> InFlight:
        """/v1/chat/completions. Raises RequestError, Busy, EngineDied, TimedOut."""
        deadline = Deadline(self._timeout_s)
        body = await self._checked(data, self._chat_body, deadline)
        tokenizer, most = self._need_tokenizer(), self.max_model_len

        def read() -> tuple[list[int], list[Choice], bool]:
            text = self._render(body)
            ids = encode_within(tokenizer, text, most)
            return ids, self._choices(body, ids), text.rstrip().endswith(THINK)

        prompt, choices, thinking = await self._read(read, deadline)
        tools, logprobs = _tools(body) or (), bool(body.logprobs)
        known = tokenizer.marks.values()
        parsers = (ReplyParser(thinking, tools, tokens=known) for _ in range(body.n or 1))
        forms = [ChatForm(parser, tokenizer, logprobs) for parser in parsers]
        names = "chat.completion", "chatcmpl"
        return self._start(body, len(prompt), choices, forms, names, deadline)

    async def complete(self, data: bytes) -> InFlight:
        """/v1/completions. Raises RequestError, Busy, EngineDied, TimedOut."""
        deadline = Deadline(self._timeout_s)
        body, given = await self._checked(data, self._completion_body, deadline)

        def read() -> tuple[int, list[Choice], list[str]]:
            ids = [self._ids(prompt) for prompt in given]
            echoes = [self._echo(*p) if body.echo else "" for p in zip(given, ids, strict=True)]
            choices = [choice for prompt in ids for choice in self._choices(body, prompt)]
            return sum(map(len, ids)), choices, echoes

        total, choices, echoes = await self._read(read, deadline)
        wanted, n = body.logprobs is not None, body.n or 1
        forms = [TextForm(e, self._tokenizer, wanted) for e in echoes for _ in range(n)]
        return self._start(body, total, choices, forms, ("text_completion", "cmpl"), deadline)

    async def tokenize(self, data: bytes) -> Json:
        """/tokenize: `tokens`, `count`, `max_model_len`."""
        body = decode(data, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise BadField("give either prompt or messages", "prompt")
        tokenizer = self._need_tokenizer()

        def read() -> list[int]:
            text = body.prompt or ""
            if body.messages is not None:
                kwargs = body.chat_template_kwargs
                text = self._template_text(body.messages, body.tools, kwargs)
            if len(text) > TOKENIZED:
                words = f"the text has {len(text)} characters; at most {TOKENIZED} are tokenised"
                raise BadField(words, "prompt" if body.messages is None else "messages")
            return tokenizer.encode(text)

        async with Deadline(self._timeout_s).enforced():
            ids = await self._others.run(read, self.client.max_queue)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    async def detokenize(self, data: bytes) -> Json:
        """/detokenize: `prompt`, special tokens included."""
        body = decode(data, DetokenizeBody)
        tokenizer, vocab = self._need_tokenizer(), self.info.limits.vocab

        def read() -> str:
            for token in body.tokens:
                if not 0 <= token < vocab:
                    raise BadField(f"tokens holds {token}; ids go from 0 to {vocab - 1}", "tokens")
            return tokenizer.decode(body.tokens, skip_special=False)

        async with Deadline(self._timeout_s).enforced():
            return {"prompt": await self._others.run(read, self.client.max_queue)}

    @property
    def open(self) -> int:
        """Requests that have not ended, those included whose prompts are still being read."""
        return self.client.in_flight + self._prompts.pending

    def close(self) -> None:
        """Ends the threads."""
        self._prompts.close()
        self._others.close()

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and answer together, that one request can reach."""
        return capacity(self.info.limits)

    async def answer(self, job: InFlight) -> Json:
        """The whole answer. Raises what `Generation.pieces` raises."""
        tokens: list[list[int]] = [[] for _ in job.choices]
        ends: dict[int, Piece] = {}
        async for index, piece in job.generation.pieces():
            job.forms[index].push(piece)
            tokens[index] += _token_ids(piece)
            if piece.finish is not None:
                ends[index] = piece
        choices = []
        for i, form in enumerate(job.forms):
            choice = {"index": i, **form.whole(), **_end(form, ends[i])}
            if job.body.return_token_ids:
                prompt = job.choices[i].request.prompt
                choice |= {"token_ids": tokens[i], "prompt_token_ids": prompt}
            choices.append(choice)
        return {**job.header, "object": job.kind, "choices": choices, "usage": job.usage}

    async def stream(self, job: InFlight) -> AsyncIterator[Json]:
        """The chunks of the answer. Raises what `Generation.pieces` raises."""
        options = job.body.stream_options
        counted = bool(options and options.continuous_usage_stats)
        for i, form in enumerate(job.forms):
            if (first := form.first()) is not None:
                extra = self._first_extra(job, i)
                yield self._chunk(
                    job, [{"index": i, **first, "finish_reason": None, **extra}], counted
                )
        async for index, piece in job.generation.pieces():
            choice = self._piece(job, index, piece)
            if choice is not None:
                yield self._chunk(job, [choice], counted)
        if options and options.include_usage:
            yield {**self._chunk(job, [], False), "usage": job.usage}

    def _chunk(self, job: InFlight, choices: list[Json], counted: bool) -> Json:
        chunk = {**job.header, "object": job.chunk_kind, "choices": choices}
        return {**chunk, "usage": job.usage} if counted else chunk

    def _first_extra(self, job: InFlight, index: int) -> Json:
        if not job.body.return_token_ids:
            return {}
        return {"prompt_token_ids": job.choices[index].request.prompt, "token_ids": []}

    def _piece(self, job: InFlight, index: int, piece: Piece) -> Json | None:
        """One choice of a chunk, or None where nothing in it is worth sending."""
        form, wanted = job.forms[index], bool(job.body.return_token_ids)
        body = form.push(piece)
        news = body.get("delta") or body.get("text") or "logprobs" in body
        if not (news or wanted or piece.finish):
            return None
        end = {"finish_reason": None} if piece.finish is None else _end(form, piece)
        choice = {"index": index, **body, **end}
        if wanted:
            choice["token_ids"] = _token_ids(piece)
        return choice

    def _start(
        self,
        body: Body,
        prompt_tokens: int,
        choices: Sequence[Choice],
        forms: Sequence[Form],
        names: tuple[str, str],
        deadline: Deadline,
    ) -> InFlight:
        """Submits, as the last thing that can fail: an error leaves no request behind.

        `names` are the answer's `object` and the prefix of its id.
        """
        slots, kind = self.info.limits.max_seqs, names[0]
        try:
            generation = Generation(self.client, self.metrics, choices, slots, deadline)
        except Busy:
            self.metrics.refused()
            raise
        header = {"id": new_id(names[1]), "created": int(time.time()), "model": self.names[0]}
        return InFlight(
            generation,
            tuple(choices),
            tuple(forms),
            header,
            kind,
            body,
            prompt_tokens,
            bool(self.info.limits.drafts),
        )

    def _choices(self, body: Body, ids: Sequence[int]) -> list[Choice]:
        """The n choices of one prompt, with the seeds s, s+1, …; they share the prompt."""
        eos, limits, prompt = self.info.eos_token_ids, self.info.limits, tuple(ids)
        params = sampling(body, self._defaults, self.info, room_after(prompt, limits))
        Request(prompt, params).check(limits, eos)
        skip, seed = body.skip_special_tokens is not False, params.seed or 0
        marks = self._turns.marks(prompt)
        found = []
        for i in range(body.n or 1):
            own = replace(params, seed=fold_seed(seed + i))
            stream = TextStream(self._tokenizer, own, eos, skip)
            found.append(Choice(Request(prompt, own, body.priority or 0, marks), stream))
        return found

    async def _checked(self, data: bytes, check: Callable[[bytes], T], deadline: Deadline) -> T:
        """What `check` makes of a body."""
        if len(data) < LARGE:
            return check(data)
        return await self._read(lambda: check(data), deadline)

    async def _read(self, work: Callable[[], T], deadline: Deadline) -> T:
        """`work` in a thread. What waits for one counts like a request in the queue."""
        room = self.info.limits.max_seqs + self.client.max_queue - self.client.in_flight
        try:
            async with deadline.enforced():
                return await self._prompts.run(work, room)
        except Busy:
            self.metrics.refused()
            raise

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return encode_within(self._need_tokenizer(), prompt, self.max_model_len)
        room_after(prompt, self.info.limits)
        return prompt

    def _render(self, body: ChatBody) -> str:
        return self._template_text(body.messages, _tools(body), body.chat_template_kwargs)

    def _template_text(
        self, messages: list[Json], tools: list[Json] | None, options: dict[str, Any] | None
    ) -> str:
        if self._template is None:
            raise RequestError("this engine has no chat template; use /v1/completions")
        return self._template.render(messages, tools, options)

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer; send token ids to /v1/completions")
        return self._tokenizer

    def _echo(self, prompt: str | Sequence[int], ids: Sequence[int]) -> str:
        return prompt if isinstance(prompt, str) else self._need_tokenizer().decode(ids)

    def _chat_body(self, data: bytes) -> ChatBody:
        body, most = decode(data, ChatBody), self.max_model_len
        self._check(body, 1)
        if len(body.messages) > most:  # none is shorter than a token
            words = f"there are {len(body.messages)} messages; this engine holds {most} tokens"
            raise BadField(words, "messages", "context_length_exceeded")
        return body

    def _completion_body(self, data: bytes) -> tuple[CompletionBody, list[str | list[int]]]:
        body = decode(data, CompletionBody)
        given = prompts(body.prompt)
        self._check(body, len(given))
        if any(isinstance(prompt, str) for prompt in given):
            self._need_tokenizer()
        return body, given

    def _check(self, body: Body, count: int) -> None:
        """All that can be said of a body with `count` prompts before they are read."""
        check(body)
        self._check_model(body.model)
        n = body.n or 1
        most = min(MAX_CHOICES, self.info.limits.max_seqs + self.client.max_queue)
        if count * n > most:
            words = f"{count} prompts with n = {n} are {count * n} answers; at most {most}"
            raise BadField(f"{words} may be wanted at once", "n" if n > 1 else "prompt")
        if body.priority and not self._allow_priority:
            words = f"priority is {body.priority}; this server answers in order of arrival"
            raise BadField(f"{words} (spark-run --allow-priority lets clients choose)", "priority")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            words = f"model {name!r} is not served here; there is {', '.join(self.names)}"
            raise UnknownModel(words, "model", "model_not_found")


def _tools(body: ChatBody) -> list[Json] | None:
    return None if body.tool_choice == "none" else body.tools


def _token_ids(piece: Piece) -> list[int]:
    return [event.token for event in piece.tokens if event.token is not None]


def _end(form: Form, piece: Piece) -> Json:
    reason = piece.finish or FinishReason.STOP
    return {"finish_reason": form.finish(reason), "stop_reason": piece.stop}
