"""`spark-run`: one answer on standard output, or a server.

Knows the command line and the environment; `command` sets the exit code. An option that would do
nothing is refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from spark_engine.command import command
from spark_engine.device.choice import choose
from spark_engine.engine_file import read_manifest
from spark_engine.errors import OptionError
from spark_engine.progress import Progress
from spark_engine.runtime.cli.options import completion, config_file
from spark_engine.runtime.cli.options.option import ASKED_FOR, Grouped, Mode, why_idle
from spark_engine.runtime.cli.options.run_options import (
    FOLDER,
    OF_FILE,
    OPTIONS,
    body,
    chat_options,
    engine_options,
    server_options,
    settings,
)
from spark_engine.runtime.cli.profile import finish
from spark_engine.runtime.cli.terminal.printable import printable
from spark_engine.runtime.engine.detect import needs_gpu
from spark_engine.runtime.engine.request import FinishReason, capacity
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from spark_engine.runtime.ranks.hosts import name_network, own_rank, serve_rank
from spark_engine.runtime.ranks.rendezvous import split_hosts
from spark_engine.runtime.server.engine_client.early import EarlyProcess
from spark_engine.runtime.server.engine_client.engine_folder import check_ranks, split_names
from spark_engine.runtime.server.operation.json_stderr import standard_error
from spark_engine.runtime.server.operation.logs import LogFormat, set_up
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.vision import Image

if TYPE_CHECKING:
    from spark_engine.runtime.cli.terminal.session import Answer, Session

NAME = "spark-run"
HISTORY = Path("spark", "history")  # of a chat, in the folder of programs' states


def _complete(context: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell is not None:
        click.echo(completion.script(shell))
        context.exit()


class _Run(Grouped):
    """`spark-run`; its first word may be another command's name; ./doctor is a folder."""

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        if args[:1] == ["doctor"]:
            from spark_engine.runtime.cli.doctor import doctor  # as below

            return doctor.make_context(f"{info_name} {doctor.name}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(
    cls=_Run,
    rows=OPTIONS,
    params=[
        click.Argument(["engine"], nargs=-1, type=click.Path()),
        *(row.parameter() for row in OPTIONS),
    ],
)
@config_file.option(
    NAME, OF_FILE, "Read options from this TOML file; the command line overrides it."
)
@click.option("--print-config", is_flag=True, help="Print all options as such a file, and exit.")
@click.option(
    "--completion",
    type=click.Choice(completion.SHELLS),
    is_eager=True,
    expose_value=False,
    callback=_complete,
    help='Print the shell completion of the spark commands: eval "$(spark-run --completion bash)".',
)
@click.version_option(package_name="spark-engine", prog_name=NAME)
@click.pass_context
def main(
    context: click.Context, /, engine: tuple[str, ...], print_config: bool, **values: Any
) -> None:
    """Runs the engine folder ENGINE, by default the embedded model. --serve takes several folders,
    as FOLDER or NAME=FOLDER: models at one address.

    Without --prompt, --prompt-ids, --chat, --serve or --batch it opens a chat on a terminal;
    without a terminal it answers the message on standard input. `spark-run doctor` checks which
    engines this machine can serve, and what to do if it cannot.
    """
    with standard_error(_log_format(context, values)), command(NAME):
        # click before 8.5 does not look here for an argument of many values
        engine = engine or (context.default_map or {}).get(FOLDER.name, ())
        if print_config:
            given = partial(_given, context)
            click.echo(config_file.write(OF_FILE, {"engine": engine, **values}, given), nl=False)
            return
        mode = _mode(context, values)
        choose(os.environ, values["device"])
        folders = split_names(engine) or {"": _embedded()}
        _check_device(folders.values(), values["device"])
        if mode is Mode.SERVE:
            code = _serve(folders, values, context.obj)
        elif len(folders) > 1 or "" not in folders:
            words = f"{' '.join(engine)}: one folder, without a name"
            raise OptionError(f"{words}; --serve takes several, and NAME=FOLDER")
        else:
            others = {Mode.BATCH: _batch, Mode.TERMINAL: _chat}
            code = others.get(mode, partial(_answer, mode))(folders[""], values)
        if values["profile"] is not None:
            click.echo(finish(values["profile"]), err=True)
        sys.exit(code)


