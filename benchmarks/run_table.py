"""Every figure of docs/performance.md and docs/results/, by one command that may be interrupted.

`python -m benchmarks.run_table --out DIR` (`make figures OUT=DIR`) runs the stages of `table.toml`
that this machine can run, one after the other; engines are built when a stage first needs them, in
`--engines`. Each stage leaves DIR/STAGE/output.txt, its files and a row of DIR/summary.tsv. The
same command continues with stages that did not succeed. `--stages decode_*,tactics` runs those, in
this order; `--list` prints what would run. Exit code 1 where a stage failed.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.result_files import ROOT, commit_here

TABLE = Path(__file__).with_name("table.toml")
KEYS = {"name", "command", "limit", "gpus", "env", "stdout", "figure"}
GRACE = 5.0  # seconds between being asked to end and being killed
_ASKED = re.compile(r"\{(engine|built)\.([\w-]+)\}")
Row = dict[str, Any]


def rows_of(data: Mapping[str, Any], kind: str) -> dict[str, Row]:
    """The engines or stages of a table by name. Raises SystemExit for one that makes no sense."""
    found: dict[str, Row] = {}
    for row in data.get(kind, ()):
        for values in row.get("each", [{}]):
            own = {k: filled(v, values) for k, v in row.items() if k != "each"}
            if set(own) - KEYS or not {"name", "command", "limit"} <= set(own):
                raise SystemExit(
                    f"[[{kind}]] {own.get('name')}: keys are {', '.join(sorted(KEYS))}"
                )
            if own["name"] in found:
                raise SystemExit(f"two rows [[{kind}]] are named {own['name']}")
            found[own["name"]] = own
    return found


def filled(value: Any, values: Mapping[str, Any]) -> Any:
    """A string with each {key} replaced; anything else as it is."""
    for key, one in values.items() if isinstance(value, str) else ():
        value = value.replace(f"{{{key}}}", str(one))
    return value


def chosen(stages: Mapping[str, Row], words: str | None) -> list[Row]:
    """The stages that the words name, in their order; all without."""
    found: dict[str, Row] = {}
    for word in words.split(",") if words else ["*"]:
        same = {name: row for name, row in stages.items() if fnmatch(name, word)}
        if not same:
            raise SystemExit(f"there is no stage {word}; there are {', '.join(stages)}")
        found |= same
    return list(found.values())


def gpu_count() -> int:
    """The GPUs that processes of this one see."""
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return 0
    here = subprocess.run(command, capture_output=True, text=True).stdout.split()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(here) if visible is None else min(len(here), len(visible.split(",")))


def run(row: Row, command: str, folder: Path) -> tuple[int, float]:
    """Runs a command; its exit code (124: it took longer than its limit) and its seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    if shutil.which(words[0]) is None:
        words[0] = str(Path(sys.executable).with_name(words[0]))
    start = time.monotonic()
    with (folder / "output.txt").open("wb") as log:
        out = (folder / row["stdout"]).open("wb") if "stdout" in row else log
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **row.get("env", {})}
        try:
            process = subprocess.Popen(
                words, stdout=out, stderr=log, cwd=ROOT, env=environment, start_new_session=True
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            return 127, 0.0
        try:
            code = process.wait(row["limit"])
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end(process)
            out.close()
    return code, time.monotonic() - start


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a command's processes."""
    for sent, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        try:
            os.killpg(process.pid, sent)
            process.wait(wait)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def figure(row: Row, folder: Path) -> str:
    """What the row's expression finds in its output."""
    files = [folder / name for name in ("output.txt", row.get("stdout", "output.txt"))]
    text = files[-1].read_text(errors="replace")
    found = re.findall(row["figure"], text, re.MULTILINE) if "figure" in row else []
    return "; ".join(
        " ".join(filter(None, one)) if isinstance(one, tuple) else one for one in found
    )


class Runner:
    """One call: stages run and engines are built into `out` and `engines`."""

    def __init__(self, engines: Mapping[str, Row], out: Path, where: Path, gpus: int) -> None:
        self._engines, self._out, self._where, self._gpus = engines, out, where, gpus
        self._summary = out / "summary.tsv"

    def done(self) -> set[str]:
        lines = self._summary.read_text().splitlines() if self._summary.is_file() else []
        return {line.split("\t")[0] for line in lines if line.split("\t")[1] == "0"}

    def stage(self, row: Row) -> bool:
        """Runs a stage behind the builds that it needs; whether it succeeded."""
        name, asked = row["name"], _ASKED.findall(row["command"])
        if row.get("gpus", 1) > self._gpus:
            print(f"{name}: needs {row.get('gpus', 1)} GPUs, here are {self._gpus}", flush=True)
            return True
        values = {"out": str(self._out / name)}
        for engine in dict.fromkeys(engine for _, engine in asked):
            if (seconds := self.build(self._engines[engine])) is None:
                print(f"{name}: its engine {engine} was not built", flush=True)
                return False
            place = self._where / engine
            values |= {f"engine.{engine}": str(place), f"built.{engine}": f"{seconds:.1f}"}
        code, seconds = run(row, filled(row["command"], values), self._out / name)
        found = figure(row, self._out / name)
        with self._summary.open("a") as file:
            file.write("\t".join((name, str(code), f"{seconds:.0f}", commit_here(), found)) + "\n")
        print(f"{name}: code {code}, {seconds:.0f} s: {found}", flush=True)
        return code == 0

    def build(self, row: Row) -> float | None:
        """The seconds that building an engine took, now or before; None where it failed."""
        place, took = self._where / row["name"], self._where / f"{row['name']}.seconds"
        if took.is_file():
            return float(took.read_text())
        shutil.rmtree(place, ignore_errors=True)
        self._where.mkdir(parents=True, exist_ok=True)
        command = filled(row["command"], {"engine": str(place)})
        code, seconds = run(row, command, self._out / f"build_{row['name']}")
        print(f"build_{row['name']}: code {code}, {seconds:.0f} s", flush=True)
        if code:
            return None
        took.write_text(f"{seconds:.1f}")
        return seconds


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--engines", type=Path, help="folder of engines; default DIR.engines")
    parser.add_argument("--stages", help="some of them, a list; NAME* for several")
    parser.add_argument("--table", type=Path, default=TABLE, help="another table")
    parser.add_argument("--list", action="store_true", help="print what would run")
    args = parser.parse_args(words)
    data, out = tomllib.loads(args.table.read_text()), args.out.absolute()
    engines = rows_of(data, "engine")
    stages = chosen(rows_of(data, "stage"), args.stages)
    where = (args.engines or out.with_name(f"{out.name}.engines")).absolute()
    runner = Runner(engines, out, where, gpu_count())
    for row in stages if args.list else ():
        state = "done" if row["name"] in runner.done() else f"at most {row['limit']} s"
        print(f"{row['name']:24} {state:14} {row['command']}")
    if args.list:
        return 0
    out.mkdir(parents=True, exist_ok=True)
    left = [row for row in stages if row["name"] not in runner.done()]
    return 0 if all([runner.stage(row) for row in left]) else 1


if __name__ == "__main__":
    sys.exit(main())
