"""The options of `spark-run` for answers: sampling, reasoning and tool calls.

Rows of the table in `runtime/cli/options/run_options.py`.
"""

import json
from pathlib import Path
from typing import Any

import click

from spark_engine.errors import OptionError
from spark_engine.runtime.cli.options.option import CHATS, FILE, ONE, SERVING, Group, Mode, table
from spark_engine.runtime.engine.request import MOST_IMAGES
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.text.reply_formats import AUTO, REASONING, TOOLS
from spark_engine.runtime.text.thinking import EFFORTS, RESERVED

CHATTING = frozenset(Mode) - {Mode.PROMPT, Mode.PROMPT_IDS}
SEEING = frozenset(Mode) - {Mode.PROMPT_IDS}


def _form(path: str | None) -> dict[str, Any] | None:
    """A schema's file as a field of a request. Raises OptionError."""
    if path is None:
        return None
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--json-schema {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--json-schema {path} is not JSON: {error}") from None
    return {"type": "json_schema", "json_schema": {"name": Path(path).stem, "schema": schema}}


def _kwargs(text: str | None) -> dict[str, Any] | None:
    """Options of a chat template. Raises OptionError."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"--chat-template-kwargs is {text[:80]}; it must be a JSON object")
    if own := [name for name in RESERVED if name in found]:
        raise OptionError(f"--chat-template-kwargs may not set {own[0]}: requests do")
    return found


_own, _answer, _chat = (table(Group.ANSWER, owner) for owner in (None, Body, ChatOptions))
ANSWER = (
    _own("--no-thinking", "Answer a chat without thinking first.", bool, modes=CHATS),
    _own("--system", "Begin a chat with this system message.", modes=CHATS),
    _own(
        "--image",
        "Show the model this image before the text. May be given several times.",
        FILE,
        many=True,
        modes=frozenset({Mode.PROMPT, Mode.CHAT}),
    ),
    _answer("--max-tokens", "Tokens at most; as many as fit by default.", int),
    _answer("--min-tokens", "Do not end before this many tokens.", int),
    _answer("--temperature", "0 takes the likeliest token.", float),
    _answer("--top-p", "Sample from the likeliest tokens with this total probability.", float),
    _answer("--top-k", "Sample from this many of the likeliest tokens.", int),
    _answer("--min-p", "Sample from tokens above this share of the highest probability.", float),
    _answer(
        "--presence-penalty", "Lowers the score of each token that was generated; -2 to 2.", float
    ),
    _answer("--frequency-penalty", "The same, times how often the token was generated.", float),
    _answer(
        "--repetition-penalty",
        "Divides the score of each token of prompt and answer; 1 is off.",
        float,
    ),
    _answer("--seed", "Makes the answer repeatable.", int),
    _answer("--stop", "End before this text. May be given several times.", many=True, turn=list),
    _answer("--ignore-eos", "Continue after the model's end token.", bool),
    _own(
        "--logprobs",
        "Report log-probabilities and the top K (with --json).",
        int,
        metavar="K",
        modes=ONE,
        needs=("--json", "which prints them"),
    ),
    _own("--json", "Print one JSON object at the end.", bool, modes=ONE),
    _answer(
        "--json-schema",
        "The answer is JSON of the schema in this file.",
        FILE,
        field="response_format",
        modes=ONE,
        turn=_form,
    ),
)
CHAT = (
    _chat(
        "--reasoning",
        "How the model marks its reasoning; auto: by its chat template.",
        click.Choice([AUTO, *REASONING]),
        modes=CHATTING,
    ),
    _chat(
        "--tools",
        "How the model writes tool calls; auto: by its chat template.",
        click.Choice([AUTO, *TOOLS]),
        modes=CHATTING,
    ),
    _chat(
        "--think-budget",
        "Tokens of reasoning at most, where a request sets no budget.",
        click.IntRange(0),
        metavar="N",
        modes=CHATTING,
    ),
    _chat(
        "--reasoning-effort",
        "How much the model reasons, where a request does not say.",
        click.Choice(list(EFFORTS)),
        modes=CHATTING,
    ),
    _chat(
        "--chat-template-kwargs",
        "Options of the chat template, where a request does not say: a JSON object, e.g. "
        "'{\"preserve_thinking\": true}'.",
        field="template_kwargs",
        metavar="JSON",
        modes=CHATTING,
        turn=_kwargs,
    ),
    _chat(
        "--max-images",
        "Most images of a request; notes replace the oldest of a longer chat. 0: read none.",
        click.IntRange(0, MOST_IMAGES),
        metavar="N",
        modes=SEEING,
    ),
    _chat(
        "--max-image-pixels",
        "Pixels of an image; larger ones are resized. By default the limit of the build.",
        click.IntRange(1),
        metavar="N",
        modes=SEEING,
    ),
    _chat(
        "--media-domains",
        "Fetch images from https://NAME too, by their URLs. May be given several times.",
        many=True,
        metavar="NAME",
        modes=SERVING,
        turn=tuple,
    ),
)
