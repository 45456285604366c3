"""The messages between the HTTP process and the processes that read prompts.

A message is a MessagePack header and blobs: bodies and lists of tokens are sent as blobs, which the
event loop never reads or copies as a whole. The process that forks workers gets orders and sends
reports, each a packet of MessagePack alone. Knows no transport.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from spark_engine.errors import CapacityError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import SamplingParams
from spark_engine.runtime.server.api.common import StreamOptions
from spark_engine.runtime.server.api.fields import BadField, UnknownModel
from spark_engine.runtime.server.api.responses_tools import ToolName
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.text.tool_schema import Types
from spark_engine.vision import Image

MESSAGE = 64 << 10  # bytes of an order or a report at most
STAYS_MARK, GROWN_MARK = b"\0", b"\1"  # after an answer's header: whether the worker continues
PLACE = "?"  # is replaced by the text of a grammar
Blobs = Sequence[bytes | bytearray | memoryview]  # several blobs, or the parts of one


class JobKind(enum.StrEnum):
    """The kind of a job. Its first blob is a body, except for FORM."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"  # further blobs: items and answer of `previous_response_id`
    MESSAGES = "messages"
    COUNT = "count"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    MODEL = "model"  # the body's name of it
    FORM = "form"  # the blob is a FormAsked


class TooCostly(BadField):
    """A job was ended at a limit of time or memory."""


class Setup(msgspec.Struct, tag=True, frozen=True):
    """The engine and options that bodies are read for. `most_answers`: choices of one request."""

    info: EngineInfo
    names: tuple[str, ...]
    chat: ChatOptions
    allow_priority: bool
    most_answers: int


class Fetched(msgspec.Struct, frozen=True):
    """What an address has is a blob; it is empty where there is an `error`."""

    url: str
    error: str = ""


class Seen(msgspec.Struct, frozen=True):
    """An image that was decoded before. `file`: of the bytes that it was decoded from, and how."""

    file: bytes
    rows: int
    columns: int
    digest: bytes


class PromptJob(msgspec.Struct, frozen=True):
    """One piece of work, in at most `cpu_s` seconds of CPU time. `fetched` are the last blobs;
    `seen` are images that need not be decoded again."""

    kind: JobKind
    cpu_s: float
    fetched: tuple[Fetched, ...] = ()
    seen: tuple[Seen, ...] = ()


