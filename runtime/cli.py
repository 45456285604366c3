"""`spark-run`: one answer on standard output, or a server.

Knows the command line and the environment; `command` says how it ends. An option that would do
nothing is refused.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from spark_engine.command import command
from spark_engine.errors import OptionError
from spark_engine.interface import MOST_DRAFTS
from spark_engine.progress import Progress
from spark_engine.runtime.embedded import embedded_engine
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.pacing import BALANCED, Pace, PrefillPolicy
from spark_engine.runtime.oneshot import Answer, OneShot
from spark_engine.runtime.profile import finish
from spark_engine.runtime.server.api.common import Body
from spark_engine.runtime.server.server import ServerOptions, run
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind

GIB, MOST_GIB = 1 << 30, 1 << 20
MODES = {"prompt", "prompt_ids", "chat", "serve"}
ANSWER = {  # options of one answer; those that are no mode and not here are the server's
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("ignore_eos", "logprobs", "as_json", "no_thinking"),
}
BOTH = {"engine", "drafts", "no_graphs", "profile"}  # of an answer and of the server


@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option("--prompt", help="Continue this text; - reads standard input.")
@click.option("--prompt-ids", help="Continue these token ids, e.g. 1,2,3.")
@click.option("--chat", help="Answer this message; - reads standard input.")
@click.option("--serve", is_flag=True, help="Serve the OpenAI API over HTTP.")
@click.option("--no-thinking", is_flag=True, help="With --chat: answer without thinking first.")
@click.option("--max-tokens", type=int, help="Tokens at most; as many as fit by default.")
@click.option("--min-tokens", type=int, help="Do not end before this many tokens.")
@click.option("--temperature", type=float, help="0 takes the likeliest token.")
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--min-p", type=float)
@click.option("--seed", type=int, help="Makes the answer repeatable.")
@click.option("--stop", multiple=True, help="End before this text. May be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@click.option("--logprobs", type=int, help="Report log-probabilities and the top K (with --json).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option(
    "--drafts",
    type=click.IntRange(0, MOST_DRAFTS),
    help="Draft tokens a round at most; 0 turns drafts off, as the engine chooses by default.",
)
@click.option(
    "--profile",
    type=click.Path(dir_okay=False),
    help="Write a trace of every step to this file (Chrome's format), and the GPU's share of time.",
)
@click.option("--no-graphs", is_flag=True, help="Queue launches one by one, to compare (slower).")
@click.option(
    "--policy",
    type=click.Choice([pace.value for pace in Pace]),
    default=BALANCED.pace.value,
    show_default=True,
    help="What prefill beside decode is for: short waits of everybody's tokens, or many tokens.",
)
@click.option(
    "--itl-ms",
    type=float,
    metavar="T",
    help="Milliseconds that a prefill may hold a token up; by default as --policy says.",
)
@click.option(
    "--cache-gib",
    type=float,
    metavar="G",
    help="GiB of the prefix cache, pages and states; by default from the memory that is free.",
)
@click.option("--no-cache", is_flag=True, help="Compute every prompt from its beginning.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--api-key", envvar="SPARK_API_KEY", help="Ask clients for this key.")
@click.option("--served-model-name", "names", multiple=True, help="What clients call the model.")
@click.option("--max-queue", type=click.IntRange(0), default=256, show_default=True)
@click.option("--max-connections", type=click.IntRange(1), default=2048, show_default=True)
@click.option(
    "--read-timeout",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that the head of a request may take to arrive, and then its body.",
)
@click.option("--allow-priority", is_flag=True, help="Let requests go before others (`priority`).")
@click.option("--request-timeout", type=float, help="Seconds that one request may take.")
@click.option("--drain-timeout", type=float, default=30.0, show_default=True)
@click.version_option(package_name="spark-engine", prog_name="spark-run")
def main(engine: Path | None, **options: object) -> None:
    """Runs the engine folder ENGINE, or the embedded model where none is named.

    Give one of --prompt, --prompt-ids, --chat and --serve.
    """
    with command("spark-run"):
        modes = [mode for mode in MODES if options[mode] not in (None, False)]
        if len(modes) != 1:
            raise OptionError("give exactly one of --prompt, --prompt-ids, --chat and --serve")
        _refuse_idle(click.get_current_context(), modes[0], bool(options["as_json"]))
        folder = engine or embedded_engine(_cache(), lambda text: click.echo(text, err=True))
        serving = modes == ["serve"]
        code = _serve(folder, options) if serving else _answer(folder, options)
        if options["profile"] is not None:
            click.echo(finish(str(options["profile"])), err=True)
        sys.exit(code)


def _refuse_idle(context: click.Context, mode: str, as_json: bool) -> None:
    """Raises OptionError for an option that was given and that this mode would ignore."""
    given = {
        p.name: p.opts[0]
        for p in context.command.params
        if p.name and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE
    }
    for name in given.keys() - MODES - BOTH:
        if mode == "serve" and name in ANSWER:
            why = "with --serve: clients say it in each request"
        elif mode != "serve" and name not in ANSWER:
            why = f"without --serve: leave it out, or serve instead of {given[mode]}"
        elif name == "no_thinking" and mode != "chat":
            why = f"with {given[mode]}, which has no chat template; --chat has"
        elif name == "logprobs" and not as_json:
            why = "without --json, which prints them: add --json"
        else:
            continue
        raise OptionError(f"{given[name]} does nothing {why}")


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path.home() / ".cache"


def _serve(folder: Path, options: dict[str, object]) -> int:
    logging.basicConfig(level=logging.INFO, format="spark-run: %(message)s")
    host = str(options["host"])
    taken = ServerOptions(
        host=host,
        port=int(str(options["port"])),
        api_key=None if options["api_key"] is None else str(options["api_key"]),
        names=tuple(options["names"]),  # type: ignore[arg-type]
        max_queue=int(str(options["max_queue"])),
        timeout_s=options["request_timeout"],  # type: ignore[arg-type]
        drain_timeout_s=float(str(options["drain_timeout"])),
        allow_priority=bool(options["allow_priority"]),
        max_connections=int(str(options["max_connections"])),
        read_timeout_s=float(str(options["read_timeout"])),
        engine=_engine_options(options),
    )
    return run(folder, taken)


def _engine_options(options: dict[str, object]) -> EngineOptions:
    pace, itl_ms = Pace(str(options["policy"])), options["itl_ms"]
    return EngineOptions(
        policy=PrefillPolicy(pace, itl_ms),  # type: ignore[arg-type]
        cache_bytes=_cache_bytes(options["cache_gib"], bool(options["no_cache"])),  # type: ignore[arg-type]
        drafts=options["drafts"],  # type: ignore[arg-type]
        graphs=not options["no_graphs"],
        profile=options["profile"],  # type: ignore[arg-type]
    )


def _cache_bytes(gib: float | None, none: bool) -> int | None:
    if gib is None:
        return 0 if none else None
    if none:
        raise OptionError("--cache-gib and --no-cache contradict each other: give one of them")
    if not 0 <= gib <= MOST_GIB:
        raise OptionError(f"--cache-gib is {gib:g}; give GiB from 0 (no cache) on, e.g. 8")
    return int(gib * GIB)


def _answer(folder: Path, options: dict[str, object]) -> int:
    shot = OneShot(folder, _engine_options(options))
    try:
        prompt = _prompt(shot, options)
        with Progress(sys.stderr) as shown:
            answer = shot.start(prompt, _body(options), options["logprobs"], shown)  # type: ignore[arg-type]
        if options["as_json"]:
            deltas = _collect(shot, answer, chat=options["chat"] is not None)
            click.echo(json.dumps({**answer.to_json(), **deltas}))
        else:
            _print(shot, answer, chat=options["chat"] is not None)
    finally:
        shot.close()
    return 0


def _prompt(shot: OneShot, options: dict[str, object]) -> list[int]:
    if options["prompt_ids"] is not None:
        return _ids(str(options["prompt_ids"]))
    if options["chat"] is not None:
        question = _text("--chat", str(options["chat"]))
        return shot.encode(shot.render(question, not options["no_thinking"]))
    return shot.encode(_text("--prompt", str(options["prompt"])))


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


def _body(options: dict[str, object]) -> Body:
    plain = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: options[name] for name in plain}
    stop = list(options["stop"])  # type: ignore[call-overload]
    return Body(**given, stop=stop, ignore_eos=bool(options["ignore_eos"]))  # type: ignore[arg-type]


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
