"""The convolution of a prefill on the host: the form that widens bf16 once has the other's bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200
from spark_engine.op import Case
from spark_engine.plugins.ops.delta_rule.causal_conv import OP
from spark_engine.tensors import Array
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


def aligned(case: Case) -> Case:
    """With rows of x that begin at whole 8 bytes; the columns behind are NaN."""

    def inputs(rng: np.random.Generator) -> tuple[Array, ...]:
        x, *rest = case.inputs(rng)
        padding = np.full((len(x), -x.shape[1] % 4), np.nan, x.dtype)
        return (np.concatenate([x, padding], axis=1), *rest)

    return replace(case, inputs=inputs)


def planned(case: Case) -> list[cuda_node.Planned]:
    return list(cuda_node.planned(OP, case, H200))


CASES = [c for c in map(aligned, cuda_node.cases_of(OP)) if len(planned(c)) == 2]


def test_some_cases_are_prefills() -> None:
    assert len(CASES) >= 2


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_words_have_the_bits_of_segments_and_are_the_reference(case: Case, cache: Path) -> None:
    arrays = case.inputs(np.random.default_rng(5))
    found = {
        name: emulated.results(OP, name, case.attrs, arrays, H200, cache)
        for name in (work.tactic.name for work in planned(case))
    }
    for a, b in zip(found["segments"], found["words"], strict=True):
        assert a.tobytes() == b.tobytes()
    want, got = list(OP.reference(case.attrs, arrays)), found["words"]
    if case.ignore:
        case.ignore(tuple(want))
        case.ignore(tuple(got))
    for a, b in zip(want, got, strict=True):
        wide = a.astype(np.float64)
        np.testing.assert_allclose(b.astype(np.float64), wide, case.rtol, case.atol)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_so_they_have_on_a_gpu(case: Case, bench: cuda_node.Bench) -> None:
    arrays = case.inputs(np.random.default_rng(5))
    works = cuda_node.planned(OP, case, bench.target)
    segments, words = (cuda_node.run(bench, work, arrays) for work in works)
    for a, b in zip(segments, words, strict=True):
        assert a.tobytes() == b.tobytes()
