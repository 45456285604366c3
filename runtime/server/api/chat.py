"""/v1/chat/completions: its body, with tools and choices in every form that clients send."""

from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.api.responses_tools import is_own, offer, unnested


class ChatBody(ChatRequest, kw_only=True):
    """/v1/chat/completions: a conversation, and the older fields for functions."""

    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    echo: bool | None = None

    def modern(self) -> tuple[ChatRequest, frozenset[str]]:
        """The same with `tools` and `tool_choice`, and the names of custom tools. Raises BadField
        where old and new fields are both given, for a function without a name, and for a choice
        that cannot be met."""
        if self.echo:
            raise BadField("echo is not supported for chats; use /v1/completions", "echo")
        given, choice = self.tools, self.tool_choice
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old) is not None and getattr(self, new) is not None:
                raise BadField(f"{old} and {new} say the same; give {new}", old)
        if self.functions is not None or self.function_call is not None:
            choice = self.function_call or choice
            if isinstance(choice, dict):
                choice = {"type": "function", "function": choice}
            functions = [{"type": "function", "function": f} for f in self.functions or []]
            given = given or functions
        tools: list[Json] = [{"type": "function", **tool} for tool in given or []]
        for i, tool in enumerate(tools):
            if is_own(tool) and not isinstance(unnested(tool).get("name"), str):
                words = 'it is like {"type": "function", "function": {"name": …, "parameters": …}}'
                raise BadField(f"tools[{i}] has no function with a name; {words}", "tools")
        chat = msgspec.structs.replace(self)
        names = offer(chat, [t for t in tools if t["type"] != "namespace"], choice, whole=True)
        return chat, frozenset(f for f, tool in names.special().items() if tool.custom)
