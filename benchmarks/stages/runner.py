"""Runs stages and the builds that they need, in their order, until all is done or the time is over.

Knows what a stage is and no stage by name: `order` says what may begin, `jobs` runs it, `book`
keeps what came. A build that failed beside something else is tried once more alone. Whatever ends
the run (its limit, a signal, a mistake) ends every process and leaves what there is on disk.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stages import book as results
from benchmarks.stages.book import Book, Outcome
from benchmarks.stages.jobs import Job
from benchmarks.stages.machine import ROOT, Machine, environment, lacking, words_of
from benchmarks.stages.order import Running, State, alone, late, next_start
from benchmarks.stages.table import Engine, Json, Stage, Table, fill

LOOK = 0.2  # seconds between two looks at what runs
SPARE, SHARE = 15.0, 0.05  # of the limit, for ending processes and packing: the less of the two
TAIL = 64 << 10  # bytes of output whose last line is shown
GIB = 1 << 30
BUILD = "build_"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wishes:
    """Of one call. `limit`: seconds of all of it; `jobs`: processes side by side."""

    engines: Path
    limit: float
    jobs: int


class Runner:
    """One call."""

    def __init__(
        self, table: Table, book: Book, machine: Machine, wishes: Wishes, say: Say = print
    ) -> None:
        self._table, self.book, self._machine = table, book, machine
        self._wishes, self._say = wishes, say
        self._began = time.monotonic()
        self._jobs: dict[str, Job] = {}
        self._beside: dict[str, set[str]] = {}
        self._load = dict.fromkeys(machine.gpus, 0)
        self.stopped = False  # a signal sets it

    @property
    def limit(self) -> float:
        """Seconds after which nothing runs any more."""
        return self._wishes.limit - min(SPARE, SHARE * self._wishes.limit)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def state(self, stages: Sequence[Stage]) -> State:
        """What is to be run of these; what cannot be is written down with its reason."""
        pending = []
        for stage in stages:
            rows: tuple[Stage | Engine, ...] = (
                stage,
                *(self._table.engines[name] for name in stage.engines),
            )
            reason = next(filter(None, (lacking(row, self._machine) for row in rows)), "")
            if self.book.done(stage.name):
                continue
            if reason:
                outcome = Outcome(stage.name, results.SKIP, 0.0, reason, self.book.commit)
                self.book.outcomes[stage.name] = outcome
                self._say(f"{stage.name}: skipped: {reason}")
            else:
                pending.append(stage)
        wanted = {name for stage in pending for name in stage.engines}
        built = {name for name in wanted if self._marker(name, self._table.engines[name])}
        return State(self._table.engines, pending, built)

    def run(self, stages: Sequence[Stage]) -> bool:
        """Whether every stage is done, or cannot be run here."""
        state = self.state(stages)
        self.book.save()
        try:
            while not self.stopped and (state.pending or state.running):
                self._reap(state)
                if self._now > self.limit:
                    break
                for stage in late(state, self._now, self.limit):
                    words = f"needs {state.wanted(stage, self._now):.0f} s of --limit"
                    self._leave(state, stage, results.LATE, words)
                row = next_start(state, self._wishes.jobs, self._now)
                if row is not None:
                    self._start(state, row)
                elif not state.running:
                    break
                else:
                    time.sleep(LOOK)
        finally:
            for running in state.running:
                self._end(running.row, results.CUT)
            for stage in state.pending:
                self._leave(state, stage, results.LATE, "the run ended before it")
        found = [self.book.outcomes.get(stage.name) for stage in stages]
        return all(o is not None and (o.done or o.code == results.SKIP) for o in found)

    # ---- beginning -------------------------------------------------------------------------------

    def _start(self, state: State, row: Stage | Engine) -> None:
        """Begins a stage or a build, or says why it cannot."""
        if isinstance(row, Stage):
            state.pending.remove(row)
            name, command = row.name, self._command(row)
        else:
            if reason := self._make_room(state, row):
                return self._give_up(state, row, reason)
            name = BUILD + row.name
            command = fill(row.command, {"engine": str(self._folder(row.name))})
        words = words_of(command)
        out = self.book.begin(name, words)
        gpus = sorted(self._load, key=lambda gpu: self._load[gpu])[: row.gpus]
        gpus.sort(key=self._machine.gpus.index)
        running = Running(row, self._now, alone(state, row), tuple(gpus))
        for gpu in gpus:
            self._load[gpu] += 1
        stdout = out / row.stdout if isinstance(row, Stage) and row.stdout else None
        most = min(row.most, self.limit - self._now)
        env = environment(row, tuple(gpus))
        self._beside[row.name] = {r.row.name for r in state.running}
        for other in state.running:
            self._beside[other.row.name].add(row.name)
        state.running.append(running)
        try:
            self._jobs[name] = Job(words, out / results.OUTPUT, env, most, ROOT, stdout)
        except OSError as error:
            self._finish(state, running, "failed", f"{words[0]}: {error}")

    def _command(self, stage: Stage) -> str:
        out = (self.book.folder / stage.name).absolute()
        given = {"out": str(out), "work": str(self._scratch(stage.name))}
        given["commit"] = self.book.commit
        for name in stage.engines:
            given[f"engine.{name}"] = str(self._folder(name))
            marker = self._marker(name, self._table.engines[name])
            given[f"built.{name}"] = str(marker["seconds"] if marker else 0.0)
        return fill(stage.command, given)

    def _folder(self, name: str) -> Path:
        return (self._wishes.engines / name).absolute()

    def _scratch(self, name: str) -> Path:
        folder = (self._wishes.engines / "work" / name).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    # ---- engines ---------------------------------------------------------------------------------

    def _marker(self, name: str, engine: Engine) -> Json:
        """What is known of an engine that was built of this row and tree; empty: there is none."""
        path = self._wishes.engines / f"{name}.json"
        if not path.is_file() or not self._folder(name).exists():
            return {}
        known: Json = json.loads(path.read_text())
        asked = (engine.command, self.book.commit)
        whole = known["seconds"] is not None and (known["command"], known["commit"]) == asked
        return known if whole else {}

    def _mark(self, engine: Engine, seconds: float | None) -> None:
        """Says that an engine is of this row, and how long it took; None: it is not whole yet."""
        known = {"command": engine.command, "commit": self.book.commit, "seconds": seconds}
        (self._wishes.engines / f"{engine.name}.json").write_text(json.dumps(known) + "\n")

    def _make_room(self, state: State, engine: Engine) -> str:
        """Takes engines away that nobody waits for until this one fits; why it does not, or ""."""
        marker, folder = self._wishes.engines / f"{engine.name}.json", self._folder(engine.name)
        if folder.exists() and not marker.is_file():
            return f"{folder} is there, and no run of this made it: give another --engines"
        self._drop(engine.name)  # half of one, or one of another tree
        wanted = {name for stage in state.pending for name in stage.engines}
        wanted |= {
            name for r in state.running if isinstance(r.row, Stage) for name in r.row.engines
        }
        spare = [name for name in self._table.engines if name in state.built - wanted]
        while (free := shutil.disk_usage(self._wishes.engines).free) < engine.gib * GIB:
            if not spare:
                there = f"{free / GIB:.0f} GiB of disk are free under {self._wishes.engines}"
                return f"engine {engine.name} needs {engine.gib:.0f} GiB: {there}"
            state.built.discard(spare[0])
            self._drop(spare.pop(0))
        self._mark(engine, None)
        return ""

    def _drop(self, name: str) -> None:
        (self._wishes.engines / f"{name}.json").unlink(missing_ok=True)
        shutil.rmtree(self._folder(name), ignore_errors=True)

    def _built(self, state: State, engine: Engine, seconds: float) -> None:
        """Marks an engine as whole."""
        self._mark(engine, round(seconds, 1))
        for name in engine.keep:
            if (file := self._folder(engine.name) / name).is_file():
                shutil.copy(file, self.book.folder / (BUILD + engine.name) / name)
        state.built.add(engine.name)

    def _give_up(self, state: State, engine: Engine, reason: str) -> None:
        """Leaves out all stages that need an engine."""
        for stage in [s for s in state.pending if engine.name in s.engines]:
            self._leave(state, stage, results.FAILED, reason)

    # ---- ending ----------------------------------------------------------------------------------

    def _reap(self, state: State) -> None:
        """Writes down what has ended, and ends what is late."""
        for running in [*state.running]:
            job = self._job(running.row)
            over = self._now > self.limit
            if job.ended():
                self._finish(state, running, str(job.code))
            elif job.late:
                self._finish(state, running, results.CUT if over else results.LIMIT)

    def _finish(self, state: State, running: Running, code: str, figure: str = "") -> None:
        row = running.row
        state.running.remove(running)
        for gpu in running.gpus:
            self._load[gpu] -= 1
        outcome = self._end(row, code, figure)
        if isinstance(row, Stage):
            return
        if outcome.done:
            self._built(state, row, outcome.seconds)
        elif outcome.beside and row.name not in state.lonely:
            self._say(f"{outcome.name}: tried again with nothing beside it")
            state.lonely.add(row.name)
        else:
            self._give_up(state, row, f"engine {row.name} was not built: {outcome.figure}")

    def _end(self, row: Stage | Engine, code: str, figure: str = "") -> Outcome:
        """Ends what runs of a row, keeps what came and says it in a line."""
        name = row.name if isinstance(row, Stage) else BUILD + row.name
        seconds = 0.0
        if job := self._jobs.pop(name, None):
            job.end()
            seconds = job.seconds
        shutil.rmtree(self._scratch(row.name), ignore_errors=True)
        if not figure:
            files, expression = [results.OUTPUT], ""
            if isinstance(row, Stage):
                files, expression = [*filter(None, [row.stdout]), *files], row.figure
            paths = [self.book.folder / name / file for file in files]
            code, figure = judged(code, paths, expression)
        beside = tuple(sorted(self._beside.pop(row.name, ())))
        outcome = Outcome(name, code, round(seconds, 1), figure, self.book.commit, beside)
        self.book.end(outcome)
        ended = "" if outcome.done else f", {said(code)}"
        self._say(f"{name}: {seconds:.0f} s{ended}: {' '.join(figure.split())[:160]}")
        return outcome

    def _leave(self, state: State, stage: Stage, code: str, words: str) -> None:
        """Writes down why a stage is not begun; what an earlier call found of it stays."""
        if stage in state.pending:
            state.pending.remove(stage)
        if not (self.book.folder / stage.name).is_dir():
            self.book.end(Outcome(stage.name, code, 0.0, words, self.book.commit))
        self._say(f"{stage.name}: {said(code)}: {words}")

    def _job(self, row: Stage | Engine) -> Job:
        return self._jobs[row.name if isinstance(row, Stage) else BUILD + row.name]


def said(code: str) -> str:
    """A code in words."""
    return f"ended with {code}" if code.lstrip("-").isdigit() else code


def judged(code: str, paths: Sequence[Path], figure: str) -> tuple[str, str]:
    """The code, and one line of what was said: what `figure` finds; where the stage failed or has
    no such expression the last line. An end without a figure is none."""
    text = "\n".join(path.read_text(errors="replace") for path in paths if path.is_file())
    lines = [line for line in text[-TAIL:].splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    found = [" ".join(filter(None, m.groups())) or m[0] for m in re.finditer(figure, text, re.M)]
    if not figure:
        return code, last
    if found:
        return code, ", ".join(found) if code == results.DONE else f"{', '.join(found)}; {last}"
    return (results.FAILED, f"no figure in it: {last}") if code == results.DONE else (code, last)
