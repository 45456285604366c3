"""Breaks the sources by hand-made bugs, one at a time, and sees whether the tests notice.

    python -m tests.mutants.run                     all of tests/mutants/*.toml
    python -m tests.mutants.run --only scheduler    label, file or reason has the pattern
    python -m tests.mutants.run --sample 10         as many, drawn by --seed from those that set no
                                                    timeout of their own

Works in copies of the tree, one for each core; the tree itself is never changed. Exits with 1
unless 95 % of the mutants that are not argued equivalent are killed and none is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from tests.mutants.listing import TIMEOUT, Mutant, faults, mutated, read
from tests.repository import PACKAGES, ROOT, files

WANTED = 0.95
BASELINE = 600.0  # seconds for the unmutated tests of one file
Answer = dict[str, Any]


class Copy:
    """A copy of the tree, an interpreter that imports it, and a worker that forks from there."""

    def __init__(self, folder: Path) -> None:
        self.tree, self._log = folder / "tree", str(folder / "log")
        for path in files():
            target = self.tree / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, target)
        # Laid out as installed, whatever a process has first on its path: the tree, its folder, ...
        for package in PACKAGES[1:]:
            (self.tree / "spark_engine" / package).symlink_to(self.tree / package)
        self._commit()
        python = self._interpreter(folder / "venv")
        # Compiled once and held against the source's hash: no mutant is taken for its original.
        mode = ["--invalidation-mode", "checked-hash", "-q", "."]
        subprocess.run([python, "-m", "compileall", *mode], cwd=self.tree, check=True)
        (folder / "tmp").mkdir()
        # CI makes pytest show differences in full, which takes minutes where arrays differ.
        unset = ("PYTHONPATH", "PYTEST_ADDOPTS", "CI", "BUILD_NUMBER")
        env = {k: v for k, v in os.environ.items() if k not in unset}
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder / "tmp")}
        env |= {"XDG_CACHE_HOME": str(folder / "cache"), "ORT_DISABLE_TELEMETRY": "1"}
        self._worker = subprocess.Popen(
            [python, "-m", "tests.mutants.worker"],
            **{"cwd": self.tree, "env": env, "text": True},
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE},
        )

    def run(self, tests: Sequence[str], timeout: float, first_only: bool) -> Answer:
        """Exit code, seconds and outcomes of these tests (`worker._run`), and the log's end."""
        ask = {"tests": tests, "timeout": timeout, "log": self._log, "first_only": first_only}
        stdin, stdout = self._worker.stdin, self._worker.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(ask) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError("the worker died")
        return {**json.loads(line), "log": Path(self._log).read_text(errors="replace")}

    def run_mutant(self, mutant: Mutant) -> Answer:
        """`run` of its tests with the mutant in place."""
        with self.changed(mutated(self.tree, mutant)):
            return self.run(mutant.tests, mutant.timeout, first_only=True)

    @contextmanager
    def changed(self, texts: Mapping[str, str]) -> Iterator[None]:
        """These files hold these texts; at the end what they held before, or they are gone."""
        before = {self.tree / file: _read(self.tree / file) for file in texts}
        try:
            for file, text in texts.items():
                (self.tree / file).parent.mkdir(parents=True, exist_ok=True)
                (self.tree / file).write_text(text)
            yield
        finally:
            for path, was in before.items():
                path.unlink() if was is None else path.write_text(was)

    def close(self) -> None:
        """Ends the worker."""
        self._worker.kill()
        self._worker.wait()

    def _commit(self) -> None:
        """Some tests ask git which files there are."""
        git = ["git", "-C", str(self.tree)]
        subprocess.run([*git, "init", "-q"], check=True)
        links = "".join(f"/spark_engine/{package}\n" for package in PACKAGES[1:])
        (self.tree / ".git/info/exclude").write_text(links)
        subprocess.run([*git, "add", "-A"], check=True)

    def _interpreter(self, folder: Path) -> str:
        """A virtual environment of the tree, and of the libraries that this process has."""
        venv.EnvBuilder(symlinks=True).create(folder)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "mutants.pth").write_text(f"{self.tree}\n")
        # Linked one by one: some look for their shared libraries beside themselves only.
        for path in (
            p for folder in sys.path if folder.endswith("-packages") for p in _items(folder)
        ):
            if not (
                path.name.startswith("__") or path.suffix == ".pth" or (site / path.name).exists()
            ):
                (site / path.name).symlink_to(path)
        return str(folder / "bin" / "python")


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _items(folder: str) -> list[Path]:
    return sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []


@dataclass
class Found:
    """What became of the mutants, by verdict."""

    seconds: float = 0.0
    verdicts: list[tuple[Mutant, str, str]] = field(default_factory=list)  # and a word on it

    def of(self, *names: str) -> list[tuple[Mutant, str, str]]:
        """Those of these verdicts."""
        return [row for row in self.verdicts if row[1] in names]

    @property
    def rate(self) -> float:
        """Killed of those that were to be killed and could be tried."""
        killed, survived = len(self.of("killed")), len(self.of("survived"))
        return killed / max(1, killed + survived)

    @property
    def good(self) -> bool:
        """Enough were killed, and nothing is to be mended in the lists."""
        return self.rate >= WANTED and not self.of("broken")


