"""`spark-run`: one answer on standard output, or a server.

Knows the command line and the environment; `command` says how it ends. An option that would do
nothing is refused.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spark_engine.command import command
from spark_engine.errors import OptionError
from spark_engine.progress import Progress
from spark_engine.runtime.embedded import embedded_engine
from spark_engine.runtime.oneshot import Answer, OneShot
from spark_engine.runtime.option import Grouped, Mode, why_idle
from spark_engine.runtime.options import OPTIONS, body, engine_options, server_options
from spark_engine.runtime.profile import finish
from spark_engine.runtime.server.server import run
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind


@click.command(
    cls=Grouped,
    rows=OPTIONS,
    params=[
        click.Argument(["engine"], type=click.Path(path_type=Path), required=False),
        *(row.parameter() for row in OPTIONS),
    ],
)
@click.version_option(package_name="spark-engine", prog_name="spark-run")
def main(engine: Path | None, **values: Any) -> None:
    """Runs the engine folder ENGINE, or the embedded model where none is named.

    Give one of --prompt, --prompt-ids, --chat and --serve.
    """
    with command("spark-run"):
        mode = _mode(click.get_current_context(), values)
        folder = engine or embedded_engine(_cache(), lambda text: click.echo(text, err=True))
        code = _serve(folder, values) if mode is Mode.SERVE else _answer(folder, values)
        if values["profile"] is not None:
            click.echo(finish(values["profile"]), err=True)
        sys.exit(code)


def _mode(context: click.Context, values: Mapping[str, Any]) -> Mode:
    """What to do. Raises OptionError where that is not said, or an option would do nothing."""
    modes = [mode for mode in Mode if values[mode] not in (None, False)]
    if len(modes) != 1:
        raise OptionError("give exactly one of --prompt, --prompt-ids, --chat and --serve")
    for row in OPTIONS:
        if context.get_parameter_source(row.name) is not ParameterSource.COMMANDLINE:
            continue
        if (why := why_idle(row, modes[0], values)) is not None:
            raise OptionError(f"{row.flag} does nothing {why}")
    return modes[0]


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path.home() / ".cache"


def _serve(folder: Path, values: Mapping[str, Any]) -> int:
    logging.basicConfig(level=logging.INFO, format="spark-run: %(message)s")
    return run(folder, server_options(values))


def _answer(folder: Path, values: Mapping[str, Any]) -> int:
    shot = OneShot(folder, engine_options(values))
    try:
        prompt = _prompt(shot, values)
        with Progress(sys.stderr) as shown:
            answer = shot.start(prompt, body(values), values["logprobs"], shown)
        if values["json"]:
            deltas = _collect(shot, answer, chat=values["chat"] is not None)
            click.echo(json.dumps({**answer.to_json(), **deltas}))
        else:
            _print(shot, answer, chat=values["chat"] is not None)
    finally:
        shot.close()
    return 0


def _prompt(shot: OneShot, values: Mapping[str, Any]) -> list[int]:
    if values["prompt_ids"] is not None:
        return _ids(values["prompt_ids"])
    if values["chat"] is not None:
        question = _text("--chat", values["chat"])
        return shot.encode(shot.render(question, not values["no_thinking"]))
    return shot.encode(_text("--prompt", values["prompt"]))


def _text(option: str, given: str) -> str:
    """The text given, or standard input for `-`, without the newline at its end."""
    if given != "-":
        return given
    if sys.stdin.isatty():
        click.echo(f"{option} -: type the text, and end it with Ctrl-D", err=True)
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"{option} -: standard input is not UTF-8 ({error})") from None


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    try:
        return [int(word) for word in words]
    except ValueError:
        raise OptionError(f"--prompt-ids is {text!r}; it must be like 1,2,3") from None


def _parser(answer: Answer) -> ReplyParser:
    return ReplyParser(answer.thinking)


def _collect(shot: OneShot, answer: Answer, chat: bool) -> dict[str, str]:
    """Runs to the end. For a chat: the answer's parts beside the whole text."""
    for _ in shot.pieces(answer):
        pass
    if not chat:
        return {}
    parser = _parser(answer)
    texts = {Kind.REASONING.value: "", Kind.CONTENT.value: ""}
    for delta in parser.push(answer.text) + parser.flush():
        texts[delta.kind.value] += delta.text
    return texts


def _print(shot: OneShot, answer: Answer, chat: bool) -> None:
    """Streams: the answer to standard output, thoughts and figures to standard error."""
    parser = _parser(answer) if chat else None
    show = _Show()
    for piece in shot.pieces(answer):
        if parser is None:
            show([Delta(Kind.CONTENT, piece.text)])
            continue
        show(parser.push(piece.text, piece.marks))
        if piece.finish is not None:
            show(parser.flush())
    click.echo()
    row = answer.to_json()
    if row["text"] is None:
        click.echo(" ".join(map(str, row["token_ids"])))
    rate = row["timings"]["tokens_per_s"]
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    drafts = "" if not answer.drafts else ", {1} of {0} drafts kept".format(*answer.drafts)
    count = len(answer.events)
    click.echo(f"[{count} tokens, {row['finish_reason']}{speed}{drafts}]", err=True)


class _Show:
    """Shows the parts of an answer as they come, a thought apart from what follows it."""

    def __init__(self) -> None:
        self._thinking = False

    def __call__(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            thought = delta.kind is Kind.REASONING
            if thought and not self._thinking:
                click.echo(click.style("thought: ", dim=True), nl=False, err=True)
            elif self._thinking and not thought:
                click.echo(click.style("\nanswer: ", dim=True), nl=False, err=True)
            self._thinking = thought
            click.echo(click.style(delta.text, dim=thought), nl=False, err=thought)


if __name__ == "__main__":
    main()
