"""TCP rendezvous of ranks on several hosts: all connect to rank 0, which sends them each other's
addresses.

Knows addresses and sockets. Connections are not authenticated: any peer that reaches these
addresses may take a rank's place, so they belong on a private network.
"""

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
from spark_engine.runtime.ranks.communicator import LinkCommunicator
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.runtime.ranks.links import LIMIT_S

PORT = 29700  # of rank 0's host, unless --hosts names one
CONNECT_S = 600.0  # time for an operator to start the other ranks
LINK_S = 60.0  # time for connecting ranks that have all started
HELLO_S = 5.0
ASK_S = 0.5  # time for connecting to a host that may run another rank 0
RETRY_S = 0.5
LENGTH = 4  # bytes of the length before each message
MOST_BYTES = 1 << 16
MOST_UNIDENTIFIED = 64  # connections that have not sent a message yet
MOST_SHOWN = 500  # characters of an invalid message in the log
T = TypeVar("T")
log = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True):
    """The sender's rank, and the port on which it listens; 0 for a connection between ranks.
    `hosts`: its --hosts. Rank 0 also sends it to the other hosts to find out whether another
    process is rank 0."""

    rank: int
    ranks: int
    port: int = 0
    hosts: tuple[str, ...] = ()


class Ports(msgspec.Struct, frozen=True):
    """The port of each rank, by rank; or the reason why rank 0 refuses the peer."""

    ports: list[int]
    refused: str = ""


def address_of(host: str, port: int = PORT) -> tuple[str, int]:
    """Parses `name`, `name:port`, or `[v6]:port`; `port` is the default. Raises OptionError."""
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
    """Parses `a,b:port,[v6]:port`; empty text gives none. Raises OptionError."""
    hosts = tuple(part.strip() for part in (text or "").split(",")) if text else ()
    for host in hosts:
        address_of(host)
    return hosts


def accept_ranks(
    hosts: Sequence[str], limit_s: float = LIMIT_S, connect_s: float = CONNECT_S
) -> RankGroup:
    """Rank 0's group, when a rank has connected from each of the other hosts.

    Raises OptionError if rank 0 cannot listen or be reached, or another process is rank 0 too;
    ExecutorError naming the ranks that do not connect.
    """
    check_reached(hosts, 0)
    others = range(1, len(hosts))
    with ExitStack() as undo, _listen(*address_of(hosts[0])) as server:
        with ExitStack() as asking:
            came = _accept(server, others, hosts, connect_s, undo, _ask(hosts, asking))
        ports = Ports([0, *(came[rank][1].port for rank in others)])
        for control, _ in came.values():
            _send(control, ports)
        links = _accept(server, others, hosts, LINK_S, undo)
        undo.pop_all()
    comm = LinkCommunicator(0, {rank: link for rank, (link, _) in links.items()}, limit_s)
    return RankGroup(comm, {rank: one for rank, (one, _) in came.items()}, {}, None, limit_s)


def join_ranks(
    hosts: Sequence[str], rank: int, connect_s: float = CONNECT_S
) -> tuple[socket.socket, LinkCommunicator]:
    """Another rank's socket to rank 0, and its communicator, when all ranks have connected.

    Raises OptionError if it cannot listen or be reached, or has the hosts in another order;
    ExecutorError if rank 0 is not reached in time, or ends meanwhile.
    """
    check_reached(hosts, rank)
    ranks, first = len(hosts), address_of(hosts[0])
    with ExitStack() as undo, _listen(*address_of(hosts[rank], 0)) as server:
        control = undo.enter_context(_connect(first, connect_s))
        _send(control, Hello(rank, ranks, server.getsockname()[1], tuple(hosts)))
        control.settimeout(connect_s)
        found = _receive(control, Ports)
        if found is None:
            raise ExecutorError(f"rank 0 ended before all {ranks} ranks had connected")
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
    return control, LinkCommunicator(rank, links)


def check_reached(hosts: Sequence[str], rank: int) -> None:
    """Raises OptionError if this host's name resolves to an address that other hosts
    cannot reach."""
    names = [address_of(host)[0] for host in hosts]
    here = _loopback(names[rank])
    if here and not all(map(_loopback, names)):
        raise OptionError(
            f"--hosts: {names[rank]} is {here} on this host (see /etc/hosts), where no "
            "other host reaches it: give an address that they reach, on every host"
        )


