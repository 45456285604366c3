"""Tools that a provider's own server runs (web search, code execution, …), which this one does not.

They are not offered to the model, since agents send them with every request. A choice that names
one is refused.
"""

from typing import Any

from spark_engine.runtime.server.api.fields import BadField, short


def not_run(name: Any) -> BadField:
    """The error of a choice that names such a tool."""
    words = f"tool_choice names {short(name)}, a tool that this server cannot run"
    return BadField(f"{words}: choose a function that your client runs, or 'auto'", "tool_choice")


def check_any(choice: Any, given: bool, offered: bool) -> None:
    """Raises BadField where `choice` asks for a call, and of the tools `given` none is offered."""
    if choice == "required" and given and not offered:
        words = "tool_choice asks for a call, but this server can run none of the tools"
        raise BadField(f"{words}: offer a function that your client runs, or say 'auto'", "tools")
