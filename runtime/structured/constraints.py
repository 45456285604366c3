"""What a request's fields, tools and tool choice mean for the form of its answer.

Knows the fields of OpenAI and vLLM. Knows no API and no engine: `ConstraintSpec` goes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer


def constraint_for(
    body: StructuredFields,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    formats: Formats,
    tokenizer: Tokenizer,
    grammars: Grammars,
    *,
    thinking: bool = False,
    parallel: bool = True,
) -> ConstraintSpec | None:
    """The form of one answer; None where anything may be said.

    `thinking`: the prompt ends inside an open thought, so the form begins behind it. `parallel`:
    more than one call may be made. Compiles, so it may take up to a second: not for an event loop.

    Raises RequestError, whose `param` is the field and whose words name the place in it, for a
    form that is malformed, contradicts another field, or cannot be followed.
    """
    raise NotImplementedError
    return None
