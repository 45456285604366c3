"""`spark-bench`: load tests of servers.

Knows the command line and the environment; `command` says how it ends.
"""

import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from spark_engine.bench import arena, machine, plot, replay, report
from spark_engine.bench.figures import targets
from spark_engine.bench.given import (
    body_of,
    cards_of,
    ids_of,
    needing_aiohttp,
    numbers,
    read_target,
)
from spark_engine.bench.load import Arrivals, Json, Load, LoadPlan
from spark_engine.bench.lock import alone
from spark_engine.bench.prompts import ConversationShape, draw, span
from spark_engine.bench.target import ask, started
from spark_engine.command import check_writable, command
from spark_engine.errors import OptionError
from spark_engine.progress import Progress
from spark_engine.runtime.cli.options.option import Finite

LOCK = "spark-bench.lock"
RANDOM = ("prompts", "input", "turn_input", "output", "turns", "shared", "pause", "vocab",
          "tokenizer")  # fmt: skip
KEY, HIDDEN = "--api-key", "***"


COUNT = click.IntRange(1)
SECONDS = Finite(0)
_SHARED: tuple[click.Parameter, ...] = (  # of both commands
    click.Argument(["target"], metavar="URL|ENGINE"),
    click.Argument(["more"], metavar="[-- SPARK-RUN-OPTIONS]", nargs=-1, type=click.UNPROCESSED),
    click.Option(
        ["--vocab"], type=COUNT, help="Draw token ids below this; by default the engine's, or 1000."
    ),
    click.Option(["--seed"], type=int, help="Seed of prompts and arrivals; a new one by default."),
    click.Option(["--model"], help="Model name at URL."),
    click.Option(["--api-key"], envvar="SPARK_API_KEY", help="API key of the server."),
    click.Option(["--json", "as_json"], is_flag=True, help="Print the result as JSON."),
    click.Option(["--wait"], is_flag=True, help="Wait for another bench on this machine to end."),
)


@click.group(context_settings={"show_default": True})
@click.version_option(package_name="spark-engine", prog_name="spark-bench")
def main() -> None:
    """Load tests of servers, as their clients see them."""


@main.command(params=[*_SHARED])
@click.option(
    "--closed", type=COUNT, help="Closed loop: this many requests in flight; 8 is the default load."
)
@click.option("--rate", type=Finite(0, min_open=True), help="Open loop: Poisson arrivals a second.")
@click.option(
    "--bursts", type=COUNT, help="Bursts: this many arrivals at once, every --every seconds."
)
@click.option("--every", type=SECONDS, default=10.0, help="Seconds between bursts.")
@click.option(
    "--stagger", type=SECONDS, default=0.0, help="Seconds between the arrivals of a burst."
)
@click.option(
    "--requests",
    type=COUNT,
    default=64,
    help="Requests of a run (conversations, with --turns or --replay).",
)
@click.option(
    "--prompts",
    type=click.Choice(["ids", "text"]),
    default="ids",
    help="Prompts as random token ids, or as text of the tokenizer.",
)
@click.option("--input", default="512-2048", help="Prompt tokens, N or MIN-MAX.")
@click.option("--output", default="64-256", help="Output tokens, N or MIN-MAX.")
@click.option(
    "--shared", type=click.IntRange(0), default=0, help="Prefix tokens that all prompts share."
)
@click.option("--turns", type=COUNT, default=1, help="Turns of each conversation.")
@click.option("--turn-input", default="64-256", help="New prompt tokens of each later turn.")
@click.option("--pause", type=SECONDS, default=0.0, help="Seconds before each later turn.")
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Folder of a tokenizer.json, for --prompts text.",
)
@click.option(
    "--replay",
    "recorded",
    type=click.Path(path_type=Path),
    help="Replay a recorded multi-turn trace (JSON).",
)
@click.option(
    "--own-answers", is_flag=True, help="With --replay: continue from the server's answers."
)
@click.option("--body", default="{}", help="JSON that is merged into every request.")
@click.option(
    "--target",
    "wanted",
    multiple=True,
    metavar="NAME=MS",
    help="Goodput target: ttft=500, itl=50, tpot or e2e. May be repeated.",
)
@click.option(
    "--repeats", type=COUNT, default=3, help="Number of runs; the report shows their spread."
)
@click.option("--warm", type=click.IntRange(0), default=8, help="Warm-up requests, not counted.")
@click.option(
    "--processes", type=COUNT, help="Client processes; by default one for four cores, 8 at most."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the JSON to a file."
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    help="Plot the result to a .html or .png file.",
)
def serve(target: str, more: tuple[str, ...], **options: Any) -> None:
    """Load-tests the server at URL, or one started for ENGINE: TTFT, ITL, throughput, goodput.

    Options after -- go to the `spark-run --serve` of ENGINE, for instance -- --profile trace.json
    """
    kept: list[Json] = []
    with command("spark-bench"):
        try:
            _measure(target, more, options, kept.append)
        finally:  # also if the bench is stopped or the server ends: the finished runs are valid
            if kept:
                _tell(kept[-1], options)


