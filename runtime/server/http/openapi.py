"""The OpenAPI document: the body of each path, from the body classes.

Knows OpenAPI's format and the limits of fields. Answers have only a media type: clients know them
from the APIs.
"""

import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.common import RANGES, Body
from spark_engine.runtime.server.api.unsupported_fields import UNSUPPORTED
from spark_engine.runtime.server.http.endpoints import Route

_SCHEMAS = "#/components/schemas/{name}"
_ERROR = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
_ERRORS = {
    "400": "a field is malformed or over a limit",
    "401": "the API key is missing or wrong",
    "404": "there is no such model, answer or path",
    "413": "the body is too large",
    "429": "the key has used what it may",
    "503": "too much waits, or the server is shutting down",
}
_MOST = 2**53  # above it, JSON parsers disagree about integers


def document(routes: Sequence[Route]) -> Json:
    bodies = [route.body for route in routes if route.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS)
    for body in bodies:
        _limit(schemas[body.__name__], isinstance(body, type) and issubclass(body, Body))
    paths: Json = {}
    for route in routes:
        path = re.sub(r"{(\w+)(:\w+)?}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "spark", "version": version("spark-engine")},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, path: str) -> Json:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_")
    error = {"application/json": {"schema": {"$ref": _SCHEMAS.format(name="Error")}}}
    answers: Json = {"200": {"description": "the answer"}}
    answers |= {code: {"description": words, "content": error} for code, words in _ERRORS.items()}
    made: Json = {"operationId": name, "summary": route.words, "responses": answers}
    made["security"] = [] if route.open else [{"bearer": []}, {"header": []}]
    if names := re.findall(r"{(\w+)}", path):
        text = {"type": "string", "minLength": 1}
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": text} for name in names
        ]
    if route.body is not None:
        schema = {"$ref": _SCHEMAS.format(name=route.body.__name__)}
        content = {"application/json": {"schema": schema}}
        made["requestBody"] = {"required": True, "content": content}
    return made


def _limit(schema: Json, sampled: bool) -> None:
    fields: dict[str, Any] = schema["properties"]
    for name in UNSUPPORTED if sampled else ():
        fields.pop(name, None)
    for name, field in fields.items():
        low, high = RANGES.get(name, (None, None))
        for kind in field.get("anyOf", (field,)):
            if kind.get("type") not in ("integer", "number"):
                continue
            if low is not None:
                kind["minimum"] = low
            if high is not None:
                kind["maximum"] = high
            elif kind["type"] == "integer":
                kind["maximum"] = _MOST
