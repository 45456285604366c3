"""TCP rendezvous of ranks on several hosts: all connect to rank 0, which sends them each other's
addresses.

Knows addresses and sockets. Whoever reaches these addresses may take a rank's place, so they belong
on a network of the hosts' own.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

import msgspec

from spark_engine.errors import ExecutorError, OptionError
from spark_engine.runtime.ranks.communicator import TcpCommunicator
from spark_engine.runtime.ranks.group import Group
from spark_engine.runtime.ranks.links import LIMIT_S, Links

PORT = 29700  # of rank 0's host, where --hosts names none
COME_S = 600.0  # for people to start the others
LINK_S = 60.0  # for ranks that are all there to be connected
HELLO_S = 5.0
ASK_S = 0.5  # for a connection to where another rank 0 may wait
RETRY_S = 0.5
LENGTH = 4  # bytes before each message
MOST_BYTES = 1 << 16
MOST_STRANGERS = 64  # that have connected and not said yet who they are
MOST_SHOWN = 500  # characters of what a stranger said
T = TypeVar("T")
log = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True):
    """Who comes, and the port where it listens; 0 for a connection between ranks. `hosts`: as it
    was given them. Rank 0's asks whether who listens there takes itself for rank 0 too."""

    rank: int
    ranks: int
    port: int = 0
    hosts: tuple[str, ...] = ()


class Ports(msgspec.Struct, frozen=True):
    """Where each rank listens, by rank; or why rank 0 does not take who came."""

    ports: list[int]
    refused: str = ""


def address_of(host: str, port: int = PORT) -> tuple[str, int]:
    """`name`, `name:port`, or `[v6]:port`; `port` where it has none. Raises OptionError."""
    name, found = host, str(port)
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        found = rest.removeprefix(":") or found
    elif host.count(":") == 1:
        name, _, found = host.partition(":")
    if not (name and found.isdecimal() and (0 < int(found) < 1 << 16 or int(found) == port)):
        raise OptionError(f"--hosts has {host!r}; a host is a name or name:port")
    return name, int(found)


def split_hosts(text: str | None) -> tuple[str, ...]:
    """`a,b:port,[v6]:port`; none where there is no text. Raises OptionError."""
    hosts = tuple(part.strip() for part in (text or "").split(",")) if text else ()
    for host in hosts:
        address_of(host)
    return hosts


def accept_ranks(hosts: Sequence[str], limit_s: float = LIMIT_S, come_s: float = COME_S) -> Group:
    """Rank 0's group, when a rank has come from each of the other hosts.

    Raises OptionError where rank 0 cannot listen or be reached, or another host takes itself for
    rank 0, ExecutorError naming those that do not come.
    """
    check_reached(hosts, 0)
    others = range(1, len(hosts))
    with ExitStack() as undo, _listen(*address_of(hosts[0])) as server:
        with ExitStack() as asking:
            came = _accept(server, others, hosts, come_s, undo, _ask(hosts, asking))
        ports = Ports([0, *(came[rank][1].port for rank in others)])
        for control, _ in came.values():
            _send(control, ports)
        links = _accept(server, others, hosts, LINK_S, undo)
        undo.pop_all()
    comm = TcpCommunicator(Links(0, {rank: link for rank, (link, _) in links.items()}, limit_s))
    return Group(comm, {rank: one for rank, (one, _) in came.items()}, {}, None, limit_s)


def join_ranks(
    hosts: Sequence[str], rank: int, come_s: float = COME_S
) -> tuple[socket.socket, TcpCommunicator]:
    """Another rank's socket to rank 0, and its communicator, when all have come together.

    Raises OptionError where it cannot listen or be reached, or has the hosts in another order,
    ExecutorError where rank 0 is not there in time, or ends meanwhile.
    """
    check_reached(hosts, rank)
    ranks, first = len(hosts), address_of(hosts[0])
    with ExitStack() as undo, _listen(*address_of(hosts[rank], 0)) as server:
        control = undo.enter_context(_connect(first, come_s))
        _send(control, Hello(rank, ranks, server.getsockname()[1], tuple(hosts)))
        control.settimeout(come_s)
        found = _receive(control, Ports)
        if found is None:
            raise ExecutorError(f"rank 0 has gone before all {ranks} ranks had come")
        if found.refused:
            raise OptionError(found.refused)
        links = {0: undo.enter_context(_connect(first, HELLO_S))}
        for other in range(1, rank):
            address = address_of(hosts[other])[0], found.ports[other]
            links[other] = undo.enter_context(_connect(address, HELLO_S))
        for link in links.values():
            _send(link, Hello(rank, ranks))
        came = _accept(server, range(rank + 1, ranks), hosts, LINK_S, undo)
        undo.pop_all()
    links |= {other: link for other, (link, _) in came.items()}
    return control, TcpCommunicator(Links(rank, links))


