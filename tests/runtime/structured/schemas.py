"""Random JSON schemas from the keywords that grammars support."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "age", "is it", "größe", "$x", "a-b", "<tag>")
PATTERNS = ("^[a-z]{2,4}$", "x|y", "^(on|off)$", r"\d\d", "[^a]b$")
FORMATS = ("date", "ipv4", "uuid", "email")


def _closed(rows: Schema, required: list[str]) -> Schema:
    kept = {"type": "object", "properties": rows, "required": required}
    return {**kept, "additionalProperties": False}


NEXT = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
NODE = _closed({"value": {"type": "integer"}, "next": NEXT}, ["value"])
DEFINITIONS = {"node": NODE, "short": {"type": "string", "maxLength": 3}}


def draw(seed: int) -> Schema:
    rng = random.Random(seed)
    schema = _object(rng, 3) if rng.random() < 0.7 else _any(rng, 3)
    return {**schema, "$defs": DEFINITIONS}


def draw_parameters(seed: int) -> Schema:
    """A schema of a function's parameters: an object with names that can be written as XML."""
    rng = random.Random(seed)
    names = rng.sample([n for n in NAMES if "<" not in n], rng.randint(1, 4))
    rows = {name: _any(rng, 2) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {**_closed(rows, required), "$defs": DEFINITIONS}


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _number, _enum, _flag, _reference]
    if depth > 0 and rng.random() < 0.5:
        return rng.choice((_object, _array, _alternatives))(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.6],
        "additionalProperties": rng.choice((False, False, {"type": "integer"})),
    }
    if rng.random() < 0.2:
        schema |= {"title": "T", "description": "an object"}
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(rng, depth - 1), "maxItems": rng.randint(1, 3)}
    if rng.random() < 0.5:
        schema["minItems"] = 1
    if rng.random() < 0.3:
        schema |= {"prefixItems": [{"type": "boolean"}], "maxItems": 3}
    return schema


def _alternatives(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    return {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 20)}


def _number(rng: random.Random) -> Schema:
    schema: Schema = {"type": rng.choice(("integer", "number"))}
    if rng.random() < 0.6:
        low = rng.randint(-50, 50)
        schema |= {"minimum": low, "maximum": low + rng.randint(1, 999)}
    elif rng.random() < 0.4:
        schema["multipleOf"] = rng.choice((5, 3))
    return schema


def _enum(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"const": rng.choice(("one", 2, None, [1, "x"], {"k": True}))}
    return {"enum": rng.choice((["red", 'gr"een', "blü"], [1, 2.5, None], ["a", 1]))}


def _flag(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"]))}


def _reference(rng: random.Random) -> Schema:
    return {"$ref": rng.choice(("#/$defs/node", "#/$defs/short"))}
