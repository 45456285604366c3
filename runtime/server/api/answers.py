"""JSON that the APIs' responses share: log-probabilities, token counts, errors, ids.

Knows the formats; knows no HTTP and no engine.
"""

import secrets
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from spark_engine.runtime.engine.draft_counts import BySource
from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.text.tokenizer import Tokenizer

Json = dict[str, Any]
Part = bytes | memoryview  # of JSON that is sent in parts
FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}
# Anthropic's error type by status
ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Reply(Protocol):
    """One answer, in the form of its API."""

    stream: bool  # whether the client wants events

    async def whole(self) -> Json:
        """The whole answer. Raises what `Generation.pieces` raises."""
        ...

    def events(self) -> AsyncIterator[bytes]:
        """Server-sent events, the last included. Raises what `Generation.pieces` raises. The first
        one waits for the first token, so that a failure before it can be a status."""
        ...

    def last_words(self, status: int, problem: Json) -> bytes:
        """The events that end a stream after a failure; `problem` is OpenAI's form."""
        ...

    def close(self) -> None:
        """Cancels what has not finished. May be called twice."""
        ...


def raw(value: Any) -> msgspec.Raw:
    """A part of an answer as JSON: it takes less memory, and a long answer is soon put together."""
    return msgspec.Raw(msgspec.json.encode(value))


def chat_logprob(event: Event, tokenizer: Tokenizer | None, most: int | None = None) -> msgspec.Raw:
    """One entry of `logprobs.content`, with at most `most` of the best."""
    entry = _entry(event.token, event.logprob, tokenizer)
    best = [_entry(i, value, tokenizer) for i, value in event.top[:most]]
    return raw({**entry, "top_logprobs": best})


def _entry(token: int | None, logprob: float | None, tokenizer: Tokenizer | None) -> Json:
    data = b"" if token is None or tokenizer is None else tokenizer.token_bytes(token)
    return {"token": token_text(token, tokenizer), "logprob": logprob, "bytes": list(data)}


def token_text(token: int | None, tokenizer: Tokenizer | None) -> str:
    """The token as text; part of a character becomes U+FFFD. Without a tokenizer its id."""
    if token is None or tokenizer is None:
        return "" if token is None else f"token_id:{token}"
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def prompt_logprob(event: Event, tokenizer: Tokenizer | None, most: int) -> msgspec.Raw:
    """vLLM's form of the log-probabilities of one token of a prompt: its own and the `most` best,
    by id."""
    best = list(event.top[:most])
    if event.token is not None and event.token not in (i for i, _ in best):
        best.append((event.token, event.logprob or 0.0))
    row = {}
    for place, (token, value) in enumerate(best, 1):
        rank = place if place <= most else None
        words = token_text(token, tokenizer)
        row[str(token)] = {"logprob": value, "rank": rank, "decoded_token": words}
    return raw(row)


def usage(
    prompt: int,
    completion: int,
    cached: int,
    drafts: tuple[int, int] | None = None,
    images: int = 0,
    by_source: BySource | None = None,
) -> Json:
    """Token counts. `cached`: prompt tokens from the prefix cache; `drafts`: those verified and
    those accepted, of an engine with drafts; `images`: prompt tokens that are images; `by_source`:
    drafts by source and position, of a request that asked for them."""
    total = prompt + completion
    counts: Json = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if images:
        counts["prompt_tokens_details"]["image_tokens"] = images
    if drafts is not None:
        verified, kept = drafts
        counts["completion_tokens_details"] = {
            "accepted_prediction_tokens": kept,
            "rejected_prediction_tokens": verified - kept,
        }
    if by_source is not None:
        counts["completion_tokens_details"]["drafts"] = msgspec.to_builtins(by_source)
    return counts


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_error(status: int, problem: Json) -> Json:
    """OpenAI's form of an error in Anthropic's."""
    kind = ANTHROPIC_ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: Json = {"type": "error", "error": {"type": kind, "message": problem["error"]["message"]}}
    if "request_id" in problem:
        body["request_id"] = problem["request_id"]
    return body


def new_id(prefix: str, joint: str = "-") -> str:
    """A unique id, e.g. `chatcmpl-1f0c…`."""
    return f"{prefix}{joint}{secrets.token_hex(12)}"


def event(kind: str, body: Json) -> bytes:
    """One server-sent event with a name, which its data repeats as `type`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **body}))
