"""The options of `spark-run` for answers: how they are drawn, and how chats are taken apart.

Rows of the table in `runtime/options.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from spark_engine.errors import OptionError
from spark_engine.runtime.option import CHATS, ONE, Group, Mode, Option
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


ANSWER = (
    Option(
        "--no-thinking",
        Group.ANSWER,
        "Answer a chat without thinking first.",
        bool,
        modes=CHATS,
    ),
    Option("--system", Group.ANSWER, "Begin a chat with this system message.", modes=CHATS),
    Option(
        "--max-tokens",
        Group.ANSWER,
        "Tokens at most; as many as fit by default.",
        int,
        fills=(Body, "max_tokens"),
    ),
    Option(
        "--min-tokens",
        Group.ANSWER,
        "Do not end before this many tokens.",
        int,
        fills=(Body, "min_tokens"),
    ),
    Option(
        "--temperature",
        Group.ANSWER,
        "0 takes the likeliest token.",
        float,
        fills=(Body, "temperature"),
    ),
    Option(
        "--top-p",
        Group.ANSWER,
        "Draw from the likeliest tokens that have this much together.",
        float,
        fills=(Body, "top_p"),
    ),
    Option(
        "--top-k",
        Group.ANSWER,
        "Draw from this many of the likeliest tokens.",
        int,
        fills=(Body, "top_k"),
    ),
    Option(
        "--min-p",
        Group.ANSWER,
        "Draw from tokens at least this likely, the likeliest being 1.",
        float,
        fills=(Body, "min_p"),
    ),
    Option("--seed", Group.ANSWER, "Makes the answer repeatable.", int, fills=(Body, "seed")),
    Option(
        "--stop",
        Group.ANSWER,
        "End before this text. May be given several times.",
        many=True,
        fills=(Body, "stop"),
        turn=list,
    ),
    Option(
        "--ignore-eos",
        Group.ANSWER,
        "Go on after the model's end token.",
        bool,
        fills=(Body, "ignore_eos"),
    ),
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
    Option(
        "--json-schema",
        Group.ANSWER,
        "The answer is JSON of the schema in this file.",
        click.Path(dir_okay=False),
        metavar="FILE",
        modes=ONE,
        fills=(Body, "response_format"),
        turn=_form,
    ),
)
CHAT = (
    Option(
        "--reasoning",
        Group.ANSWER,
        "How the model marks its thoughts; auto: as its chat template does.",
        click.Choice([AUTO, *REASONING]),
        fills=(ChatOptions, "reasoning"),
        modes=CHATTING,
    ),
    Option(
        "--tools",
        Group.ANSWER,
        "How the model writes tool calls; auto: as its chat template teaches.",
        click.Choice([AUTO, *TOOLS]),
        fills=(ChatOptions, "tools"),
        modes=CHATTING,
    ),
    Option(
        "--think-budget",
        Group.ANSWER,
        "Tokens of thought at most, where a request does not say; then it answers.",
        click.IntRange(0),
        metavar="N",
        fills=(ChatOptions, "think_budget"),
        modes=CHATTING,
    ),
)
