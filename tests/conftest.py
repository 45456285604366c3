"""What all tests share: one folder of compiled kernels, how long generated traces are tried, and
which files begin first.
"""

import asyncio
import gc
import inspect
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

import spark_engine  # noqa: F401

# For `benchmarks` and `training`, which are not installed. `spark_engine` comes first: the root has
# a folder of that name.
sys.path.append(str(Path(__file__).resolve().parent.parent))

# No deadline: a busy machine may stop a test for long. Forty examples keep `make test` in its time.
settings.register_profile("patient", deadline=None, max_examples=40)
settings.load_profile("patient")
settings.register_profile("soak", max_examples=1000)  # `make soak`; 40 otherwise
settings.register_profile("fuzz", max_examples=600)  # `make fuzz`; 3 otherwise

# Files of half a minute or more, the longest first: started last, one would leave a core idle.
LONG = (
    "plugins/test_cuda_compile.py",
    "published/test_published.py",
    "builder/test_build.py",
    "runtime/test_real_engine.py",
    "runtime/test_real_cache.py",
    "builder/plan/test_large_models.py",
    "builder/native/test_backend.py",
    "plugins/moe/test_emulated_moe.py",
    "check/test_check.py",
    "runtime/engine/test_traces.py",
    "runtime/server/process/test_server.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Brings the tests of LONG to the front."""
    order = {Path(__file__).parent / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function by its fixture `run`, else in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    pyfuncitem.funcargs.get("run", asyncio.run)(pyfuncitem.obj(**given))
    return True


def pytest_configure() -> None:
    """Makes a run independent of how it is started, and collects garbage less often."""
    # The modules and tests that a process holds are a million objects, which each full collection
    # reads: one in ten seconds of the tests of models were its.
    gc.set_threshold(100_000, 20, 100)
    # Where these are set, pytest prints differences in full. For the bytes of two states that takes
    # longer than a test may take, and hides that the test failed.
    for name in ("CI", "BUILD_NUMBER"):
        if name in os.environ:  # emptied and not removed: hypothesis asks whether it is there
            os.environ[name] = ""
    # A script starts background jobs with SIGINT ignored. Python and its child processes keep that,
    # so a test that sends Ctrl-C would wait for nothing.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels by content, of earlier runs too: nothing is compiled twice."""
    kept = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    return tmp_path_factory.mktemp("cubins") if kept is None else Path(kept.mkdir("cubins"))
