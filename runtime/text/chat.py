"""From a list of chat messages to the text of a prompt, by the engine's chat template.

Knows Jinja as Hugging Face sets it up. Knows no tokens and no reply: `reply.py` takes the model's
answer apart. A template comes from a checkpoint, so it runs in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from spark_engine.errors import EngineError, RequestError

Message = Mapping[str, Any]
RESERVED = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """One compiled template and the special tokens that it may name."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        """Raises EngineError when `source` is not a template."""
        try:
            self._template = _compile(source)
        except TemplateError as error:
            raise EngineError(f"the chat template does not compile: {error}") from None
        self._tokens = dict(tokens or {})

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a tokenizer folder; None where there is none.

        `chat_template.jinja` comes before the `chat_template` of tokenizer_config.json.
        """
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        own = folder / "chat_template.jinja"
        named = config.get("chat_template")
        source = own.read_text(encoding="utf-8") if own.exists() else _default(named)
        return None if source is None else cls(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `options` are `chat_template_kwargs`, e.g. {"enable_thinking": False}.

        Raises RequestError with the template's own words when it refuses the messages.
        """
        options = dict(options or {})
        for name in RESERVED:
            if name in options:
                raise RequestError(f"chat_template_kwargs may not set {name!r}; send it directly")
        values = {**self._tokens, **options, "add_generation_prompt": True}
        try:
            plain = [prepare(message) for message in messages]
            return self._template.render(messages=plain, tools=tools or None, **values)
        except RequestError:
            raise
        except Exception as error:  # a template may trip over its input in any way
            raise RequestError(f"the chat template refused the messages: {error}") from None


def prepare(message: Message) -> dict[str, Any]:
    """The message as templates expect it: `arguments` of tool calls as mappings.

    Clients send them as JSON text. Raises RequestError when that text is not a JSON object.
    """
    plain = dict(message)
    if "reasoning" in plain and "reasoning_content" not in plain:
        plain["reasoning_content"] = plain["reasoning"]
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_prepare_call(call) for call in calls]
    return plain


def _prepare_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"tool call {call!r} has no function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        given = function.get("arguments")
        raise RequestError(f"tool call arguments must be a JSON object, got {given!r}")
    return {**call, "function": {**function, "arguments": arguments}}


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
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
    """JSON without the HTML escapes that Jinja's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _default(named: Any) -> str | None:
    """tokenizer_config.json holds a template, or a list of named ones."""
    if isinstance(named, list):
        named = {row.get("name"): row.get("template") for row in named}.get("default")
    return named if isinstance(named, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config.get(name) for name in names}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
