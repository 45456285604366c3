"""404s of paths that are not served, and the form of an error by API.

Knows the table of routes and the paths of other servers.
"""

from spark_engine.runtime.server.api.answers import Json, anthropic_error
from spark_engine.runtime.server.http.routes import ROUTES
from spark_engine.runtime.server.replies.errors import NoSuchPath

_TEXT = "this server reads and writes text"
# paths of other servers, and why this one does not have them
ELSEWHERE = {
    "/v1/embeddings": "this engine generates text and has no embeddings; serve a model of them",
    "/v1/rerank": "this engine generates text and ranks none; serve a reranking model",
    "/v1/score": "this engine generates text and scores none; serve a reranking model",
    "/v1/pooling": "this engine generates text and pools none; serve an embedding model",
    "/v1/classify": "this engine generates text and classifies none",
    "/v1/moderations": "this engine generates text and judges none",
    "/v1/audio": f"{_TEXT}; serve a model of speech",
    "/v1/images": f"{_TEXT}; serve a model of images",
    "/v1/videos": f"{_TEXT}; serve a model of videos",
    "/v1/realtime": f"{_TEXT}, over HTTP alone",
    "/v1/files": "this server keeps no files; put their text into a message",
    "/v1/batches": "this server takes requests one by one, as many at a time as you like",
    "/v1/fine_tuning": "this server trains nothing",
    "/v1/assistants": "use /v1/responses",
    "/v1/threads": "use /v1/responses",
    "/v1/vector_stores": "this server keeps no documents",
    "/v1/load_lora_adapter": "this engine has no adapters",
    "/v1/complete": "use /v1/messages",
    "/api/": "that is another server's API; use /v1/chat/completions",
}
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
