"""First requests of coding agents, and requests with an image that a tool read, in our own words.

The shape (kinds and number of tools, roles, fields) is that of Codex CLI 0.171, Claude Code 2.1 and
of chat clients; the texts are short. Imports the standard library alone: a client's script and the
API's tests use it.
"""

from typing import Any

Json = dict[str, Any]
PNG = (  # one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPj/HwADBwIAMCbHYQAAAABJRU5E"
    "rkJggg=="
)
BETAS = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,effort-2025-11-24"
)
CODEX_TOOLS = (
    *("exec_command", "write_stdin", "update_plan", "view_image", "request_user_input"),
    *("list_resources", "list_resource_templates", "read_resource"),
)
AGENT_TOOLS = ("spawn_agent", "send_input", "wait", "close_agent", "resume_agent")
CLAUDE_TOOLS = (
    *("Task", "Bash", "Glob", "Grep", "Read", "Edit", "Write", "NotebookEdit", "WebFetch"),
    *("WebSearch", "TodoWrite", "BashOutput", "KillShell", "Skill", "SlashCommand"),
    *("AskUserQuestion", "EnterPlanMode", "ExitPlanMode", "ListResources", "ReadResource"),
    *("TaskOutput", "TaskStop", "ToolSearch", "LSP"),
)


def _schema(field: str) -> Json:
    words = {"type": "string", "description": "What."}
    return {
        "type": "object",
        "properties": {field: words, "timeout_ms": {"type": "number"}},
        "required": [field],
        "additionalProperties": False,
    }


def _function(name: str) -> Json:
    row = {"name": name, "description": f"{name}.", "strict": False}
    return {"type": "function", **row, "parameters": _schema("what")}


def codex(model: str, question: str) -> Json:
    """/v1/responses, as Codex begins."""
    space = {
        "type": "namespace",
        "name": "agents",
        "description": "Other agents.",
        "tools": [_function(name) for name in AGENT_TOOLS],
    }

    def said(role: str, *texts: str) -> Json:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "role": role, "content": parts}

    return {
        "model": model,
        "instructions": "You are a coding agent.",
        "input": [
            said("developer", "<permissions>All is allowed.</permissions>"),
            said("developer", "<collaboration_mode>Work alone.</collaboration_mode>"),
            said(
                "user", "# AGENTS.md\nBe brief.", "<environment_context>bash</environment_context>"
            ),
            said("user", question),
        ],
        "tools": [
            *map(_function, CODEX_TOOLS[:4]),
            space,
            *map(_function, CODEX_TOOLS[4:]),
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "client_metadata": {"x-codex-installation-id": "0"},
    }


def claude_code(model: str, question: str) -> Json:
    """/v1/messages?beta=true, as Claude Code begins."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    reminder = "<system-reminder>\nIt is today.\n</system-reminder>\n"
    return {
        "model": model,
        "max_tokens": 400,
        "stream": True,
        "metadata": {"user_id": "user_0_account__session_1"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cch=0a1b2;"},
            {"type": "text", "text": "You are a coding agent.", **cached},
            {"type": "text", "text": "Be brief.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": question, "cache_control": {"type": "ephemeral"}},
                ],
            }
        ],
        "tools": [
            {"name": name, "description": f"{name}.", "input_schema": _schema("what")}
            for name in CLAUDE_TOOLS
        ],
    }


def images(model: str, question: str) -> dict[str, Json]:
    """By path: a chat in which a tool has read an image. Chat has it in a user's turn behind the
    result, too, where some agents put it."""
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    call = {"name": "Read", "arguments": '{"what": "a.png"}'}
    user = {"role": "user", "content": question}
    use = {"type": "tool_use", "id": "c1", "name": "Read", "input": {"what": "a.png"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "image", "source": source}],
    }
    function = {"name": "Read", "parameters": _schema("what")}
    return {
        "/v1/chat/completions": {
            "model": model,
            "max_tokens": 60,
            "messages": [
                user,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": [url]},
                {"role": "user", "content": [{"type": "text", "text": "Attached:"}, url]},
            ],
            "tools": [{"type": "function", "function": function}],
        },
        "/v1/messages": {
            "model": model,
            "max_tokens": 60,
            "messages": [
                user,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
            "tools": [{"name": "Read", "input_schema": _schema("what")}],
        },
        "/v1/responses": {
            "model": model,
            "max_output_tokens": 60,
            "input": [
                user,
                {"type": "function_call", "call_id": "c1", **call},
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": url["image_url"]["url"]}],
                },
            ],
            "tools": [_function("Read")],
        },
    }
