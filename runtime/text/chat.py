"""Renders chat messages to the text of a prompt, with the engine's chat template.

Uses Jinja with Hugging Face's settings. Knows no tokens, and of an answer only its beginning;
`reply_parser` parses it. A template comes from a checkpoint, so it runs in a sandbox.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, pass_context
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spark_engine.errors import EngineError, RequestError
from spark_engine.runtime.text.image_parts import Marks
from spark_engine.runtime.text.messages import Message, normalise
from spark_engine.runtime.text.reply_formats import ReasoningFormat
from spark_engine.runtime.text.thinking import RESERVED

_SURROGATE = re.compile("[\ud800-\udfff]")
_HERE = "\u2063answer-goes-on-here\u2063"  # marks the end of a continued message during rendering


class Ending(enum.Enum):
    ANSWER = enum.auto()  # the beginning of the assistant's turn
    NOTHING = enum.auto()  # the end of the last message (`add_generation_prompt` false)
    CONTINUE = enum.auto()  # the last message, left open (`continue_final_message`)

    @classmethod
    def of(cls, generation: bool | None, continued: bool | None) -> Ending:
        """From `add_generation_prompt` and `continue_final_message`; None means absent.

        Raises RequestError if both are true.
        """
        if continued and generation:
            words = "continue_final_message and add_generation_prompt are both true: the last "
            words += "message continues or a new turn begins; set one to false"
            raise RequestError(words, "continue_final_message")
        if continued:
            return cls.CONTINUE
        return cls.NOTHING if generation is False else cls.ANSWER


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt."""

    text: str
    thinking: bool  # it ends inside an open thought
    fresh: bool = True  # the answer starts a turn, so it may open a thought


class ChatTemplate:
    """One compiled template and the special tokens for it."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        """Raises EngineError if `source` is not a template."""
        try:
            self._template = _compile(source)
        except (TemplateError, SyntaxError, RecursionError, ValueError, OverflowError) as error:
            raise EngineError(f"the chat template does not compile: {error}") from None
        self.source = source
        self._tokens = dict(tokens or {})

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a tokenizer folder; None if there is none."""
        source, config = read_source(folder)
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        marks: Marks | None = None,
    ) -> str:
        """The text of a prompt that ends where the answer starts. Raises the errors of `prompt`."""
        return self._render(normalise(messages), tools, options, True, marks)

    def accepted(self, name: str, values: Iterable[str], **more: Any) -> frozenset[str]:
        """The values of an option that the template accepts together with the options `more`; all
        values if it refuses a chat without the option."""
        given = tuple(values)
        if not self._takes({}):
            return frozenset(given)
        return frozenset(value for value in given if self._takes({name: value, **more}))

    @cached_property
    def _writes_images(self) -> bool:
        """True if the template writes something for an image in a list of parts."""
        text, image = {"type": "text", "text": "hi"}, {"type": "image"}
        try:
            with_it, without = (
                self._render([{"role": "user", "content": parts}], None, None, True, None)
                for parts in ([text, image], [text])
            )
        except RequestError:
            return False
        return with_it != without

    def _takes(self, options: Mapping[str, Any]) -> bool:
        try:
            self.render([{"role": "user", "content": "hi"}], None, options)
        except RequestError:
            return False
        return True

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        ending: Ending = Ending.ANSWER,
        thoughts: ReasoningFormat | None = None,
        marks: Marks | None = None,
    ) -> Prompt:
        """The prompt. `options`: `chat_template_kwargs`, e.g. {"enable_thinking": False};
        `thoughts`: the marks of the model's thoughts, None if it has none; `marks`: of the images
        in the messages, around what the template writes for each.

        Raises RequestError for malformed messages (`normalise`), for the template's own refusals,
        and if the last message cannot be continued.
        """
        plain = normalise(messages)
        if ending is Ending.CONTINUE:
            return self._continued(plain, tools, options, marks)
        text = self._render(plain, tools, options, ending is Ending.ANSWER, marks)
        opens = thoughts is not None and text.rstrip().endswith(thoughts.start)
        return Prompt(text, opens)

    def _continued(
        self,
        plain: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
        marks: Marks | None,
    ) -> Prompt:
        """Renders with a marker at the end of the last message and cuts there, which removes the
        template's text after a message."""
        last = plain[-1] if plain else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            words = "needs an assistant's message without tool calls at the end"
            raise RequestError(f"continue_final_message {words}", "continue_final_message")
        thinking = not last["content"] and bool(last.get("reasoning_content"))
        name = "reasoning_content" if thinking else "content"
        marked = [*plain[:-1], {**last, name: last[name] + _HERE}]
        text, here, _ = self._render(marked, tools, options, False, marks).rpartition(_HERE)
        if not here:
            words = (
                f"the chat template leaves out the last message's {name}: it cannot be continued"
            )
            raise RequestError(words, "continue_final_message")
        return Prompt(text, thinking, fresh=False)

    def _render(
        self,
        plain: list[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
        generation: bool,
        marks: Marks | None,
    ) -> str:
        options = dict(options or {})
        if marks is not None and self._writes_images:
            plain = [{**message, "content": marks.parts(message["content"])} for message in plain]
        for name in RESERVED:
            if name in options:
                words = f"chat_template_kwargs may not set {name!r}; send it directly"
                raise RequestError(words, "chat_template_kwargs")
        values = {**self._tokens, **options, "add_generation_prompt": generation}
        values |= {"messages": plain, "tools": tools or None}
        try:
            text = self._template.render(values)  # a client's option may have any name
        except MemoryError:  # left to the code that set the limit
            raise
        except Exception as error:  # a template may raise any exception
            words = f"the chat template refused the messages: {error}"
            raise RequestError(words, "messages") from None
        # JSON within JSON, such as a call's arguments, may hold an escaped half of a surrogate pair
        return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def read_source(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """(source of a tokenizer folder's template, tokenizer_config.json); None if there is no
    template. Raises EngineError.

    `chat_template.jinja` takes precedence over `chat_template` of tokenizer_config.json.
    """
    path = folder / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path} is not valid JSON ({error}): build it again") from None
    if not isinstance(config, dict):
        raise EngineError(f"{path} holds {type(config).__name__}, not an object")
    own = folder / "chat_template.jinja"
    source = own.read_text(encoding="utf-8") if own.exists() else None
    return _default(config.get("chat_template")) if source is None else source, config


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        optimized=False,  # do not evaluate constant expressions, however large,
        finalize=pass_context(lambda _, value: value),  # nor printed constants, at compile time
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _default(named: Any) -> str | None:
    """The template in tokenizer_config.json, which holds one or a list of named ones."""
    if isinstance(named, list):
        rows = [row for row in named if isinstance(row, dict)]
        named = next((row.get("template") for row in rows if row.get("name") == "default"), None)
    return named if isinstance(named, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config.get(name) for name in names}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
