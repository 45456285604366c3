"""The tests that need a GPU, as on the rehearsed one. A part of `benchmarks.rehearsal`.

Those that ask for what only the whole GPU has skip themselves; the ops' own cases are the part
`ops`.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rehearsal import skip_done_tests
from benchmarks.rehearsal.reporter import Reporter

ROOT = Path(__file__).parents[2]
# Compare free memory, or have a limit of time, and so have the card for themselves.
ALONE = ("tests/runtime/executors/test_native_gpu.py", "tests/check/test_check_native.py")
LEFT_OUT = ("tests/plugins/test_cuda_ops.py", "tests/runtime/executors/test_trt.py")
MARK = "pytest.mark.gpu"  # is in every file that has such tests
MOST = 400  # characters of what is said of a failure
WORKERS = min(8, (os.cpu_count() or 1) // 4)  # processes that share the GPU; one below two


class Teller:
    """A plugin of pytest that tells each test as a row, and how many were skipped by reason."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter, self.skipped = reporter, Counter[str]()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reporter.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test is over, or could not begin."""
        if report.skipped:
            self.skipped[str(report.longrepr[-1]).removeprefix("Skipped: ")] += 1
            self.reporter.head(skipped=dict(self.skipped))
        elif report.failed or report.when == "call":
            words = str(report.longrepr)[-MOST:] if report.failed else ""
            seconds = round(report.duration, 1)
            self.reporter.row(report.nodeid, right=report.passed, seconds=seconds, note=words)


def main() -> None:
    """Runs them, in some processes where there are cores; pytest writes to standard error."""
    reporter = Reporter(stream=os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        done = Path(folder) / "done.json"
        done.write_text(json.dumps(sorted(reporter.done)))
        os.environ[skip_done_tests.DONE] = str(done)
        teller = Teller(reporter)
        codes = [pytest.main([*common(), *words], plugins=[teller]) for words in asked()]
    well = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    sys.exit(next((int(code) for code in codes if code not in well), 0))


def files(root: Path = ROOT) -> Sequence[str]:
    """The files of the other tests that need a GPU, found by their mark."""
    every = sorted((root / "tests").rglob("test_*.py"))
    marked = (str(p.relative_to(root)) for p in every if MARK in p.read_text())
    return [name for name in marked if name not in (*LEFT_OUT, *ALONE)]


def common() -> list[str]:
    """The words of every call of pytest."""
    return ["-m", "gpu", "--timeout", "600", "--rootdir", str(ROOT), "-p", skip_done_tests.__name__]


def asked() -> tuple[Sequence[str], Sequence[str]]:
    """What is run: most of it in some processes where there are cores, then what wants the GPU for
    itself."""
    most = [*files()]
    if WORKERS > 1:
        most += ["-n", str(WORKERS), "--dist", "worksteal"]
    return most, ALONE


if __name__ == "__main__":
    main()
