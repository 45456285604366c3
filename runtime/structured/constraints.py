"""What a request's fields, tools and tool choice mean for the form of its answer.

Knows the fields of OpenAI and vLLM. Knows no API and no engine: `ConstraintSpec` goes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.forms import Form, form_of
from spark_engine.runtime.structured.lark import Lark, json_of, one_of, quoted
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.structured.raw_text import without
from spark_engine.runtime.structured.schema_errors import locate
from spark_engine.runtime.structured.tool_calls import CallWriter
from spark_engine.runtime.structured.tool_choice import AUTO, NONE, ToolChoice
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer

_GAP = '("\\n\\n" | "\\n")?'  # between a thought and the answer


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
    form that is malformed, contradicts another field, or cannot be enforced.
    """
    form = form_of(body)
    choice = ToolChoice.of(tools, tool_choice)
    lark = Lark()
    answer = _answer(lark, form, choice, CallWriter.of(lark, formats, tokenizer), parallel)
    if answer is None:
        return None
    end = -1
    thoughts = formats.thoughts
    if thinking and thoughts is not None:
        number = tokenizer.id_of(thoughts.end)
        if number is None:  # the mark is text, and the thought part of the grammar
            mark = thoughts.end
            answer = f"{without(lark, [mark])} {quoted(mark)} {_GAP} {answer}"
        else:
            end, answer = number, f"{_GAP} {answer}"
    text = lark.text(answer)
    try:
        grammars.check(text)
    except RequestError as error:
        raise _explained(error, lark, form, grammars) from None
    return ConstraintSpec(grammar=text, end_of_thought=end)


def _answer(
    lark: Lark, form: Form | None, choice: ToolChoice, writer: CallWriter | None, parallel: bool
) -> str | None:
    """The expression of the answer behind its thought; None where it is free."""
    if choice.mode == NONE or writer is None:
        if choice.mode not in (NONE, AUTO):
            words = "this model's replies have no form of tool calls (--tools none)"
            raise RequestError(f"tool_choice asks for a call, but {words}", "tool_choice")
        return None if form is None else form.write(lark)
    several = parallel and not choice.single
    if choice.mode != AUTO:
        return writer.calls(choice.tools, several)
    if form is not None:
        return one_of([writer.calls(choice.tools, several), form.write(lark)])
    if any(tool.strict for tool in choice.tools):
        return writer.text_or_calls(choice.tools, several)
    return None


def _explained(error: RequestError, lark: Lark, form: Form | None, grammars: Grammars) -> Exception:
    """What is wrong with the grammar, and where in the request."""
    for piece in lark.pieces:

        def wrong(schema: Any, style: Any = piece.style) -> str:
            return grammars.error_of(f"start: {json_of(schema, style)}")

        if wrong(piece.schema):
            place, words = locate(piece.schema, piece.place, wrong)
            return RequestError(f"{place} cannot be enforced: {words}", piece.field)
    place, field = ("tools", "tools") if form is None else (form.place, form.field)
    return RequestError(f"{place} cannot be enforced: {error}", field)