@main.command("arena", params=[*_SHARED])
@click.option(
    "--depth",
    default=",".join(map(str, arena.DEPTHS)),
    help="Lengths of the context before each prompt, in tokens.",
)
@click.option(
    "--streams", default=",".join(map(str, arena.STREAMS)), help="Numbers of requests at once."
)
@click.option(
    "--repeats",
    type=COUNT,
    default=3,
    help="Runs of each cell; the table has their medians.",
)
def run_arena(target: str, more: tuple[str, ...], **options: Any) -> None:
    """Spark Arena's grid: prompts of 2,048 tokens after contexts, answers of 128.

    Depths beyond the server's context are left out. Options after -- go to `spark-run --serve`.
    """
    with command("spark-bench"):
        found = _arena(target, more, options)
        if options["as_json"]:
            click.echo(json.dumps(found, indent=1))
            return
        title = f"{found['model']}: {arena.PROMPT:,} tokens in, {arena.OUTPUT} out"
        Console(width=max(Console().width, 100)).print(arena.table(found["cells"], title))


def _arena(where: str, more: tuple[str, ...], options: Json) -> Json:
    clients_module = needing_aiohttp("clients")
    seed = time.time_ns() % 2**32 if options["seed"] is None else options["seed"]
    depths, streams = numbers("--depth", options, 0), numbers("--streams", options, 1)
    grid = arena.Grid(depths, streams, options["repeats"], seed)
    url, engine = read_target(where, more)
    ids, say = ids_of(engine, {**options, "tokenizer": None}), _say
    with ExitStack() as stack:
        stack.enter_context(alone(Path(tempfile.gettempdir()) / LOCK, options["wait"], say))
        if engine:
            url = stack.enter_context(started(engine, more, say))
        found = ask(url, options["model"], options["api_key"])
        clients = stack.enter_context(clients_module.Clients(found, 1))
        shown = stack.enter_context(Progress(sys.stderr))
        cells: list[Json] = []
        with shown.track("cells", len(grid.cells(found.most))) as step:
            for cell in arena.measured(clients, ids, grid, found.most):
                cells.append(cell)
                step()
    head = {"model": found.model, "url": url, "server_version": found.version, "seed": seed}
    return {**head, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cells": cells}


def _say(words: str) -> None:
    click.echo(words, err=True)


def _tell(result: Json, options: Json) -> None:
    result["command"] = shlex.join(["spark-bench", *_without_keys(sys.argv[1:])])
    if options["out"]:
        options["out"].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options["picture"]:
        plot.save(result, options["picture"])
    if options["as_json"]:
        click.echo(json.dumps(result, indent=1))
    else:
        report.show(result, Console(width=max(Console().width, 100)))


def _without_keys(words: Iterable[str]) -> list[str]:
    """The options of `spark-run` without keys, since results are shared."""
    found: list[str] = []
    for word in words:
        name, given, _ = word.partition("=")
        if found and found[-1] == KEY:
            word = HIDDEN
        elif name == KEY and given:
            word = f"{KEY}={HIDDEN}"
        found.append(word)
    return found


def _measure(
    where: str, more: tuple[str, ...], options: Json, keep: Callable[[Json], None]
) -> None:
    """Checks all options, then runs; `keep` receives the result after every run. Raises OptionError
    or EngineError."""
    _refuse_idle(click.get_current_context(), options["recorded"] is not None)
    measure = needing_aiohttp("measure").measure
    url, engine = read_target(where, more)
    plan = _plan(engine, cards_of(more, engine, os.environ), options)
    if options["picture"]:
        plot.check(options["picture"])
        check_writable("--plot", options["picture"])
    if options["out"]:
        check_writable("--out", options["out"])
    with ExitStack() as stack:
        stack.enter_context(alone(Path(tempfile.gettempdir()) / LOCK, options["wait"], _say))
        others = machine.processes(*plan.cards) if engine else []
        if engine:
            url = stack.enter_context(started(engine, more, _say))
        found = ask(url, options["model"], options["api_key"])
        shown = stack.enter_context(Progress(sys.stderr))
        measure(found, plan, shown, lambda result: keep({**result, "others": others}))


def _plan(engine: Path | None, cards: tuple[str, ...], options: Json) -> LoadPlan:
    closed = options["closed"]
    if closed is options["rate"] is options["bursts"] is None:
        closed = 8
    arrivals = Arrivals(
        closed, options["rate"], options["bursts"], options["every"], options["stagger"]
    )
    arrivals.check()
    body, seed = body_of(options["body"]), options["seed"]
    recorded = replay.read(options["recorded"]) if options["recorded"] else None
    shape = _shape(options)
    ids = ids_of(engine, options)
    as_text, count = options["prompts"] == "text", options["requests"]

    def make(rng: random.Random, mark: str) -> Load:
        if recorded is None:
            return arrivals.spread(draw(shape, count, ids, as_text, rng), body, rng)
        rows = [recorded[i % len(recorded)] for i in range(count)]
        turns = [replay.turns(row, mark, options["own_answers"]) for row in rows]
        return arrivals.spread(turns, [{**replay.more(row, mark), **body} for row in rows], rng)

    if as_text and recorded is None:
        ids.text(())  # raises if there is no tokenizer
    return LoadPlan(
        make,
        longest=None if recorded else shape.longest,
        repeats=options["repeats"],
        warm=options["warm"],
        processes=options["processes"] or max(1, min(8, (os.cpu_count() or 1) // 4)),
        targets=targets(options["wanted"]),
        seed=time.time_ns() % 2**32 if seed is None else seed,
        cards=cards,
    )


def _shape(options: Json) -> ConversationShape:
    return ConversationShape(
        first=span(options["input"], "--input"),
        later=span(options["turn_input"], "--turn-input"),
        output=span(options["output"], "--output"),
        turns=options["turns"],
        shared=options["shared"],
        pause_s=options["pause"],
    )


def _refuse_idle(context: click.Context, recorded: bool) -> None:
    """Raises OptionError for a given option without effect."""
    default = click.core.ParameterSource.DEFAULT
    given = {
        p.name: p.opts[0]
        for p in context.command.params
        if p.name and context.get_parameter_source(p.name) is not default
    }
    idle = dict.fromkeys(RANDOM, "with --replay: the trace decides") if recorded else {}
    idle |= {} if recorded else {"own_answers": "without --replay"}
    if "bursts" not in given:
        idle |= dict.fromkeys(("every", "stagger"), "without --bursts")
    if context.params["turns"] == 1:
        idle |= dict.fromkeys(("pause", "turn_input"), "without --turns of 2 or more")
    for name in (name for name in given if name in idle):
        raise OptionError(f"{given[name]} does nothing {idle[name]}: leave it out")


if __name__ == "__main__":
    main()
