"""The tests do not depend on how they are started."""

import signal
import subprocess
import sys

import pytest

from tests import conftest
from tests.repository import ROOT

FILE = "tests/repository_checks/test_conftest.py"


def test_sigint_is_not_ignored() -> None:
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_run_that_starts_with_sigint_ignored_hears_it(workers: tuple[str, ...]) -> None:
    """As in the background of a script."""
    one = f"{FILE}::{test_sigint_is_not_ignored.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, one]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode == 0, done.stdout


def test_the_files_that_begin_first_exist() -> None:
    assert all((ROOT / "tests" / name).is_file() for name in conftest.LONG)
