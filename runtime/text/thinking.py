"""Whether a model thinks before it answers, for how long, and whether the thought is shown.

Knows every switch by which clients say so, and what they mean together. Knows no template and no
engine beyond the form of a constraint: the engine holds a budget.

    enable_thinking, chat_template_kwargs.enable_thinking|thinking      on or off
    thinking        {type: enabled|disabled|adaptive, budget_tokens, display}, or on or off
    reasoning       {enabled, effort, max_tokens, exclude}, or on or off
    reasoning_effort                                                    a row of EFFORTS
    BUDGETS         tokens of thought at most; 0 is off, -1 has no limit
    include_reasoning                                                   false: thoughts are left out

Two that contradict each other are refused, since one of them would have to be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.text.reply_formats import CallFormat, ReasoningFormat
from spark_engine.runtime.text.tokenizer import Tokenizer

UNLIMITED = -1
# Tokens of thought at most; None leaves the limit to the server. `none` does not think at all.
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
BUDGETS = ("thinking_budget", "thinking_token_budget", "budget_tokens", "max_reasoning_tokens")
# Of a request's body; `of` looks at no other.
FIELDS = (
    *("enable_thinking", "thinking", "reasoning", "reasoning_effort", "include_reasoning"),
    *BUDGETS,
)
_IN_KWARGS = ("enable_thinking", "thinking", "reasoning_effort", "thinking_budget")
_TYPES = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}
_SHOWN = 80  # characters of a value in an error
T = TypeVar("T")


@dataclass(frozen=True)
class Thinking:
    """What one request says of thinking.

    Attributes:
        enabled: None leaves it to the template.
        budget: tokens of thought at most; None: no limit.
        options: of the template (`chat_template_kwargs`), with what the switches say.
        shown: thoughts are part of the answer.
    """

    enabled: bool | None = None
    budget: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    shown: bool = True

    @classmethod
    def of(
        cls,
        fields: Mapping[str, Any],
        kwargs: Mapping[str, Any] | None = None,
        budget: int | None = None,
    ) -> Thinking:
        """From a body's FIELDS (others are not looked at), its `chat_template_kwargs`, and the
        server's own budget, which holds where the request says nothing of one.

        Raises RequestError whose `param` is the field that is malformed or contradicts another.
        """
        said = _Said()
        for name in FIELDS:
            said.take(name, name, fields.get(name))
        for name in _IN_KWARGS:
            said.take(name, f"chat_template_kwargs.{name}", (kwargs or {}).get(name))
        enabled, own = said.enabled, said.budget
        limit = budget if own is None else own
        options = dict(kwargs or {})
        if enabled is not None:
            options["enable_thinking"] = enabled
        if said.effort is not None:
            options["reasoning_effort"] = said.effort
        unlimited = limit is None or limit == UNLIMITED or enabled is False
        return cls(enabled, None if unlimited else limit, options, said.shown)

    def bind(
        self,
        spec: ConstraintSpec | None,
        tokenizer: Tokenizer,
        thoughts: ReasoningFormat | None,
        calls: CallFormat | None = None,
    ) -> ConstraintSpec | None:
        """What binds an answer, with this budget. `spec` is what else does; `thoughts` are the
        marks where the prompt ends inside an open thought, else None; `calls` those of calls that
        may be made, which end a thought as well: no budget cuts a call in two.

        A grammar starts behind the thought. A thought that was switched off and is open all the
        same ends at once. Raises RequestError when there is no token to know a thought's end by.
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


class _Said:
    """What the switches of one request say together."""

    def __init__(self) -> None:
        self.effort: str | None = None
        self.shown = True
        self._switches: list[tuple[str, bool]] = []
        self._budgets: list[tuple[str, int]] = []

    def take(self, name: str, place: str, value: Any) -> None:
        """One field by its name; `place` is how an error calls it."""
        if value is None:
            return
        if name == "enable_thinking":
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
    def enabled(self) -> bool | None:
        """Raises RequestError when the switches do not agree."""
        return _agreed(self._switches)

    @property
    def budget(self) -> int | None:
        """Tokens, or -1 for no limit; None: nothing was said. What an effort means counts least.

        Raises RequestError when two say different things.
        """
        own = _agreed(self._budgets)
        if own is not None or self.effort is None:
            return own
        return EFFORTS[self.effort]

    def _thinking(self, place: str, value: Any) -> None:
        if not isinstance(value, Mapping):
            self._switches.append((place, _flag(place, value)))
            return
        kind = value.get("type", "enabled")
        if not isinstance(kind, str) or kind not in _TYPES:
            known = "'enabled', 'disabled' or 'adaptive'"
            raise _error(place, f"{place}.type is {_short(kind)}; it must be {known}")
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
            raise _error(place, f"{place} is {_short(value)}; it must be one of {known}")
        self.effort = value
        self._switch(place, False if value == "none" else None)

    def _budget(self, place: str, value: Any) -> None:
        if value is None:
            return
        whole = (
            isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        )
        if not whole or value < UNLIMITED:
            words = "tokens of thought at most, 0 for none, or -1 for no limit"
            raise _error(place, f"{place} is {_short(value)}; it must be a number of {words}")
        self._budgets.append((place, int(value)))
        self._switch(place, False if value == 0 else None)

    def _switch(self, place: str, on: bool | None) -> None:
        if on is not None:
            self._switches.append((place, on))


def _agreed(said: Sequence[tuple[str, T]]) -> T | None:
    """The one value; None where nothing was said."""
    for place, value in said:
        first, wanted = said[0]
        if value != wanted:
            words = f"{first} ({wanted}) and {place} ({value}) contradict each other: give one"
            raise _error(place, words)
    return said[0][1] if said else None


def _flag(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _error(place, f"{place} is {_short(value)}; it must be true or false")
    return value


def _error(place: str, words: str) -> RequestError:
    return RequestError(words, place.partition(".")[0])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
