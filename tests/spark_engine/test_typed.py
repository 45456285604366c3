"""JSON values become frozen dataclasses, or are refused if they do not fit the fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from spark_engine.manifest import StateInfo
from spark_engine.tensors import DType, TensorSpec
from spark_engine.typed import MOST, typed


@dataclass(frozen=True)
class Inner:
    name: str
    count: int = 3


@dataclass(frozen=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    counts: Mapping[str, int]
    spec: TensorSpec
    dtype: DType
    anything: Any


SPEC = {"name": "x", "dtype": "f32", "shape": [2, "rows"]}
GOOD: dict[str, Any] = {
    "inner": {"name": "a", "count": 0},
    "many": [{"name": "b", "count": MOST}],
    "counts": {"c": 7},
    "spec": SPEC,
    "dtype": "bf16",
    "anything": [None, 0.5],
}


def test_values_become_what_the_fields_say() -> None:
    spec = TensorSpec("x", DType.F32, (2, "rows"))
    assert typed(Outer, GOOD) == Outer(
        Inner("a", 0), (Inner("b", MOST),), {"c": 7}, spec, DType.BF16, [None, 0.5]
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inner": {"name": "a"}}, r"inner lacks \['count'\]"),
        ({"inner": {"name": "a", "count": 1, "more": 2}}, r"has the unknown \['more'\]"),
        ({"inner": {"name": 1, "count": 1}}, "inner name must be str, not int"),
        ({"inner": {"name": "a", "count": True}}, "inner count must be int, not bool"),
        ({"inner": {"name": "a", "count": "1"}}, "inner count must be int, not str"),
        ({"inner": {"name": "a", "count": -1}}, "inner count is -1, not between 0 and"),
        ({"inner": {"name": "a", "count": MOST + 1}}, f"not between 0 and {MOST}"),
        ({"inner": None}, "inner must be dict, not NoneType"),
        ({"many": {}}, "many must be list, not dict"),
        ({"many": [[]]}, "many must be dict, not list"),
        ({"counts": {"c": 1.0}}, "counts c must be int, not float"),
        ({"spec": {**SPEC, "shape": [2.5]}}, "x must be int"),
        ({"spec": {**SPEC, "shape": [-1]}}, "x is -1"),
        ({"spec": {**SPEC, "name": 7}}, "name must be str"),
        ({"dtype": "f128"}, "f128"),
        ({"dtype": 3}, "dtype must be str"),
    ],
)
def test_what_is_not_so_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        typed(Outer, {**GOOD, **change})


@pytest.mark.parametrize("change", [{"unit": "row"}, {"unit": 1}, {"shape": []}])
def test_a_state_counts_slots_or_pages_on_its_first_axis(change: dict[str, Any]) -> None:
    row = {**SPEC, "shape": [3, 4], "unit": "slot"}
    assert StateInfo.from_json(row).unit == "slot"
    with pytest.raises(ValueError):
        StateInfo.from_json({**row, **change})
