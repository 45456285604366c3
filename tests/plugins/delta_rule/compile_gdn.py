"""Compiles everything that tests and benchmarks of the gated delta net load, in parallel."""

from __future__ import annotations

import os

from spark_engine.builder.native import nvrtc
from spark_engine.kernel import H200
from tests.plugins import run_tactic
from tests.plugins.delta_rule import test_cuda_gdn


def main() -> None:
    plans = []
    for op, case in test_cuda_gdn.CASES:
        arrays = test_cuda_gdn.arrays_of(op, case)
        for tried in (arrays, test_cuda_gdn.as_bf16(op, arrays)):
            specs = run_tactic.specs_of(op, tried)
            for tactic in op.cuda.tactics:
                if not tactic.refuse(case.attrs, specs, H200):
                    plans.append((tactic.source, tactic.plan(case.attrs, specs, H200)))
    jobs = nvrtc.jobs_of(plans)
    nvrtc.compile_all(jobs, H200, run_tactic.CACHE, os.cpu_count() or 1)
    print(len(jobs), "cubins")


if __name__ == "__main__":
    main()
