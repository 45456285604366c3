"""How many tactics there are, and that each is worth its lines."""

from collections.abc import Iterator

import pytest

from spark_engine.kernel import Tactic
from spark_engine.plugins.registry import OPS, STANDARD
from spark_engine.plugins.tuning.recorded import best

MOST = 108
PAIRS = [(op.name, op.cuda.tactics) for op in OPS] + [(n, c.tactics) for n, c in STANDARD.items()]


def _several() -> Iterator[tuple[str, Tactic]]:
    """Those of ops that have more than one."""
    for op, tactics in PAIRS:
        if len(tactics) > 1:
            yield from ((op, tactic) for tactic in tactics)


def test_tactics_are_few() -> None:
    assert sum(len(tactics) for _, tactics in PAIRS) <= MOST


@pytest.mark.parametrize(("op", "tactic"), [*_several()], ids=lambda x: getattr(x, "name", x))
def test_each_is_the_best_of_a_published_bucket_or_says_why(op: str, tactic: Tactic) -> None:
    assert tactic.why or (op, tactic.name) in best("sm_90a")
