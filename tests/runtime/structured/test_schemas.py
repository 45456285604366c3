"""Answers by a schema's grammar are valid for the schema, according to another library."""

import json
from collections import Counter

import pytest
from jsonschema import Draft202012Validator

from tests.runtime.structured.grammar_walks import spec, text, walk
from tests.runtime.structured.schemas import draw

SCHEMAS, WALKS = 200, 2
CHECK = Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("first", range(0, SCHEMAS, 50))
def test_every_answer_is_of_its_schema(first: int) -> None:
    ends = Counter[bool]()
    for seed in range(first, first + 50):
        schema = draw(seed)
        made = spec(guided_json=schema)
        assert made.end_of_thought == -1
        validator = Draft202012Validator(schema, format_checker=CHECK)
        for variant in range(WALKS):
            ids, whole = walk(made.grammar, seed * WALKS + variant)
            ends[whole] += 1
            if whole:
                validator.validate(json.loads(text(ids)))
    assert ends[True] > 0.8 * ends.total()
