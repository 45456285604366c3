"""From request bodies to answers: binds tokenizer, template, engine and JSON forms.

Knows what the endpoints mean. Knows no HTTP: bodies come in as bytes, answers leave as JSON values
or as a stream of them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.chat import ChatTemplate
from spark_engine.runtime.client import Busy, EngineClient
from spark_engine.runtime.generation import Choice, Generation
from spark_engine.runtime.ipc import EngineInfo
from spark_engine.runtime.metrics import Metrics
from spark_engine.runtime.protocol import (
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
from spark_engine.runtime.replies import ChatForm, Form, Json, TextForm, new_id, usage
from spark_engine.runtime.reply import THINK, ReplyParser
from spark_engine.runtime.request import FinishReason, Request, SamplingParams, capacity
from spark_engine.runtime.text import Piece, TextStream
from spark_engine.runtime.tokenizer import Tokenizer


class UnknownModel(BadField):
    """The request names a model that is not served here."""

    status = 404


@dataclass(frozen=True)
class Answering:
    """One request in flight with all that its answer needs."""

    generation: Generation
    choices: tuple[Choice, ...]
    forms: tuple[Form, ...]
    header: Json  # id, created, model
    kind: str  # "chat.completion" or "text_completion"
    body: Body
    prompt_tokens: int

    @property
    def usage(self) -> Json:
        """Tokens so far."""
        return usage(self.prompt_tokens, sum(c.stream.tokens for c in self.choices))

    @property
    def chunk_kind(self) -> str:
        """The `object` of a streamed chunk."""
        return self.kind + ".chunk" if self.kind == "chat.completion" else self.kind


class Service:
    """One engine behind one or more names. `timeout_s` limits a request; None for no limit."""

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        names: Sequence[str],
        timeout_s: float | None = None,
    ) -> None:
        self.client = client
        self.info = info
        self.names = tuple(names)
        self.metrics = Metrics(self.names[0], lambda: (client.stats, client.step_age))
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = Defaults.of(info.generation)
        self._timeout_s = timeout_s

    def chat(self, data: bytes) -> Answering:
        """/v1/chat/completions. Raises RequestError, Busy, EngineDied."""
        body = decode(data, ChatBody)
        check(body)
        self._check_model(body.model)
        tokenizer, text = self._need_tokenizer(), self._render(body)
        thinking = text.rstrip().endswith(THINK)
        tools = _tools(body) or ()

        def form() -> Form:
            return ChatForm(ReplyParser(thinking, tools), tokenizer, bool(body.logprobs))

        prompt = tokenizer.encode(text)
        return self._start(body, [prompt], [form] * (body.n or 1), "chat.completion", "chatcmpl")

    def complete(self, data: bytes) -> Answering:
        """/v1/completions. Raises RequestError, Busy, EngineDied."""
        body = decode(data, CompletionBody)
        check(body)
        self._check_model(body.model)
        given = prompts(body.prompt)
        ids = [self._need_tokenizer().encode(p) if isinstance(p, str) else p for p in given]
        forms: list[Callable[[], Form]] = []
        for prompt, tokens in zip(given, ids, strict=True):
            echo = self._echo(prompt, tokens) if body.echo else ""
            wanted = body.logprobs is not None
            forms += [partial(TextForm, echo, self._tokenizer, wanted)] * (body.n or 1)
        return self._start(body, ids, forms, "text_completion", "cmpl")

    def tokenize(self, data: bytes) -> Json:
        """/tokenize: `tokens`, `count`, `max_model_len`."""
        body = decode(data, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise BadField("give either prompt or messages", "prompt")
        tokenizer = self._need_tokenizer()
        if body.messages is not None:
            text = self._template_text(body.messages, body.tools, body.chat_template_kwargs)
        else:
            text = body.prompt or ""
        ids = tokenizer.encode(text)
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    def detokenize(self, data: bytes) -> Json:
        """/detokenize: `prompt`, special tokens included."""
        body = decode(data, DetokenizeBody)
        vocab = self.info.limits.vocab
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise BadField(f"tokens holds {token}; ids go from 0 to {vocab - 1}", "tokens")
        return {"prompt": self._need_tokenizer().decode(body.tokens, skip_special=False)}

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and answer together, that one request can reach."""
        return capacity(self.info.limits)

    async def answer(self, job: Answering) -> Json:
        """The whole answer. Raises what `Generation.pieces` raises."""
        tokens: list[list[int]] = [[] for _ in job.choices]
        ends: dict[int, Piece] = {}
        async for index, piece in job.generation.pieces():
            job.forms[index].push(piece)
            if piece.token is not None and piece.token.token is not None:
                tokens[index].append(piece.token.token)
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

    async def stream(self, job: Answering) -> AsyncIterator[Json]:
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

    def _chunk(self, job: Answering, choices: list[Json], counted: bool) -> Json:
        chunk = {**job.header, "object": job.chunk_kind, "choices": choices}
        return {**chunk, "usage": job.usage} if counted else chunk

    def _first_extra(self, job: Answering, index: int) -> Json:
        if not job.body.return_token_ids:
            return {}
        return {"prompt_token_ids": job.choices[index].request.prompt, "token_ids": []}

    def _piece(self, job: Answering, index: int, piece: Piece) -> Json | None:
        """One choice of a chunk, or None where nothing in it is worth sending."""
        form, wanted = job.forms[index], bool(job.body.return_token_ids)
        body = form.push(piece)
        news = body.get("delta") or body.get("text") or "logprobs" in body
        if not (news or wanted or piece.finish):
            return None
        end = {"finish_reason": None} if piece.finish is None else _end(form, piece)
        choice = {"index": index, **body, **end}
        if wanted:
            choice["token_ids"] = [] if piece.token is None else [piece.token.token]
        return choice

    def _start(
        self,
        body: Body,
        ids: Sequence[Sequence[int]],
        forms: Sequence[Callable[[], Form]],
        kind: str,
        prefix: str,
    ) -> Answering:
        if len(forms) > MAX_CHOICES:
            raise BadField(f"{len(forms)} answers are wanted; at most {MAX_CHOICES}", "n")
        n = body.n or 1
        choices = tuple(self._choice(body, p, s) for p, s in self._sampled(body, ids, n))
        slots = self.info.limits.max_seqs
        try:
            generation = Generation(self.client, self.metrics, choices, slots, self._timeout_s)
        except Busy:
            self.metrics.refused()
            raise
        header = {"id": new_id(prefix), "created": int(time.time()), "model": self.names[0]}
        made = tuple(form() for form in forms)
        total = sum(len(p) for p in ids)
        return Answering(generation, choices, made, header, kind, body, total)

    def _sampled(
        self, body: Body, ids: Sequence[Sequence[int]], n: int
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        """(prompt, parameters) of every choice, with the seeds s, s+1, … over n."""
        found = []
        for prompt in ids:
            room = room_after(prompt, self.info.limits)
            params = sampling(body, self._defaults, self.info, room)
            seed = params.seed or 0
            found += [(prompt, replace(params, seed=fold_seed(seed + i))) for i in range(n)]
        return found

    def _choice(self, body: Body, prompt: Sequence[int], params: SamplingParams) -> Choice:
        eos = self.info.eos_token_ids
        request = Request(tuple(prompt), params, body.priority or 0)
        request.check(self.info.limits, eos)
        skip = body.skip_special_tokens is not False
        return Choice(request, TextStream(self._tokenizer, params, eos, skip))

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

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            words = f"model {name!r} is not served here; there is {', '.join(self.names)}"
            raise UnknownModel(words, "model", "model_not_found")


def _tools(body: ChatBody) -> list[Json] | None:
    return None if body.tool_choice == "none" else body.tools


def _end(form: Form, piece: Piece) -> Json:
    reason = piece.finish or FinishReason.STOP
    return {"finish_reason": form.finish(reason), "stop_reason": piece.stop}
