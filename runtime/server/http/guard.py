"""The names by which a server without keys may be called, and the pages that may call it.

A browser on this machine reaches a server on 127.0.0.1 for any page that its user visits. A foreign
page may resolve its own name to this address (DNS rebinding); its requests then have that name as
their Host. Or it sends a simple request, which needs no CORS preflight, with its Origin. Programs
other than browsers send no Origin. Knows headers; knows no endpoint.
"""

import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from spark_engine.runtime.server.api.answers import error
from spark_engine.runtime.server.http.endpoints import json_response
from spark_engine.runtime.server.http.host_names import ALL, NAME, address, is_loopback
from spark_engine.runtime.server.http.unknown_paths import in_api_form
from spark_engine.runtime.server.operation.http_request import note_problem
from spark_engine.runtime.server.operation.request_ids import current

_V6 = r"[0-9A-Fa-f:.]+(?:%25?\w+)?"
_HOST = re.compile(
    rf"(?:(?P<name>{NAME})|\[(?P<v6>{_V6})\])(?::(?P<port>[0-9]{{1,5}})?)?", re.ASCII
)
_PORTS = {"http": 80, "https": 443}
_ELSEWHERE = (b"cross-site", b"same-site")  # of Sec-Fetch-Site: a foreign page's
_READS = ("GET", "HEAD")
Place = tuple[str, int | None]  # a host in lower case, and its port


class Guard:
    """Checks requests. `hosts`: names in addition to localhost and every IP address; None: any.
    `origins`: of pages other than the server's own, `*` for all; None: any page's requests."""

    def __init__(self, hosts: Sequence[str] | None, origins: Sequence[str] | None) -> None:
        self._hosts = None if hosts is None or ALL in hosts else frozenset(hosts) | {"localhost"}
        self._origins = None if origins is None or ALL in origins else frozenset(origins)

    def refusal(self, scope: Scope) -> tuple[str, str]:
        """(why a request is refused, the error's code); empty where it is not."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        hosts = headers.get(b"host", [])  # none: a program with HTTP/1.0, never a browser
        if self._hosts is not None and not all(map(self._knows, hosts)):
            shown = b", ".join(hosts)[:80].decode("latin-1")
            words = f"this server is not known as {shown!r}; its operator can name it with"
            return f"{words} --allowed-hosts, or lock it with --api-key", "host_not_allowed"
        if self._origins is not None and not self._serves_page(scope["method"], hosts, headers):
            origin = b", ".join(headers.get(b"origin", [b"another site"]))[:80].decode("latin-1")
            words = f"pages of {origin} may not use this server; its operator can let them with"
            return f"{words} --cors-origin", "origin_not_allowed"
        return "", ""

    def _knows(self, host: bytes) -> bool:
        place = _place(host)
        if place is None:
            return False
        name, hosts = place[0], self._hosts or frozenset()
        parents = (f"*{name[i:]}" for i, letter in enumerate(name) if letter == ".")
        return name in hosts or address(name) is not None or any(p in hosts for p in parents)

    def _serves_page(
        self, method: str, hosts: Sequence[bytes], headers: dict[bytes, list[bytes]]
    ) -> bool:
        """True if the request is from no page, from the server's own, or from an allowed one."""
        origins = headers.get(b"origin")
        if origins is not None:
            return all(
                origin.decode("latin-1") in (self._origins or ()) or is_own(origin, hosts)
                for origin in origins
            )
        if not set(headers.get(b"sec-fetch-site", ())) & set(_ELSEWHERE):
            return True
        return method in _READS and headers.get(b"sec-fetch-mode") == [b"navigate"]  # a link


class Guarded:
    """Middleware: refuses requests to `app` that the guard refuses."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        words, code = self._guard.refusal(scope) if scope["type"] == "http" else ("", "")
        if not words:
            await self._app(scope, receive, send)
            return
        body = error(words, "permission_error", code=code)
        note_problem(body["error"])
        body |= {"request_id": name} if (name := current()) else {}
        await json_response(in_api_form(scope["path"], 403, body), 403)(scope, receive, send)


def guard_of(
    hosts: Sequence[str], bound: str, listener: socket.socket, locked: bool, origins: Sequence[str]
) -> Guard:
    """The guard of a server on `listener`; `bound`: its --host. On a loopback address without keys
    it allows the names of `hosts` and `bound`; elsewhere `hosts`, if there are any. Without keys it
    allows its own pages and those of `origins`."""
    names = {*hosts, bound.lower().rstrip(".")}
    inside = is_loopback(listener) and not locked
    return Guard(tuple(names) if hosts or inside else None, origins if inside else None)


def is_own(origin: bytes, hosts: Sequence[bytes]) -> bool:
    """True if a page of this origin is from the server that a request's Host names. A proxy may
    have another scheme; where Host has no port, that scheme's default port applies."""
    try:
        parts = urlsplit(origin.decode("ascii"))
        known = parts.scheme in _PORTS and not (parts.path or parts.query or parts.fragment)
        place = _place(parts.netloc.encode()) if known else None
    except ValueError:
        return False
    if place is None or len(hosts) != 1 or (host := _place(hosts[0])) is None:
        return False
    default = _PORTS[parts.scheme]
    return place[0] == host[0] and (place[1] or default) == (host[1] or default)


def _place(host: bytes) -> Place | None:
    """The host and port of a Host header; None for an invalid one."""
    found = _HOST.fullmatch(host.decode("latin-1"))
    if found is None:
        return None
    name = found["v6"] or found["name"].removesuffix(".")
    if found["v6"] and address(name) is None:
        return None
    return name.lower(), int(found["port"]) if found["port"] else None
