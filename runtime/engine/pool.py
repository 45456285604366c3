"""A pool of numbered units: KV pages, slots, or rows of snapshots.

Counts the users of each unit and how often the cache keeps it.
"""

from collections.abc import Iterable

from spark_engine.errors import InternalError


class Pool:
    """Units 0..size-1, handed out last-returned first. `name` is for messages.

    A unit is free when it has no user and the cache does not keep it.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.kept = 0  # units that the cache keeps
        self.spare = 0  # those of them without a user
        self._free = list(range(size - 1, -1, -1))
        self._users = [0] * size
        self._keeps = [0] * size

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int = 1) -> list[int]:
        """`count` units. Raises InternalError when there are not that many: ask `free` first."""
        if count > len(self._free):
            raise InternalError(f"{count} {self.name} taken, {len(self._free)} of {self.size} free")
        taken = [self._free.pop() for _ in range(count)]
        for unit in taken:
            self._users[unit] = 1
        return taken

    def share(self, units: Iterable[int]) -> None:
        """Adds a user to each. Raises InternalError for a unit that is free or unknown."""
        users, keeps, size, spare = self._users, self._keeps, self.size, self.spare
        for unit in units:  # hundreds of a long prompt, and a first token waits for them
            if not 0 <= unit < size or not (users[unit] or keeps[unit]):
                raise InternalError(f"{self.name} {unit} shared, but it is free")
            spare -= not users[unit]
            users[unit] += 1
        self.spare = spare

    def give(self, units: Iterable[int]) -> None:
        """Removes a user from each. Raises InternalError for a unit without users."""
        for unit in units:
            if not 0 <= unit < self.size or not self._users[unit]:
                raise InternalError(f"{self.name} {unit} returned, but it was not taken")
            self._users[unit] -= 1
            if not self._users[unit]:
                if self._keeps[unit]:
                    self.spare += 1
                else:
                    self._free.append(unit)

    def keep(self, unit: int) -> None:
        """The cache keeps the unit, once more. Raises InternalError for one that is free."""
        if not 0 <= unit < self.size or not (self._users[unit] or self._keeps[unit]):
            raise InternalError(f"{self.name} {unit} kept, but it is free")
        self.kept += not self._keeps[unit]
        self._keeps[unit] += 1

    def drop(self, unit: int) -> None:
        """The cache keeps the unit once less. Raises InternalError if it does not keep it."""
        if not 0 <= unit < self.size or not self._keeps[unit]:
            raise InternalError(f"{self.name} {unit} dropped, but it was not kept")
        self._keeps[unit] -= 1
        if not self._keeps[unit]:
            self.kept -= 1
            if not self._users[unit]:
                self.spare -= 1
                self._free.append(unit)

    def users(self, unit: int) -> int:
        return self._users[unit]

    def unused(self, units: Iterable[int]) -> int:
        users = self._users
        return [users[unit] for unit in units].count(0)

    def keeps(self, unit: int) -> int:
        return self._keeps[unit]
