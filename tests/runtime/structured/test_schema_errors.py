"""The place of an error in a schema."""

from typing import Any

import pytest

from spark_engine.errors import RequestError
from spark_engine.runtime.structured import schema_errors
from spark_engine.runtime.structured.schema_errors import Search, Trials
from tests.runtime.structured.grammar_walks import spec

BAD = {"type": "string", "pattern": r"(a)\1"}


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        ({"properties": {"a": {"items": BAD}}}, ".properties.a.items.pattern", "backref"),
        ({"properties": {"a b": BAD}}, '.properties["a b"].pattern', "backref"),
        ({"anyOf": [{"type": "null"}, BAD]}, ".anyOf[1].pattern", "backref"),
        ({"$defs": {"x": BAD}, "items": {"$ref": "#/$defs/x"}}, ".$defs.x.pattern", "backref"),
        ({"items": {"$ref": "#/$defs/y"}}, ".items.$ref", "does not exist"),
        ({"not": {"type": "string"}}, ".not", '"not" cannot be enforced'),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ".minimum", "greater than"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern", "look-around"),
        ({"$ref": "#"}, ".$ref", "no answer satisfies it"),
        (False, "", "schema is false"),
    ],
)
def test_the_deepest_place_is_named(schema: Any, place: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec(guided_json=schema)
    assert str(caught.value).startswith(f"guided_json{place} cannot be enforced: ")
    assert words in str(caught.value)


def _deep(count: int) -> dict[str, Any]:
    return {"items": _deep(count - 1)} if count else {}


def test_a_schema_has_bounds() -> None:
    for schema, words in (
        (_deep(schema_errors.DEEPEST), "nests 65 deep"),
        ({"enum": ["x" * schema_errors.MOST_TEXT]}, "characters; at most"),
        ({"items": {"type": "integer", "multipleOf": 99991}}, "multipleOf are 99991 together"),
        ({"type": "string", "pattern": "a?b*" * 20_000}, "patterns are too"),
    ):
        with pytest.raises(RequestError, match=words) as caught:
            spec(guided_json=schema)
        assert caught.value.param == "guided_json" and len(str(caught.value)) < 600
    spec(guided_json=_deep(schema_errors.DEEPEST - 1))
    spec(guided_json={"type": "number", "multipleOf": 0.25})


def test_references_may_be_long_chains() -> None:
    """Each reference takes some kilobytes of stack during the compilation."""
    rows = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)}
    spec(guided_json={"$defs": {**rows, "d1500": {}}, "$ref": "#/$defs/d0"})


def test_looking_for_a_place_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def wrong(_: Any) -> str:
        nonlocal asked
        asked += 1
        return "wrong"

    wide: Any = {"properties": {str(i): {"anyOf": [{}] * 10} for i in range(1000)}}
    place, words = Search(wide, wrong, Trials()).locate("x")
    assert (
        place.startswith("x.properties") and words == "wrong" and asked < schema_errors.TRIALS + 2
    )
    monkeypatch.setattr(schema_errors, "TRIALS_S", -1)
    assert Search(wide, wrong, Trials()).locate("x") == ("x", "wrong")
