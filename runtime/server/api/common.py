"""The fields that chat and completions share, and their meaning for the engine.

Knows ranges and defaults. Knows no messages, no prompts' text and no answers. Unknown fields are
ignored, as clients expect; a known field that would change the answer and is not supported is
refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from spark_engine.interface import MOST_DRAFTS, Limits
from spark_engine.runtime.engine.request import MAX_LOGPROBS, MOST_PIXELS, SamplingParams, capacity
from spark_engine.runtime.server.api.fields import BadField, check_range, short, too_long
from spark_engine.runtime.server.api.unsupported_fields import UnsupportedFields

NO_LIMIT = -1  # of tokens; same as null
MAX_CHOICES = 512  # choices of one HTTP request, over all its prompts
COLDEST = 1e-4  # the engine takes 0 or at least this; values in between mean argmax
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
    "max_tokens": (NO_LIMIT, None),
    "max_completion_tokens": (NO_LIMIT, None),
    "truncate_prompt_tokens": (NO_LIMIT, None),
    "min_tokens": (0, None),
    "priority": (-(2**31), 2**31 - 1),
    "drafts": (0, MOST_DRAFTS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "top_logprobs": (0, MAX_LOGPROBS),
}
MOST_STOP_IDS = 512
MOST_SALT = 256  # characters
MOST_STOP = 4096  # characters of all stop strings together
MOST_SUBMITTED = 8 << 20  # bytes of a prompt's ids, times its choices
_ID_DIGITS = 10  # of the longest token id that a logit_bias key may hold


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(UnsupportedFields, kw_only=True):
    """The fields of both kinds of request. Null is the same as absent."""

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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None  # false: only ids
    truncate_prompt_tokens: int | None = None  # the last ones; -1: as many as fit
    priority: int | None = None
    drafts: int | None = None  # of a round, at most; changes no token
    return_draft_counts: bool | None = None  # in the usage
    prompt_logprobs: int | None = None
    cache_salt: str | None = None  # prompts are shared in the cache with requests of the same one

    def most_tokens(self) -> int | None:
        """The maximum number of tokens; None: as many as fit."""
        return limit_of(self.max_tokens)

    def scores_prompt(self) -> bool:
        """True if the log-probabilities of the prompt's own tokens are wanted."""
        return self.prompt_logprobs is not None

    def wanted_logprobs(self) -> int | None:
        """k for the log-probabilities of each token and the top k; None for none."""
        return None

    def check_own(self) -> None:
        """Checks the fields of this kind of body. Raises BadField."""


@dataclass(frozen=True)
class Defaults:
    """Defaults of absent fields: the checkpoint's generation config."""

    values: Mapping[str, float]

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> Defaults:
        """Reads the sampling fields; `do_sample: false` means temperature 0."""
        given = {k: generation[k] for k in GENERATION if generation.get(k) is not None}
        if generation.get("do_sample") is False:
            given["temperature"] = 0.0
        return cls(given)


def check(body: Body) -> None:
    """Checks ranges and combinations. Raises BadField."""
    for name, (low, high) in RANGES.items():
        check_range(name, getattr(body, name, None), low, high)
    if body.top_p == 0:
        raise BadField("top_p is 0; it must be above 0 (say temperature 0 for argmax)", "top_p")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops):
        raise BadField("stop holds an empty string; each must hold a character", "stop")
    if (size := sum(map(len, stops))) > MOST_STOP:
        words = f"stop holds {size} characters; at most {MOST_STOP} are searched for"
        raise BadField(words, "stop")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MOST_SALT:
        words = f"cache_salt has {len(body.cache_salt)} characters; it must have 1 to {MOST_SALT}"
        raise BadField(words, "cache_salt")
    if body.stream_options is not None and not body.stream:
        raise BadField("stream_options needs stream: true", "stream_options")
    for name in ("max_tokens", "max_completion_tokens", "truncate_prompt_tokens"):
        if getattr(body, name, None) == 0 and not (name == "max_tokens" and body.scores_prompt()):
            raise BadField(f"{name} is 0; it must be at least 1, or -1 for no limit", name)
    if stops and body.detokenize is False:
        raise BadField("stop needs text, and detokenize is false; leave one of them out", "stop")
    if body.prompt_logprobs is not None and body.stream:
        raise BadField("prompt_logprobs come with whole answers; leave stream out", "stream")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise BadField(f"best_of is {body.best_of}; only the value of n is supported", "best_of")
    body.check_supported()
    body.check_own()


