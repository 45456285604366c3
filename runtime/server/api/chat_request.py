"""`ChatRequest`: the body of /v1/chat/completions, and the one form of a chat request.

The other chat APIs are translated to it and back, so the meaning of a conversation is defined once.
Knows fields and their checks; knows no template and no engine.
"""

from typing import Any

import msgspec

from spark_engine.runtime.server.api.common import Body, either, limit_of
from spark_engine.runtime.server.api.fields import BadField, check_type, short
from spark_engine.runtime.text.thinking import FIELDS

# fields that other APIs fill with what their clients sent
TRANSLATED = ("tool_choice", "response_format", "reasoning_effort", "thinking")


class ChatRequest(Body, kw_only=True):
    """One conversation to answer."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None  # false: the answer ends after the first call
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # whether to think, for how long, and whether that is shown (`thinking.Thinking`):
    enable_thinking: bool | None = None
    enableThinking: bool | None = None  # noqa: N815 (as its clients write it)
    think: bool | str | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning: bool | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: float | None = None
    thinking_token_budget: float | None = None
    budget_tokens: float | None = None
    max_reasoning_tokens: float | None = None
    reasoning_budget: float | None = None
    thinking_budget_tokens: float | None = None
    include_reasoning: bool | None = None

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    def most_tokens(self) -> int | None:
        """The newer field takes precedence over the older."""
        return limit_of(either(self.max_completion_tokens, self.max_tokens))

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_own(self) -> None:
        for name in TRANSLATED:
            check_type(self, name)
        if not self.messages:
            raise BadField("messages is empty; at least one message is needed", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadField("top_logprobs needs logprobs: true", "top_logprobs")


class ThinkingFields(msgspec.Struct, kw_only=True):
    """Fields of thinking of the APIs that are translated, the same as in a `ChatRequest`."""

    enable_thinking: bool | None = None
    enableThinking: bool | None = None  # noqa: N815 (as its clients write it)
    think: bool | str | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning: bool | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    thinking_budget: float | None = None
    thinking_token_budget: float | None = None
    budget_tokens: float | None = None
    max_reasoning_tokens: float | None = None
    reasoning_budget: float | None = None
    thinking_budget_tokens: float | None = None
    include_reasoning: bool | None = None

    def copy_to(self, chat: ChatRequest) -> bool:
        """Sets these fields of a chat. Returns whether one of them decides about thinking."""
        given = {name: getattr(self, name) for name in FIELDS}
        for name, value in given.items():
            setattr(chat, name, value)
        del given["include_reasoning"]
        return any(value is not None for value in given.values())


def not_run(name: Any) -> BadField:
    """The error of a choice that names a tool which a provider's own server runs (web search, code
    execution, …). They are not offered to the model, since agents send them with every request."""
    words = f"tool_choice names {short(name)}, a tool that this server cannot run"
    return BadField(f"{words}: choose a function that your client runs, or 'auto'", "tool_choice")


def check_any(choice: Any, given: bool, offered: bool) -> None:
    """Raises BadField where `choice` asks for a call, and of the tools `given` none is offered."""
    if choice == "required" and given and not offered:
        words = "tool_choice asks for a call, but this server can run none of the tools"
        raise BadField(f"{words}: offer a function that your client runs, or say 'auto'", "tools")
