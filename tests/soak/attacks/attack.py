"""What an attack is, and what it is made with: requests in parallel, sockets, counts of statuses.

Knows HTTP; knows no process but through `Attacker.server`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.soak.attacks.processes import Server

PATIENCE_S = 60.0
READ_S = 5.0
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, TOKENIZE = "/v1/responses", "/v1/messages", "/tokenize"
GOOD: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4}
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """Of one request; `status` 0: none came, and `body` says why."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


class Attacker:
    """Sends to one server, counts the statuses, and notes what is wrong.

    Attributes:
        alone: but for an honest client no other client asks the server.
        soon_s: what a refusal may take. `patience_s`: what an answer may take. `read_s`: the
            server's --read-timeout.
        busy: statuses that are right besides those that an attack expects.
    """

    alone, soon_s, patience_s, read_s = True, 10.0, PATIENCE_S, READ_S
    busy: tuple[int, ...] = ()

    def __init__(
        self,
        address: tuple[str, int],
        key: str = "",
        tls: bool = False,
        server: Server | None = None,
    ) -> None:
        self.address, self.key, self._tls, self._server = address, key, tls, server
        self.statuses: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()

    @classmethod
    def of(cls, server: Server, key: str = "") -> Attacker:
        """Of a server of which it may touch the processes."""
        return cls(server.address, key, server.how.tls, server)

    @property
    def server(self) -> Server:
        assert self._server is not None, "this attack needs a separate server"
        return self._server

    def count(self, what: object) -> None:
        with self._lock:
            self.statuses[str(what)] += 1

    def expect(self, good: bool, words: str) -> None:
        """Notes `words` where it is not good."""
        if not good:
            with self._lock:
                self.wrong.append(words)

    def only(self, *statuses: int | str) -> None:
        """All requests so far had one of these."""
        other = set(self.statuses) - {str(s) for s in (*statuses, *self.busy)}
        self.expect(not other, f"answered by {sorted(other)}")

    def connect(self, patience_s: float | None = None) -> http.client.HTTPConnection:
        host, port = self.address
        patience_s = patience_s or self.patience_s
        if self._tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return http.client.HTTPSConnection(host, port, timeout=patience_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=patience_s)

    def send(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        method: str = "POST",
        patience_s: float | None = None,
        key: str | None = None,
    ) -> Answer:
        """One request on a new connection. `key`: in place of the attacker's."""
        start = time.monotonic()
        fields = {"content-type": "application/json", **(headers or {})}
        if one := self.key if key is None else key:
            fields.setdefault("authorization", f"Bearer {one}")
        connection = self.connect(patience_s)
        try:
            connection.request(method, path, body, fields)
            found = connection.getresponse()
            answer = Answer(found.status, found.read(), time.monotonic() - start)
        except TimeoutError:
            answer = Answer(0, b"timeout", time.monotonic() - start)
        except (OSError, http.client.HTTPException) as error:
            answer = Answer(0, type(error).__name__.encode(), time.monotonic() - start)
        finally:
            connection.close()
        self.count(answer.status or answer.body.decode())
        return answer

    def post(self, path: str, body: Any, **how: Any) -> Answer:
        """The same, of a value that becomes JSON."""
        return self.send(path, json.dumps(body).encode(), **how)

    def get(self, path: str, **how: Any) -> Answer:
        return self.send(path, method="GET", **how)

    def all(self, work: Callable[[T], object], over: Iterable[T], at_once: int) -> None:
        """Does `work` of each, so many at a time."""
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(work, over))

    def raw(self, data: bytes, seconds: float = 10.0) -> bytes:
        """What comes back for these bytes until the server closes, or so long."""
        with contextlib.closing(socket.create_connection(self.address, timeout=seconds)) as s:
            found = b""
            with contextlib.suppress(OSError):
                s.sendall(data)
                while part := s.recv(1 << 16):
                    found += part
            return found

    def head(self, path: str, length: int | None = None, more: str = "") -> bytes:
        rows = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
        rows += [f"authorization: Bearer {self.key}"] if self.key else []
        rows += [f"content-length: {length}"] if length is not None else []
        rows += [more] if more else []
        return ("\r\n".join(rows) + "\r\n\r\n").encode()

    def leave(self, path: str, body: bytes, after_s: float, reset: bool = False) -> None:
        """Sends a request and closes the connection after so long."""
        with contextlib.closing(socket.create_connection(self.address, timeout=5)) as s:
            with contextlib.suppress(OSError):
                s.sendall(self.head(path, len(body)) + body)
                time.sleep(after_s)
                if reset:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.count("left")

    def in_flight(self) -> int:
        """Requests that the server runs or that wait, by /metrics; -1 where it does not say."""
        answer = self.get("/metrics")
        names = (b"vllm:num_requests_running", b"vllm:num_requests_waiting{", b"spark:open_req")
        rows = [r.rpartition(b" ")[2] for r in answer.body.splitlines() if r.startswith(names)]
        with contextlib.suppress(ValueError):
            return int(sum(map(float, rows)))
        return -1

    def drained(self, seconds: float = 20.0) -> None:
        """No request of a client that left may continue."""
        if not self.alone:
            return
        end = time.monotonic() + seconds
        while (running := self.in_flight()) > 1 and time.monotonic() < end:  # 1: the honest one
            time.sleep(0.5)
        self.expect(running <= 1, f"{running} requests still run {seconds:g} s later")


@dataclass(frozen=True)
class Attack:
    """One row."""

    name: str  # of the table
    run: Callable[[Attacker], None]  # makes it, and notes in the Attacker what is wrong
    shows: str  # what must hold, in words
    # It breaks something, so that honest requests may end in a clear error meanwhile.
    faults: bool = False
    mixed: bool = False  # it may run with others in the soak
    key: str = ""  # of the attacker
    slow: float = 0.0  # honest clients may wait so many seconds more: an engine starts again
