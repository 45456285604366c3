"""`Request`, its sampling parameters, and its `Event`s.

Knows the ranges of the sampling parameters and an engine's limits; knows no text (stop strings are
stored for the frontend, which cancels) and not how a request is run.
"""

from __future__ import annotations

import enum
import math
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from spark_engine.errors import RequestError
from spark_engine.interface import MOST_DRAFTS, PREFILL_TILE, Limits
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.draft_counts import BySource
from spark_engine.vision import DIGEST, Image, VisionInfo

MAX_STOP_STRINGS = 16
# Bounds of each choice sent to the engine; the APIs' own bounds are within these.
MOST_STOP_IDS = 512
MOST_BYTES = {"stop": 64 << 10, "grammar": 2 << 20, "owner": 512, "salt": 64}  # of texts, as UTF-8
MOST_IDS, MOST_BARRED, MOST_MARKS = 4096, 1 << 17, 1024  # barred: ids and rows together
MAX_LOGPROBS = 20
MOST_IMAGES, MOST_PIXELS = 1024, 192 << 20  # of a request; pixels in bytes, of all together
_NO_BIAS: Mapping[int, float] = MappingProxyType({})
# name: (lowest, highest), both allowed; checked for being finite first
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition": (0.01, 10.0),
    "presence": (-2.0, 2.0),
    "frequency": (-2.0, 2.0),
}


class FinishReason(enum.StrEnum):
    """Why a request ended. Every request ends with exactly one."""

    STOP = "stop"  # an end or stop id was sampled, or the frontend saw a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"
    ERROR = "error"


# How the message of an ERROR begins for which the request's grammar, or load, is the reason.
SLOW_GRAMMAR = "the grammar took longer than"


