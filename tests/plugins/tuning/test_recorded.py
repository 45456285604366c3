"""Recorded times: at a recorded node, between two, and where nothing was recorded."""

import math
import re

import pytest

from spark_engine.plugins.tuning import recorded
from tests.repository import ROOT

OP, ARCHITECTURE = "fp8_linear", "sm_90a"
ROWS = [(op, t, s, dict(us)) for op, t, s, us in recorded._rows(ARCHITECTURE) if s]


@pytest.mark.parametrize(("op", "tokens", "size", "us"), ROWS)
def test_a_recorded_node_takes_what_was_recorded(
    op: str, tokens: int, size: int, us: dict[str, float]
) -> None:
    for tactic, time in us.items():
        found = recorded.seconds(ARCHITECTURE, op, tactic, size, tokens)
        assert found is not None and math.isclose(found, time * 1e-6, rel_tol=1e-9)


def test_between_sizes_and_tokens_times_are_between() -> None:
    sizes = sorted({s for op, _, s, us in ROWS if op == OP and "stream-k" in us})
    for low, high in zip(sizes, sizes[1:], strict=False):
        ends = [recorded.seconds(ARCHITECTURE, OP, "stream-k", s, 100) or 0 for s in (low, high)]
        middle = recorded.seconds(ARCHITECTURE, OP, "stream-k", (low + high) // 2, 100) or 0
        assert min(ends) <= middle <= max(ends)
    one, eight = (recorded.seconds(ARCHITECTURE, OP, "skinny", sizes[0], m) or 0 for m in (1, 8))
    assert min(one, eight) <= (recorded.seconds(ARCHITECTURE, OP, "skinny", sizes[0], 4) or 0)
    more = recorded.seconds(ARCHITECTURE, OP, "whole tiles", sizes[-1], 16_384) or 0
    last = recorded.seconds(ARCHITECTURE, OP, "whole tiles", sizes[-1], 8192) or 0
    assert last < more <= 2.001 * last


def test_what_was_not_recorded_has_no_time() -> None:
    sizes = [s for op, _, s, _ in ROWS if op == OP]
    assert recorded.seconds("sm_121a", OP, "skinny", sizes[0], 8) is None
    assert recorded.seconds(ARCHITECTURE, OP, "no such", sizes[0], 8) is None
    assert recorded.seconds(ARCHITECTURE, OP, "skinny", 2 * max(sizes), 8) is None
    assert recorded.seconds(ARCHITECTURE, "nvfp4_linear_a4", "stream-k", sizes[0], 8) is None
    assert recorded.best("sm_121a") == frozenset()


def test_recorded_times_are_those_of_the_results() -> None:
    """All but those of a log, which the file names."""
    results = [
        ROOT / "benchmarks/results/kernels" / f"{n}.json"
        for n in ("tactics_h200", "tactics", "gdn_rounds_h200")
    ]
    known = {float(x) for path in results for x in re.findall(r"\d+\.\d+", path.read_text())}
    rows = recorded._rows(ARCHITECTURE)
    ours = {(op, tactic, time) for op, _, _, us in rows for tactic, time in us.items()}
    assert len(ours) > 200
    assert {tactic for _, tactic, time in ours if time not in known} <= {"many registers"}
