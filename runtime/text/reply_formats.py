"""How a model writes what is not plain content: thoughts and tool calls; a row for each form.

Knows the marks; takes nothing apart (`reply_parser`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Thoughts:
    """The marks around a thought."""

    start: str
    end: str


@dataclass(frozen=True)
class Calls:
    """The marks around a call. Inside stand `<function=NAME>` and parameters (`xml`), or an object
    with `name` and `arguments`."""

    start: str
    end: str
    xml: bool


_THINK = Thoughts("<think>", "</think>")
REASONING: Mapping[str, Thoughts | None] = MappingProxyType({"qwen3": _THINK, "none": None})
TOOLS: Mapping[str, Calls | None] = MappingProxyType(
    {
        "qwen3_coder": Calls("<tool_call>", "</tool_call>", xml=True),
        "hermes": Calls("<tool_call>", "</tool_call>", xml=False),
        "none": None,
    }
)
# What the XML form is made of; text, never tokens of their own.
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


def marks() -> frozenset[str]:
    """Every mark that a tokenizer may know as one token: only as that token it is a mark."""
    forms = (*REASONING.values(), *TOOLS.values())
    return frozenset(m for form in forms if form is not None for m in (form.start, form.end))
