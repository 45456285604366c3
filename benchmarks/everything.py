"""Every figure of docs/performance.md and docs/results/, by one command that may be cut off.

`python -m benchmarks.everything --out DIR` runs the stages of `benchmarks/stages/table.toml` that
this machine can run: those without a result first, then those of the oldest. Engines are built when
the first stage needs them, two at a time where there are cores, beside stages that are not timed;
a timed one has the machine to itself. Each stage has a limit of its own, and nothing begins that
would not end within `--limit`. After each stage DIR/STAGE/, DIR/summary.tsv and DIR.tar.gz are
whole; SIGTERM and SIGINT end everything and leave them so. The same command again goes on with
what is missing: what was cut off or failed is tried again, with `--engines` the engines are kept.

`--dry-run` says what would be run, and when (`--machine 2:32`: on 2 GPUs and 32 cores). `--stages
decode_*,linears` runs those, in this order.
Exit code 0 where all is done or cannot be done here, 1 where not, 130 and 143 after a signal.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from benchmarks.stages.aims import aim_of
from benchmarks.stages.book import Book, Outcome
from benchmarks.stages.machine import Machine, commit_here, here, told
from benchmarks.stages.order import Planned, by_value, schedule
from benchmarks.stages.runner import Runner, Wishes, said
from benchmarks.stages.table import TABLE, Stage, StageError, Table, read

HALF_AN_HOUR = 1740.0  # less what getting there takes
CORES, MOST = 5, 3  # cores for a process beside others, and processes
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WIDE = 96  # characters of a figure in the table


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--stages", help="some of them, a list, in this order; NAME* for several")
    parser.add_argument("--limit", type=float, default=HALF_AN_HOUR, help="seconds for everything")
    parser.add_argument("--engines", type=Path, help="folder of engines; default DIR.engines")
    parser.add_argument("--jobs", type=int, help="processes side by side; default by the cores")
    parser.add_argument("--commit", help="of this tree, where there is no git")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table of stages")
    parser.add_argument("--machine", help="GPUS:CORES to plan for, with --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run")
    args = parser.parse_args(words)
    if args.limit <= 0 or (args.jobs is not None and args.jobs < 1):
        parser.error("--limit and --jobs are positive")
    if args.machine and not (args.dry_run and re.fullmatch(r"\d+:\d+", args.machine)):
        parser.error(f"--machine {args.machine} is to be as in --dry-run --machine 2:32")
    args.out = args.out.absolute()
    args.engines = args.engines or args.out.with_name(f"{args.out.name}.engines")
    return args


def jobs_of(machine: Machine) -> int:
    """How many processes may run side by side: one alone where there are few cores."""
    return max(1, min(MOST, machine.cores // CORES))


def plan_lines(found: Sequence[Planned], machine: Machine, skipped: Sequence[str]) -> Iterator[str]:
    """What would be run, a line each, and how long all of it would take."""
    for one in found:
        kind = "stage" if isinstance(one.row, Stage) else "build"
        when = "no time" if one.late else f"at {one.begin:5.0f} s"
        row = one.row
        alone = ", alone" if isinstance(row, Stage) and row.timed else ""
        yield f"{when:10} {kind} {row.name:28} {row.seconds:4.0f} s ({row.known}){alone}"
    yield from skipped
    ends = [one.begin + one.row.seconds for one in found if not one.late]
    gpus = f"{len(machine.gpus)} GPUs, {machine.cores} cores"
    yield f"{len(ends)} of {len(found)} in {max(ends, default=0):.0f} s, on {gpus}"


def table_lines(stages: Sequence[Stage], outcomes: dict[str, Outcome]) -> Iterator[str]:
    """The end: each stage, its figure and the aim."""
    for stage in stages:
        outcome = outcomes.get(stage.name)
        if outcome is None:
            continue
        code = "" if outcome.done else f"{said(outcome.code)}: "
        figure = f"{code}{outcome.figure}"
        yield f"{stage.name:24} {outcome.seconds:5.0f} s  {figure[:WIDE]}"
        if (aim := aim_of(stage)) and outcome.done:
            yield f"{'':24} {'':5}    aim: {aim}"


@contextmanager
def signals(runner: Runner, got: list[int]) -> Iterator[None]:
    """While it lasts a signal ends the run and not the process; `got` gets it."""

    def stop(number: int, frame: FrameType | None) -> None:
        got.append(number)
        runner.stopped = True

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(args: argparse.Namespace) -> int:
    """One call."""
    table = read(args.table)
    for stage in table.stages:
        aim_of(stage)  # raises now, and not when everything was measured
    stages = [*table.chosen(args.stages.split(","))] if args.stages else by_value(table.stages)
    commit, machine = args.commit or commit_here(), here()
    if args.machine:
        gpus, cores = map(int, args.machine.split(":"))
        machine = Machine(tuple(map(str, range(gpus))), cores)
    wishes = Wishes(args.engines, args.limit, args.jobs or jobs_of(machine))
    if args.dry_run:
        print_plan(table, stages, machine, wishes, args.out, commit)
        return 0
    got: list[int] = []
    with ExitStack() as held:
        args.engines.mkdir(parents=True, exist_ok=True)
        held.enter_context(alone(args.engines / "lock"))
        runner = Runner(table, Book(args.out, commit), machine, wishes, tell)
        held.enter_context(signals(runner, got))
        known = told(machine, commit)
        runner.book.note(known)
        for card in known["cards"]:
            if card["others"]:
                tell(f"also on GPU {card['number']}: {'; '.join(card['others'])}")
        good = runner.run(stages)
        shutil.rmtree(args.engines / "work", ignore_errors=True)
    print("\n".join(table_lines(stages, runner.book.outcomes)))
    print(f"all of it: {runner.book.archive}")
    return 128 + got[0] if got else 0 if good else 1


def print_plan(
    table: Table,
    stages: Sequence[Stage],
    machine: Machine,
    wishes: Wishes,
    out: Path,
    commit: str,
) -> None:
    """What `run` would do; nothing is written."""
    skipped: list[str] = []
    book = Book(out, commit)
    runner = Runner(table, book, machine, wishes, skipped.append)
    state = runner.state(stages)
    done = [s.name for s in stages if book.done(s.name)]
    if done:
        skipped.append(f"done before: {', '.join(done)}")
    print("\n".join(plan_lines(schedule(state, wishes.jobs, runner.limit), machine, skipped)))


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Raises StageError where another run builds in the same folder."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StageError(f"another run uses {path.parent}: give another --engines") from error
        yield


def tell(words: str) -> None:
    """At once, and also where nobody reads any more."""
    try:
        print(words, flush=True)
    except OSError:  # the terminal is gone: the run goes on
        sys.stdout = open(os.devnull, "w")


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    try:
        return run(arguments(words))
    except StageError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
