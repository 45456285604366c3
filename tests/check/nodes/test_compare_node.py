"""A fault of 2 % is found despite unwritten pages, a large residual and empty launches."""

from typing import Any

import ml_dtypes
import numpy as np

from spark_engine.check.engines.reference import ReferenceStep
from spark_engine.check.nodes.compare_node import DefinedRows, Recorded, StateValue, compare_node
from spark_engine.check.verdicts.compare import Verdict
from spark_engine.check.verdicts.thresholds import node_limits
from spark_engine.plugins.registry import get
from spark_engine.tensors import DType

LIMITS = node_limits(DType.BF16)
EVERY = np.ones(40, np.bool_)
MASKS = DefinedRows(EVERY, EVERY, EVERY)
RNG = np.random.default_rng(5)


def _pages(values: Any) -> Any:
    """u8 [301, 2048]: e4m3 codes, of which a launch wrote one page."""
    pages = RNG.standard_normal((301, 2048)).astype(ml_dtypes.float8_e4m3fn)
    pages[150] = values.astype(ml_dtypes.float8_e4m3fn)
    return pages.view(np.uint8)


def _state(got: Any, want: Any, before: Any) -> Verdict:
    step = ReferenceStep("attention", "paged", None, {}, ("pages",), ("pages.out",))
    verdicts = []
    part = np.asarray([2, 3, 4, 149, 150, 151])
    for index in (np.arange(len(want) - 1), part):  # the whole pool, or a part of it
        held = StateValue("pages", index, len(want))
        states = {name: held for name in ("pages", "pages.out")}
        old, truth, new = (a[index] for a in (before, want, got))
        recorded = Recorded(step, (old,), (truth,), states)
        verdicts += compare_node(recorded, (new,), MASKS, LIMITS)
    assert bool(verdicts[0]) == bool(verdicts[1])
    assert verdicts[0].figures == verdicts[1].figures
    return verdicts[0]


def test_a_page_that_was_written_is_measured_without_the_others() -> None:
    values = RNG.standard_normal(2048) * 8
    want = _pages(values)
    before, got = want.copy(), want.copy()
    before[150] = 0
    assert _state(want.copy(), want, before)
    assert _state(before, before, before), "nothing was written"
    got[150] = (values * 1.02).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    verdict = _state(got, want, before)
    assert not verdict


def test_a_write_to_another_page_is_found() -> None:
    want = _pages(RNG.standard_normal(2048))
    before, got = want.copy(), want.copy()
    before[150] = 0
    got[3] = 0x48
    assert not _state(got, want, before)


def test_a_residual_hides_nothing() -> None:
    """The experts' result is 2 % too large, and a twentieth of what it is added to."""
    bf16 = ml_dtypes.bfloat16
    residual = (20 * RNG.standard_normal((40, 128))).astype(bf16)
    made = RNG.standard_normal((40, 128))
    op = get("moe_norm_quant")
    attrs = {"format": "dense", "dtype": "bf16", "eps": 1e-6, "keep": 1, "quant": "none", "n": 1}
    step = ReferenceStep("n", op.name, op, attrs, ("x", "ids", "w", "r"), ("y", "sum"))
    y = RNG.standard_normal((40, 128)).astype(bf16)

    def verdicts(factor: float) -> list[Verdict]:
        want = (residual.astype(np.float64) + made).astype(bf16)
        noisy = made * factor + 0.02 * RNG.standard_normal(made.shape)
        got = (residual.astype(np.float64) + noisy).astype(bf16)
        recorded = Recorded(step, (y, y, y, residual), (y, want))
        return list(compare_node(recorded, (y, got), MASKS, LIMITS))

    assert all(verdicts(1.0))
    first, total = verdicts(1.06)
    assert first and not total and "differs from its reference by" in total.reason


def test_codes_count_by_what_they_mean() -> None:
    """One scale a token, and two of 128 columns: codes half as large with scales twice as large."""
    values = RNG.standard_normal((40, 256))
    for blocks in (1, 2):
        scale = np.full((40, blocks), 0.01, np.float32)
        step = ReferenceStep("n", "quantiser", None, {}, ("x",), ("codes", "scale"))
        want = (values / 0.01).astype(ml_dtypes.float8_e4m3fn)
        half = (values / 0.02).astype(ml_dtypes.float8_e4m3fn)
        recorded = Recorded(step, (values,), (want, scale))
        for codes, right in ((half, True), (want, False)):
            found = next(compare_node(recorded, (codes, 2 * scale), MASKS, LIMITS))
            assert bool(found) is right, (blocks, found)


def test_a_router_may_take_one_expert_for_another_that_is_as_good() -> None:
    """And not others altogether: a launch of one token would have no other to give it away."""
    step = ReferenceStep("n", "moe_router", None, {}, ("x", "w"), ("ids", "weights"))

    def right(tokens: int, *chosen: int) -> bool:
        want = np.tile(np.asarray([7, 3, 5], np.int32), (tokens, 1))
        weights, got = np.full(want.shape, 0.25, np.float32), want.copy()
        got[-1] = chosen
        every = np.ones(tokens, np.bool_)
        recorded = Recorded(step, (weights, weights), (want, weights))
        masks = DefinedRows(every, every, every)
        return bool(next(compare_node(recorded, (got, weights), masks, LIMITS)))

    for tokens in (1, 40):
        assert right(tokens, 7, 3, 5) and right(tokens, 7, 3, 9) and right(tokens, 3, 7, 5)
        assert not right(tokens, 7, 8, 9) and not right(tokens, 1, 2, 4)


def test_an_infinity_is_a_value_like_others() -> None:
    """A token without a candidate has value −∞ in both; in one alone, it is a difference."""
    step = ReferenceStep("top", "top_ids", None, {}, ("logits",), ("values",))
    want = RNG.standard_normal((40, 3)).astype(np.float32)
    want[::4, 1:] = -np.inf

    def verdict(got: Any) -> Verdict:
        return next(compare_node(Recorded(step, (want,), (want,), {}), (got,), MASKS, LIMITS))

    assert verdict(want.copy())
    for place, value in (((1, 1), -np.inf), ((0, 1), np.inf), ((0, 1), -1e9), ((0, 1), np.nan)):
        got = want.copy()
        got[place] = value
        assert "infini" in verdict(got).reason, (place, value)
