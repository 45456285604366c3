"""The rehearsal of another GPU on a part of this one: all that can be run of it, in one command.

`python -m benchmarks.rehearsal` runs, with SPARK_REHEARSE=sm_121a in the environment of every part
(so that all it opens is a part of 48 multiprocessors, with that GPU's kernels): `ops`, every tactic
over its op's cases; `tests`, the other tests that need a GPU; `check`, the embedded model's engine
by spark-check and the trial of batches; `layers`, both published models' shapes with drawn weights,
launch by launch; `steps`, 100,000 steps next to another process; `memcheck` and `racecheck`, the
cases of `ops` again under compute-sanitizer. `--part ops,check` runs some, `--ops linear,sample`
these three for some ops. Two calls with other parts and another `--work` may run side by side.
What is found is printed and written as it comes, to `PART.json.xz` under `--out`; the pages of
docs/results/ are made from these. A part that dies or says nothing for a while is started again
behind the case that ended it, which gets a row: wrong, or hung. `--resume` continues a call that
was cut off: its right rows stay. Exit code 1 where a row is not right.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import IO, Any

from benchmarks.result_files import REHEARSED, read, write
from spark_engine.device.gpu import present
from spark_engine.device.rehearsal import VARIABLE
from spark_engine.kernel import TARGETS

PARTS: Mapping[str, float] = {  # by the seconds for which each may say nothing
    "ops": 180.0,
    "tests": 240.0,
    "check": 240.0,
    "layers": 240.0,
    "steps": 180.0,
    "memcheck": 400.0,
    "racecheck": 400.0,
}
SANITIZERS = ("memcheck", "racecheck")
TRIES = 6
KEEP = 1.0  # seconds between two writings of a file
Row = dict[str, Any]
Start = Callable[[str, Sequence[str]], Sequence[str]]


@dataclass
class Found:
    """What a part reports, in the file that it is kept in; `stamp`: fields that each row gets."""

    path: Path
    stamp: Row = field(default_factory=dict)
    head: Row = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    started: str = ""
    _kept: float = 0.0

    def hear(self, said: Mapping[str, Any]) -> str:
        """Takes one line of a part, and returns what is printed."""
        if "head" in said:
            self.head |= said["head"]
            self.keep()
            return json.dumps(said["head"])
        if "begin" in said:
            self.started = said["begin"]
            return ""
        if "row" in said:
            row = said["row"] | self.stamp
            self.rows[row["label"]], self.started = row, ""
            if time.monotonic() - self._kept >= KEEP:
                self.keep()
            more = {
                k: v
                for k, v in row.items()
                if k not in ("label", "right", *self.stamp) and v not in ("", 0)
            }
            words = ", ".join(f"{k} {v}" for k, v in more.items() if not isinstance(v, list | dict))
            return f"{'right' if row.get('right') else 'WRONG'} {row['label']}: {words}"
        return f"  {said.get('note', '')}"

    def fail(self, why: str) -> str:
        """The process ended in the middle of something, which is not right."""
        label = self.started or "the part itself"
        return self.hear({"row": {"label": label, "right": False, "note": why}})

    def keep(self) -> None:
        self._kept = time.monotonic()
        write(self.path, {**self.head, "date": str(date.today()), "rows": [*self.rows.values()]})


def kept_rows(rows: Sequence[Row]) -> dict[str, Row]:
    """What an earlier call found right, by label."""
    return {row["label"]: row for row in rows if row.get("right")}


def module_of(part: str, words: Sequence[str]) -> Sequence[str]:
    module = "sanitized" if part in SANITIZERS else part
    return [sys.executable, "-u", "-m", f"benchmarks.rehearsal.{module}", *words]


def run_part(
    part: str, found: Found, options: Row, silence: float, start: Start = module_of
) -> bool:
    """Runs a part to its end; True where all its rows are right."""
    found.head.pop("gave_up", None)  # of an earlier call
    for _ in range(TRIES):
        before = len(found.rows)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as done:
            json.dump(list(found.rows), done)
            done.flush()
            why = _watched(start(part, (done.name, json.dumps(options))), found, silence, options)
        if not why:
            break
        if found.started or len(found.rows) == before:
            named = bool(found.started)
            print(found.fail(why), flush=True)
            if not named:
                break  # it died of no row: it would again
    else:
        found.head["gave_up"] = f"after {TRIES} tries: {why}"
    found.keep()
    ended = "gave_up" not in found.head
    return ended and bool(found.rows) and all(row.get("right") for row in found.rows.values())


def _watched(command: Sequence[str], found: Found, silence: float, options: Row) -> str:
    """Why the process did not end as it should; empty where it did."""
    environment = {**os.environ, VARIABLE: options["rehearse"], "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    try:
        while True:
            try:
                line = lines.get(timeout=silence)
            except queue.Empty:
                return f"hung: it said nothing for {silence:.0f} s"
            if line is None:
                code = process.wait()
                return f"it ended with code {code}" if code else ""
            words = found.hear(json.loads(line)) if line.startswith("{") else line.rstrip()
            if words:
                print(words, flush=True)
    finally:
        with suppress(ProcessLookupError):  # with what it started, which may be on the GPU
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default=",".join(PARTS), help="some of them, a list")
    parser.add_argument("--target", default="sm_121a", help="the target that is rehearsed")
    parser.add_argument("--models", help="of `layers` and `steps`, a list; default all")
    parser.add_argument("--ops", help="of `ops` and the sanitizers, a list; default all")
    parser.add_argument("--jobs", type=int, help="processes of a sanitizer at a time")
    parser.add_argument("--steps", type=int, default=100_000, help="of `steps`")
    parser.add_argument("--work", type=Path, default=Path("/tmp/rehearsal"), help="for engines")
    parser.add_argument("--out", type=Path, default=REHEARSED, help="folder of the rows")
    parser.add_argument("--resume", action="store_true", help="keep what was right before")
    args = parser.parse_args(words)
    unknown = sorted(set(args.part.split(",")) - set(PARTS))
    if unknown:
        parser.error(f"--part {','.join(unknown)} is not known; there are {', '.join(PARTS)}")
    return args


def check_here(target: str) -> str:
    """The card's name. Ends with a sentence where nothing could be run, before any kept file is
    touched."""
    if target not in TARGETS:
        raise SystemExit(f"--target {target} is not known; there are {', '.join(TARGETS)}")
    if (here := present()) is None:
        raise SystemExit("no GPU can be used here, and a rehearsal needs a part of one")
    if here.card.sms < TARGETS[target].card.sms:
        raise SystemExit(
            f"{here.card.product} has {here.card.sms} multiprocessors, fewer than the "
            f"{TARGETS[target].card.sms} that {target} is rehearsed on"
        )
    return here.card.product


def main() -> int:
    """Runs the parts in order and sums up."""
    args = arguments()
    options = {"rehearse": args.target, "work": str(args.work), "steps": args.steps}
    options |= {"out": str(args.out), "jobs": args.jobs}
    for name in ("models", "ops"):
        options |= {name: value.split(",")} if (value := getattr(args, name)) else {}
    stamp = {"card": check_here(args.target), "date": str(date.today())}
    right = True
    for part in args.part.split(","):
        options["part"] = part
        found = Found(args.out / f"{part}.json.xz", stamp)
        if args.resume and found.path.is_file():
            kept = read(found.path)
            found.rows = kept_rows(kept.pop("rows"))
            found.head = kept
        start = time.monotonic()
        print(f"== {part}", flush=True)
        try:
            good = run_part(part, found, options, PARTS[part])
        finally:
            found.keep()  # also where a user ends it
        wrong = sum(not row.get("right") for row in found.rows.values())
        took = time.monotonic() - start
        print(f"{part}: {len(found.rows)} rows, {wrong} not right, {took:.0f} s", flush=True)
        right = right and good
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
