"""What ptxas says of a kernel, and compilation by processes while other work is done."""

import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from spark_engine.builder.native import nvrtc
from spark_engine.errors import InternalError
from spark_engine.kernel import H200, TARGETS, Target
from tests.repository import ROOT

SPILLS = """
__device__ __noinline__ void spills(float* p, int n) {
  float x[80];
#pragma unroll
  for (int i = 0; i < 80; i++) x[i] = p[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 80; i++) p[i * n + 1] = x[(i * 7) % 80] * x[79 - i];
}
extern "C" __global__ void __launch_bounds__(1024, 2) calls(float* p, int n) { spills(p, n); }
"""
NONE = """
__device__ __noinline__ float none(float x) { return x * x; }
extern "C" __global__ void calls(float* p, int n) { *p = none(n); }
"""


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
@pytest.mark.parametrize(("source", "spilled"), [(SPILLS, True), (NONE, False)])
def test_what_a_called_function_spills_counts(
    target: Target, source: str, spilled: bool, tmp_path: Path
) -> None:
    (tmp_path / "a.cu").write_text(source)
    job = nvrtc.Job("a.cu", (), ("calls",))
    usage = nvrtc.compile(job, target, folder=tmp_path).usage["calls"]
    assert (usage.spills > 0) == spilled, usage


class Pool:
    """Answers at once with the name of the source as code."""

    def __init__(self) -> None:
        self.got: list[nvrtc.Job] = []
        self.cancelled = False

    def submit(self, work: Any, job: nvrtc.Job, *how: Any) -> Future[nvrtc.Cubin]:
        self.got.append(job)
        done: Future[nvrtc.Cubin] = Future()
        done.set_result(nvrtc.Cubin(job.source.encode(), {}))
        return done

    def shutdown(self, cancel_futures: bool) -> None:
        self.cancelled = cancel_futures


def _sources(folder: Path, *names: str) -> list[nvrtc.Job]:
    for name in names:
        (folder / name).write_text(NONE)
    return [nvrtc.Job(name, (), ("calls",)) for name in names]


def test_what_is_started_is_compiled_once_and_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, cache = Pool(), tmp_path / "kept"
    monkeypatch.setattr(nvrtc, "_processes", lambda workers: pool)
    first, second, kept, other = _sources(tmp_path, "b.cu", "a.cu", "kept.cu", "other.cu")
    there = nvrtc.compile(kept, H200, cache, tmp_path)
    with nvrtc.Compiler(H200, cache, 2, tmp_path) as compiler:
        compiler.start([first, kept, second])
        compiler.start([second, first])
        assert pool.got == [first, second], "what is in the folder is not compiled"
        assert compiler(second).code == b"a.cu", "the process's, which is waited for"
        assert compiler(kept) == there
        assert compiler(other).code == nvrtc.compile(other, H200, None, tmp_path).code
    assert pool.cancelled, "what was not asked for is not waited for"


def test_nothing_is_started_where_all_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = _sources(tmp_path, "a.cu", "b.cu")
    made = nvrtc.compile_all(jobs, H200, tmp_path / "kept", 1, tmp_path)
    monkeypatch.setattr(nvrtc, "_processes", lambda workers: pytest.fail("no process is needed"))
    assert nvrtc.compile_all(jobs, H200, tmp_path / "kept", 4, tmp_path) == made


BUILDS = """
import sys
from pathlib import Path
from spark_engine.builder.native import nvrtc
from spark_engine.kernel import H200
folder = Path(sys.argv[1])
with (folder / "runs").open("a") as file:
    file.write("run ")
jobs = [nvrtc.Job(name, (), ("calls",)) for name in ("a.cu", "b.cu", "broken.cu")]
print(len(nvrtc.compile_all(jobs[:2], H200, None, 2, folder)), flush=True)
nvrtc.compile_all(jobs, H200, None, 2, folder)
"""


def test_a_script_without_a_guard_compiles_and_does_not_run_again_in_each_process(
    tmp_path: Path,
) -> None:
    """It would wait for the build that waits for it. An error of a process has its words."""
    _sources(tmp_path, "a.cu", "b.cu")
    (tmp_path / "broken.cu").write_text("this is no source")
    script = tmp_path / "script.py"
    script.write_text(BUILDS)
    command = [sys.executable, str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (tmp_path / "runs").read_text() == "run " and done.stdout == "2\n", done.stderr
    assert InternalError.__name__ in done.stderr and "broken.cu" in done.stderr
    assert "does not compile" in done.stderr
