"""From bodies to requests in the engine: the pool that reads bodies, the engine, deadlines.

Knows no HTTP and no API's answers (`replies/`). Bodies are read in other processes (`prompts/`).
"""

import asyncio
import re
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import msgspec

from spark_engine.errors import InternalError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.draft_counts import joined
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.images.fetch import Fetcher
from spark_engine.runtime.server.api.answers import Json, usage
from spark_engine.runtime.server.api.common import fold_seed
from spark_engine.runtime.server.engine_client.client import Busy, EngineClient
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.operation.engine_metrics import EngineCollector
from spark_engine.runtime.server.operation.http_request import current, owner
from spark_engine.runtime.server.operation.metrics import Metrics
from spark_engine.runtime.server.prompts import contract
from spark_engine.runtime.server.prompts.limits import KNOWN_FORMS
from spark_engine.runtime.server.prompts.pool import WorkerPool
from spark_engine.runtime.server.service.generation import CompletionChoice, Deadline, Generation
from spark_engine.runtime.server.service.stored_responses import ResponseStore
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.text_stream import TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.vision import Image

SALT_BYTES = 16  # of a digest
MOST_FETCHED = 64 << 20  # bytes of the images of a request that are fetched
MOST_ROUNDS = 3  # of fetching: of messages, and of a system message
Stored = Callable[[str], Sequence[contract.Blobs]]  # items and answer of a stored response


class ReadingFailed(InternalError):
    """A bug of ours in reading a body."""


@dataclass(frozen=True)
class PreparedChoices:
    """A body that was read: its choices, the parser and the echo of each, and further results of
    its worker (`more`)."""

    asked: contract.Asked
    choices: tuple[CompletionChoice, ...]
    parsers: tuple[ReplyParser, ...]
    echoes: tuple[str, ...]
    prompt_tokens: int
    more: Sequence[bytes]


@dataclass(frozen=True)
class Running:
    generation: Generation
    choices: tuple[CompletionChoice, ...]
    body: contract.Asked
    prompt_tokens: int
    drafting: bool  # the engine makes drafts

    @property
    def usage(self) -> Json:
        """Tokens so far, and drafts where the engine makes any.

        A prompt counts once, whatever the number of its choices, and so do its cached tokens: the
        first choice's, since the others always find its pages.
        """
        streams = [choice.stream for choice in self.choices]
        n = self.body.n or 1
        cached = sum(s.cached for s in streams[::n])
        images = sum(i.tokens for choice in self.choices[::n] for i in choice.request.images)
        drafts = (sum(s.drafted for s in streams), sum(s.accepted for s in streams))
        tokens = sum(s.tokens for s in streams)
        made = drafts if self.drafting else None
        by_source = joined(s.by_source for s in streams)
        return usage(self.prompt_tokens, tokens, cached, made, images, by_source)


