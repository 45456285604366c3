"""A queue in which owners take turns: an item waits for its owner's earlier items, and not for all
items of others."""

import asyncio
from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """All methods run in one event loop."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, deque[T]] = OrderedDict()  # by owner; the next turn first
        self._size = 0
        self._added = asyncio.Event()

    def __len__(self) -> int:
        return self._size

    def put(self, owner: str, item: T, first: bool = False) -> None:
        """Adds an item; `first`: before the owner's others."""
        row = self._rows.setdefault(owner, deque())
        if first:
            row.appendleft(item)
        else:
            row.append(item)
        self._size += 1
        self._added.set()

    async def get(self) -> T:
        """The next item; waits for one."""
        while not self._size:
            self._added.clear()
            await self._added.wait()
        owner, row = next(iter(self._rows.items()))
        item = row.popleft()
        self._size -= 1
        self._rows.move_to_end(owner)
        if not row:
            del self._rows[owner]
        return item

    def remove(self, owner: str, item: T) -> None:
        """Removes an item, if it is still queued."""
        row = self._rows.get(owner)
        if row is None or item not in row:
            return
        row.remove(item)
        self._size -= 1
        if not row:
            del self._rows[owner]

    def counts(self) -> dict[str, int]:
        return {owner: len(row) for owner, row in self._rows.items()}

    def last_of(self, owner: str) -> T:
        return self._rows[owner][-1]
