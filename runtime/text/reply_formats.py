"""The formats of reasoning and tool calls in a model's text: a row for each.

Knows the marks, and which form a chat template teaches; takes nothing apart (`reply_parser`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spark_engine.errors import OptionError


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning. `close` ends one whose budget is spent, the mark included."""

    start: str
    end: str
    close: str


@dataclass(frozen=True)
class CallFormat:
    """The marks around a call. Inside stand `<function=NAME>` and parameters (`xml`), or an object
    with `name` and `arguments`."""

    start: str
    end: str
    xml: bool


# Qwen's own words for a thought that is cut short: it goes on to answer from what it has.
_CLOSE = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the "
    "thinking directly now.\n</think>\n\n"
)
_THINK = ReasoningFormat("<think>", "</think>", _CLOSE)
REASONING: Mapping[str, ReasoningFormat | None] = MappingProxyType({"qwen3": _THINK, "none": None})
TOOLS: Mapping[str, CallFormat | None] = MappingProxyType(
    {
        "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", xml=True),
        "hermes": CallFormat("<tool_call>", "</tool_call>", xml=False),
        "none": None,
    }
)
AUTO = "auto"  # as the chat template says


@dataclass(frozen=True)
class Formats:
    """Names of rows: of REASONING and of TOOLS."""

    reasoning: str = "qwen3"
    tools: str = "qwen3_coder"

    @property
    def thoughts(self) -> ReasoningFormat | None:
        """The marks of thoughts."""
        return REASONING[self.reasoning]

    @property
    def calls(self) -> CallFormat | None:
        """The marks of calls."""
        return TOOLS[self.tools]

    @classmethod
    def of(cls, template: str | None, reasoning: str = AUTO, tools: str = AUTO) -> Formats:
        """Those named, and for `auto` those that a chat template's source teaches.

        A template that speaks of no form leaves the usual one. Raises OptionError for a name that
        is no row.
        """
        for option, name, known in (
            ("--reasoning", reasoning, (AUTO, *REASONING)),
            ("--tools", tools, (AUTO, *TOOLS)),
        ):
            if name not in known:
                raise OptionError(f"{option} is {name!r}; it must be one of {', '.join(known)}")
        return cls(
            cls.reasoning if reasoning == AUTO else reasoning,
            _taught(template or "") if tools == AUTO else tools,
        )


def _taught(template: str) -> str:
    """The form of calls in a template: those with `<function=` show it, since they write it out."""
    objects = "<tool_call>" in template and FUNCTION not in template
    return "hermes" if objects else Formats.tools


# What the XML form is made of; text, never tokens of their own.
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# Written behind a call that is closed already; the last is of an older form.
STRAY = (END_FUNCTION, END_PARAMETER, "</function_invocation>")


def marks() -> frozenset[str]:
    """Every mark that a tokenizer may know as one token: only as that token it is a mark."""
    forms = (*REASONING.values(), *TOOLS.values())
    return frozenset(m for form in forms if form is not None for m in (form.start, form.end))