class Service:
    """One engine under one or more names. All methods run in one event loop.

    `pool` reads bodies; `formats` are the answers'. `timeout_s` limits a request, `queue_s` its
    wait for the engine; None for no limit. `fetcher` fetches images that bodies name by URLs.
    `peer`: another service of the same server; they share metrics and stored responses.
    """

    def __init__(
        self,
        client: EngineClient,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        pool: WorkerPool,
        names: Sequence[str],
        formats: Formats | None = None,
        timeout_s: float | None = None,
        queue_s: float | None = None,
        fetcher: Fetcher | None = None,
        peer: "Service | None" = None,
    ) -> None:
        self.client = client
        self.info = info
        self.names = tuple(names)
        self.created = int(time.time())
        self.responses: ResponseStore = ResponseStore() if peer is None else peer.responses
        engine = EngineCollector(
            self.names[0],
            lambda: (client.stats, client.step_age),
            info.limits,
            lambda: client.pid,
            None if client.state is None else lambda: (client.running, client.loads),
        )
        self.metrics: Metrics = Metrics(engine) if peer is None else peer.metrics.of_model(engine)
        self.tokenizer = tokenizer
        self._pool, self._formats = pool, formats or Formats()
        self._timeout_s, self._queue_s, self._fetcher = timeout_s, queue_s, fetcher
        self._forms: OrderedDict[str, str] = OrderedDict()  # grammars by their forms' names
        self._forms_size = 0  # characters
        self._reading, self._computing = 0, 0

    @property
    def open(self) -> int:
        """Requests that have not ended, including those with prompts that are still being read."""
        return self.client.in_flight + self._reading

    def unhealthy_reason(self) -> str | None:
        """Why a new request would not be answered now, or None."""
        return self.client.unhealthy_reason() or self._pool.unhealthy_reason()

    # What an API does with one body, in this order.

    def deadline(self) -> Deadline:
        return Deadline(self._timeout_s, self._queue_s)

    async def prepare(
        self,
        kind: contract.JobKind,
        body: contract.Blobs,
        deadline: Deadline,
        stored: Stored | None = None,
    ) -> PreparedChoices:
        """Reads a body, in another process. `stored` finds the response that the body continues.

        One that waits counts as a request in the queue. Raises RequestError, Busy, TimedOut, and
        what `stored` does.
        """
        self._reading += 1
        try:
            self._check_capacity()
            async with deadline.enforced():
                result, blobs = await self._run(kind, [body])
                if isinstance(result, contract.Missing):
                    assert stored is not None
                    result, blobs = await self._run(kind, [body, *stored(result.ident)])
                prepared = _of(contract.Prepared, result)
                at = len(prepared.prompts)
                forms = {
                    form.name: await self._form(form, blob)
                    for form, blob in zip(prepared.forms, blobs[at:], strict=False)
                }
        except Busy:
            self.metrics.refused()
            raise
        finally:
            self._reading -= 1
        return self._conversation(prepared, blobs, forms)

    async def compute(self, kind: contract.JobKind, body: contract.Blobs) -> bytes:
        """An answer that needs no engine, as JSON. Raises RequestError, Busy, TimedOut."""
        self._computing += 1
        try:
            if self._computing > self.client.max_queue and not self._pool.refuse_one(owner()):
                raise Busy(f"{self._computing - 1} requests are being computed already; retry")
            async with self.deadline().enforced():
                result, blobs = await self._run(kind, [body])
        finally:
            self._computing -= 1
        _of(contract.Done, result)
        return blobs[0]

    def submit(self, found: PreparedChoices, deadline: Deadline) -> Running:
        """Submits all choices or none: nothing after it can fail."""
        limits, tokens = self.info.limits, found.prompt_tokens
        owned_by, salt = owner(), _salt(found.asked.cache_salt)
        choices = tuple(
            replace(c, request=replace(c.request, owner=owned_by, salt=salt)) for c in found.choices
        )
        try:
            generation = Generation(self.client, self.metrics, choices, limits.max_seqs, deadline)
        except Busy:
            self.metrics.refused()
            raise
        return Running(generation, choices, found.asked, tokens, bool(limits.drafts))

    async def _run(
        self, kind: contract.JobKind, blobs: Sequence[contract.Blobs]
    ) -> tuple[contract.Result, list[bytes]]:
        """One job of the pool, with the images that it wants to be fetched."""
        rows: dict[contract.Fetched, bytes] = {}
        for _ in range(MOST_ROUNDS):
            more = [[data] for data in rows.values()]
            result, found = await self._pool.run(kind, [*blobs, *more], owner(), tuple(rows))
            if not isinstance(result, contract.Fetch):
                break
            await asyncio.gather(*(self._fetch(url, rows) for url in set(result.urls)))
        return result, found

    async def _fetch(self, url: str, rows: dict[contract.Fetched, bytes]) -> None:
        """Adds what an address has, or why it has nothing."""
        assert self._fetcher is not None
        words = f"the request's images at URLs are over {MOST_FETCHED >> 20} MiB: send fewer"
        try:
            data = await self._fetcher.fetch(url)
            if sum(map(len, rows.values())) + len(data) > MOST_FETCHED:
                raise RequestError(words)
            rows[contract.Fetched(url)] = data
        except RequestError as error:
            rows[contract.Fetched(url, str(error))] = b""

    def _check_capacity(self) -> None:
        """Raises Busy where another prompt would be too many and no waiting one can be refused."""
        acceptable = self.info.limits.max_seqs + self.client.max_queue - self.client.in_flight
        if self._reading > acceptable and (acceptable <= 0 or not self._pool.refuse_one(owner())):
            words = f"the queue is full ({self._reading - 1} prompts are still being read); retry"
            raise Busy(words)

    async def _form(self, form: contract.FormName, asked: bytes) -> str:
        """The grammar of a form, "" where any answer has it. Raises RequestError for one that
        cannot be enforced."""
        if (known := self._forms.get(form.name)) is not None:
            self._forms.move_to_end(form.name)
            return known
        try:
            result, blobs = await self._pool.run(contract.JobKind.FORM, [[asked]], owner())
        except contract.TooCostly as error:
            words = f"{form.place} cannot be enforced: {error}; make it simpler"
            raise contract.TooCostly(words, re.split(r"[.\[]", form.place)[0]) from None
        _of(contract.Done, result)
        grammar = self._forms[form.name] = blobs[0].decode()
        self._forms_size += len(grammar)
        while self._forms_size > KNOWN_FORMS:
            self._forms_size -= len(self._forms.popitem(last=False)[1])
        return grammar

    def _conversation(
        self, found: contract.Prepared, blobs: Sequence[bytes], forms: Mapping[str, str]
    ) -> PreparedChoices:
        asked, choices, parsers, echoes = found.asked, [], [], []
        count, tokens = len(found.prompts), 0
        rest = iter(blobs[count + len(found.forms) :])
        for prompt, blob in zip(found.prompts, blobs[:count], strict=True):
            tokens += len(blob) // 4
            bound = _bound(prompt.bounds, forms)
            images = tuple(replace(image, pixels=next(rest)) for image in prompt.images)
            for choice in self._choices(found, prompt, blob, bound, images):
                parser = self._parser(asked)
                if asked.conversation:
                    choice.stream.stop_behind(partial(self._parser, asked))
                    choice = replace(choice, ended=parser.has_ended)
                choices.append(choice)
                parsers.append(parser)
                echoes.append(prompt.echo)
        made = tuple(choices), tuple(parsers), tuple(echoes)
        return PreparedChoices(asked, *made, tokens, list(rest))

    def _choices(
        self,
        found: contract.Prepared,
        prompt: contract.PreparedPrompt,
        blob: bytes,
        bound: ConstraintSpec | None,
        images: tuple[Image, ...],
    ) -> list[CompletionChoice]:
        """The n choices of one prompt, with the seeds s, s+1, …; they share the prompt, its images
        and the constraint."""
        asked, eos, ids = found.asked, self.info.eos_token_ids, array("i", blob)
        forced = prompt.forced
        if asked.prompt_scored:
            bound = bound or ConstraintSpec()
            bound = msgspec.structs.replace(bound, forced=tuple(ids[1:]))
            ids = ids[:1]
        tokenizer = self.tokenizer if asked.detokenize else None
        choices = []
        for i in range(asked.n):
            own = _own(found.params, prompt, fold_seed(prompt.seed + i))
            stream = TextStream(tokenizer, own, eos, asked.skip_special, asked.keep_stop, forced)
            request = Request(ids, own, found.priority, prompt.marks, bound, images=images)
            choices.append(CompletionChoice(request, stream))
        return choices

    def _parser(self, asked: contract.Asked) -> ReplyParser:
        known = () if self.tokenizer is None else self.tokenizer.marks.values()
        how = asked.fresh, asked.parallel, asked.types or {}
        return ReplyParser(asked.thinking, (), self._formats, known, *how)


