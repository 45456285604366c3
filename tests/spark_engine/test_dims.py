"""Formulas of dimensions: their values, and what one unknown name must be."""

import pytest

from spark_engine.dims import divisor, evaluated, names, solved
from spark_engine.tensors import Dim

KNOWN: dict[str, Dim] = {"Hk": 2, "Dk": 8, "Hv": 4, "Dv": 16, "K": 200, "S": 5, "rows": "rows"}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("8", 8),
        ("K", 200),
        ("rows", "rows"),
        ("2·Hk·Dk+Hv·Dv", 96),
        ("⌈K/128⌉", 2),
        ("⌈2K/128⌉", 4),
        ("⌈Hv·Dv/128⌉", 1),
        ("K/8", 25),
        ("K−1", 199),
        ("S+1", 6),
        ("unknown", None),
        ("2unknown", None),
        ("2·rows", None),
    ],
)
def test_a_formula_has_a_value(formula: str, value: Dim | None) -> None:
    assert evaluated(formula, KNOWN.get) == value


@pytest.mark.parametrize(
    ("formula", "size", "found"),
    [
        ("X", 7, ("X", 7)),
        ("X", "tokens", ("X", "tokens")),
        ("2X", 14, ("X", 7)),
        ("X/16", 3, ("X", 48)),
        ("P+1", 9, ("P", 8)),
        ("2·Hk·Dk+X·Dv", 96, ("X", 4)),
        ("⌈X/128⌉", 2, None),
        ("X·Y", 6, None),
        ("K", 200, None),
        ("2X", "tokens", None),
        ("2·rows·X", 6, None),
    ],
)
def test_one_unknown_is_solved(formula: str, size: Dim, found: tuple[str, Dim] | None) -> None:
    assert solved(formula, size, KNOWN.get) == found


def test_what_is_not_whole_is_refused() -> None:
    with pytest.raises(ValueError, match="25/2 is not whole"):
        evaluated("K/16", KNOWN.get)
    with pytest.raises(ValueError, match="7/2 is not whole"):
        solved("2X", 7, KNOWN.get)
    assert [divisor(f) for f in ("K/16", "2I", "K/heads", "N")] == ["16", "2", "heads", "1"]
    assert {*names("2·Hk·Dk+Hv·Dv")} == {"Hk", "Dk", "Hv", "Dv"}
