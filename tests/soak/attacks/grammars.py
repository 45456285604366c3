"""Schemas, grammars and tool lists that cost much to compile."""

import json
from collections.abc import Iterator
from typing import Any

from tests.soak.attacks.attack import CHAT, TEXT, Attack, Attacker

K = 12  # references to itself: k^8 paths in a walk that forgets where it was
Schema = dict[str, Any]


def tools(schema: Schema, count: int = 1, strict: bool = True) -> list[Any]:
    """Functions with one parameter, which has the schema."""
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    if "$defs" in schema:
        parameters["$defs"] = schema.pop("$defs")
    function = {"parameters": parameters, "strict": strict}
    return [{"type": "function", "function": {"name": f"f{i}", **function}} for i in range(count)]


def walks(k: int = K) -> Iterator[Schema]:
    """Schemas in which each definition refers k times to itself."""

    def refs(name: str) -> list[Schema]:
        return [{"$ref": f"#/$defs/{name}"} for _ in range(k)]

    for word in ("anyOf", "oneOf", "allOf"):
        yield {"$ref": "#/$defs/A", "$defs": {"A": {word: refs("A")}}}
        chain = {f"A{i}": {word: refs(f"A{(i + 1) % 9}")} for i in range(9)}
        yield {"$ref": "#/$defs/A0", "$defs": chain}
        ends = {f"A{i}": {word: refs(f"A{i + 1}")} for i in range(9)}
        yield {"$ref": "#/$defs/A0", "$defs": {**ends, "A9": {"type": "string"}}}
    both = {"A": {"anyOf": refs("B")}, "B": {"oneOf": [*refs("A"), {"type": "string"}]}}
    yield {"$ref": "#/$defs/A", "$defs": both}
    nest: Schema = {"type": "string"}
    for _ in range(8):
        nest = {"anyOf": [nest, nest]}
    yield nest
    items = {"A": {"type": "array", "items": {"anyOf": refs("A")}, "minItems": 1}}
    yield {"$ref": "#/$defs/A", "$defs": items}
    shape = {f"p{i}": {"$ref": "#/$defs/A"} for i in range(k)}
    yield {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": shape}}}
    yield {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}


def exponential(at: Attacker) -> None:
    """Small bodies with exponentially many paths through a schema; strict, required, forms."""
    bodies: list[tuple[str, Schema]] = []
    question = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    for schema in walks():
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": dict(schema)}}
        bodies.append((CHAT, {**question, "response_format": form}))
        rows = tools(dict(schema))
        bodies += [
            (CHAT, {**question, "tools": rows, "tool_choice": choice})
            for choice in ("auto", "required")
        ]
        loose = tools(dict(schema), strict=False)
        bodies.append((CHAT, {**question, "tools": loose, "tool_choice": "required"}))
    at.all(lambda row: at.post(*row), bodies, 8)
    at.only(200, 400)


def slow_schema(number: int, strings: int = 2400) -> Schema:
    """A valid schema that takes seconds to compile: 113 KB."""
    names = [f"a{number}x{i}" for i in range(strings)]
    shape = {name: {"type": "string", "maxLength": 100 + i % 9} for i, name in enumerate(names)}
    return {"type": "object", "properties": shape, "required": names[:9]}


def slow(at: Attacker) -> None:

    def send(number: int) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": slow_schema(number)}}
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        at.post(CHAT, {**body, "response_format": form})

    at.all(send, range(12), 12)
    at.only(200, 400, 503)


def different(at: Attacker) -> None:

    def send(number: int) -> None:
        kinds: tuple[Schema, ...] = (
            {"guided_regex": f"[a-z]{{1,{number % 60 + 1}}}{number}"},
            {"guided_choice": [f"bear {number}", "fish"]},
            {"guided_json": {"type": "object", "properties": {f"a{number}": {"type": "integer"}}}},
            {"guided_grammar": f'root ::= "a" | "b{number}"'},
        )
        at.post(TEXT, {"prompt": "a", "max_tokens": 2, **kinds[number % len(kinds)]})

    at.all(send, range(500), 8)
    at.only(200)


def refused_tools(at: Attacker) -> None:
    """Lists of tools of 3 MB, of one long one and of many, which are too much for a grammar."""
    question = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    many = tools({"type": "string", "enum": [f"v{i}" for i in range(60)]}, count=2500)
    one = tools({"type": "string", "enum": ["v" * 40 + str(i) for i in range(60_000)]})
    wrong = tools({"type": "string", "pattern": "(" * 2000})
    for rows in (many, one, wrong * 900):
        for choice in ("required", "auto"):
            found = at.post(CHAT, {**question, "tools": rows, "tool_choice": choice})
            reason = found.json()["error"]["message"] if found.status == 400 else ""
            words = f"{choice}, {len(json.dumps(rows))} bytes: {found.status} {reason[:100]!r}"
            at.expect(found.status in (200, 413, *at.busy) or len(reason) > 20, words)


def costly(at: Attacker) -> None:
    """Regexes, grammars and schemas that are cheap to say and costly to have."""
    deep: Schema = {"type": "string"}
    for _ in range(60):
        deep = {"type": "array", "items": deep, "maxItems": 1000}
    rows: list[Schema] = [
        {"guided_regex": "(a|a)*" * 300},
        {"guided_regex": "((a{1,200}){1,200}){1,200}"},
        {"guided_regex": "(" * 4000 + "a" + ")" * 4000},
        {"guided_regex": "(?i)" + "[^ab]" * 2000},
        {"guided_grammar": "root ::= " + " | ".join(f'"a{i}" root' for i in range(1500))},
        {"guided_grammar": 'root ::= root root | "a"'},
        {"guided_grammar": "start: a\n" + "\n".join(f'a{i}: "b"' for i in range(2000))},
        {"guided_choice": ["a" * i for i in range(1, 400)]},
        {"guided_json": deep},
        {"guided_json": {"type": "string", "minLength": 10**9, "maxLength": 10**9}},
        {"guided_json": {"type": "array", "minItems": 10**9, "items": {"type": "null"}}},
        {"guided_json": {"enum": list(range(20_000))}},
        {"guided_json": {"type": "string", "pattern": "^(a+)+$" * 100}},
    ]
    at.all(lambda row: at.post(TEXT, {"prompt": "a", "max_tokens": 2, **row}), rows, 4)
    at.only(200, 400)


ATTACKS = (
    Attack("exponential schemas, k = 12", exponential, "an answer or 400", mixed=True),
    Attack("12 slow grammars at once", slow, "an answer, 400 or 503", mixed=True),
    Attack("500 different grammars", different, "an answer", mixed=True),
    Attack("refused tools of 3 MB", refused_tools, "400 with a reason", mixed=True),
    Attack("costly regexes and grammars", costly, "an answer or 400", mixed=True),
)
