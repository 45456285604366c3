"""Types that schemas allow and targets of references, against a simple implementation."""

from functools import reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.runtime.text.schema_root import Root

NAMES = ("string", "integer", "null", "array")


def plain_types(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The same by plain recursion, for schemas that are not recursive."""
    while "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
    said = [frozenset([schema["type"]])] if "type" in schema else []
    for name in ("anyOf", "oneOf", "allOf"):
        parts = [plain_types(part, root) for part in schema.get(name, [])]
        said += parts if name == "allOf" else [frozenset[str]().union(*parts)]
    said = [types for types in said if types]
    common = reduce(frozenset.intersection, said) if said else frozenset()
    return common or frozenset().union(*said)


def _rows(number: int) -> st.SearchStrategy[Any]:
    """Schemas that refer to earlier definitions, which are thus shared."""
    leaf: st.SearchStrategy[Any] = st.sampled_from([{"type": name} for name in NAMES])
    if number:
        leaf |= st.integers(0, number - 1).map(lambda i: {"$ref": f"#/$defs/d{i}"})
    several = st.lists(leaf, max_size=3)
    names = st.sampled_from(["anyOf", "oneOf", "allOf"])
    return leaf | st.dictionaries(names, several, max_size=2)


@settings(max_examples=200, deadline=None)
@given(st.tuples(*map(_rows, range(6))), st.permutations(range(6)))
def test_types_of_shared_schemas_are_those_of_a_plain_reading(rows: Any, order: list[int]) -> None:
    schema = {"$defs": {f"d{i}": row for i, row in enumerate(rows)}}
    root = Root(schema)
    for i in order:  # in any order of calls
        assert root.types(rows[i]) == plain_types(rows[i], schema)


def test_a_schema_that_is_shared_counts_in_each_place() -> None:
    both = [{"anyOf": [{"$ref": "#/$defs/s"}, {"type": t}]} for t in ("null", "integer")]
    schema = {"$defs": {"s": {"type": "string"}}, "allOf": both}
    assert Root(schema).types(schema) == {"string"}


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("#", "root"),
        ("#/$defs/a", 1),
        ("#/$defs/b~1c%20d", 2),
        ("#/anyOf/1", 3),
        ("#/anyOf/9", None),
        ("#name", 4),
        ("https://example.com/x.json", "root"),
        ("https://example.com/x.json#/$defs/a", 1),
        ("other.json", 5),
        ("#/$defs/none", None),
        ("#none", None),
        ("elsewhere.json#/$defs/a", None),
        ("#/anyOf/" + "9" * 5000, None),
    ],
)
def test_where_a_reference_leads(where: str, found: Any) -> None:
    rows = {
        "a": 1,
        "b/c d": 2,
        "n": {"$anchor": "name", "const": 4},
        "o": {"$id": "other.json", "const": 5},
    }
    schema = {"$id": "https://example.com/x.json", "$defs": rows, "anyOf": [0, 3]}
    target = Root(schema).target(where)
    if isinstance(target, dict) and found != "root":
        target = target["const"]
    assert target == (schema if found == "root" else found)


def test_references_in_a_circle_lead_nowhere() -> None:
    root = Root({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}})
    assert root.resolve({"$ref": "#/$defs/a"}) == {}
    assert root.types({"$ref": "#/$defs/a"}) == frozenset()