class Status(enum.StrEnum):
    WAITING = "waiting"  # holds nothing
    SWAPPED = "swapped"  # holds a snapshot
    RUNNING = "running"  # holds a slot and pages
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    `temperature` 0 is argmax. `top_k` 0 or -1 is off. `max_tokens` None: as many as fit. No end id
    and no stop id is sampled before `min_tokens` tokens. `seed` None: the engine draws one.
    `logprobs` None: none; k: the sampled token's and the top k. `drafts`: most drafts of a round,
    up to the engine's; None: the engine's. `draft_counts`: events count drafts by source and
    position. Of `stop_token_ids` each is kept once.
    Raises RequestError naming the parameter, its value and its range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    logprobs: int | None = None
    drafts: int | None = None
    draft_counts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))
        for name, (low, high) in _RANGES.items():
            _check_float(name, getattr(self, name), low, high)
        _require(self.top_p > 0, "top_p", self.top_p, "above 0")
        # A smaller temperature overflows the scaled logits; argmax is 0.
        t = self.temperature
        _require(t == 0 or t >= 1e-4, "temperature", t, "0, or at least 0.0001")
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, max(1, self.min_tokens), 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.drafts is not None:
            _check_int("drafts", self.drafts, 0, MOST_DRAFTS)
        self._check_stops()

    def _check_stops(self) -> None:
        count = len(self.stop)
        _require(
            count <= MAX_STOP_STRINGS, "stop", f"{count} strings", f"at most {MAX_STOP_STRINGS}"
        )
        _require(all(self.stop), "stop", "an empty string", "non-empty strings")
        ids = len(self.stop_token_ids)
        _require(ids <= MOST_STOP_IDS, "stop_token_ids", f"{ids} ids", f"at most {MOST_STOP_IDS}")
        for value in self.logit_bias.values():
            _check_float("logit_bias", value, -100.0, 100.0)

    def stop_ids(self, eos: tuple[int, ...]) -> frozenset[int]:
        """The ids that end this request, `eos` being the model's end ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos))

    def check(self, limits: Limits, eos: tuple[int, ...]) -> None:
        """Raises RequestError when an id or a count is over the engine's limits."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                _check_int(name, token, 0, limits.vocab - 1)
        suppressed = self.stop_ids(eos) if self.min_tokens else frozenset()
        used = len(suppressed) + len(self.logit_bias)
        allowed = f"at most {limits.bias_slots} ids (those suppressed by min_tokens count)"
        _require(used <= limits.bias_slots, "logit_bias", f"{used} ids", allowed)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, limits.top_logprobs)


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, how to sample, and how urgent it is (higher runs first).

    An engine reads `prompt` as i32; an array("i") needs no conversion. `marks`: positions of the
    prompt, ascending, up to which other requests are likely to have the same tokens; they change no
    token. `constraint` restricts the sampled tokens. Requests share the results of equal prefixes
    only where their `salt` is equal. Among equal priorities owners (API keys, connections) take
    turns, by `owner`. `images` are in the order of their rows in the prompt, where each row is one
    token: the engine's `image_id`.
    """

    prompt: tuple[int, ...] | array[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    marks: tuple[int, ...] = ()
    constraint: ConstraintSpec | None = None
    owner: str = ""
    salt: bytes = b""
    images: tuple[Image, ...] = ()

    @cached_property
    def packed(self) -> bytes:
        """The prompt's ids as i32. Raises struct.error for a value that is not one."""
        if isinstance(self.prompt, array):
            return self.prompt.tobytes()
        return struct.pack(f"{len(self.prompt)}i", *self.prompt)

    def check_sizes(self) -> None:
        """Raises RequestError when a part of it, other than the prompt, is too large."""
        bound = self.constraint or ConstraintSpec()
        texts = {"stop": "".join(self.params.stop), "grammar": bound.grammar, "owner": self.owner}
        sizes = {name: len(text.encode("utf-8", "replace")) for name, text in texts.items()}
        for name, size in (sizes | {"salt": len(self.salt)}).items():
            most = MOST_BYTES[name]
            _require(size <= most, name, f"{size} bytes", f"at most {most}")
        barred = sum(map(len, bound.barred))
        for name, count, most in (
            ("close", len(bound.close), MOST_IDS),
            ("calls", len(bound.calls), MOST_IDS),
            ("barred", barred + len(bound.barred), MOST_BARRED),
            ("marks", len(self.marks), MOST_MARKS),
            ("images", len(self.images), MOST_IMAGES),
            ("pixels", sum(len(image.pixels) for image in self.images), MOST_PIXELS),
        ):
            _require(count <= most, name, f"{count} entries", f"at most {most}")

    def check(self, limits: Limits, eos: tuple[int, ...], vision: VisionInfo | None = None) -> None:
        """Raises RequestError when an engine of these limits can never run the request."""
        self.check_sizes()
        _require(bool(self.prompt), "prompt", "empty", "at least one token")
        self._check_ids(limits.vocab)
        most = capacity(limits) - 1
        allowed = f"at most {most} (context {limits.max_context}, {limits.pages} pages of "
        _require(
            len(self.prompt) <= most,
            "prompt",
            f"{len(self.prompt)} tokens",
            allowed + f"{limits.page_size} tokens, one token to generate)",
        )
        self._check_images(limits, vision)
        self.params.check(limits, eos)
        if self.constraint is not None:
            self.constraint.check(limits.vocab)
            count, forced = len(self.prompt), len(self.constraint.forced)
            left = capacity(limits) - count
            wanted = f"at most {left}, what the prompt of {count} tokens leaves"
            _require(forced <= left, "forced", f"{forced} tokens", wanted)

    def _check_images(self, limits: Limits, vision: VisionInfo | None) -> None:
        """Images in order, of the engine's sizes, over its tokens; a tile's fit in memory."""
        if not self.images:
            return
        if vision is None or not limits.image_rows:
            raise RequestError("images: the engine reads none; rebuild it without --no-vision")
        ids, end = np.frombuffer(self.packed, np.int32), 0
        for at, image in enumerate(self.images):
            name = f"images[{at}]"
            inside = end <= image.start < image.end <= len(self.prompt)
            place = f"positions {image.start} to {image.end}"
            _require(inside, name, place, f"within {end} to {len(self.prompt)}")
            own = bool((ids[image.start : image.end] == vision.image_id).all())
            _require(own, name, f"{place}, not all of id {vision.image_id}", "of that id")
            pixels = image.tokens * vision.unit**2
            sound = image.rows > 0 and len(image.pixels) == 3 * pixels
            sound = sound and len(image.digest) == DIGEST and pixels <= vision.most_pixels
            shape = f"{image.rows} x {image.columns} rows in {len(image.pixels)} bytes"
            _require(sound, name, shape, f"at most {vision.most_pixels} pixels of 3 bytes")
            end = image.end
        for at, image in enumerate(self.images):  # that one tile may need together
            near = (i.tokens for i in self.images[at:] if i.start - image.end < PREFILL_TILE)
            rows = sum(near)
            _require(rows <= limits.image_rows, f"images[{at}]", f"{rows} rows with those next to "
                     "it", f"at most {limits.image_rows}, or further apart")  # fmt: skip

    def _check_ids(self, vocab: int) -> None:
        """In one pass outside Python, since a prompt of 100,000 ids is checked before it is queued;
        `packed` is cached and used again."""
        prompt = self.prompt
        try:
            ids = np.frombuffer(self.packed, np.uint32)
        except struct.error:
            pass
        else:
            bools = any(type(prompt[i]) is bool for i in np.flatnonzero(ids < 2).tolist())
            if ids.max() < vocab and not bools:
                return
        whole = all(type(token) is int for token in prompt)
        _require(whole, "prompt", "not all integers", "a sequence of token ids")
        for token in (min(prompt), max(prompt)):
            _check_int("prompt token", token, 0, vocab - 1)


class Event(NamedTuple):
    """One sampled token of one request, or its end, or both.

    `logprob` and `top` ((id, log-probability) descending, under the raw logits) are set when the
    request asked for them. `finish` is set on a request's last event; `message` is the error where
    the reason is ERROR. `drafted` and `accepted` count the request's draft tokens that were
    verified and accepted so far; the last event has the totals. `cached` counts the prompt's tokens
    that were not computed, because the prefix cache had them. `by_source` has both counts of drafts
    by source and position so far, in an engine with drafts, for a request that asked for them.
    """

    request_id: int
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    message: str = ""
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    by_source: BySource | None = None


def capacity(limits: Limits) -> int:
    """Tokens, prompt and generated, that a sequence running alone can reach."""
    return min(limits.max_context, limits.pages * limits.page_size)


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise RequestError(f"{name} is {value}; it must be {wanted}")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(ok, name, repr(value), f"an integer from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    ok = ok and math.isfinite(value) and low <= value <= high  # type: ignore[arg-type,operator]
    _require(ok, name, repr(value), f"a number from {low:g} to {high:g}")
