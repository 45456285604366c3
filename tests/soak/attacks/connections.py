"""Connections that say little, much in small parts, or that leave; and long prompts."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

from tests.soak.attacks.attack import CHAT, GOOD, TEXT, Attack, Attacker
from tests.soak.attacks.grammars import slow_schema

HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(100)  # half of a TLS client's
HOLD_S = 12.0  # how long a client waits for its long prompts
WORDS = "once upon a time a small bear went to the river and saw that fish was gone".split()


def hold(at: Attacker, count: int, data: Callable[[int], bytes], patience_s: float = 3.0) -> None:
    """Opens connections, and wants each closed by the server within its time."""
    with ExitStack() as opened:
        sockets = []
        for i in range(count):
            s = opened.enter_context(closing(socket.create_connection(at.address)))
            sockets.append(s)
            with contextlib.suppress(OSError):
                s.sendall(data(i))
        time.sleep(at.read_s + patience_s)
        still = 0
        for s in sockets:
            s.setblocking(False)
            try:
                while s.recv(4096):
                    pass
                at.count("closed")
            except BlockingIOError:
                still += 1
            except OSError:
                at.count("closed")
        at.expect(not still, f"{still} of {count} are still open")


def idle_sockets(at: Attacker) -> None:
    hold(at, 100, lambda i: b"")


def half_open(at: Attacker) -> None:
    """300 requests that never end: half of them in their head, half in their body."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    hold(at, 300, lambda i: head + (b"content-length: 9\r\n\r\n{" if i % 2 else b""))


def half_handshakes(at: Attacker) -> None:
    hold(at, 300, lambda i: HELLO if i % 2 else b"")


def _chunks(at: Attacker, size: int) -> None:
    """A body in chunks of one byte; `size`: bytes on the wire."""
    body = json.dumps({**GOOD, "junk": ""}).encode()
    count = size // 6 - len(body)
    body = body[:-2] + b"j" * count + body[-2:]
    wire = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    data = at.head(TEXT, more="transfer-encoding: chunked\r\nconnection: close") + wire
    found = at.raw(data, 30)
    status = found.split(b" ", 2)[1:2]
    at.count(status[0].decode() if status else "closed")


def tiny_chunks(at: Attacker) -> None:
    """Bodies of 1.8 MB and 8 MB of chunks of one byte each, twice at once."""
    at.all(lambda size: _chunks(at, size), (1_800_000, 1_800_000, 8_000_000, 8_000_000), 2)


def drips(at: Attacker) -> None:

    def send(number: int) -> None:
        with closing(socket.create_connection(at.address)) as s, contextlib.suppress(OSError):
            s.sendall(at.head(TEXT, 1000))
            for _ in range(40):
                s.sendall(b" ")
                time.sleep(0.2)
        at.count("closed")

    at.all(send, range(50), 50)


def _long(seed: int, words: int = 1700) -> bytes:
    rng = random.Random(seed)
    text = " ".join(f"{rng.choice(WORDS)}{rng.randrange(10)}" for _ in range(words))
    return json.dumps({"prompt": text[:9000], "max_tokens": 4}).encode()


def _long_prompts(at: Attacker, count: int) -> None:
    """That many prompts of some 3,500 tokens; a client without an answer in time leaves."""
    seed = time.monotonic_ns()
    at.all(lambda i: at.send(TEXT, _long(seed + i), patience_s=HOLD_S), range(count), count)
    at.only(200, 503, "timeout")
    at.drained(60)


def long_prompts_40(at: Attacker) -> None:
    _long_prompts(at, 40)


def long_prompts_100(at: Attacker) -> None:
    _long_prompts(at, 100)


def names(at: Attacker) -> None:
    for host in ("evil.example", "localhost.evil.example", "evil.example:8000", "0x7f.1.evil"):
        for path in ("/v1/models", "/", "/metrics", "/report"):
            at.get(path, headers={"host": host})
    for origin in ("http://evil.example", "https://localhost.evil.example", "null", "file://"):
        body, plain = json.dumps(GOOD).encode(), {"content-type": "text/plain"}
        at.send(TEXT, body, {**plain, "origin": origin})
    at.only(403)


def smuggling(at: Attacker) -> None:
    """Requests that two parsers may read differently: one answer, and the connection closes."""
    second = at.head(TEXT, 4) + b"null"
    chunk = b"4\r\nnull\r\n0\r\n\r\n"
    both = "content-length: 4\r\ntransfer-encoding: chunked"
    rows = [
        at.head(TEXT, more=both) + chunk + second,
        at.head(TEXT, more="transfer-encoding: chunked\r\ncontent-length: 4") + chunk + second,
        at.head(TEXT, more="content-length: 4\r\ncontent-length: 5") + b"null" + second,
        at.head(TEXT, more="transfer-encoding: xchunked") + chunk + second,
        at.head(TEXT, more="transfer-encoding: chunked, identity") + chunk + second,
        at.head(TEXT, more="content-length: +4") + b"null" + second,
        at.head(TEXT, more="transfer-encoding : chunked") + chunk + second,
        at.head(TEXT, more="x: " + "a" * 70_000) + second,
        at.head(TEXT, more="\r\n".join(f"x{i}: a" for i in range(10_000))) + second,
        b"GET /v1/models HTTP/0.9\r\n\r\n" + second,
        b"\x16\x03\x01\x02\x00\x01\x00" * 100 + second,
        bytes(range(256)) * 200,
    ]
    for data in rows:
        found = at.raw(data, 20)
        answers = found.count(b"HTTP/1.1 ")
        status = found.split(b" ", 2)[1:2]
        at.count(status[0].decode() if status else "closed")
        at.expect(answers <= 1, f"{answers} answers to {data[:120]!r}")
        refused = not found or status[0] in (b"400", b"401", b"431")
        at.expect(refused, f"{found[:60]!r}: {data[:120]!r}")


def leaving(at: Attacker) -> None:
    """Clients that leave at every stage: head, body, reading, compiling, prefill, streaming."""
    seed = time.monotonic_ns()
    text = "once upon a time there was " * 40_000
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": slow_schema(seed)}}
    turn = {"messages": [{"role": "user", "content": "a"}]}
    bodies: list[tuple[str, bytes]] = [
        (TEXT, json.dumps({"prompt": text, "truncate_prompt_tokens": 9}).encode()),
        (CHAT, json.dumps({**turn, "response_format": form}).encode()),
        (TEXT, _long(seed)),
        (CHAT, json.dumps({**turn, "stream": True, "max_tokens": 500}).encode()),
        (CHAT, json.dumps({**turn, "stream": True, "max_tokens": 500, "n": 8}).encode()),
        (TEXT, json.dumps({"prompt": "a", "max_tokens": 2000}).encode()),
    ]
    rng = random.Random(5)
    times = (0.0, 0.01, 0.05, 0.2, 1.0)
    rows = [(*body, after, reset) for body in bodies for after in times for reset in (True, False)]
    rng.shuffle(rows)
    at.all(lambda row: at.leave(*row), rows * 3, 12)
    head = at.head(TEXT, 1000)
    for cut in range(0, len(head) + 20, 8):
        with closing(socket.create_connection(at.address)) as s:
            s.sendall((head + b"{" * 100)[:cut])
        at.count("left")
    at.drained()


def page(at: Attacker) -> None:
    """The page and its files while long prompts and large bodies come."""
    stop = threading.Event()

    def load(number: int) -> None:
        while not stop.is_set():
            at.send(TEXT, _long(time.monotonic_ns()), patience_s=3)
            at.send(CHAT, b'{"messages":[' + b"{}," * 300_000 + b"{}]}")

    others = [threading.Thread(target=load, args=(i,)) for i in range(6)]
    for other in others:
        other.start()
    try:
        files = ("/", "/page/main.js", "/page/page.css", "/page/live", "/page/chat.js")
        for name in files * 6:
            found = at.get(name)
            words = f"{name}: {found.status} after {found.seconds:.1f} s"
            at.expect(found.status == 200 and len(found.body) > 50 and found.seconds < 2, words)
    finally:
        stop.set()
        for other in others:
            other.join()
    at.drained(60)


def garbage(at: Attacker) -> None:
    """A TLS port gets bytes that are none, half handshakes, plain HTTP, and silence."""
    rows = [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\x00" * 5000,
        HELLO,
        b"\x16\x03\x01\xff\xff",
        b"",
    ]
    hold(at, 100, lambda i: rows[i % len(rows)], patience_s=5.0)
    for _ in range(50):  # whole handshakes that say nothing
        connection = at.connect()
        connection.connect()
        connection.close()
        at.count("closed")


ATTACKS = (
    Attack("300 half-open requests", half_open, "closed in time", mixed=True),
    Attack("bodies of one-byte chunks, 1.8-8 MB", tiny_chunks, "an answer or 4xx", mixed=True),
    Attack("50 bodies that drip", drips, "closed in time", mixed=True),
    Attack("40 long prompts of one client", long_prompts_40, "short ones overtake", mixed=True),
    Attack("100 long prompts of one client", long_prompts_100, "short ones overtake", mixed=True),
    Attack("Host and Origin of elsewhere", names, "403", mixed=True),
    Attack("two lengths, bad heads", smuggling, "one answer, 400", mixed=True),
    Attack("clients that leave, at every stage", leaving, "nothing continues", mixed=True),
    Attack("the page under load", page, "200 soon"),
)
FEW = (
    Attack("100 idle sockets, 64 descriptors", idle_sockets, "closed in time"),
    Attack("300 half-open, 64 descriptors", half_open, "closed in time"),
)
FEW_TLS = (Attack("300 half handshakes, 64 descriptors", half_handshakes, "closed in time"),)
TLS = (Attack("TLS: garbage, half handshakes", garbage, "closed in time"),)
