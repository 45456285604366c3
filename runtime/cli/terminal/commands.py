"""The /commands of a chat on the terminal, a table.

Each changes the conversation or reports on it. Knows no terminal and no engine.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from spark_engine.command import system_words
from spark_engine.errors import OptionError
from spark_engine.hints import near
from spark_engine.runtime.cli.options.answer_options import ANSWER
from spark_engine.runtime.cli.options.option import Option
from spark_engine.runtime.cli.terminal.conversation import ChatHistory, with_images
from spark_engine.runtime.server.api.common import Body, check

MARK = "/"  # of a command; doubled for a message that starts with it
MOST_FILE = 4 << 20  # bytes of a file that /file reads
# What /set sets: the options that fill a field of a request, by the name that is typed.
SETTINGS: Mapping[str, Option] = {
    row.key: row for row in ANSWER if row.fills is not None and row.fills[0] is Body
}
FIELDS = frozenset(row.fills[1] for row in SETTINGS.values() if row.fills is not None)


class Next(enum.Enum):
    ASK = enum.auto()  # the next line
    ANSWER = enum.auto()  # an answer to the last message
    LEAVE = enum.auto()


@dataclass(frozen=True)
class CommandResult:
    text: str = ""
    next: Next = Next.ASK


@dataclass(frozen=True)
class Command:
    """A row: `takes` is the form of its argument, `choices` the words that are completed.
    `aliases` are its names in other programs."""

    name: str
    takes: str
    help: str
    run: Callable[[ChatHistory, str], CommandResult]
    choices: Sequence[str] = ()
    files: bool = False
    aliases: tuple[str, ...] = ()


def run(line: str, conversation: ChatHistory) -> CommandResult:
    """Runs a line that starts with `/`. Raises OptionError or RequestError."""
    name, _, rest = line.strip().removeprefix(MARK).partition(" ")
    for row in COMMANDS:
        if name.lower() in (row.name, *row.aliases):
            if rest.strip() and not row.takes:
                raise OptionError(f"/{row.name} takes nothing, not {rest.strip()!r}")
            return row.run(conversation, rest.strip())
    hint = near(name, [row.name for row in COMMANDS])
    raise OptionError(
        f"there is no /{name}{hint}; /help lists the commands, and a message that begins with / "
        "is typed with two"
    )


def _help(_: ChatHistory, __: str) -> CommandResult:
    rows = [(f"/{row.name} {row.takes}".rstrip(), row.help) for row in COMMANDS]
    rows += [
        ("Alt-Enter", 'a new line; or paste, or type between two """'),
        ("Ctrl-C", "stop the answer, or drop the line; Ctrl-D leaves"),
    ]
    width = max(len(left) for left, _ in rows) + 2
    return CommandResult("\n".join(f"{left:{width}}{right}" for left, right in rows))


def _new(conversation: ChatHistory, _: str) -> CommandResult:
    conversation.clear()
    return CommandResult("a new chat; the system message and the settings stay")


def _system(conversation: ChatHistory, text: str) -> CommandResult:
    if text == "off":
        conversation.system = None
        return CommandResult("no system message")
    if text:
        conversation.system = text
        return CommandResult("the system message is set")
    if conversation.system is None:
        return CommandResult("there is no system message; /system TEXT sets one")
    return CommandResult(f"{conversation.system}\n(/system off takes it away)")


def _think(conversation: ChatHistory, text: str) -> CommandResult:
    if text and text not in ("on", "off"):
        raise OptionError(f"/think is {text!r}; give on or off")
    if text:
        conversation.thinking = text == "on"
    return CommandResult(f"thinking is {'on' if conversation.thinking else 'off'}")


def _set(conversation: ChatHistory, text: str) -> CommandResult:
    if not text:
        set_ = {key: _current(conversation, row) for key, row in SETTINGS.items()}
        given = (f"{key} {value!r}" for key, value in set_.items() if value is not None)
        return CommandResult(", ".join(given) or "nothing is set: all as the model's makers chose")
    key, _, value = text.partition(" ")
    row = SETTINGS.get(key.replace("_", "-"))
    if row is None or row.fills is None:
        hint = near(key, list(SETTINGS))
        raise OptionError(f"there is no setting {key!r}{hint}; it is one of {', '.join(SETTINGS)}")
    if not value.strip():
        raise OptionError(f"/set {row.key} needs a value, or `default`")
    _change(conversation, row.fills[1], row, value.strip())
    now = _current(conversation, row)
    return CommandResult(f"{row.key} is {'as by default' if now is None else repr(now)}")


