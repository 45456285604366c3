"""The replicas that there are: which take requests, which are silent, which have gone.

Knows addresses, health and times; knows no request beyond the task that carries it. All methods
belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from spark_engine.errors import OptionError
from spark_engine.runtime.replicas.routing import Router
from spark_engine.runtime.replicas.upstream import Lost, Refused, Upstream

PROBE_S = 1.0  # between two looks at a replica's health, of up to A_SECOND of them
A_SECOND = 200  # looks; with more replicas each is looked at less often
PATIENCE_S = 3.0  # for the answer to one
MISSES = 3  # answers missed in a row after which a replica counts as dead
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Where a replica is. `name` is of one life: one that is started again has another."""

    name: str
    url: str


Members = Callable[[], Awaitable[Sequence[Address]]]


@dataclass
class Replica:
    """One replica.

    Attributes:
        up: it takes requests, as far as is known.
        dead: it was given up; what was on its way there is cut off.
        listed: it is still named. One that is not is looked at until what it has has ended.
        why: why it is not up.
        flights: the tasks that carry requests there.
    """

    address: Address
    up: bool = False
    dead: bool = False
    listed: bool = True
    why: str = "its health was not asked for yet"
    misses: int = 0
    flights: set[asyncio.Task[object]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Its name."""
        return self.address.name

    @contextlib.contextmanager
    def flight(self) -> Iterator[None]:
        """What is done in the block is cut off with Lost where the replica dies meanwhile."""
        task = asyncio.current_task()
        assert task is not None
        if self.dead:
            raise Lost(self.why)
        self.flights.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.dead or task.uncancel():
                raise
            raise Lost(self.why) from None
        finally:
            self.flights.discard(task)


class Fleet:
    """The replicas that `members` names, each asked for its health again and again."""

    def __init__(self, members: Members, upstream: Upstream, router: Router) -> None:
        self._members, self._upstream, self.router = members, upstream, router
        self.replicas: dict[str, Replica] = {}
        self._blind = False  # nobody says who is there
        self.leaving: dict[str, Replica] = {}  # no longer named, with requests that have not ended

    @property
    def up(self) -> list[Replica]:
        """Those that take requests."""
        return [replica for replica in self.replicas.values() if replica.up]

    async def watch(self) -> None:
        """Looks after them until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # a front that looks no more sends requests to the dead for ever
                log.exception("a look at the replicas failed")
            await asyncio.sleep(PROBE_S * max(1.0, len(self.replicas) / A_SECOND))

    async def look(self) -> None:
        """One look: who is there, and how everybody is."""
        try:
            self._set(await self._members())
            if self._blind:
                log.info("replicas can be asked for again")
            self._blind = False
        except Exception as error:  # who knows the members may be away for a while
            if not self._blind:
                log.warning("replicas cannot be asked for: %s: %s", type(error).__name__, error)
            self._blind = True
        self.leaving = {k: v for k, v in self.leaving.items() if v.flights}
        everybody = [*self.replicas.values(), *self.leaving.values()]
        for replica, found in zip(
            everybody,
            await asyncio.gather(*map(self._probe, everybody), return_exceptions=True),
            strict=True,
        ):
            if isinstance(found, Exception):  # what it says is none of HTTP
                self.miss(replica, f"{type(found).__name__}: {found}")

    def _set(self, addresses: Sequence[Address]) -> None:
        named = {address.name: address for address in addresses}
        for name in self.replicas.keys() - named.keys():  # on its way down: what it has may end
            replica = self.leaving[name] = self.replicas.pop(name)
            self.router.remove(name)
            replica.up, replica.listed, replica.why = False, False, "it is on its way down"
            log.info("replica %s leaves", name)
        for name, address in named.items():
            if name not in self.replicas:
                replica = self.leaving.pop(name) if name in self.leaving else Replica(address)
                replica.address, replica.listed = address, True
                self.replicas[name] = replica

    async def _probe(self, replica: Replica) -> None:
        try:
            status, body, _ = await self._upstream.get(f"{replica.address.url}/health", PATIENCE_S)
        except Refused as error:  # it drains, or is gone: then its streams are gone with it
            self._down(replica, str(error))
            return
        except Lost as error:
            self.miss(replica, str(error))
            return
        replica.misses = 0
        if status != 200:
            self._down(replica, body.decode("utf-8", "replace")[:200])
        elif not replica.up and replica.listed:
            replica.up, replica.dead, replica.why = True, False, ""
            self.router.add(replica.name)
            log.info("replica %s takes requests at %s", replica.name, replica.address.url)

    def suspect(self, replica: Replica, why: str) -> None:
        """A request broke there: no other goes there until its health was asked for again."""
        self._down(replica, why)

    def miss(self, replica: Replica, why: str) -> None:
        """It did not answer. No new requests; after some misses what it has is cut off."""
        replica.misses += 1
        self._down(replica, why)
        if replica.misses >= MISSES and not replica.dead:
            replica.dead = True
            log.error("replica %s is given up: %s", replica.name, why)
            for task in list(replica.flights):
                task.cancel()

    def _down(self, replica: Replica, why: str) -> None:
        if replica.up:
            log.warning("replica %s takes no requests: %s", replica.name, why)
        replica.up, replica.why = False, why
        self.router.remove(replica.name)


def listed(urls: Sequence[str]) -> Members:
    """The members that `urls` name: http://HOST:PORT, or dns://NAME:PORT for every address of a
    name, as a Kubernetes service without a cluster IP has them. Raises OptionError."""
    fixed, names = [], []
    for url in urls:
        parts = urlsplit(url)
        try:
            port = parts.port
            good = parts.scheme in ("http", "dns") and parts.hostname and parts.path in ("", "/")
        except ValueError:
            good = False
        if not good:
            words = "give http://HOST:PORT, or dns://NAME:PORT for all addresses of a name"
            raise OptionError(f"replica {url!r} is no address: {words}")
        if parts.scheme == "dns":
            names.append((str(parts.hostname), port or 8000))
        else:
            fixed.append(Address(parts.netloc, f"http://{parts.netloc}"))

    async def members() -> Sequence[Address]:
        found, loop = list(fixed), asyncio.get_running_loop()
        for name, port in names:
            rows = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            for host in sorted({str(row[4][0]) for row in rows}):
                netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                found.append(Address(netloc, f"http://{netloc}"))
        return found

    return members
