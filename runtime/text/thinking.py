"""Whether a model thinks before it answers, how long, and whether the answer shows the thought.

Knows the switches of all clients and their combined meaning. Knows no template, and of the engine
only the form of a constraint: the engine enforces a budget.

    enable_thinking, chat_template_kwargs.enable_thinking|thinking      on or off
    enableThinking, think                                               on or off; or an effort
    thinking        {type: enabled|disabled|adaptive, budget_tokens, display}, or on or off
    reasoning       {enabled, effort, max_tokens, exclude}, or on or off
    reasoning_effort                                                    a row of EFFORTS
    BUDGETS         tokens of thought at most; 0 is off, -1 has no limit
    include_reasoning                                                   false: thoughts are left out

Contradicting switches are refused, since one of them would be ignored. A server's settings apply
where a request does not set the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.text.parts import short
from spark_engine.runtime.text.reply_formats import CallFormat, ReasoningFormat

if TYPE_CHECKING:  # its library is not needed to read options
    from spark_engine.runtime.text.tokenizer import Tokenizer

UNLIMITED = -1
# Tokens of thought at most; None leaves the limit to the server. `none` disables thinking.
EFFORTS: Mapping[str, int | None] = MappingProxyType(
    {
        "none": 0,
        "minimal": 512,
        "low": 2048,
        "medium": None,
        "high": None,
        "xhigh": None,
        "max": None,
        "default": None,
    }
)
BUDGETS = (
    *("thinking_budget", "thinking_token_budget", "budget_tokens", "max_reasoning_tokens"),
    *("reasoning_budget", "thinking_budget_tokens"),
)
SWITCHES = ("enable_thinking", "enableThinking", "think")
MOST_BUDGET = 2**31 - 1  # a larger one is no limit: no engine holds as many tokens
# Fields of a request's body that `of` reads.
# Names that a chat template gets from the request.
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
FIELDS = (*SWITCHES, *("thinking", "reasoning", "reasoning_effort", "include_reasoning"), *BUDGETS)
_IN_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")
_LEVELS = ("minimal", "low", "medium", "high", "xhigh", "max")  # efforts, ascending
_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
T = TypeVar("T")


@dataclass(frozen=True)
class Thinking:
    """One request's settings of thinking.

    Attributes:
        options: of the template (`chat_template_kwargs`), including the switches' values.
    """

    enabled: bool | None = None  # None: the template decides
    budget: int | None = None  # tokens of thought at most; None: no limit
    options: Mapping[str, Any] = field(default_factory=dict)
    shown: bool = True  # thoughts are part of the answer

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None = None,
        budget: int | None = None,
        server: Mapping[str, Any] | None = None,
        accepted: Collection[str] = EFFORTS,
    ) -> Thinking:
        """From a body's FIELDS (others are ignored) and its `chat_template_kwargs`. `budget` and
        `server` (as kwargs): the server's settings; `accepted`: efforts that the template accepts;
        others become the nearest one.

        Raises RequestError; its `param` is the field that is malformed or contradicts another.
        """
        asked = _Asked.of(fields, kwargs)
        default = dict(server or {})
        if asked.effort is not None or (
            asked.enabled and default.get("reasoning_effort") == "none"
        ):
            default.pop("reasoning_effort", None)
        own = _Asked.of({}, default)
        enabled = own.enabled if asked.enabled is None else asked.enabled
        # a template's budget of 0 means off, which a request's "on" overrides
        last = None if enabled and own.budget == 0 else own.budget
        limit = next((v for v in (asked.budget, budget, last) if v is not None), UNLIMITED)
        options = {**default, **(kwargs or {})}
        if enabled is not None:
            options["enable_thinking"] = enabled
            options |= {"thinking": enabled} if isinstance(options.get("thinking"), bool) else {}
        effort = nearest(asked.effort or own.effort, accepted)
        options.pop("reasoning_effort", None)
        options |= {} if effort is None else {"reasoning_effort": effort}
        unlimited = not 0 <= limit <= MOST_BUDGET or enabled is False
        return cls(enabled, None if unlimited else limit, options, asked.shown)

    def bind(
        self,
        spec: ConstraintSpec | None,
        tokenizer: Tokenizer,
        thoughts: ReasoningFormat | None,
        calls: CallFormat | None = None,
    ) -> ConstraintSpec | None:
        """The constraint of an answer with this budget. `spec`: its other constraint; `thoughts`:
        the marks, if the prompt ends inside an open thought, otherwise None; `calls`: the marks of
        allowed calls, which also end a thought, so that no budget cuts a call in two.

        A grammar starts after the thought. A thought that is open although thinking is off ends at
        once. Raises RequestError if no token marks the end of a thought.
        """
        budget = 0 if self.enabled is False else self.budget
        if thoughts is None or (spec is None and budget is None):
            return spec
        end = tokenizer.id_of(thoughts.end)
        if end is None:
            words = f"this engine's tokenizer has no token {thoughts.end!r}: reasoning can be"
            raise RequestError(f"{words} neither limited nor separated from a structured output")
        close = thoughts.close if budget else f"\n{thoughts.end}\n\n"
        begin = None if calls is None else tokenizer.id_of(calls.start)
        return msgspec.structs.replace(
            spec or ConstraintSpec(),
            end_of_thought=end,
            calls=() if begin is None else (begin,),
            close=() if budget is None else tuple(tokenizer.encode(close)),
            budget=budget,
        )


def nearest(effort: str | None, accepted: Collection[str]) -> str | None:
    """The accepted effort for the template; None for none. Of two equally near ones it is the
    higher: a request for `high` wants more than `medium`."""
    if effort is None or effort in accepted:
        return effort
    known = [level for level in _LEVELS if level in accepted]
    if effort not in _LEVELS or not known:
        return None
    place = _LEVELS.index(effort)
    return min(reversed(known), key=lambda level: abs(_LEVELS.index(level) - place))


class _Asked:
    @classmethod
    def of(cls, fields: Mapping[str, Any], kwargs: Mapping[str, Any] | None) -> _Asked:
        """Raises RequestError for a malformed field."""
        asked = cls()
        for name in FIELDS:
            asked.take(name, name, fields.get(name))
        for name in _IN_KWARGS:
            asked.take(name, f"chat_template_kwargs.{name}", (kwargs or {}).get(name))
        return asked

    def __init__(self) -> None:
        self.shown = True
        self._efforts: list[tuple[str, str]] = []
        self._switches: list[tuple[str, bool]] = []
        self._budgets: list[tuple[str, int]] = []

    def take(self, name: str, place: str, value: Any) -> None:
        """Reads one field by its name; `place`: its name in errors."""
        if value is None:
            return
        if (
            name in SWITCHES and isinstance(value, str) and value in EFFORTS
        ):  # Ollama's `think` may be an effort
            self._effort(place, value)
        elif name in SWITCHES:
            self._switches.append((place, _flag(place, value)))
        elif name == "include_reasoning":
            self.shown = _flag(place, value) and self.shown
        elif name == "reasoning_effort":
            self._effort(place, value)
        elif name == "thinking":
            self._thinking(place, value)
        elif name == "reasoning":
            self._reasoning(place, value)
        else:
            self._budget(place, value)

    @property
    def effort(self) -> str | None:
        """Raises RequestError if two differ."""
        return _agreed(self._efforts)

    @property
    def enabled(self) -> bool | None:
        """Raises RequestError if the switches contradict each other."""
        return _agreed(self._switches)

    @property
    def budget(self) -> int | None:
        """Tokens, or -1 for no limit; None if not set. An effort's budget has the lowest
        precedence.

        Raises RequestError if two differ.
        """
        own = _agreed(self._budgets)
        effort = self.effort if own is None else None
        return own if effort is None else EFFORTS[effort]

    def _thinking(self, place: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            self._switches.append((place, _flag(place, value)))
            return
        kind = value.get("type", "enabled")
        if not isinstance(kind, str) or kind not in _TYPES:
            known = "'enabled', 'disabled' or 'adaptive'"
            raise _error(place, f"{place}.type is {short(kind)}; it must be {known}")
        self._switch(f"{place}.type", _TYPES[kind])
        self._budget(f"{place}.budget_tokens", value.get("budget_tokens"))
        self.shown = value.get("display") != "omitted" and self.shown

    def _reasoning(self, place: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            self._switches.append((place, _flag(place, value)))
            return
        if (on := value.get("enabled")) is not None:
            self._switch(f"{place}.enabled", _flag(f"{place}.enabled", on))
        if (effort := value.get("effort")) is not None:
            self._effort(f"{place}.effort", effort)
        self._budget(f"{place}.max_tokens", value.get("max_tokens"))
        if (hidden := value.get("exclude")) is not None:
            self.shown = not _flag(f"{place}.exclude", hidden) and self.shown

    def _effort(self, place: str, value: Any) -> None:
        if not isinstance(value, str) or value not in EFFORTS:
            known = ", ".join(EFFORTS)
            raise _error(place, f"{place} is {short(value)}; it must be one of {known}")
        self._efforts.append((place, value))
        self._switch(place, False if value == "none" else None)

    def _budget(self, place: str, value: Any) -> None:
        if value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # an integer may have any number of digits, so it is never converted to float
        whole = number and (isinstance(value, int) or value.is_integer())
        if not whole or value < UNLIMITED:
            words = "tokens of thought at most, 0 for none, or -1 for no limit"
            raise _error(place, f"{place} is {short(value)}; it must be a number of {words}")
        self._budgets.append((place, UNLIMITED if value > MOST_BUDGET else int(value)))
        self._switch(place, False if value == 0 else None)

    def _switch(self, place: str, on: bool | None) -> None:
        if on is not None:
            self._switches.append((place, on))


def _agreed(asked: Sequence[tuple[str, T]]) -> T | None:
    """The one value; None if none is set."""
    for place, value in asked:
        first, wanted = asked[0]
        if value != wanted:
            words = f"{first} ({wanted}) and {place} ({value}) contradict each other: send only one"
            raise _error(place, words)
    return asked[0][1] if asked else None


def _flag(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _error(place, f"{place} is {short(value)}; it must be true or false")
    return value


def _error(place: str, words: str) -> RequestError:
    return RequestError(words, place.partition(".")[0])
