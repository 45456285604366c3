"""By which names and for which pages a server without keys answers."""

import socket
from typing import Any, cast

import httpx
import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.server.http.guard import Guard, Guarded, guard_of
from spark_engine.runtime.server.http.host_names import allowed_hosts

MINE = "localhost:8000"
Headers = list[tuple[str, str]]


def bound(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((address, 0))
    return listener


def local(*hosts: str, locked: bool = False, origins: tuple[str, ...] = ()) -> Guard:
    with bound("127.0.0.1") as listener:
        return guard_of(hosts, "127.0.0.1", listener, locked, origins)


def code(guard: Guard, headers: Headers, method: str = "POST") -> str:
    rows = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    return guard.refusal({"method": method, "headers": rows})[1]


KNOWN = f"localhost {MINE} LocalHost:1 localhost. 127.0.0.1:8000 127.0.0.1 [::1]:8000 [::1]".split()
KNOWN += "10.1.2.3:8000 [fe80::1%25eth0]:80 0.0.0.0:8000 localhost:".split()
STRANGE = ["evil.example", "evil.example:8000", "localhost.evil.example", "evil.example.", ""]
STRANGE += ["127.0.0.1.evil.example", "a@localhost", "localhost@evil.example", "localhost, evil"]
STRANGE += "localhost/evil localhost:80:80 [::1 ::1 localhost:x localhost# [evil]".split()
STRANGE += ["127.0.0.1\\@evil", "xlocalhost", "localhost..", "127.1", "2130706433", "lo\xe7alhost"]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_a_name_that_the_server_was_not_given_is_refused(method: str) -> None:
    guard = local()
    found = {host: code(guard, [("host", host)], method) for host in (*KNOWN, *STRANGE)}
    assert found == dict.fromkeys(KNOWN, "") | dict.fromkeys(STRANGE, "host_not_allowed")
    assert code(guard, [("host", MINE), ("host", "evil.example")], method) == "host_not_allowed"
    assert code(guard, [], method) == "", "a program of HTTP/1.0"


def test_names_are_added() -> None:
    guard = local(*allowed_hosts(["Spark.example, *.lan", "other."]))
    for host in ("spark.example", "SPARK.example.:443", "a.lan", "a.b.lan:1", "other", MINE):
        assert code(guard, [("host", host)]) == ""
    for host in ("lan", "xlan", "a.spark.example", "evil"):
        assert code(guard, [("host", host)]) == "host_not_allowed"
    assert code(local("*"), [("host", "evil")]) == ""
    for wrong in ("http://a", "a:80", "a/b", "", "*.*", "a b"):
        with pytest.raises(OptionError, match="--allowed-hosts has"):
            allowed_hosts([wrong])


OWN = ["http://localhost:8000", "https://localhost:8000"]
FOREIGN = "http://evil.example null http://localhost:3000 http://localhost localhost:8000".split()
FOREIGN += "http://127.0.0.1:8000 file:// http://localhost:8000/x http://a@localhost:8000".split()
FOREIGN += "http://localhost:8000.evil.example chrome-extension://abc".split()
FOREIGN += ["", "http://localhost:99999999"]


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "HEAD"])
def test_a_page_of_elsewhere_is_refused(method: str) -> None:
    guard = local(origins=("https://chat.example",))
    for origin in [*OWN, "https://chat.example"]:
        assert code(guard, [("host", MINE), ("origin", origin)], method) == "", origin
    for origin in FOREIGN:
        found = code(guard, [("host", MINE), ("origin", origin)], method)
        assert found == "origin_not_allowed", origin
    two = [("host", MINE), ("origin", OWN[0]), ("origin", "http://evil.example")]
    assert code(guard, two, method) == "origin_not_allowed"
    for host, origin in (("localhost", "http://localhost"), ("[::1]:80", "http://[::1]")):
        assert code(guard, [("host", host), ("origin", origin)], method) == ""
    evil = [("host", MINE), ("origin", "http://evil.example")]
    assert code(local(origins=("*",)), evil, method) == ""


def test_a_request_of_another_site_without_its_name_is_refused_unless_it_is_a_link() -> None:
    guard = local()
    for site in ("cross-site", "same-site"):
        foreign = [("host", MINE), ("sec-fetch-site", site)]
        assert code(guard, foreign, "GET") == "origin_not_allowed", "an image or a script"
        link = [*foreign, ("sec-fetch-mode", "navigate")]
        assert code(guard, link, "GET") == ""
        assert code(guard, link, "POST") == "origin_not_allowed", "a form"
    for site in ("same-origin", "none"):
        assert code(guard, [("host", MINE), ("sec-fetch-site", site)], "GET") == ""


def test_a_server_with_keys_or_for_others_is_not_guarded_unless_names_are_given() -> None:
    evil = [("host", "evil.example"), ("origin", "http://evil.example")]
    assert code(local(locked=True), evil) == ""
    assert code(local("spark.example", locked=True), evil) == "host_not_allowed"
    with bound("0.0.0.0") as listener:
        assert code(guard_of((), "0.0.0.0", listener, False, ()), evil) == ""
        given = guard_of(("spark.example",), "0.0.0.0", listener, False, ())
    assert code(given, evil) == "host_not_allowed"
    assert code(given, [("host", "spark.example")]) == ""
    for address in ("127.0.0.2", "::1"):
        with bound(address) as listener:
            assert code(guard_of((), "spark", listener, False, ()), evil) == "host_not_allowed"
            assert code(guard_of((), "spark", listener, False, ()), [("host", "Spark:1")]) == ""


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/metrics", "/"])
async def test_a_refusal_names_the_remedy(path: str) -> None:
    transport = httpx.ASGITransport(Guarded(cast(Any, None), local()))
    async with httpx.AsyncClient(transport=transport, base_url="http://evil.example") as client:
        answer = await client.get(path)
    body = answer.json()
    assert answer.status_code == 403
    assert body.get("type") == ("error" if path == "/v1/messages" else None)
    assert "'evil.example'" in body["error"]["message"]
    assert "--allowed-hosts" in body["error"]["message"]