R = TypeVar("R")


def _of(kind: type[R], result: contract.Result) -> R:
    """The result. Raises what a worker found wrong."""
    if isinstance(result, kind):
        return result
    if isinstance(result, contract.BodyRefused):
        raise result.exception()
    words = result.words if isinstance(result, contract.Broken) else repr(result)
    raise ReadingFailed(f"reading a body failed: {words}")


def _bound(bounds: contract.Bounds, forms: Mapping[str, str]) -> ConstraintSpec | None:
    """The constraint on an answer, with the grammar of its form."""
    if bounds.form == "":
        return bounds.bound
    grammar = forms[bounds.form]
    if not grammar or bounds.bound is None:
        return bounds.free
    return msgspec.structs.replace(bounds.bound, grammar=grammar)


def _own(params: SamplingParams, prompt: contract.PreparedPrompt, seed: int) -> SamplingParams:
    """The parameters of one choice, without checks: all were checked before."""
    own = copy(params)
    for name, value in (
        ("max_tokens", prompt.max_tokens),
        ("logprobs", prompt.logprobs),
        ("seed", seed),
    ):
        object.__setattr__(own, name, value)
    return own


def _salt(given: str | None) -> bytes:
    """The current request's: a digest of its `cache_salt` (`given`) and of its key's salt. Requests
    share cached prefixes only where both are equal."""
    request = current()
    account = None if request is None else request.account
    of_key = None if account is None else account.key.salt
    if of_key is None and given is None:
        return b""
    both = msgspec.msgpack.encode([_bytes(of_key), _bytes(given)])
    return blake2b(both, digest_size=SALT_BYTES).digest()


def _bytes(text: str | None) -> bytes | None:
    """UTF-8 of any text: JSON may hold halves of surrogate pairs."""
    return None if text is None else text.encode("utf-8", "surrogatepass")
