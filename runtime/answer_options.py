"""The options of `spark-run` for answers: how they are drawn, and how chats are taken apart.

Rows of the table in `runtime/options.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from spark_engine.errors import OptionError
from spark_engine.runtime.option import CHATS, ONE, Group, Mode, Option, table
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.server.conversation import ChatOptions
from spark_engine.runtime.text.reply_formats import AUTO, REASONING, TOOLS

CHATTING = frozenset(Mode) - {Mode.PROMPT, Mode.PROMPT_IDS}


def _form(path: str | None) -> dict[str, Any] | None:
    """A schema's file as the field of a request. Raises OptionError."""
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--json-schema {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--json-schema {path} is not JSON: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": Path(path).stem, "schema": schema}}


_answer, _chat = table(Group.ANSWER, Body), table(Group.ANSWER, ChatOptions)
ANSWER = (
    Option(
        "--no-thinking",
        Group.ANSWER,
        "Answer a chat without thinking first.",
        bool,
        modes=CHATS,
    ),
    Option("--system", Group.ANSWER, "Begin a chat with this system message.", modes=CHATS),
    _answer("--max-tokens", "Tokens at most; as many as fit by default.", int),
    _answer("--min-tokens", "Do not end before this many tokens.", int),
    _answer("--temperature", "0 takes the likeliest token.", float),
    _answer("--top-p", "Draw from the likeliest tokens that have this much together.", float),
    _answer("--top-k", "Draw from this many of the likeliest tokens.", int),
    _answer("--min-p", "Draw from tokens at least this likely, the likeliest being 1.", float),
    _answer("--seed", "Makes the answer repeatable.", int),
    _answer("--stop", "End before this text. May be given several times.", many=True, turn=list),
    _answer("--ignore-eos", "Go on after the model's end token.", bool),
    Option(
        "--logprobs",
        Group.ANSWER,
        "Report log-probabilities and the top K (with --json).",
        int,
        metavar="K",
        modes=ONE,
        needs=("--json", "which prints them"),
    ),
    Option("--json", Group.ANSWER, "Print one JSON object at the end.", bool, modes=ONE),
    _answer(
        "--json-schema",
        "The answer is JSON of the schema in this file.",
        click.Path(dir_okay=False),
        field="response_format",
        metavar="FILE",
        modes=ONE,
        turn=_form,
    ),
)
CHAT = (
    _chat(
        "--reasoning",
        "How the model marks its thoughts; auto: as its chat template does.",
        click.Choice([AUTO, *REASONING]),
        modes=CHATTING,
    ),
    _chat(
        "--tools",
        "How the model writes tool calls; auto: as its chat template teaches.",
        click.Choice([AUTO, *TOOLS]),
        modes=CHATTING,
    ),
    _chat(
        "--think-budget",
        "Tokens of thought at most, where a request does not say; then it answers.",
        click.IntRange(0),
        metavar="N",
        modes=CHATTING,
    ),
)
