"""The models of one address: which service answers a request.

Knows names and services; a body's model is read here where it is small, else in another process.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from spark_engine.errors import RequestError
from spark_engine.runtime.server.api.fields import ModelField, unknown_model
from spark_engine.runtime.server.prompts.contract import Blobs, JobKind
from spark_engine.runtime.server.prompts.limits import SMALL_BODY
from spark_engine.runtime.server.service.service import Service


class Models:
    """Services by the names of their models. The first one answers requests without a name."""

    def __init__(self, services: Sequence[Service]) -> None:
        self.services, self.first = tuple(services), services[0]
        self._by_name = {name: one for one in services for name in one.names}

    def __iter__(self) -> Iterator[tuple[str, Service]]:
        return iter(self._by_name.items())

    @property
    def several(self) -> bool:
        """Whether they are loaded on demand."""
        return self.first.client.state is not None

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return sum(service.open for service in self.services)

    @property
    def in_flight(self) -> int:
        """Those that have been read."""
        return sum(service.client.in_flight for service in self.services)

    def cancel_all(self) -> None:
        for service in self.services:
            service.client.cancel_all()

    def named(self, name: str | None) -> Service:
        """Raises UnknownModel."""
        if name is None:
            return self.first
        if name not in self._by_name:
            raise unknown_model(name, list(self._by_name))
        return self._by_name[name]

    async def of(self, body: Blobs) -> Service:
        """The service for a body. Raises UnknownModel, and what reading a large body does; for a
        malformed one, the first, which says what is wrong with it."""
        if len(self.services) == 1:
            return self.first
        if sum(map(len, body)) > SMALL_BODY:
            found = await self.first.compute(JobKind.MODEL, body)
            return self.named(msgspec.json.decode(found, type=ModelField).model)
        try:
            asked = ModelField.of(b"".join(body))
        except RequestError:
            return self.first
        return self.named(asked.model)

    def unhealthy_reason(self) -> str | None:
        """Why no model would answer, or None."""
        found = [service.unhealthy_reason() for service in self.services]
        return found[0] if all(found) else None

    def full(self) -> str | None:
        """Why a new request would be refused by every model, or None."""
        words = None
        for one in self.services:
            most = one.info.limits.max_seqs + one.client.max_queue
            if one.open < most:
                return None
            words = words or f"{one.open} requests run or wait; the limit is {most}"
        return words

    def states(self) -> dict[str, int]:
        """Models by their state."""
        return Counter(service.client.state or "loaded" for service in self.services)
