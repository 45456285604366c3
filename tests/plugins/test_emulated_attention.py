"""Prefill attention on the host, thread by thread: pairs of warps without wgmma."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10
from spark_engine.plugins.attention.paged_attention import OP
from spark_engine.plugins.attention.paged_attention_cases import Launch
from spark_engine.plugins.attention.paged_attention_cuda import TILES_PAIR
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
# The first row begins within a tile of keys, the second in its page of the cache; the third is not
# there, the last has one token.
SLOTS, STARTS, COUNTS = (1, 0, -1, 2), (61, 0, 9, 64), (64, 40, 0, 1)


def given(kv: DType, slots: tuple[int, ...], starts: tuple[int, ...], counts: tuple[int, ...]):
    return Launch(64, slots, starts, counts, 4, 2, 256, 32, kv=kv, dtype=DType.BF16)


def run(launch: Launch, arrays: tuple[Array, ...], cache: Path, late: bool) -> list[Array]:
    specs = cuda_node.specs_of(OP, launch.attrs, arrays)
    assert TILES_PAIR.refuse(launch.attrs, specs, GB10) is None
    plan, outs = TILES_PAIR.plan(launch.attrs, specs, GB10), OP.infer(launch.attrs, specs)
    aliases = OP.aliases(launch.attrs)
    return emulated.run(plan, TILES_PAIR.source, arrays, outs, cache, late, aliases)


@pytest.mark.parametrize("kv", [DType.F8E4M3, DType.BF16], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_what_the_reference_says(kv: DType, late: bool, cache: Path) -> None:
    launch = given(kv, SLOTS, STARTS, COUNTS)
    arrays = launch.inputs(np.random.default_rng(3))
    got, want = run(launch, arrays, cache, late), OP.reference(launch.attrs, arrays)
    for outputs in (got, want):
        launch.ignore(tuple(outputs))
    assert cuda_node.compare("o", got[0], want[0], OP.tolerance(launch.attrs), False) == ""
