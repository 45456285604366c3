"""The contracts' small arithmetic: pages, dtypes, bound shapes, columns of the tables."""

from dataclasses import replace

import pytest

from spark_engine.interface import SAMPLING_F, SAMPLING_I, Limits, Precision, tables
from spark_engine.kernel import Launch, Pointer, Scalar
from spark_engine.tensors import DType, TensorSpec

LIMITS = Limits(max_seqs=3, max_context=128, pages=9, vocab=50)


@pytest.mark.parametrize(("context", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2)])
def test_a_context_that_ends_within_a_page_has_that_page(context: int, pages: int) -> None:
    limits = replace(LIMITS, max_context=context)
    assert limits.pages_per_seq == pages
    (table,) = [t for t in tables(limits) if t.name == "page_table"]
    assert table.shape == (4, pages)


def test_limits_survive_json_and_old_ones_have_no_ring() -> None:
    ringed = replace(LIMITS, gdn_ring=8, bias_slots=7)
    assert Limits.from_json(ringed.to_json()) == ringed
    old = {k: v for k, v in LIMITS.to_json().items() if k != "gdn_ring"}
    assert Limits.from_json(old) == LIMITS


def test_fp8_pages_are_codes() -> None:
    stored = [Precision(DType.BF16, kv, DType.F32).kv_storage for kv in (DType.F8E4M3, DType.BF16)]
    assert stored == [DType.U8, DType.BF16]


def test_columns_of_the_sampling_tables_are_those_of_the_page() -> None:
    """docs/graph.md; `fill` writes them and the sampler reads them by number."""
    first = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    assert SAMPLING_F == (*first, "", "") and SAMPLING_I == (
        "top_k",
        "seed_low",
        "seed_high",
        "masked",
    )


def test_what_is_not_bound_stays_a_name_and_is_no_number() -> None:
    spec = TensorSpec("t", DType.F32, (2, "rows", "tokens"))
    half = spec.bind({"rows": 3})
    assert half.shape == (2, 3, "tokens") and half.bind({"tokens": 4}).nbytes == 96
    with pytest.raises(ValueError, match=r"tensor t has unbound dimensions \(2, 3, 'tokens'\)"):
        _ = half.dims


def test_a_launchs_shape_has_all_that_the_driver_needs() -> None:
    args = (Pointer("input", 0), Scalar("i32", 4), Scalar("f32", 0.5))
    launch = Launch("k", (1, 2, 3), (32, 1, 1), args, 99, (2, 1, 1), pdl=True)
    shape = launch.shape
    assert shape.kinds == ("address", "i32", "f32")
    assert (shape.grid, shape.block, shape.cluster) == ((1, 2, 3), (32, 1, 1), (2, 1, 1))
    assert (shape.shared, shape.pdl) == (99, True)
