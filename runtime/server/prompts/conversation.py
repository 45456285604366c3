"""From a chat request to its prompt, and the constraint on and the parser of its answer.

Knows the chat template, the formats of thoughts and calls, and the fields that change them. Knows
no engine and no API's answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from spark_engine.errors import OptionError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.forms import form_of
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.chat import ChatTemplate, Ending
from spark_engine.runtime.text.image_parts import Marks
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.thinking import EFFORTS, FIELDS, Thinking
from spark_engine.runtime.text.tokenizer import Tokenizer, need

_TAIL = 8  # tokens that include the mark of a thought and white space after it


@dataclass(frozen=True)
class Reading:
    """A conversation that was read. `form`: the grammar of the answer's form; `bind` makes the
    constraint from it; `shown`: thoughts are part of the answer; `thinking`: the prompt ends inside
    one; `fresh`: the answer starts a turn."""

    text: str
    form: ConstraintSpec | None
    bind: Callable[[ConstraintSpec | None], ConstraintSpec | None]
    shown: bool
    thinking: bool
    fresh: bool


class ChatReader:
    """Reads conversations for one template and tokenizer. Immutable, so thread-safe."""

    def __init__(
        self,
        template: ChatTemplate | None,
        tokenizer: Tokenizer | None,
        options: ChatOptions,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars` None: no answer may have a form.

        Raises OptionError for an unknown format, or a budget that cannot be enforced."""
        source = None if template is None else template.source
        self.formats = Formats.of(source, options.reasoning, options.tools)
        self._template = template
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._server = _defaults(options)
        self._accepted = _accepted(template)
        thoughts = self.formats.thoughts
        holds = thoughts is not None and tokenizer and tokenizer.id_of(thoughts.end) is not None
        if options.think_budget is not None and not holds:
            words = f"--think-budget is {options.think_budget}, but this engine has no token that"
            raise OptionError(f"{words} ends a thought: leave it out")
        self._budget = options.think_budget
        self.default = self.thinking({})
        self._open_budget = self.default.budget if holds else None

    @property
    def template(self) -> ChatTemplate:
        """Raises RequestError where the engine has none."""
        if self._template is None:
            raise RequestError("this engine has no chat template; use /v1/completions")
        return self._template

    def read(self, chat: ChatRequest, marks: Marks | None = None) -> Reading:
        """`marks`: of the images in the messages.

        Raises RequestError for messages and switches that are malformed or contradictory."""
        template, tokenizer = self.template, need(self._tokenizer)
        given = {name: getattr(chat, name) for name in FIELDS}
        thinking = self.thinking(given, chat.chat_template_kwargs)
        ending = Ending.of(chat.add_generation_prompt, chat.continue_final_message)
        tools, thoughts = chat.offered or (), self.formats.thoughts
        prompt = template.prompt(chat.messages, tools, thinking.options, ending, thoughts, marks)
        parallel = chat.parallel_tool_calls is not False
        form = self.form(chat, prompt.thinking, tools, chat.tool_choice, parallel)
        opened, calls = thoughts if prompt.thinking else None, self.formats.calls if tools else None
        bind = partial(thinking.bind, tokenizer=tokenizer, thoughts=opened, calls=calls)
        fresh = prompt.fresh
        return Reading(prompt.text, form, bind, thinking.shown, prompt.thinking, fresh)

    def thinking(
        self, fields: Mapping[str, Any], kwargs: Mapping[str, Any] | None = None
    ) -> Thinking:
        """Thinking by the fields of a request and its kwargs, with the server's defaults. Raises
        RequestError."""
        return Thinking.of(fields, kwargs, self._budget, self._server, self._accepted)

    def form(
        self,
        body: StructuredFields,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: str | Mapping[str, Any] | None = None,
        parallel: bool = True,
    ) -> ConstraintSpec | None:
        """The form that an answer must have; None for any. Raises RequestError."""
        if self._tokenizer is None or self._grammars is None:
            if form_of(body) is None:
                return None
            raise RequestError("this engine has no tokenizer, which structured outputs need")
        known = self.formats, self._tokenizer, self._grammars
        return constraint_for(body, tools, choice, *known, thinking=thinking, parallel=parallel)

    def parser(
        self,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        fresh: bool = True,
        parallel: bool = True,
    ) -> ReplyParser:
        known = () if self._tokenizer is None else self._tokenizer.marks.values()
        return ReplyParser(thinking, tools, self.formats, known, fresh, parallel)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """True if a prompt's token ids end inside an open thought."""
        thoughts, tokenizer = self.formats.thoughts, self._tokenizer
        if thoughts is None or tokenizer is None:
            return False
        return tokenizer.decode(prompt[-_TAIL:]).rstrip().endswith(thoughts.start)

    def bound(self, thinking: bool, body: StructuredFields) -> ConstraintSpec | None:
        """The constraint on the answer to a prompt without fields of thinking; `thinking`: it ends
        inside an open thought. Raises RequestError."""
        return self.bind(thinking, self.form(body, thinking))

    def bind(self, thinking: bool, form: ConstraintSpec | None) -> ConstraintSpec | None:
        """The same, from the form of the answer."""
        if self._tokenizer is None or not thinking:
            return form
        return Thinking(budget=self._open_budget).bind(form, self._tokenizer, self.formats.thoughts)


def _defaults(options: ChatOptions) -> dict[str, Any]:
    """The server's defaults of a template's options. Raises OptionError."""
    kwargs, effort = dict(options.template_kwargs or {}), options.reasoning_effort
    if effort is not None and kwargs.setdefault("reasoning_effort", effort) != effort:
        words = "--reasoning-effort and --chat-template-kwargs contradict each other"
        raise OptionError(f"{words}: give the effort once")
    try:
        Thinking.of({}, None, None, kwargs)
    except RequestError as error:
        raise OptionError(f"--chat-template-kwargs: {error}") from None
    return kwargs


def _accepted(template: ChatTemplate | None) -> frozenset[str]:
    """The efforts that a template accepts: Qwen3.8's accepts three."""
    if template is None:
        return frozenset(EFFORTS)
    levels = frozenset(EFFORTS) - {"none"}
    off = template.accepted("reasoning_effort", ["none"], enable_thinking=False)
    return template.accepted("reasoning_effort", levels) | off