def sampling(
    body: Body, defaults: Defaults, available: int, logprobs: int | None = None
) -> SamplingParams:
    """The parameters of one choice; `available` is how many tokens fit after the prompt.

    `logprobs` is used where the kind of body has no field for it.

    Raises BadField or RequestError where a value is over the engine's limits.
    """
    given = {k: either(getattr(body, k), defaults.values.get(k)) for k in GENERATION}
    most = body.most_tokens()
    least = body.min_tokens or 0
    limit = available if most is None else min(most, available)
    if least > limit:
        words = f"min_tokens is {short(least)}; at most {limit} tokens can come"
        raise BadField(words, "min_tokens")
    temperature = float(either(given["temperature"], 1.0))
    return SamplingParams(
        temperature=temperature if temperature >= COLDEST else 0.0,
        top_p=float(either(given["top_p"], 1.0)),
        top_k=int(either(given["top_k"], 0)),
        min_p=float(either(given["min_p"], 0.0)),
        repetition=float(either(given["repetition_penalty"], 1.0)),
        presence=body.presence_penalty or 0.0,
        frequency=body.frequency_penalty or 0.0,
        max_tokens=max(1, limit),
        min_tokens=least,
        ignore_eos=bool(body.ignore_eos),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_token_ids=_stop_ids(body.stop_token_ids or ()),
        logit_bias=_bias(body.logit_bias or {}),
        seed=secrets.randbits(63) if body.seed is None else fold_seed(body.seed),
        logprobs=either(body.wanted_logprobs(), logprobs),
        drafts=body.drafts,
        draft_counts=bool(body.return_draft_counts),
    )


def scored(body: Body, params: SamplingParams, forced: int) -> SamplingParams:
    """The same for a prompt to be scored: `forced` tokens are generated before the answer's, each
    with its log-probabilities."""
    most = 0 if body.max_tokens == 0 else params.max_tokens or 0
    wanted = max(params.logprobs or 0, body.prompt_logprobs or 0)
    return replace(params, max_tokens=forced + most, logprobs=wanted)


def capacity_after(prompt: Sequence[int], limits: Limits) -> int:
    """Tokens that can follow the prompt. Raises BadField when none can."""
    most = capacity(limits)
    if not prompt:
        raise BadField("prompt is empty; it must hold at least one token", "prompt")
    if len(prompt) >= most:
        raise too_long(f"{len(prompt)} tokens > {most - 1} maximum", most)
    return most - len(prompt)


def limit_of(given: int | None) -> int | None:
    return None if given == NO_LIMIT else given


def fold_seed(seed: int) -> int:
    """Any integer as a signed one of 64 bits, which the engine takes."""
    return (seed + 2**63) % 2**64 - 2**63


def either(first: Any, second: Any) -> Any:
    return second if first is None else first


def check_together(prompt: Sequence[int], n: int, pixels: int = 0) -> None:
    """Raises BadField where too much is sent to the engine: each choice with its prompt, and the
    `pixels` (bytes) of its images."""
    if pixels * n > MOST_PIXELS:
        words = f"n is {n}; of a prompt with images of {pixels} bytes of pixels"
        raise BadField(f"{words} at most {MOST_PIXELS // pixels} choices are made at once", "n")
    if 4 * len(prompt) * n > MOST_SUBMITTED:
        most = MOST_SUBMITTED // (4 * len(prompt))
        words = f"n is {n}; of a prompt of {len(prompt)} tokens at most {most} choices are made"
        raise BadField(f"{words} at once", "n")


def _stop_ids(given: Sequence[int]) -> tuple[int, ...]:
    """Each id once. They are sent to the engine with every choice."""
    ids = tuple(dict.fromkeys(given))
    if len(ids) > MOST_STOP_IDS:
        words = f"stop_token_ids holds {len(ids)} ids; at most {MOST_STOP_IDS} are allowed"
        raise BadField(words, "stop_token_ids")
    return ids


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > _ID_DIGITS:
            words = f"logit_bias has the key {short(key)}; keys must be token ids"
            raise BadField(words, "logit_bias")
        if not -100 <= value <= 100:
            raise BadField(f"logit_bias[{key}] is {value}; it must be in -100…100", "logit_bias")
        found[int(key)] = value
    return found
