"""How answers are sampled, as users of the Python API say it: fields of a request's body.

Knows names; the server's reading code knows ranges and meanings, and reports what is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spark_engine.errors import RequestError
from spark_engine.runtime.server.prompts.contract import JobKind
from spark_engine.runtime.server.prompts.limits import MAX_BODY

_FORMS = ("regex", "choice", "grammar")
# Fields of bodies that give an answer another shape than a Completion.
_SHAPES = ("n", "best_of", "stream", "stream_options", "echo", "prompt_logprobs", "functions")
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling of one answer. None: the checkpoint's default, as in a request to the server.

    Attributes:
        max_tokens: None: as many as fit in the context.
        temperature: 0 takes the likeliest token.
        seed: makes the answer repeatable; None draws one.
        logprobs: report the log-probability of each token, and of the k likeliest; None: none.
        logit_bias: added to the logits of these token ids, -100 to 100.
        json_schema: the answer is JSON of this schema.
        regex, choice, grammar: the answer matches it, is one of these texts, is of this grammar.
        extra: other fields of a body of /v1/completions or /v1/chat/completions, by name.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: NOTHING)

    def fields(self, kind: JobKind) -> dict[str, Any]:
        """The fields of a body."""
        rows = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extra"}
        made = {name: value for name, value in rows.items() if value is not None}
        made.setdefault("max_tokens", -1)
        forms = {name: made.pop(name) for name in _FORMS if name in made}
        if forms:
            made["structured_outputs"] = forms
        if (schema := made.pop("json_schema", None)) is not None:
            form = {"name": "answer", "schema": schema}
            made["response_format"] = {"type": "json_schema", "json_schema": form}
        if self.logprobs is not None and kind is JobKind.CHAT:
            made |= {"logprobs": True, "top_logprobs": self.logprobs}
        return made | dict(self.extra)


def encode(body: Mapping[str, Any]) -> bytes:
    """A body as JSON. Raises RequestError where it cannot be written, is too large, or asks for
    something else than one Completion."""
    if wrong := [name for name in _SHAPES if body.get(name) is not None]:
        words = "a Completion has one answer, without its prompt: give a prompt several times"
        raise RequestError(f"{wrong[0]} is not for the Python API; {words}, and functions as tools")
    try:
        data = msgspec.json.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        words = "give only dicts, lists, texts, numbers, booleans and None"
        raise RequestError(f"the request cannot be written as JSON ({error}): {words}") from None
    if len(data) > MAX_BODY:
        words = f"the request has {len(data) >> 20} MiB; at most {MAX_BODY >> 20} are read"
        raise RequestError(f"{words}: shorten it")
    return data
