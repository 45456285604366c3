"""The OpenAI request bodies: what is accepted, what is refused and in which words.

Knows fields, types, ranges and defaults. Knows no tokenizer and no engine beyond its limits.
Unknown fields are ignored, as clients of every server expect; a known field that would change
the answer and is not supported is refused.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from spark_engine.errors import RequestError
from spark_engine.interface import MOST_DRAFTS, Limits
from spark_engine.runtime.engine.request import SamplingParams, capacity
from spark_engine.runtime.server.ipc import EngineInfo

MAX_CHOICES = 512  # choices of one HTTP request, over all its prompts
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions; chat generates as much as fits
COLDEST = 1e-4  # the engine takes 0 or at least this; what lies between means argmax
GENERATION = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# name: (lowest, highest), None for no limit
RANGES: Mapping[str, tuple[float | None, float | None]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "max_tokens": (1, None),
    "max_completion_tokens": (1, None),
    "min_tokens": (0, None),
    "priority": (-(2**31), 2**31 - 1),
    "drafts": (0, MOST_DRAFTS),
}
_ID_DIGITS = 10  # of the longest token id that a logit_bias key may hold
_SHOWN = 1000  # bytes of a field's JSON beyond which an error shows it as it was sent
_PATH = re.compile(r" - at `\$\.?([A-Za-z_]*)(.*)`$")


class BadField(RequestError):
    """A request is malformed. `param` names the field, `code` is OpenAI's word for the case."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both kinds of request share. Null is as good as absent."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    drafts: int | None = None  # of a round, at most; changes no token
    # known and not supported:
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


class ChatBody(Body, kw_only=True):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known and not supported:
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(Body, kw_only=True):
    """/v1/completions. `prompt` is checked by `prompts`."""

    prompt: str | list[str | int | list[int]]  # one type refuses most nonsense before it is built
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize."""

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True)
class Defaults:
    """What holds where a request says nothing: the checkpoint's generation config."""

    values: Mapping[str, float]

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> Defaults:
        """Reads the sampling fields; `do_sample: false` means temperature 0."""
        given = {k: generation[k] for k in GENERATION if generation.get(k) is not None}
        if generation.get("do_sample") is False:
            given["temperature"] = 0.0
        return cls(given)


T = TypeVar("T")


def decode(data: bytes, kind: type[T]) -> T:
    """One request body. Raises BadField naming the field, its value and what was expected.

    Fields that are not known are skipped without being built: a body may be large and hold little.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadField(f"the body is not valid JSON: {error}", code="invalid_json") from None


def check(body: Body) -> None:
    """Ranges and combinations. Raises BadField."""
    for name, (low, high) in RANGES.items():
        _check_range(name, getattr(body, name, None), low, high)
    if body.top_p == 0:
        raise BadField("top_p is 0; it must be above 0 (say temperature 0 for argmax)", "top_p")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops):
        raise BadField("stop holds an empty string; each must hold a character", "stop")
    if body.stream_options is not None and not body.stream:
        raise BadField("stream_options needs stream: true", "stream_options")
    _check_unsupported(body)
    if isinstance(body, ChatBody):
        _check_chat(body)


def sampling(
    body: Body, defaults: Defaults, info: EngineInfo, room: int, logprobs: int | None = None
) -> SamplingParams:
    """The parameters of one choice; `room` is how many tokens fit after the prompt.

    `logprobs` counts where the kind of body has no field for it.

    Raises BadField or RequestError where a value is over the engine's limits.
    """
    given = {k: _or(getattr(body, k), defaults.values.get(k)) for k in GENERATION}
    most, name = _max_tokens(body)
    context = info.limits.max_context
    if most is not None and most > context:
        raise BadField(f"{name} is {_short(most)}; this engine's context is {context} tokens", name)
    least = body.min_tokens or 0
    limit = room if most is None else min(most, room)
    if least > limit:
        words = f"min_tokens is {_short(least)}; at most {limit} tokens can come"
        raise BadField(words, "min_tokens")
    temperature = float(_or(given["temperature"], 1.0))
    return SamplingParams(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=float(_or(given["top_p"], 1.0)),
        top_k=int(_or(given["top_k"], 0)),
        min_p=float(_or(given["min_p"], 0.0)),
        repetition=float(_or(given["repetition_penalty"], 1.0)),
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        max_tokens=limit,
        min_tokens=least,
        ignore_eos=bool(body.ignore_eos),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_bias(body.logit_bias or {}),
        seed=secrets.randbits(63) if body.seed is None else fold_seed(body.seed),
        logprobs=_or(_logprobs(body), logprobs),
        drafts=body.drafts,
    )


def room_after(prompt: Sequence[int], limits: Limits) -> int:
    """Tokens that can follow the prompt. Raises BadField when none can."""
    most = capacity(limits)
    if not prompt:
        raise BadField("prompt is empty; it must hold at least one token", "prompt")
    if len(prompt) >= most:
        words = f"the prompt is {len(prompt)} tokens; this engine holds {most}, one of them new"
        raise BadField(words, "prompt", "context_length_exceeded")
    return most - len(prompt)


def fold_seed(seed: int) -> int:
    """Any integer as one of 64 bits with a sign, which is what the engine takes."""
    return (seed + 2**63) % 2**64 - 2**63


def prompts(value: Any) -> list[str | list[int]]:
    """The four forms of `prompt` as a list. Raises BadField."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_id(v) for v in value):
            return [value]
        if all(isinstance(v, str) for v in value):
            return list(value)
        if all(isinstance(v, list) and v and all(_is_id(i) for i in v) for v in value):
            return list(value)
    words = "a string, a list of strings, a list of token ids or a list of such lists, none empty"
    raise BadField(f"prompt is {_short(value)}; it must be {words}", "prompt")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _or(first: Any, second: Any) -> Any:
    return second if first is None else first