def _change(conversation: ChatHistory, field: str, row: Option, value: str) -> None:
    settings = {k: v for k, v in conversation.settings.items() if k != field}
    if value != "default":
        try:
            made: Any = click.types.convert_type(bool if row.kind is bool else row.kind)(value)
        except click.BadParameter as error:
            raise OptionError(f"{row.key}: {error.message}") from None
        settings[field] = [made] if row.many else made
    check(Body(**settings))
    conversation.settings = settings


def _current(conversation: ChatHistory, row: Option) -> Any:
    assert row.fills is not None
    return conversation.settings.get(row.fills[1])


def _path(text: str, conversation: ChatHistory, command: str) -> Path:
    if text:
        return Path(text).expanduser()
    if conversation.file is None:
        raise OptionError(f"/{command} needs the name of a file, e.g. /{command} chat.json")
    return conversation.file


def _save(conversation: ChatHistory, text: str) -> CommandResult:
    path = _path(text, conversation, "save")
    conversation.save(path)
    return CommandResult(f"saved to {path}: a body for /v1/chat/completions")


def _load(conversation: ChatHistory, text: str) -> CommandResult:
    path = _path(text, conversation, "load")
    conversation.load(path, FIELDS)
    return CommandResult(f"{path}: {len(conversation.messages)} messages")


def _retry(conversation: ChatHistory, _: str) -> CommandResult:
    conversation.take_back_answer()
    return CommandResult(next=Next.ANSWER)


def _undo(conversation: ChatHistory, _: str) -> CommandResult:
    conversation.take_back_answer()
    conversation.take_back_question()
    left = len(conversation.messages)
    return CommandResult(f"your last message and its answer are removed; {left} messages are left")


def _file(conversation: ChatHistory, text: str) -> CommandResult:
    if not text:
        raise OptionError("/file needs the name of a text file, e.g. /file notes.md")
    path = Path(text).expanduser()
    try:
        if path.stat().st_size > MOST_FILE:
            raise OptionError(f"{path} has over {MOST_FILE >> 20} MiB: take a part of it")
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(system_words(error)) from None
    except UnicodeDecodeError:
        raise OptionError(f"{path} is not a text file in UTF-8: only text can be read") from None
    conversation.attach(path.name, content)
    return CommandResult(f"{path.name}, {len(content):,} characters, goes with your next message")


def _image(conversation: ChatHistory, text: str) -> CommandResult:
    if not text:
        raise OptionError("/image needs the name of an image file, e.g. /image plot.png")
    path = Path(text).expanduser()
    with_images([path], "")  # raises where it cannot be read
    conversation.images.append(path)
    return CommandResult(f"{path.name} is shown with your next message")


def _stats(conversation: ChatHistory, _: str) -> CommandResult:
    total = conversation.totals
    lines = [
        f"model     {conversation.model}",
        f"context   {conversation.used:,} of {conversation.context:,} tokens at the last turn",
        f"answers   {total.answers}, {total.tokens:,} tokens"
        + (f", {total.decoded / total.seconds:.1f} tokens/s" if total.seconds else ""),
        f"prompts   {total.prompt_tokens:,} tokens, {total.cached:,} of them cached",
    ]
    if total.drafted:
        lines.append(f"drafts    {total.accepted:,} of {total.drafted:,} kept")
    return CommandResult("\n".join(lines))


def _exit(_: ChatHistory, __: str) -> CommandResult:
    return CommandResult(next=Next.LEAVE)


COMMANDS = (
    Command("help", "", "this list", _help, aliases=("?",)),
    Command("new", "", "begin a new chat", _new, aliases=("clear", "reset")),
    Command("system", "[TEXT|off]", "show, set or drop the system message", _system, ("off",)),
    Command("think", "[on|off]", "think before answering, or not", _think, ("on", "off")),
    Command(
        "set",
        "[NAME VALUE]",
        "sampling, e.g. /set temperature 0.7, or default",
        _set,
        tuple(SETTINGS),
    ),
    Command("retry", "", "answer the last message again", _retry, aliases=("regenerate",)),
    Command("undo", "", "remove your last message and its answer", _undo),
    Command("file", "FILE", "send a text file with your next message", _file, (), True),
    Command("image", "FILE", "show an image with your next message", _image, (), True),
    Command(
        "save", "[FILE]", "write the chat to a file, as a request of the server", _save, (), True
    ),
    Command("load", "[FILE]", "continue a saved chat", _load, (), True),
    Command("stats", "", "model, tokens, speed, cached tokens", _stats, aliases=("model",)),
    Command("exit", "", "leave", _exit, aliases=("quit", "bye")),
)
