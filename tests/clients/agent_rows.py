"""The coding agents that are tried, as `agents.toml` lists them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from tests.clients.agent_proxy import Call

ASKED = "Run the command, look at the picture, and say what you found."
GIVEN = "spark-42"  # what the commands print; it is not in their text
PICTURE = "picture.png"
CONTEXT = 100_000  # tokens


@dataclass(frozen=True)
class Agent:
    """One agent."""

    name: str
    package: str  # the npm package that has the agent's version
    command: list[str]  # the program and its arguments
    # shell and image: the calls that are forced; texts of arguments are templates too.
    shell: Call
    image: Call
    # Environment variables in addition to the common ones.
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # by their path in `$home`, their text


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """A text, or texts in lists and mappings, with the names filled in."""
    if isinstance(value, str):
        return Template(value).safe_substitute(names)
    if isinstance(value, Mapping):
        return {key: filled(one, names) for key, one in value.items()}
    return [filled(one, names) for one in value] if isinstance(value, list) else value


def _agents() -> tuple[Agent, ...]:
    rows = tomllib.loads(Path(__file__).with_name("agents.toml").read_text())["agents"]
    calls = [{name: Call(**row.pop(name)) for name in ("shell", "image")} for row in rows]
    return tuple(Agent(**row, **own) for row, own in zip(rows, calls, strict=True))


AGENTS = _agents()