def _max_tokens(body: Body) -> tuple[int | None, str]:
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            return body.max_completion_tokens, "max_completion_tokens"
        return body.max_tokens, "max_tokens"
    if isinstance(body, CompletionBody) and body.max_tokens is None:
        least = body.min_tokens or 0
        return max(COMPLETION_TOKENS, least), "min_tokens" if least else "max_tokens"
    return body.max_tokens, "max_tokens"


def _logprobs(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > _ID_DIGITS:
            words = f"logit_bias has the key {_short(key)}; keys must be token ids"
            raise BadField(words, "logit_bias")
        if not -100 <= value <= 100:
            raise BadField(f"logit_bias[{key}] is {value}; it must be in -100…100", "logit_bias")
        found[int(key)] = value
    return found


def _check_range(name: str, value: Any, low: float | None, high: float | None) -> None:
    if value is None:
        return
    above = low is None or value >= low
    below = high is None or value <= high
    # an integer may have any number of digits: it is compared, never made a float
    finite = isinstance(value, int) or math.isfinite(value)
    if not (finite and above and below):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise BadField(f"{name} is {_short(value)}; it must be {span}", name)


def _check_unsupported(body: Body) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadField(f"best_of is {body.best_of}; only the value of n is supported", "best_of")
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise BadField(f"response_format {kind!r} is not supported, only 'text'", "response_format")
    names = ["prompt_logprobs", "use_beam_search", "structured_outputs"]
    names += [f"guided_{kind}" for kind in ("json", "regex", "choice", "grammar")]
    for name in names:
        if getattr(body, name) not in (None, False):
            raise BadField(f"{name} is not supported", name)
    if isinstance(body, CompletionBody):
        if body.suffix:
            raise BadField("suffix is not supported: the model does not fill in text", "suffix")
        if body.echo and body.logprobs is not None:
            raise BadField("logprobs of the prompt (echo with logprobs) are not supported", "echo")


def _check_chat(body: ChatBody) -> None:
    if not body.messages:
        raise BadField("messages is empty; at least one message is needed", "messages")
    for i, message in enumerate(body.messages):
        if not isinstance(role := message.get("role"), str):
            raise BadField(f"messages[{i}].role is {_short(role)}; it must be a string", "messages")
        _check_content(f"messages[{i}].content", message.get("content"))
    if body.top_logprobs is not None and not body.logprobs:
        raise BadField("top_logprobs needs logprobs: true", "top_logprobs")
    for i, tool in enumerate(body.tools or []):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadField(f"tools[{i}] has no function with a name", "tools")
    if body.tool_choice not in (None, "none", "auto"):
        words = f"tool_choice is {_short(body.tool_choice)}; only 'auto' and 'none' are supported"
        raise BadField(words, "tool_choice")
    if body.continue_final_message or body.add_generation_prompt is False:
        words = "continuing a message is not supported; the answer is always a new turn"
        raise BadField(words, "continue_final_message")


def _check_content(where: str, content: Any) -> None:
    """Null, a string, or a list of text parts."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadField(f"{where} is {_short(content)}; it must be a string or a list", "messages")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            words = f"{where} holds {_short(part)}; only parts of type 'text' are supported"
            raise BadField(words, "messages")


def _explain(message: str, data: bytes) -> BadField:
    """msgspec's words, with the field's name and value."""
    found = _PATH.search(message)
    text = _PATH.sub("", message).replace("`", "")
    if found is None or not found[1]:
        missing = re.search(r"required field (\w+)", text)
        if missing is None:
            text = f"the body must be a JSON object: {text}"
        return BadField(text, missing[1] if missing else None)
    name = found[1]
    words = f"{name}{found[2]} is not right: {text}; {name} is {_field(data, name)}"
    return BadField(words, name)


def _field(data: bytes, name: str) -> str:
    """One field of a body for an error. A long one is not built: it is cut as it was sent."""
    try:
        raw = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw])[name])
        whole = msgspec.json.decode(raw) if len(raw) <= _SHOWN else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "unreadable"
    return _short(whole) if len(raw) <= _SHOWN else f"{raw[:77].decode(errors='replace')}..."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