def check_reached(hosts: Sequence[str], rank: int) -> None:
    """Raises OptionError where this host's name is an address of its own that no other reaches."""
    names = [address_of(host)[0] for host in hosts]
    here = _loopback(names[rank])
    if here and not all(map(_loopback, names)):
        raise OptionError(
            f"--hosts: {names[rank]} is {here} on this host (as /etc/hosts may say), where no "
            "other host reaches it: give the address by which they do, on every host"
        )


def _loopback(name: str) -> str | None:
    """The address of this name, where it is one that a host has of itself."""
    try:
        found = [row[4][0] for row in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    own = [str(a) for a in found if ip_address(str(a).partition("%")[0]).is_loopback]
    return own[0] if own and len(own) == len(found) else None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=_family(host), backlog=64)
    except OSError as error:
        raise OptionError(
            f"--hosts: rank cannot listen on {host}:{port} ({error.strerror}): name this host as "
            "the others reach it, with a free port"
        ) from None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connect(address: tuple[str, int], come_s: float) -> socket.socket:
    """A connection, as soon as somebody listens there."""
    until = time.monotonic() + come_s
    while True:
        try:
            return socket.create_connection(address, timeout=HELLO_S)
        except OSError as error:
            if time.monotonic() > until:
                words = f"nobody answers at {address[0]}:{address[1]} ({error})"
                raise ExecutorError(words) from None
        time.sleep(RETRY_S)


def _accept(
    server: socket.socket,
    wanted: Sequence[int],
    hosts: Sequence[str],
    come_s: float,
    undo: ExitStack,
    asked: Sequence[socket.socket] | None = None,
) -> dict[int, tuple[socket.socket, Hello]]:
    """A connection of each of these ranks: the first, by which it comes, where one that comes again
    takes its own place and who was `asked` is heard; or one between ranks, which nobody comes by
    anew. Raises ExecutorError naming ranks that do not come, OptionError of who was asked."""
    came: dict[int, tuple[socket.socket, Hello]] = {}
    first, unheard = asked is not None, [_Incoming(one, Ports, come_s) for one in asked or ()]
    strangers: list[_Incoming[Hello]] = []
    until, knocks = time.monotonic() + come_s, server.fileno()
    server.setblocking(False)
    undo.callback(_close, came)
    refused: OptionError | None = None  # said when nobody waits for our answer any more
    try:
        while missing := sorted(set(wanted) - set(came)):
            found = _wait(knocks, [*strangers, *unheard], 0 if refused and not strangers else until)
            if knocks in found:
                _let_in(server, strangers)
            for one in [one for one in strangers if one.over]:
                taken = _take(one, hosts, wanted, came, first)
                strangers.remove(one)
                if not taken:
                    one.peer.close()
            for other in [other for other in unheard if other.over]:
                unheard.remove(other)
                if other.message is not None and other.message.refused:
                    refused = OptionError(other.message.refused)
            if refused and knocks not in found and not strangers:
                raise refused
            if time.monotonic() >= until and set(wanted) - set(came):
                raise ExecutorError(f"ranks {missing} have not come for {come_s:g} s")
    finally:
        for one in strangers:
            one.peer.close()
    return came


class _Incoming(Generic[T]):
    """A message on its way: all of it within `limit_s` seconds, or none.

    Attributes:
        over: it has come, or never will.
        message: None while it has not come, and where the other end says anything else.
    """

    def __init__(self, peer: socket.socket, kind: type[T], limit_s: float) -> None:
        self.peer, self._kind, self._data = peer, kind, bytearray()
        self.until = time.monotonic() + limit_s
        self.over, self.message = False, None  # type: bool, T | None
        peer.setblocking(False)

    def read(self) -> None:
        """Takes what is there, and no byte of what comes behind the message."""
        size = int.from_bytes(self._data[:LENGTH], "little")
        left = LENGTH - len(self._data)
        if left <= 0:
            left += size
        try:
            part = self.peer.recv(left)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self._data += part
        size = int.from_bytes(self._data[:LENGTH], "little")
        if not part or len(self._data) >= LENGTH and size > MOST_BYTES:
            self.over = True
        elif len(self._data) == LENGTH + size:
            self.over = True
            with suppress(msgspec.DecodeError, RecursionError):
                self.message = msgspec.msgpack.decode(self._data[LENGTH:], type=self._kind)
            self.peer.settimeout(HELLO_S)


