"""`spark-run`: one answer on standard output, or a server.

Knows the command line and the environment. Exit codes: 0, 2 for something the user can mend (one
line on standard error, no traceback), 70 for a bug of ours.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path

import click

from spark_engine.errors import InternalError, OptionError, UserError
from spark_engine.runtime.embedded import embedded_engine
from spark_engine.runtime.oneshot import Answer, OneShot
from spark_engine.runtime.protocol import Body
from spark_engine.runtime.reply import Delta, Kind, ReplyParser
from spark_engine.runtime.server import ServerOptions, run

USER, BUG, INTERRUPTED = 2, 70, 130


@click.command()
@click.argument("engine", type=click.Path(path_type=Path), required=False)
@click.option("--prompt", help="Continue this text.")
@click.option("--prompt-ids", help="Continue these token ids, e.g. 1,2,3.")
@click.option("--chat", help="Answer this message.")
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
def main(engine: Path | None, **options: object) -> None:
    """Runs the engine folder ENGINE, or the embedded model where none is named.

    Give one of --prompt, --prompt-ids, --chat and --serve.
    """
    try:
        sys.exit(_main(engine, options))
    except UserError as error:
        click.echo(f"spark-run: {error}", err=True)
        sys.exit(USER)
    except InternalError as error:
        traceback.print_exc()
        click.echo(f"spark-run: this is a bug of ours, please report it: {error}", err=True)
        sys.exit(BUG)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _main(engine: Path | None, options: dict[str, object]) -> int:
    modes = [
        m for m in ("prompt", "prompt_ids", "chat", "serve") if options[m] not in (None, False)
    ]
    if len(modes) != 1:
        raise OptionError("give exactly one of --prompt, --prompt-ids, --chat and --serve")
    folder = engine or embedded_engine(_cache(), lambda text: click.echo(text, err=True))
    return _serve(folder, options) if modes == ["serve"] else _answer(folder, options)


def _cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path.home() / ".cache"


def _serve(folder: Path, options: dict[str, object]) -> int:
    logging.basicConfig(level=logging.INFO, format="spark-run: %(message)s")
    taken = ServerOptions(
        host=str(options["host"]),
        port=int(str(options["port"])),
        api_key=None if options["api_key"] is None else str(options["api_key"]),
        names=tuple(options["names"]),  # type: ignore[arg-type]
        max_queue=int(str(options["max_queue"])),
        timeout_s=options["request_timeout"],  # type: ignore[arg-type]
        drain_timeout_s=float(str(options["drain_timeout"])),
        allow_priority=bool(options["allow_priority"]),
        max_connections=int(str(options["max_connections"])),
        read_timeout_s=float(str(options["read_timeout"])),
    )
    return run(folder, taken)


def _answer(folder: Path, options: dict[str, object]) -> int:
    shot = OneShot(folder)
    try:
        answer = shot.start(_prompt(shot, options), _body(options), options["logprobs"])  # type: ignore[arg-type]
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
        return shot.encode(shot.render(str(options["chat"]), not options["no_thinking"]))
    return shot.encode(str(options["prompt"]))


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
    for piece in shot.pieces(answer):
        if parser is None:
            _show([Delta(Kind.CONTENT, piece.text)])
            continue
        _show(parser.push(piece.text))
        if piece.finish is not None:
            _show(parser.flush())
    click.echo()
    row = answer.to_json()
    if row["text"] is None:
        click.echo(" ".join(map(str, row["token_ids"])))
    rate = row["timings"]["tokens_per_s"]
    speed = "" if rate is None else f", {rate:.1f} tokens/s"
    click.echo(f"[{len(answer.events)} tokens, {row['finish_reason']}{speed}]", err=True)


def _show(deltas: list[Delta]) -> None:
    for delta in deltas:
        thought = delta.kind is Kind.REASONING
        click.echo(click.style(delta.text, dim=thought), nl=False, err=thought)


if __name__ == "__main__":
    main()
