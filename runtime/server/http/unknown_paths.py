"""404s of paths that are not served, and the form of an error by API.

Knows the table of routes, and the paths of other servers: unknown_paths.json.
"""

import json
from pathlib import Path

from spark_engine.runtime.server.api.answers import Json, anthropic_error
from spark_engine.runtime.server.http.routes import ROUTES
from spark_engine.runtime.server.replies.errors import NoSuchPath

# paths of other servers, and why this one does not have them
ELSEWHERE: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
_ALSO = {"/rerank": "/v1/rerank", "/score": "/v1/score", "/pooling": "/v1/pooling"}
_ALSO |= {"/v2/rerank": "/v1/rerank", "/classify": "/v1/classify", "/embed": "/v1/embeddings"}


def no_such_path(method: str, path: str) -> NoSuchPath:
    """The error of a request without a route: 404, or 405 if the path has other methods."""
    plain = path.rstrip("/") or "/"
    methods = [route.method for route in ROUTES if route.takes(plain)]
    if methods and method not in methods:
        words = f"{path} takes {' and '.join(methods)}, not {method}"
        return NoSuchPath(405, words, "method_not_allowed")
    known = _ALSO.get(plain, plain)
    for start, why in ELSEWHERE.items():
        if known == start or known.startswith(start.rstrip("/") + "/"):
            return NoSuchPath(404, f"{path} is not served here: {why}", "not_supported")
    exist = ", ".join(dict.fromkeys(route.path.partition("{")[0] for route in ROUTES))
    return NoSuchPath(404, f"there is no {path} here; there is {exist}", "not_found")


def in_api_form(path: str, status: int, problem: Json) -> Json:
    """An error in OpenAI's form, in the form of the API under `path`."""
    return anthropic_error(status, problem) if path.startswith("/v1/messages") else problem