def _check_device(folders: Collection[Path], number: int | None) -> None:
    """Raises OptionError where a GPU is chosen for engines that use none."""
    targets = {} if number is None else {one: read_manifest(one).target for one in folders}
    if targets and not any(map(needs_gpu, targets.values())):
        folder, target = next(iter(targets.items()))
        words = f"{folder} is for the {target}: leave it out, or build for the GPU with --target"
        raise OptionError(f"--device does nothing: {words}")


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


def _mode(context: click.Context, values: Mapping[str, Any]) -> Mode:
    """The mode: of the command line, else of the configuration file, else a chat.

    Raises OptionError where that is ambiguous, or an option would do nothing. A file may have
    options of other modes.
    """
    source = context.get_parameter_source
    asked = [mode for mode in ASKED_FOR if values[mode] not in (None, False)]
    typed = [mode for mode in asked if source(mode) is ParameterSource.COMMANDLINE]
    if len(modes := typed or asked) > 1:
        raise OptionError(f"give only one of {', '.join(mode.flag for mode in ASKED_FOR)}")
    mode = modes[0] if modes else _default_mode()
    for row in OPTIONS:
        of_file = source(row.name) is ParameterSource.DEFAULT_MAP and mode in row.where
        if source(row.name) is not ParameterSource.COMMANDLINE and not of_file:
            continue
        if (why := why_idle(row, mode, values)) is not None:
            raise OptionError(f"{row.flag} does nothing {why}")
    return mode


def _log_format(context: click.Context, values: Mapping[str, Any]) -> LogFormat:
    """The form of standard error: JSON only for a server, not for another mode of the command line,
    whatever the configuration file says."""
    source = context.get_parameter_source
    typed = [mode for mode in ASKED_FOR if source(mode) is ParameterSource.COMMANDLINE]
    serves = values["serve"] and typed in ([], [Mode.SERVE])
    return LogFormat(values["log_format"]) if serves else LogFormat.TEXT


def _default_mode() -> Mode:
    """The default: a chat on a terminal, one answer to piped input."""
    if not sys.stdin.isatty():
        return Mode.CHAT
    if not sys.stdout.isatty():
        words = "standard output is no terminal to chat on: give --prompt, --chat or --serve"
        raise OptionError(words)
    return Mode.TERMINAL


def _embedded() -> Path:
    return embedded_engine(cache_folder(os.environ), lambda text: click.echo(text, err=True))


def _state() -> Path:
    given = os.environ.get("XDG_STATE_HOME")
    return Path(given) if given else Path.home() / ".local" / "state"


def _serve(
    folders: Mapping[str, Path], values: Mapping[str, Any], early: EarlyProcess | None
) -> int:
    """`early` becomes the engine process of one engine here, on the first GPU; its standard error
    is no JSON."""
    options = server_options(values)
    set_up(options.log_format, options.log_level)
    several = len(folders) > 1 or options.idle_unload_s is not None
    other = several or values["rank"] or values["device"] is not None
    if early is not None and (other or options.log_format is LogFormat.JSON):
        early.close()
    folder = next(iter(folders.values()))
    for one in folders.values():
        check_ranks(one, options.engine)
    if several:
        # imported here, as below
        from spark_engine.runtime.server.process.server import run_models

        return run_models(folders, options)
    if options.models_bytes is not None:
        raise OptionError("--models-gib does nothing for one engine: leave it out")
    if name := next(iter(folders)):
        options = replace(options, names=(name, *options.names))
    hosts = split_hosts(options.engine.hosts)
    rank = own_rank(hosts, values["rank"])
    if hosts:
        name_network(os.environ, hosts[rank])
    if rank:
        return serve_rank(folder, hosts, rank, lambda text: click.echo(text, err=True))
    # imported here: other modes start in half the time without a library for HTTP
    from spark_engine.runtime.server.process.server import run

    return run(folder, options, early)


def _batch(folder: Path, values: Mapping[str, Any]) -> int:
    if values["out"] is None:
        raise OptionError("--batch needs --out FILE, for the answers")
    options = server_options(values)
    check_ranks(folder, options.engine)
    # imported here, as for a server
    from spark_engine.runtime.offline.batch import run_batch

    with Progress(sys.stderr) as shown:
        words = run_batch(Path(values["batch"]), Path(values["out"]), folder, options, shown)
    click.echo(words, err=True)
    return 0


