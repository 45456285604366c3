"""What ptxas says of a kernel, read from a real compilation."""

from pathlib import Path

import pytest

from spark_engine.builder.native import nvrtc
from spark_engine.kernel import TARGETS, Target

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