def judge(mutant: Mutant, answer: Answer) -> tuple[str, str]:
    """The verdict on a mutant, and a word on it.

    killed: a test failed. broken: the tests did not run to a verdict (the mutant does not import,
    say, or hangs), or the mutant is argued equivalent and was seen.
    """
    code = answer["code"]
    if code is None and not mutant.may_hang:
        return "broken", f"ran into {mutant.timeout:.0f} s; say may_hang where that is its nature"
    aborted = code == -signal.SIGABRT and mutant.may_abort
    if code not in (None, 0, 1) and not aborted:
        return "broken", f"pytest ended with {code}: {answer['log'][-600:]}"
    seen = code != 0
    if mutant.equivalent:
        return ("broken", "argued equivalent, and killed") if seen else ("equivalent", "")
    return ("killed" if seen else "survived"), f"{answer['seconds']:.1f} s"


def run(mutants: Sequence[Mutant], workers: int, say: Callable[[str], None]) -> Found:
    """Tries them all. Raises SystemExit when a test fails without any mutant."""
    start, found = time.monotonic(), Found()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: list[Copy] = []
        try:
            for i in range(workers):
                (Path(folder) / str(i)).mkdir()
                copies.append(Copy(Path(folder) / str(i)))
            passed = _baseline(copies, mutants, say)
            _try_all(copies, mutants, passed, found, say)
        finally:
            for copy in copies:
                copy.close()
    order = {mutant.label: i for i, mutant in enumerate(mutants)}
    found.verdicts.sort(key=lambda row: order[row[0].label])
    found.seconds = time.monotonic() - start
    return found


def _baseline(
    copies: Sequence[Copy], mutants: Iterable[Mutant], say: Callable[[str], None]
) -> set[str]:
    """The node ids that pass unmutated; what is skipped here cannot see a mutant."""
    by_file: dict[str, set[str]] = defaultdict(set)
    for test in {test for mutant in mutants for test in mutant.tests}:
        by_file[test.partition("::")[0]].add(test)
    say(f"{sum(map(len, by_file.values()))} tests in {len(by_file)} files, unmutated")
    passed: set[str] = set()
    failed: list[str] = []

    def one(copy: Copy, tests: set[str]) -> None:
        answer = copy.run(sorted(tests), BASELINE, first_only=False)
        passed.update(t for t, outcome in answer["outcomes"].items() if outcome == "passed")
        if answer["code"] != 0:
            failed.append(answer["log"][-3000:])

    _share(copies, list(by_file.values()), one)
    if failed:
        raise SystemExit("\n".join(["these fail without any mutant:", *failed]))
    return passed


def _try_all(
    copies: Sequence[Copy],
    mutants: Sequence[Mutant],
    passed: set[str],
    found: Found,
    say: Callable[[str], None],
) -> None:
    def one(copy: Copy, mutant: Mutant) -> None:
        if any(_runs(test, passed) for test in mutant.tests):
            verdict, word = judge(mutant, copy.run_mutant(mutant))
        else:
            verdict, word = "skipped", "none of its tests runs on this machine"
        found.verdicts.append((mutant, verdict, word))
        say(f"{len(found.verdicts)}/{len(mutants)} {mutant.label} {mutant.file}: {verdict} {word}")

    _share(copies, mutants, one)


def _runs(test: str, passed: Iterable[str]) -> bool:
    return any(p == test or p.startswith((f"{test}[", f"{test}::")) for p in passed)


def _share(copies: Sequence[Copy], jobs: Iterable[Any], one: Callable[[Copy, Any], None]) -> None:
    """Does every job on some copy; an error in any of them is raised here."""
    queue: SimpleQueue[Any] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    errors: list[BaseException] = []

    def work(copy: Copy) -> None:
        try:
            while not errors:
                one(copy, queue.get_nowait())
        except Empty:
            pass
        except BaseException as error:  # noqa: B036 - raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(copy,), daemon=True) for copy in copies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def table(found: Found) -> str:
    """Verdicts by file, then what is to be looked at, then the rate."""
    names = ("killed", "survived", "equivalent", "skipped", "broken")
    lines = [f"{'file':40}" + "".join(f"{name:>11}" for name in names)]
    for file in sorted({mutant.file for mutant, _, _ in found.verdicts}):
        counts = [sum(m.file == file for m, _, _ in found.of(name)) for name in names]
        lines.append(f"{file:40}" + "".join(f"{count:>11}" for count in counts))
    lines.append(f"{'all':40}" + "".join(f"{len(found.of(name)):>11}" for name in names))
    for mutant, verdict, word in found.of("survived", "broken", "skipped"):
        lines.append(f"{verdict}: {mutant.label} {mutant.file}: {mutant.why} ({word})")
    for mutant, _, _ in found.of("equivalent"):
        lines.append(f"equivalent: {mutant.label} {mutant.file}: {mutant.equivalent}")
    lines.append(f"{found.rate:.1%} killed in {found.seconds:.0f} s; {WANTED:.0%} are wanted")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tests.mutants.run")
    parser.add_argument("--only", default="", help="a pattern in label, file or reason")
    parser.add_argument("--sample", type=int, help="how many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(words)
    mutants = [m for m in read() if re.search(options.only, f"{m.label} {m.file} {m.why}")]
    if options.sample is not None:
        quick = [m for m in mutants if m.timeout == TIMEOUT and not m.equivalent]
        some = random.Random(options.seed).sample(quick, min(options.sample, len(quick)))
        mutants = [m for m in mutants if m in some]
    if wrong := [fault for mutant in mutants for fault in faults(ROOT, mutant)]:
        print("\n".join(wrong))
        return 1
    if not mutants:
        print("no mutant has that pattern")
        return 1
    workers = min(options.workers, len(mutants))
    found = run(mutants, workers, lambda text: print(text, flush=True))
    print(table(found))
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