class NotFetched(Exception):
    """A body names images by these addresses."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(f"{len(urls)} images are not fetched yet")
        self.urls = urls


class Asked(msgspec.Struct, kw_only=True):
    """The fields of a body that determine the form of its answer.

    Attributes:
        types: of the parameters of the tools that may be called; None without tools.
        custom, names: custom tools of chats; tools of /v1/responses, by function, that are not
            functions.
        detokenize, skip_special, keep_stop: how tokens become text.
        prompt_scored: the prompt's tokens after the first are generated too, to be scored.
        cache_salt: prompts are shared in the prefix cache with requests of the same one.
    """

    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    words: bool = True  # log-probabilities show tokens as text, not as ids
    conversation: bool = False  # the answer is parsed for thoughts and calls
    shown: bool = True  # thoughts are part of the answer; `thinking`: the prompt ends inside one
    thinking: bool = False
    fresh: bool = True  # the answer starts a turn. `parallel`: it may make several calls
    parallel: bool = True
    types: Types | None = None
    legacy: bool = False  # calls are written as `function_call`
    custom: frozenset[str] = frozenset()
    names: dict[str, ToolName] = {}
    managed: bool = False  # the client requested edits of its context
    detokenize: bool = True
    skip_special: bool = True
    keep_stop: bool = False
    prompt_scored: bool = False
    token_logprobs: bool = False  # an answer of /v1/responses has log-probabilities
    background: bool = False  # the answer is generated in the background. `store`: it is stored
    store: bool = False
    cache_salt: str | None = None


class FormAsked(msgspec.Struct):
    """The requested form of an answer: the arguments of `constraint_for`."""

    fields: StructuredFields
    tools: list[dict[str, Any]]
    tool_choice: Any
    thinking: bool
    parallel: bool


class FormName(msgspec.Struct, frozen=True):
    """`name` is a hash of the FormAsked, `place` its field in the body."""

    name: str
    place: str


class Bounds(msgspec.Struct, frozen=True):
    """The constraint on an answer before its form is compiled. `form` is the name of a form in
    `Prepared.forms`; "" for none.

    `bound` applies if the form has a grammar, which replaces PLACE, and `free` if the form allows
    any answer.
    """

    form: str
    bound: ConstraintSpec | None
    free: ConstraintSpec | None


class PreparedPrompt(msgspec.Struct):
    """One prompt; its ids are a blob of i32. `forced` of them are generated first, to be scored.

    It has what differs between the prompts of one body: the tokens that fit after it, and the
    seed of the first choice. The pixels of `images` are further blobs, empty for those of the job's
    `seen`; `files` is what each was decoded from.
    """

    forced: int
    marks: tuple[int, ...]
    max_tokens: int
    logprobs: int | None
    seed: int
    bounds: Bounds
    echo: str = ""
    images: tuple[Image, ...] = ()
    files: tuple[bytes, ...] = ()


class Prepared(msgspec.Struct, tag=True):
    """A body that was read. Blobs: the ids of each prompt; a FormAsked for each of `forms`, which
    are their names; the pixels of each image; for RESPONSES then the conversation's items, and a
    JSON object of the fields that a response repeats."""

    prompts: list[PreparedPrompt]
    params: SamplingParams
    priority: int
    asked: Asked
    forms: list[FormName] = []


class Done(msgspec.Struct, tag=True, frozen=True):
    """Success. The blob is the answer as JSON; for FORM the text of the grammar, empty where any
    answer has the form."""


class Missing(msgspec.Struct, tag=True, frozen=True):
    """The job needs the stored response of this id: submit it again with that."""

    ident: str


class Fetch(msgspec.Struct, tag=True, frozen=True):
    """The job needs what is at these addresses: submit it again with that."""

    urls: tuple[str, ...]


class BodyRefused(msgspec.Struct, tag=True, frozen=True):
    """The body is invalid; `error` is a key of ERRORS."""

    error: str
    message: str
    param: str | None = None
    code: str | None = None

    def exception(self) -> Exception:
        if self.error == CapacityError.__name__:
            return CapacityError(self.message)
        return ERRORS.get(self.error, BadField)(self.message, self.param, self.code)


class Broken(msgspec.Struct, tag=True, frozen=True):
    """A bug; `words` are its traceback."""

    words: str


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Fork a worker; its socket is attached to the message. `memory`: bytes of address space in
    addition to the current ones."""

    nice: int
    memory: int


class ForkerReady(msgspec.Struct, tag=True, frozen=True):
    """All is loaded."""


class Unloadable(msgspec.Struct, tag=True, frozen=True):
    """Something cannot be loaded; the process ends. `user`: it is not our bug."""

    message: str
    user: bool


class WorkerEnded(msgspec.Struct, tag=True, frozen=True):
    """A worker ended; `status` as of `os.waitstatus_to_exitcode`."""

    pid: int
    status: int


class WorkerHello(msgspec.Struct, frozen=True):
    """A worker's first message."""

    pid: int


Order = Setup | Fork
Report = ForkerReady | Unloadable | WorkerEnded
Result = Prepared | Done | Missing | Fetch | BodyRefused | Broken
ERRORS: dict[str, Callable[[str, str | None, str | None], RequestError]] = {
    kind.__name__: kind for kind in (RequestError, BadField, UnknownModel)
}
# the bytes of a header, or of a FORM's blob; read-only mappings are sent as dicts
encode: Callable[[PromptJob | Result | FormAsked | Order | Report | WorkerHello], bytes]
encode = msgspec.msgpack.Encoder(enc_hook=dict).encode
decode_job: Callable[[bytes], PromptJob] = msgspec.msgpack.Decoder(PromptJob).decode
decode_result: Callable[[bytes], Result] = msgspec.msgpack.Decoder(Result).decode
decode_order: Callable[[bytes], Order] = msgspec.msgpack.Decoder(Order).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
