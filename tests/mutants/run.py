"""Applies hand-made bugs to the sources, one at a time, and checks that a test fails with each.

    python -m tests.mutants.run                     all of tests/mutants/*.toml
    python -m tests.mutants.run --only scheduler    label, file or reason has the pattern

Works in copies of the tree, one per worker; the tree itself is never changed. Exits with 1 unless
all are killed; a mutant is not counted if all its tests skip on this machine.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.mutants.listing import Mutant, edited, faults, read
from tests.repository import PACKAGES, ROOT, files

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
        # The layout of the installed package, whichever folder a process has first on its path.
        for package in PACKAGES[1:]:
            (self.tree / "spark_engine" / package).symlink_to(self.tree / package)
        self._commit()
        python = self._interpreter(folder / "venv")
        # Compiled once; the source's hash is checked, so that no mutant runs its original's code.
        # pytest compiles files of tests itself.
        mode = ["--invalidation-mode", "checked-hash", "-x", r"/test_\w+\.py$", "-q", "."]
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
        # Linked one by one: some look for their shared libraries in their parent folder only.
        folders = (Path(folder) for folder in sys.path if folder.endswith("-packages"))
        for path in (path for folder in folders for path in sorted(folder.glob("*"))):
            hidden = path.name.startswith("__") or path.suffix == ".pth"
            if not hidden and not (site / path.name).exists():
                (site / path.name).symlink_to(path)
        return str(folder / "bin" / "python")


def _read(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def judge(mutant: Mutant, answer: Answer) -> str:
    """killed: a test failed. survived: none did. broken: pytest ended in another form (the mutant
    does not import, or hangs without `may_crash`)."""
    code = answer["code"]
    if code == 1 or (mutant.may_crash and code in (None, -signal.SIGABRT)):
        return "killed"
    return "survived" if code == 0 else "broken"


def run(mutants: Sequence[Mutant], workers: int) -> list[str]:
    """Tries them all: a line for each, which begins with its verdict and is printed at once.

    Raises SystemExit where a test fails without a mutant.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
        free: SimpleQueue[Copy] = SimpleQueue()
        for i in range(workers):
            free.put(copy := Copy(folder / str(i)))
            stack.callback(copy.close)
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)

        def on_a_copy(work: Callable[[Copy, Any], Any], jobs: Iterable[Any]) -> Iterator[Any]:
            def one(job: Any) -> Any:
                copy = free.get()
                try:
                    return work(copy, job)
                finally:
                    free.put(copy)

            return pool.map(one, jobs)

        by_file: dict[str, set[str]] = defaultdict(set)
        for test in {test for mutant in mutants for test in mutant.tests}:
            by_file[test.partition("::")[0]].add(test)
        print(f"unmutated tests of {len(by_file)} files", flush=True)
        passed = set[str]().union(*on_a_copy(_passed, by_file.values()))
        return list(on_a_copy(lambda copy, mutant: _try(copy, mutant, passed), mutants))


def _passed(copy: Copy, tests: Iterable[str]) -> set[str]:
    """The node ids that pass unmutated; a test that skips here cannot see a mutant."""
    answer = copy.run(sorted(tests), BASELINE, first_only=False)
    if answer["code"] != 0:
        raise SystemExit(f"these fail without a mutant:\n{answer['log'][-3000:]}")
    return {test for test, outcome in answer["outcomes"].items() if outcome == "passed"}


def _try(copy: Copy, mutant: Mutant, passed: Iterable[str]) -> str:
    if not any(p == t or p.startswith((f"{t}[", f"{t}::")) for t in mutant.tests for p in passed):
        verdict, words = "skipped", "none of its tests runs on this machine"
    else:
        with copy.changed(edited(copy.tree, mutant.label, mutant.edits)):
            answer = copy.run(mutant.tests, mutant.timeout, first_only=True)
        verdict, words = judge(mutant, answer), f"{answer['seconds']:.1f} s"
        if verdict == "broken":
            words += f", pytest ended with {answer['code']}: {answer['log'][-600:]}"
    line = f"{verdict}: {mutant.label} {mutant.file}: {mutant.why} ({words})"
    print(line, flush=True)
    return line


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants.run")
    parser.add_argument("--only", default="", help="a pattern in label, file or reason")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(words)
    mutants = [m for m in read() if re.search(options.only, f"{m.label} {m.file} {m.why}")]
    if wrong := [fault for mutant in mutants for fault in faults(ROOT, mutant)]:
        raise SystemExit("\n".join(wrong))
    if not mutants:
        raise SystemExit("no mutant matches the pattern")
    lines = run(mutants, min(options.workers, len(mutants)))
    print("\n".join(["", *(line for line in lines if not line.startswith("killed"))]))
    counts = Counter(line.partition(":")[0] for line in lines)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(bool(counts["survived"] or counts["broken"]))


if __name__ == "__main__":
    sys.exit(main())
