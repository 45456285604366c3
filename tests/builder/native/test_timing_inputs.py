"""What timed nodes read: finite, in range, and no larger than what the launch reaches."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from spark_engine.builder.native.tactics import CONTEXT, Work
from spark_engine.builder.native.timing_inputs import Filling, fillings, operands
from spark_engine.plugins import registry
from spark_engine.tensors import DType, TensorSpec
from tests.plugins.cases.seeded import seeded

RNG = np.random.default_rng(0)
LIMITS = {"S": 9, "MP": 32, "P": 300}


def attention(rows: int, tile: int, long: bool = False) -> dict[str, np.ndarray]:
    """The filled integers of a paged_attention node, by operand, at the last of its contexts."""
    op = registry.get("paged_attention")
    shapes = [
        (DType.BF16, (rows * tile, 2048)),
        *[(DType.F32, (64,))] * 2,
        (DType.F32, (8,)),
        (DType.I32, (rows, 192 if tile == 64 else 1)),
        (DType.F32, (2,)),
        *[(DType.U8, (LIMITS["P"] + 1, 2, 64, 64))] * 2,
        (DType.I32, (LIMITS["S"] + 1, LIMITS["MP"])),
        *[(DType.I32, (rows,))] * 3,
    ]
    specs = tuple(TensorSpec("t", d, s) for d, s in shapes)
    work = Work(op.name, op, {"tile": tile}, specs, (), frozenset())
    work = replace(work, context=work.contexts[-1]) if long else work
    names = [o.name for o in operands(work)]
    made = dict(zip(names, zip(fillings(work, RNG), specs, strict=True), strict=True))
    found = {n: whole(f, s).reshape(s.dims) for n, (f, s) in made.items() if s.dtype is DType.I32}
    return {**found, "reached": np.array([made["k_pages"][0].nbytes // (2 * 64 * 64)])}


def whole(filling: Filling, spec: TensorSpec) -> np.ndarray:
    """The operand as the GPU gets it."""
    repeated = np.resize(filling.pattern, filling.nbytes)
    return repeated.view(spec.dtype.numpy)


@pytest.mark.parametrize("op", registry.OPS, ids=lambda op: op.name)
def test_every_operand_is_finite_whatever_it_is_read_as(op) -> None:
    case = seeded(op)[0]
    arrays = case.inputs(np.random.default_rng(0))
    specs = tuple(TensorSpec("t", DType.of(a.dtype), a.shape) for a in arrays)
    work = Work(op.name, op, case.attrs, specs, (), frozenset())
    for filling, spec in zip(fillings(work, RNG), specs, strict=True):
        assert 0 < filling.nbytes <= spec.nbytes
        assert filling.nbytes % spec.dtype.itemsize == 0
        if spec.dtype not in (DType.I32, DType.I64):
            assert np.isfinite(whole(filling, spec).astype(np.float64)).all()
        if spec.dtype in (DType.U8, DType.F8E4M3):  # packed: it may contain other numbers
            for inner in (ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, np.float32):
                size = filling.nbytes // 4 * 4
                part = np.resize(filling.pattern, filling.nbytes)[:size].view(inner)
                assert np.isfinite(part.astype(np.float64)).all()


def test_decode_rows_have_a_context_on_pages_that_exist() -> None:
    made = attention(8, 1)
    assert made["slots"].tolist() == list(range(8))
    assert (made["starts"] == CONTEXT).all() and (made["counts"] == 1).all()
    held = made["page_table"][:8, : CONTEXT // 64 + 1]
    assert len(np.unique(held)) == held.size and held.max() < made["reached"][0]
    assert (made["page_table"][:, CONTEXT // 64 + 1 :] == -1).all()


def test_rows_of_a_round_are_sequences_and_their_tokens_have_places() -> None:
    made = attention(8, 4)
    assert made["slots"].tolist() == list(range(8))
    assert (made["starts"] == CONTEXT).all() and (made["counts"] == 4).all()
    long = attention(1, 8, long=True)
    assert long["starts"].tolist() == [32 * 64 - 8] and (long["page_table"][0] >= 0).all()


@pytest.mark.parametrize("rows", [1, 9])
def test_a_long_context_fills_the_table_and_stays_in_the_pool(rows: int) -> None:
    made = attention(rows, 1, long=True)
    assert (made["starts"] == 32 * 64 - 1).all()
    held = made["page_table"][:rows]
    assert len(np.unique(held)) == held.size == rows * 32, "no two rows share a page"
    assert 0 <= held.min() and held.max() < made["reached"][0] <= LIMITS["P"] + 1


def test_prefill_rows_are_sequences_of_the_context() -> None:
    made = attention(32, 64)
    assert made["slots"].tolist() == [0] * 16 + [1] * 16
    assert made["starts"].tolist() == [64 * i for i in range(16)] * 2
    table = made["page_table"][:2, :16]
    assert table.min() >= 0 and table.max() < made["reached"][0] <= 2 * 17


def test_a_launch_prefills_the_end_of_a_long_sequence() -> None:
    made = attention(4, 64)
    assert made["slots"].tolist() == [0] * 4
    assert made["starts"].tolist() == [768, 832, 896, 960]
    assert (made["page_table"][0, :16] >= 0).all()


def test_tokens_choose_distinct_experts_and_the_shared_one() -> None:
    op = registry.get("grouped_moe")
    shapes = [(DType.BF16, (50, 64)), (DType.I32, (50, 5)), (DType.F32, (50, 5))]
    shapes += [(DType.BF16, (17, 64, 64)), (DType.BF16, (17, 64, 32))]
    specs = tuple(TensorSpec("t", d, s) for d, s in shapes)
    work = Work(op.name, op, {"format": "dense"}, specs, (), frozenset())
    ids = whole(fillings(work, RNG)[1], specs[1]).reshape(50, 5)
    assert (ids[:, -1] == 16).all() and ids[:, :-1].max() < 16
    assert all(len(set(row)) == 5 for row in ids.tolist())
    assert len(np.unique(ids)) > 10, "routing is spread"
