"""Every op, every case, every tactic equals the reference on the GPU.

A case in f32 activations is refused by the tactics; its bf16 variant runs in its place.
"""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.op import Case, Op, Tolerance  # noqa: E402
from spark_engine.plugins import registry  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.cases.seeded import seeded

OPS = [op for op in registry.OPS if op.cuda.tactics]
PAIRS = [pytest.param(op, case, id=f"{op.name}-{case.label}") for op in OPS for case in seeded(op)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_every_tactic_equals_the_reference(op: Op, case: Case, bench: cuda_node.Bench) -> None:
    """The bf16 variant is made here: the workers that collect this file draw no inputs."""
    bench.gpu.wait()  # skipped where there is none: test_cuda_compile.py plans all cases
    narrow = cuda_node.as_bf16(op, case)
    taken = [check_tactics(op, tried, bench) for tried in (case, narrow) if tried is not None]
    if not any(taken):
        pytest.skip("every tactic refuses this case")


def check_tactics(op: Op, case: Case, bench: cuda_node.Bench) -> int:
    """Each tactic that takes the case against the reference; returns how many there are."""
    works = list(cuda_node.planned(op, case, bench.target))
    arrays, want = cuda_node.truth(op, case) if works else ((), ())
    for work in works:
        if note := cuda_node.compared(bench, work, arrays, want):
            print(note)
    return len(works)


def test_an_error_is_small_next_to_its_row() -> None:
    """Sums of loud values round more; a quiet row, padding and outliers allow no more."""
    want = np.zeros((8, 64), ml_dtypes.bfloat16)
    want[0], want[1:7], want[1, 7] = 16384, 2, 16384
    limits = Tolerance(norm=1e-2, element=2**-7)
    for at, allowed in (((0, 3), True), ((1, 3), False), ((7, 3), False)):
        got = want.copy()
        got[at] = float(got[at]) - 64
        if allowed:
            cuda_node.compare("", got, want, limits, nibbles=False)
            continue
        with pytest.raises(AssertionError, match=rf"element \({at[0]}, {at[1]}\)"):
            cuda_node.compare("", got, want, limits, nibbles=False)


def test_a_case_in_f32_becomes_one_in_bf16() -> None:
    for op in registry.OPS:
        for case in seeded(op):
            made = cuda_node.as_bf16(op, case)
            if made is None:
                continue
            arrays = made.inputs(np.random.default_rng(0))
            op.infer(made.attrs, cuda_node.specs_of(op, made.attrs, arrays))