def _wait(server: int, incoming: Sequence[_Incoming[Any]], until: float) -> set[int]:
    """Reads what came until something does, a message takes too long, or it is `until`: what can be
    read."""
    poll = select.poll()
    for number in (server, *(one.peer.fileno() for one in incoming)):
        poll.register(number, select.POLLIN)
    end = min([until, *(one.until for one in incoming)])
    found = {number for number, _ in poll.poll(1000 * max(0.0, end - time.monotonic()))}
    for one in incoming:
        if one.peer.fileno() in found:
            one.read()
        one.over |= time.monotonic() >= one.until
    return found


def _let_in(server: socket.socket, strangers: list[_Incoming[Hello]]) -> None:
    """Takes each peer that connects. Of too many who say nothing the first gives way."""
    try:
        peer, _ = server.accept()
    except OSError:  # it has left again
        return
    if len(strangers) >= MOST_STRANGERS:
        strangers.pop(0).peer.close()
    strangers.append(_Incoming(peer, Hello, HELLO_S))


def _take(
    one: _Incoming[Hello],
    hosts: Sequence[str],
    wanted: Sequence[int],
    came: dict[int, tuple[socket.socket, Hello]],
    first: bool,
) -> bool:
    """Whether it is a rank that is wanted. Raises ExecutorError for one that comes anew while all
    are being connected."""
    hello, peer = one.message, one.peer
    if hello is not None and (words := _disorder(hello, hosts, first)):
        log.warning("%s: %s", _name(peer), words)
        with suppress(ExecutorError):
            _send(peer, Ports([], words))
        return False
    if hello is None or hello.ranks != len(hosts) or hello.rank not in wanted:
        said = str(hello)[:MOST_SHOWN]
        log.warning("%s said %s, which is no rank that is missing", _name(peer), said)
        return False
    if not first and hello.port:
        raise ExecutorError(f"rank {hello.rank} has come anew while all were being connected")
    if hello.rank in came:  # its process was started again
        came[hello.rank][0].close()
    came[hello.rank] = peer, hello
    return True


def _close(came: Mapping[int, tuple[socket.socket, Hello]]) -> None:
    for peer, _ in came.values():
        peer.close()


def _name(peer: socket.socket) -> str:
    try:
        return str(peer.getpeername()[0])
    except OSError:
        return "a host that has left"


def _ask(hosts: Sequence[str], asking: ExitStack) -> list[socket.socket]:
    """Connections to those of the other hosts that listen, each asked whether it is rank 0 too. It
    may answer at any time: at once where it waits already, later where it asks meanwhile."""
    asked = []
    for host in hosts[1:]:
        with suppress(OSError, ExecutorError):
            peer = socket.create_connection(address_of(host), timeout=ASK_S)
            asked.append(asking.enter_context(peer))
            _send(peer, Hello(0, len(hosts), hosts=tuple(hosts)))
            peer.settimeout(HELLO_S)
    return asked


def _disorder(hello: Hello, ours: Sequence[str], first: bool) -> str:
    """What to do where there are two of rank 0, who asks the `first` one alone, or somebody has the
    same hosts in another order."""
    theirs, two = hello.hosts, first and hello.rank == 0
    given = f"--hosts {','.join(ours)}"
    if theirs == tuple(ours):
        mend = "name each host once, and give --rank 0 to the first alone, if at all"
        return f"two processes are rank 0 of {given}: {mend}" if two else ""
    if sorted(theirs) != sorted(ours) and not two:
        return ""
    shown = "".join(c if c.isprintable() else "?" for c in ",".join(theirs)[:MOST_SHOWN])
    words = f"one host was given --hosts {shown}, another {given}"
    return f"{words}: give all the same hosts in the same order, of which the first is rank 0"


def _send(peer: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    try:
        peer.sendall(len(data).to_bytes(LENGTH, "little") + data)
    except OSError as error:
        raise ExecutorError(f"a rank has gone before all had come ({error})") from None


def _receive(peer: socket.socket, kind: type[T]) -> T | None:
    """What the other end says within the socket's timeout; None where it closes, is silent, or says
    anything else."""
    limit_s = peer.gettimeout()
    one = _Incoming(peer, kind, HELLO_S if limit_s is None else limit_s)
    poll = select.poll()
    poll.register(peer.fileno(), select.POLLIN)
    while not one.over and (left := one.until - time.monotonic()) > 0:
        if poll.poll(1000 * left):
            one.read()
    peer.settimeout(limit_s)
    return one.message
