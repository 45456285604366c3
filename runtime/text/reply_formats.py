"""The formats of reasoning and tool calls in a model's text: one row each.

Knows the marks, and detects the format that a chat template teaches; parses nothing
(`reply_parser`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from spark_engine.errors import OptionError


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around reasoning. `close` ends a thought that has used up its budget, and includes
    the mark."""

    start: str
    end: str
    close: str


@dataclass(frozen=True)
class CallFormat:
    """The marks around a call, which holds `<function=NAME>` and parameters (`xml`), or an object
    with `name` and `arguments`."""

    start: str
    end: str
    xml: bool


# Qwen's own text that ends a thought early: the model then answers from its thought so far.
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
AUTO = "auto"  # as the chat template defines


@dataclass(frozen=True)
class Formats:
    """Names of rows of REASONING and of TOOLS."""

    reasoning: str = "qwen3"
    tools: str = "qwen3_coder"

    @property
    def thoughts(self) -> ReasoningFormat | None:
        return REASONING[self.reasoning]

    @property
    def calls(self) -> CallFormat | None:
        return TOOLS[self.tools]

    @classmethod
    def of(cls, template: str | None, reasoning: str = AUTO, tools: str = AUTO) -> Formats:
        """The named rows; for `auto`, those that a chat template's source teaches.

        A template without a known format gives the default. Raises OptionError for an unknown name.
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
    """The format of calls in a template: one with `<function=` shows the XML format in full."""
    objects = "<tool_call>" in template and FUNCTION not in template
    return "hermes" if objects else Formats.tools


# Parts of the XML format: text, never single tokens.
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# Written after a call that is already closed; the last one is of an older format.
STRAY = (END_FUNCTION, END_PARAMETER, "</function_invocation>")


def marks() -> frozenset[str]:
    """Every mark that a tokenizer may have as one token; then only that token is the mark."""
    forms = (*REASONING.values(), *TOOLS.values())
    return frozenset(m for form in forms if form is not None for m in (form.start, form.end))
