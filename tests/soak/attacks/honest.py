"""An honest client in a separate process: short streamed chats, one after the other.

    python -P honest.py URL [KEY]

A line of JSON for each: `at` (time.time()), `ttft` (seconds to the first token, or null), `health`
(seconds that GET /health took), and `wrong`: what was not as it should be, or "". `clear`: where it
is an error, it said so in the form of the API. It ends when its standard input closes. It is a
process, since threads of the attackers would delay what it measures.
"""

import http.client
import json
import ssl
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

PAUSE_S = 0.1
PATIENCE_S = 60.0
CHAT = {
    "messages": [{"role": "user", "content": "Tell me of a small bear."}],
    **{"stream": True, "max_tokens": 4, "temperature": 0, "enable_thinking": False},
}


class Lost(Exception):
    """An end that no honest client should see. `clear`: the server said why."""

    def __init__(self, words: str, clear: bool = False) -> None:
        super().__init__(words)
        self.clear = clear


def connect(url: str) -> http.client.HTTPConnection:
    at = urlsplit(url)
    host, port = str(at.hostname), at.port
    if at.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=PATIENCE_S, context=context)
    return http.client.HTTPConnection(host, port, timeout=PATIENCE_S)


def _error(status: int, data: bytes) -> Lost:
    try:
        words = json.loads(data)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return Lost(f"{status} {data[:200]!r}")
    return Lost(f"{status} {words[:200]}", clear=True)


def chat(url: str, headers: dict[str, str]) -> float:
    """Seconds to the first token of an answer that came whole."""
    line, first, begin, finished = b"", 0.0, time.monotonic(), False
    connection = connect(url)
    try:
        body = json.dumps(CHAT).encode()
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise _error(answer.status, answer.read())
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]") and finished:
                    return first
                continue
            row = json.loads(line[6:])
            if "error" in row:
                raise Lost(f"in the stream: {row['error']['message'][:200]}", clear=True)
            for choice in row["choices"]:
                delta = choice["delta"]
                finished = finished or choice["finish_reason"] in ("stop", "length")
                if choice["finish_reason"] or delta.get("content") or delta.get("reasoning"):
                    first = first or time.monotonic() - begin
        raise Lost("the stream was cut")
    finally:
        connection.close()


def health(url: str, headers: dict[str, str]) -> tuple[float, int]:
    """Seconds and status of GET /health."""
    begin = time.monotonic()
    connection = connect(url)
    try:
        connection.request("GET", "/health", headers=headers)
        answer = connection.getresponse()
        answer.read()
        return time.monotonic() - begin, answer.status
    finally:
        connection.close()


def once(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """One chat and one look at /health."""
    row: dict[str, Any] = {"at": time.time(), "ttft": None, "health": None, "wrong": ""}
    try:
        row["ttft"] = chat(url, headers)
        row["health"], status = health(url, headers)
        if status != 200:
            row |= {"wrong": f"/health {status}", "clear": True}
    except Lost as lost:
        row |= {"wrong": str(lost), "clear": lost.clear}
    except (OSError, http.client.HTTPException, ValueError) as error:
        row |= {"wrong": f"{type(error).__name__}: {error}", "clear": False}
    return row | {"until": time.time()}


def main() -> None:
    """Asks until standard input closes."""
    done = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    headers = {"content-type": "application/json"}
    if len(sys.argv) > 2:
        headers["authorization"] = f"Bearer {sys.argv[2]}"
    while not done.is_set():
        print(json.dumps(once(sys.argv[1], headers)), flush=True)
        done.wait(PAUSE_S)


if __name__ == "__main__":
    main()
