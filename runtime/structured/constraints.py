"""The constraint of an answer, from a request's fields, tools and tool choice.

Knows the fields of OpenAI and vLLM. Knows no API and no engine; the result is a `ConstraintSpec`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.forms import OutputForm, form_of
from spark_engine.runtime.structured.lark import Lark, one_of, quoted
from spark_engine.runtime.structured.loosening import settle
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.structured.raw_text import without
from spark_engine.runtime.structured.tool_calls import CallWriter
from spark_engine.runtime.structured.tool_choice import AUTO, NONE, ToolChoice
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tokenizer import Tokenizer

_GAP = '("\\n\\n" | "\\n")?'  # between reasoning and answer


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
    """The constraint of one answer; None if the answer is free.

    `thinking`: the prompt ends inside an open thought, so the grammar starts after it. `parallel`:
    more than one call is allowed. Compiles for up to a second: not for an event loop.

    Raises RequestError; its `param` is the field, its text names the place in it. The cause is a
    constraint that is malformed, contradicts another field, or cannot be enforced.
    """
    form = form_of(body)
    choice = ToolChoice.of(tools, tool_choice)
    thoughts = formats.thoughts if thinking else None
    number = None if thoughts is None else tokenizer.id_of(thoughts.end)

    def write(lark: Lark) -> str | None:
        answer = _answer(lark, form, choice, CallWriter.of(lark, formats, tokenizer), parallel)
        if answer is None or thoughts is None:
            return answer
        if number is not None:
            return f"{_GAP} {answer}"
        mark = thoughts.end  # the end mark is plain text, so the thought is a part of the grammar
        return f"{without(lark, [mark])} {quoted(mark)} {_GAP} {answer}"

    calls = choice.mode != NONE and formats.calls is not None
    place = form.place if form is not None and not calls else "tools"
    text = settle(write, grammars, place)
    if text is None:
        return None
    return ConstraintSpec(grammar=text, end_of_thought=-1 if number is None else number)


def _answer(
    lark: Lark,
    form: OutputForm | None,
    choice: ToolChoice,
    writer: CallWriter | None,
    parallel: bool,
) -> str | None:
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
