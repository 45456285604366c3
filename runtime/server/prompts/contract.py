"""What the HTTP process and the processes that read prompts say to each other.

A message is a MessagePack header and blobs: bodies and lists of tokens travel as blobs, which the
event loop never reads or copies as a whole. Knows no transport.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from spark_engine.errors import CapacityError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import SamplingParams
from spark_engine.runtime.server.api.common import StreamOptions
from spark_engine.runtime.server.api.fields import BadField, UnknownModel
from spark_engine.runtime.server.api.responses_tools import Named
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.prompts.conversation import ChatOptions
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.text.tool_schema import Types

PLACE = "?"  # where the text of a grammar belongs
Blobs = Sequence[bytes | bytearray | memoryview]  # several, or the parts of one


class JobKind(enum.StrEnum):
    """What is to be done with a job's blobs. The first is a body, but for FORM."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"  # further blobs: items and answer of `previous_response_id`
    MESSAGES = "messages"
    COUNT = "count"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    FORM = "form"  # the blob is a FormAsked


class TooCostly(BadField):
    """A job was ended at a limit of time or memory."""


class Setup(msgspec.Struct, tag=True, frozen=True):
    """What bodies are read for. `most_answers`: choices of one request."""

    info: EngineInfo
    names: tuple[str, ...]
    chat: ChatOptions
    allow_priority: bool
    most_answers: int


class Job(msgspec.Struct, frozen=True):
    """One piece of work, in at most `cpu_s` seconds of CPU time."""

    kind: JobKind
    cpu_s: float


class Asked(msgspec.Struct, kw_only=True):
    """The fields of a body that its answer is written by.

    Attributes:
        conversation: the answer may have thoughts and calls, which are taken apart.
        words: log-probabilities show tokens as text, not as ids.
        shown: thoughts are part of the answer; `thinking`: the prompt ends inside one.
        fresh: the answer begins a turn. `parallel`: it may make several calls.
        types: of the parameters of the tools that may be called; None: there are none.
        legacy: calls are written as `function_call`.
        custom, names: tools of chats that take a text; tools of /v1/responses, by function, that
            are more than a function.
        managed: the client asked for edits of its context.
        detokenize, skip_special, keep_stop: how tokens become text.
        prompt_scored: the prompt's tokens but the first come with the answer's, to be scored.
        token_chances: log-probabilities of a /v1/responses answer are in it.
        background: nobody waits for the answer. `store`: it is kept.
        cache_salt: prompts are shared in the prefix cache with requests of the same one.
    """

    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    words: bool = True
    conversation: bool = False
    shown: bool = True
    thinking: bool = False
    fresh: bool = True
    parallel: bool = True
    types: Types | None = None
    legacy: bool = False
    custom: frozenset[str] = frozenset()
    names: dict[str, Named] = {}
    managed: bool = False
    detokenize: bool = True
    skip_special: bool = True
    keep_stop: bool = False
    prompt_scored: bool = False
    token_chances: bool = False
    background: bool = False
    store: bool = False
    cache_salt: str | None = None


class FormAsked(msgspec.Struct):
    """The form of an answer, as it is asked for: the arguments of `constraint_for`."""

    fields: StructuredFields
    tools: list[dict[str, Any]]
    tool_choice: Any
    thinking: bool
    parallel: bool


class FormName(msgspec.Struct, frozen=True):
    """`name` is a hash of the FormAsked, and `place` where in the body it is."""

    name: str
    place: str


class Bounds(msgspec.Struct, frozen=True):
    """What binds an answer whose form is not known yet. `form` is the name of a form in
    `Prepared.forms`; "" for none.

    `bound` holds where that makes a grammar, which then takes the place of PLACE, and `free` where
    the form turns out to bind nothing.
    """

    form: str
    bound: ConstraintSpec | None
    free: ConstraintSpec | None


class PreparedPrompt(msgspec.Struct):
    """One prompt; its ids are a blob of i32, `forced` of which come as the answer's first tokens.

    It holds what differs between the prompts of one body: the room behind them, and the seed of
    the first choice.
    """

    forced: int
    marks: tuple[int, ...]
    max_tokens: int
    logprobs: int | None
    seed: int
    bounds: Bounds
    echo: str = ""


class Prepared(msgspec.Struct, tag=True):
    """A body that was read. Blobs: the ids of each prompt; a FormAsked for each of `forms`, which
    are their names; for RESPONSES then the conversation's items, and a JSON object of the fields
    that a response repeats.
    """

    prompts: list[PreparedPrompt]
    params: SamplingParams
    priority: int
    asked: Asked
    forms: list[FormName] = []


class Done(msgspec.Struct, tag=True, frozen=True):
    """Nothing was wrong. The blob is the answer as JSON; for FORM the text of the grammar, empty
    where any answer has the form."""


class Missing(msgspec.Struct, tag=True, frozen=True):
    """The job is to be given again, with the response of this id."""

    ident: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The body is at fault; `error` is a key of ERRORS."""

    error: str
    message: str
    param: str | None = None
    code: str | None = None

    def exception(self) -> Exception:
        """What is raised where the answer is awaited."""
        if self.error == CapacityError.__name__:
            return CapacityError(self.message)
        return ERRORS.get(self.error, BadField)(self.message, self.param, self.code)


class Broken(msgspec.Struct, tag=True, frozen=True):
    """A bug of ours; `words` are its traceback."""

    words: str


Result = Prepared | Done | Missing | Refused | Broken
ERRORS: dict[str, Callable[[str, str | None, str | None], RequestError]] = {
    kind.__name__: kind for kind in (RequestError, BadField, UnknownModel)
}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=dict)  # read-only mappings travel as dicts
_JOBS, _RESULTS = msgspec.msgpack.Decoder(Job), msgspec.msgpack.Decoder(Result)


def encode(message: Job | Result | FormAsked) -> bytes:
    """The bytes of a header, or of a FORM's blob."""
    return _ENCODER.encode(message)


def decode_job(data: bytes) -> Job:
    """The inverse of `encode` in a worker."""
    job: Job = _JOBS.decode(data)
    return job


def decode_result(data: bytes) -> Result:
    """The inverse of `encode` in the HTTP process."""
    result: Result = _RESULTS.decode(data)
    return result


class TextPool(Protocol):
    """Who does jobs. All methods belong to one event loop."""

    async def run(
        self, kind: JobKind, blobs: Sequence[Blobs], owner: str = ""
    ) -> tuple[Result, list[bytes]]:
        """The result of one job and its blobs. `blobs`: the parts of each; `owner`: whose turn it
        takes.

        Raises Busy, and TooCostly where the job went over a limit."""
        ...

    def make_way(self, owner: str) -> bool:
        """Refuses a job of the owner that has most of them waiting, where these are more than
        `owner` has; whether it did."""
        ...

    def unhealthy_reason(self) -> str | None:
        """Why no job can be done now, or None."""
        ...
