"""/v1/chat/completions: its body, including the older fields for functions."""

from typing import Any

import msgspec

from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.chat_tools import read_tools
from spark_engine.runtime.server.api.fields import BadField


class ChatBody(ChatRequest, kw_only=True):
    """/v1/chat/completions: a conversation, and the older fields for functions."""

    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    echo: bool | None = None

    def modern(self) -> tuple[ChatRequest, frozenset[str]]:
        """The same with `tools` and `tool_choice`, and the names of custom tools. Raises BadField
        where old and new fields are both given, and what `read_tools` raises."""
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
        found = read_tools(given, choice)
        chat = msgspec.structs.replace(self, tools=found.tools, tool_choice=found.choice)
        return chat, found.custom