def _chat(folder: Path, values: Mapping[str, Any]) -> int:
    # imported here: a server starts faster without them
    from rich.console import Console

    from spark_engine.runtime.cli.terminal.chat import TerminalChat
    from spark_engine.runtime.cli.terminal.conversation import ChatHistory
    from spark_engine.runtime.cli.terminal.input import LineReader
    from spark_engine.runtime.cli.terminal.screen import Screen
    from spark_engine.runtime.cli.terminal.session import Session

    session = Session(folder, engine_options(values), chat_options(values))
    try:
        conversation = ChatHistory(
            model=session.info.name,
            context=capacity(session.info.limits),
            system=values["system"],
            thinking=session.thinks and not values["no_thinking"],
            settings=settings(values),
        )
        session.render([{"role": "user", "content": "hi"}])  # raises without a chat template
        with Progress(sys.stderr) as shown:
            session.open(shown)
        TerminalChat(session, conversation, LineReader(_state() / HISTORY), Screen(Console())).run()
    finally:
        session.close()
    return 0


def _answer(mode: Mode, folder: Path, values: Mapping[str, Any]) -> int:
    # imported here, as above
    from spark_engine.runtime.cli.terminal.session import Session

    alone = replace(engine_options(values), cache_bytes=0)  # one answer: no cache
    session = Session(folder, alone, chat_options(values))
    try:
        prompt, images = _prompt(session, mode, values)
        with Progress(sys.stderr) as shown:
            chat = mode is Mode.CHAT
            asked = body(values), values["logprobs"]
            answer = session.start(prompt, *asked, shown, chat, images)
        if values["json"]:
            deltas = _collect(session, answer, chat)
            click.echo(json.dumps({**answer.to_json(), **deltas}))
        else:
            _print(session, answer, chat)
        if values["json_schema"] and answer.finish is FinishReason.LENGTH:
            raise OptionError(
                f"the answer was cut after {len(answer.events)} tokens and is no whole JSON of the "
                "schema: raise --max-tokens"
            )
    finally:
        session.close()
    return 0


def _prompt(
    session: Session, mode: Mode, values: Mapping[str, Any]
) -> tuple[list[int], tuple[Image, ...]]:
    if mode is Mode.PROMPT_IDS:
        return _ids(values["prompt_ids"]), ()
    from spark_engine.runtime.cli.terminal.conversation import with_images  # as above

    text = _text(mode.flag, "-" if values[mode] is None else values[mode])
    if mode is Mode.CHAT:
        if values["chat"] is None and not text.strip():
            raise OptionError(
                "standard input is empty: pipe in the message, or give one of --prompt, "
                "--prompt-ids, --chat and --serve"
            )
    texts = {"system": values["system"], "user": with_images(map(Path, values["image"]), text)}
    messages = [{"role": k, "content": v} for k, v in texts.items() if v is not None]
    thinking = False if values["no_thinking"] else None
    return session.prompt(messages, thinking, chat=mode is Mode.CHAT)


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


def _collect(session: Session, answer: Answer, chat: bool) -> dict[str, str]:
    """Runs to the end. For a chat: the answer's parts and the whole text."""
    texts = {Kind.REASONING.value: "", Kind.CONTENT.value: ""}
    for delta in chain.from_iterable(session.deltas(answer)):
        texts[delta.kind.value] += delta.text
    return texts if chat else {}


def _print(session: Session, answer: Answer, chat: bool) -> None:
    """Streams: the answer to standard output, thoughts and figures to standard error."""
    show = _Show()
    texts = ([Delta(Kind.CONTENT, piece.text)] for piece in session.pieces(answer))
    for deltas in session.deltas(answer) if chat else texts:
        show(deltas)
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
    """Shows the parts of an answer as they are generated, thoughts separately."""

    def __init__(self) -> None:
        self._thinking = False
        self._terminals = [stream.isatty() for stream in (sys.stdout, sys.stderr)]

    def __call__(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            thought = delta.kind is Kind.REASONING
            if thought and not self._thinking:
                click.echo(click.style("thought: ", dim=True), nl=False, err=True)
            elif self._thinking and not thought:
                click.echo(click.style("\nanswer: ", dim=True), nl=False, err=True)
            self._thinking = thought
            text = printable(delta.text) if self._terminals[thought] else delta.text
            click.echo(click.style(text, dim=True) if thought else text, nl=False, err=thought)


if __name__ == "__main__":
    main()
