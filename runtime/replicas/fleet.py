"""The known replicas and their states: serving, unresponsive, leaving.

Knows addresses, health and times; of a request it knows only the task. All methods belong to one
event loop.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from spark_engine.errors import OptionError
from spark_engine.runtime.replicas.routing import Router
from spark_engine.runtime.replicas.upstream import ConnectRefused, Lost, Upstream

PROBE_S = 1.0  # between two health checks of a replica, at up to A_SECOND checks
A_SECOND = 200  # checks; more replicas are checked less often
PATIENCE_S = 3.0  # time limit of a check
MISSES = 3  # consecutive failed checks after which a replica counts as dead
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Address:
    """Address of a replica. A restarted replica has a new `name`."""

    name: str
    url: str


Members = Callable[[], Awaitable[Sequence[Address]]]


@dataclass
class Replica:
    """One replica.

    Attributes:
        listed: `members` lists it. A replica that is not listed is checked until its requests end.
    """

    address: Address
    up: bool = False  # it accepts requests, as far as is known
    dead: bool = False  # it was removed; its running requests are aborted
    listed: bool = True
    why: str = "its health is not checked yet"  # the reason why it is not up
    misses: int = 0
    flights: set[asyncio.Task[object]] = field(default_factory=set)  # the tasks of its requests

    @property
    def name(self) -> str:
        return self.address.name

    @contextlib.contextmanager
    def flight(self) -> Iterator[None]:
        """Aborts the block with Lost if the replica dies meanwhile."""
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
    """The replicas that `members` lists, with periodic health checks."""

    def __init__(self, members: Members, upstream: Upstream, router: Router) -> None:
        self._members, self._upstream, self.router = members, upstream, router
        self.replicas: dict[str, Replica] = {}
        self._listing_failed = False  # `members` failed
        self.leaving: dict[str, Replica] = {}  # no longer listed, with running requests

    @property
    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.up]

    async def watch(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:  # without checks the front would send requests to dead replicas
                log.exception("a check of the replicas failed")
            await asyncio.sleep(PROBE_S * max(1.0, len(self.replicas) / A_SECOND))

    async def look(self) -> None:
        """One update of the list and of every replica's health."""
        try:
            self._set(await self._members())
            if self._listing_failed:
                log.info("the list of replicas is available again")
            self._listing_failed = False
        except Exception as error:  # the directory may be unavailable for a while
            if not self._listing_failed:
                log.warning(
                    "the list of replicas is not available: %s: %s", type(error).__name__, error
                )
            self._listing_failed = True
        self.leaving = {k: v for k, v in self.leaving.items() if v.flights}
        known = [*self.replicas.values(), *self.leaving.values()]
        for replica, found in zip(
            known,
            await asyncio.gather(*map(self._probe, known), return_exceptions=True),
            strict=True,
        ):
            if isinstance(found, Exception):  # invalid HTTP, for example
                self.miss(replica, f"{type(found).__name__}: {found}")

    def _set(self, addresses: Sequence[Address]) -> None:
        named = {address.name: address for address in addresses}
        for name in self.replicas.keys() - named.keys():  # its requests may end
            replica = self.leaving[name] = self.replicas.pop(name)
            self.router.remove(name)
            replica.up, replica.listed, replica.why = False, False, "it is shutting down"
            log.info("replica %s leaves", name)
        for name, address in named.items():
            if name not in self.replicas:
                replica = self.leaving.pop(name) if name in self.leaving else Replica(address)
                replica.address, replica.listed = address, True
                self.replicas[name] = replica

    async def _probe(self, replica: Replica) -> None:
        try:
            status, body = await self._upstream.get(f"{replica.address.url}/health", PATIENCE_S)
        except ConnectRefused as error:  # it drains, or its process ended, and with it its streams
            self.down(replica, str(error))
            return
        except Lost as error:
            self.miss(replica, str(error))
            return
        replica.misses = 0
        if status != 200:
            self.down(replica, body.decode("utf-8", "replace")[:200])
        elif not replica.up and replica.listed:
            replica.up, replica.dead, replica.why = True, False, ""
            self.router.add(replica.name)
            log.info("replica %s takes requests at %s", replica.name, replica.address.url)

    def miss(self, replica: Replica, why: str) -> None:
        """Records a failed check: no new requests; after MISSES its running requests
        are aborted."""
        replica.misses += 1
        self.down(replica, why)
        if replica.misses >= MISSES and not replica.dead:
            replica.dead = True
            log.error("replica %s is removed: %s", replica.name, why)
            for task in list(replica.flights):
                task.cancel()

    def down(self, replica: Replica, why: str) -> None:
        """Marks a replica; it gets no request until its next health check."""
        if replica.up:
            log.warning("replica %s takes no requests: %s", replica.name, why)
        replica.up, replica.why = False, why
        self.router.remove(replica.name)


def listed(urls: Sequence[str]) -> Members:
    """The members of `urls`: http://HOST:PORT, or dns://NAME:PORT for every address of a name, such
    as a Kubernetes service without a cluster IP. Raises OptionError."""
    fixed, names = [], []
    for url in urls:
        parts = urlsplit(url)
        try:
            port = parts.port
            good = parts.scheme in ("http", "dns") and parts.hostname and parts.path in ("", "/")
        except ValueError:
            good = False
        if not good:
            words = "use http://HOST:PORT, or dns://NAME:PORT for all addresses of a name"
            raise OptionError(f"replica {url!r} is not an address: {words}")
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