def _loopback(name: str) -> str | None:
    """The loopback address to which this name resolves, if it does."""
    try:
        found = [row[4][0] for row in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return None
    own = [str(a) for a in found if ip_address(str(a).partition("%")[0]).is_loopback]
    return own[0] if own and len(own) == len(found) else None


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise OptionError(
            f"--hosts: rank cannot listen on {host}:{port} ({error.strerror}): name this host as "
            "the others reach it, with a free port"
        ) from None


def _connect(address: tuple[str, int], connect_s: float) -> socket.socket:
    """A connection to the address, retried until a process listens there."""
    until = time.monotonic() + connect_s
    while True:
        try:
            return socket.create_connection(address, timeout=HELLO_S)
        except OSError as error:
            if time.monotonic() > until:
                words = f"no process answers at {address[0]}:{address[1]} ({error})"
                raise ExecutorError(words) from None
        time.sleep(RETRY_S)


def _accept(
    server: socket.socket,
    wanted: Sequence[int],
    hosts: Sequence[str],
    connect_s: float,
    undo: ExitStack,
    asked: Sequence[socket.socket] | None = None,
) -> dict[int, tuple[socket.socket, Hello]]:
    """One connection of each of these ranks. In the first phase a rank that connects again replaces
    its earlier connection, and the answers of the `asked` hosts are read; between ranks a second
    connection is an error. Raises ExecutorError naming the missing ranks, OptionError from the
    answers."""
    came: dict[int, tuple[socket.socket, Hello]] = {}
    first, unanswered = asked is not None, [_Incoming(one, Ports, connect_s) for one in asked or ()]
    unidentified: list[_Incoming[Hello]] = []
    until, listening = time.monotonic() + connect_s, server.fileno()
    server.setblocking(False)
    undo.callback(_close, came)
    refused: OptionError | None = None  # raised at the end: other peers still get their answers
    try:
        while missing := sorted(set(wanted) - set(came)):
            found = _wait(
                listening,
                [*unidentified, *unanswered],
                0 if refused and not unidentified else until,
            )
            if listening in found:
                _accept_one(server, unidentified)
            for one in [one for one in unidentified if one.over]:
                taken = _take(one, hosts, wanted, came, first)
                unidentified.remove(one)
                if not taken:
                    one.peer.close()
            for other in [other for other in unanswered if other.over]:
                unanswered.remove(other)
                if other.message is not None and other.message.refused:
                    refused = OptionError(other.message.refused)
            if refused and listening not in found and not unidentified:
                raise refused
            if time.monotonic() >= until and set(wanted) - set(came):
                raise ExecutorError(f"ranks {missing} did not connect within {connect_s:g} s")
    finally:
        for one in unidentified:
            one.peer.close()
    return came


class _Incoming(Generic[T]):
    """A message being received: complete within `limit_s` seconds, or rejected.

    Attributes:
        over: it is complete, or never will be.
        message: None until it is complete, and if it is not a valid message.
    """

    def __init__(self, peer: socket.socket, kind: type[T], limit_s: float) -> None:
        self.peer, self._kind, self._data = peer, kind, bytearray()
        self.until = time.monotonic() + limit_s
        self.over, self.message = False, None  # type: bool, T | None
        peer.setblocking(False)

    def read(self) -> None:
        """Reads available bytes, and none after the end of the message."""
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
    """Reads incoming bytes until a listener or a message is ready, a message exceeds its limit, or
    `until`; returns what is ready."""
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


def _accept_one(server: socket.socket, unidentified: list[_Incoming[Hello]]) -> None:
    """Accepts each peer that connects. Closes the oldest beyond MOST_UNIDENTIFIED peers."""
    try:
        peer, _ = server.accept()
    except OSError:  # the peer has already left
        return
    if len(unidentified) >= MOST_UNIDENTIFIED:
        unidentified.pop(0).peer.close()
    unidentified.append(_Incoming(peer, Hello, HELLO_S))


def _take(
    one: _Incoming[Hello],
    hosts: Sequence[str],
    wanted: Sequence[int],
    came: dict[int, tuple[socket.socket, Hello]],
    first: bool,
) -> bool:
    """Whether the message is from a missing rank. Raises ExecutorError for a rank that connects
    again during the second phase."""
    hello, peer = one.message, one.peer
    if hello is not None and (words := _host_conflict(hello, hosts, first)):
        log.warning("%s: %s", _name(peer), words)
        with suppress(ExecutorError):
            _send(peer, Ports([], words))
        return False
    if hello is None or hello.ranks != len(hosts) or hello.rank not in wanted:
        shown = str(hello)[:MOST_SHOWN]
        log.warning("%s sent %s, which is not a missing rank", _name(peer), shown)
        return False
    if not first and hello.port:
        raise ExecutorError(f"rank {hello.rank} connected again while all ranks were connecting")
    if hello.rank in came:  # its process was restarted
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
        return "a host that has disconnected"


def _ask(hosts: Sequence[str], asking: ExitStack) -> list[socket.socket]:
    """Connections to the other hosts that listen; each is asked whether it is rank 0 too. It may
    answer at any time: at once if it already waits, later if it is also asking."""
    asked = []
    for host in hosts[1:]:
        with suppress(OSError, ExecutorError):
            peer = socket.create_connection(address_of(host), timeout=ASK_S)
            asked.append(asking.enter_context(peer))
            _send(peer, Hello(0, len(hosts), hosts=tuple(hosts)))
            peer.settimeout(HELLO_S)
    return asked


def _host_conflict(hello: Hello, ours: Sequence[str], first: bool) -> str:
    """The error if two processes are rank 0, which asks only the `first` host, or if another host
    has the same hosts in another order; otherwise empty."""
    theirs, two = hello.hosts, first and hello.rank == 0
    given = f"--hosts {','.join(ours)}"
    if theirs == tuple(ours):
        remedy = "name each host once, and give --rank 0 to the first alone, if at all"
        return f"two processes are rank 0 of {given}: {remedy}" if two else ""
    if sorted(theirs) != sorted(ours) and not two:
        return ""
    shown = "".join(c if c.isprintable() else "?" for c in ",".join(theirs)[:MOST_SHOWN])
    words = f"one host has --hosts {shown}, another {given}"
    return f"{words}: give the same hosts in the same order everywhere; the first is rank 0"


def _send(peer: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    try:
        peer.sendall(len(data).to_bytes(LENGTH, "little") + data)
    except OSError as error:
        raise ExecutorError(f"a rank ended before all had connected ({error})") from None


def _receive(peer: socket.socket, kind: type[T]) -> T | None:
    """The peer's message within the socket's timeout; None if it closes, is silent, or sends
    another message."""
    limit_s = peer.gettimeout()
    one = _Incoming(peer, kind, HELLO_S if limit_s is None else limit_s)
    poll = select.poll()
    poll.register(peer.fileno(), select.POLLIN)
    while not one.over and (left := one.until - time.monotonic()) > 0:
        if poll.poll(1000 * left):
            one.read()
    peer.settimeout(limit_s)
    return one.message
