"""Prefill attention of pairs of heads on the host, thread by thread, where parts of the keys meet.

One launch holds a long tile and a short one behind it, a tile in the first page, a partial one, and
a row that is not there; parts begin and end within sequences. Pages hold NaN beyond each sequence,
outputs before the launch too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import H200, Tactic
from spark_engine.op import Tolerance
from spark_engine.plugins.attention.paged_attention import OP
from spark_engine.plugins.attention.paged_attention_cases import Launch
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
SLOTS, STARTS, COUNTS = (2, 2, 0, 1, -1), (1010, 1074, 0, 580, 7), (64, 9, 17, 40, 0)
HEADS, KV_HEADS, SMS = 8, 2, 24


def launch(kv: DType) -> Launch:
    return Launch(64, SLOTS, STARTS, COUNTS, HEADS, KV_HEADS, 256, 32, kv=kv, dtype=DType.BF16)


def run(name: str, kv: DType, cache: Path, sms: int = SMS) -> tuple[Launch, list[Array]]:
    """The outputs of a tactic, on so many multiprocessors."""
    given, target = launch(kv), replace(H200, card=replace(H200.card, sms=sms))
    arrays = given.inputs(np.random.default_rng(3))
    tactic: Tactic = next(t for t in OP.cuda.tactics if t.name == name)
    specs = cuda_node.specs_of(OP, given.attrs, arrays)
    assert tactic.refuse(given.attrs, specs, target) is None
    plan, outs = tactic.plan(given.attrs, specs, target), OP.infer(given.attrs, specs)
    source, aliases = tactic.source, OP.aliases(given.attrs)
    return given, emulated.run(plan, source, arrays, outs, cache, True, aliases)


@pytest.mark.parametrize("kv", [DType.BF16, DType.F8E4M3])
def test_packed_rows_are_the_reference(kv: DType, cache: Path) -> None:
    given, got = run("packed", kv, cache)
    want = OP.reference(given.attrs, given.inputs(np.random.default_rng(3)))
    dead = np.arange(64) >= np.asarray(COUNTS)[:, None]
    assert not got[0].reshape(len(COUNTS), 64, -1)[dead].astype(np.float32).any()
    given.ignore(tuple(got))
    given.ignore(tuple(want))
    limits = Tolerance()
    wide = replace(limits, element=2.0**-5 if kv is DType.BF16 else limits.element)
    assert cuda_node.compare("o", got[0], want[0], wide, False) == ""
