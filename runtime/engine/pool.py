"""A pool of numbered units: KV pages, or slots.

Knows which units are free; who holds the others is the holders' business, and `check` compares
the two.
"""

from __future__ import annotations

from collections.abc import Iterable

from spark_engine.errors import InternalError


class Pool:
    """Units 0..size-1, handed out last-returned first. `name` is for messages."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * size)

    @property
    def free(self) -> int:
        """How many units are free."""
        return len(self._free)

    def take(self, count: int = 1) -> list[int]:
        """`count` units. Raises InternalError when there are not that many: ask `free` first."""
        if count > len(self._free):
            raise InternalError(f"{count} {self.name} taken, {len(self._free)} of {self.size} free")
        taken = [self._free.pop() for _ in range(count)]
        for unit in taken:
            self._is_free[unit] = 0
        return taken

    def give(self, units: Iterable[int]) -> None:
        """Returns units. Raises InternalError for one that is free or unknown."""
        for unit in units:
            if not 0 <= unit < self.size or self._is_free[unit]:
                raise InternalError(f"{self.name} {unit} returned, but it was not taken")
            self._is_free[unit] = 1
            self._free.append(unit)

    def check(self, held: Iterable[int]) -> None:
        """Raises InternalError unless every unit is either free or in `held`, and once only."""
        seen = bytearray(self._is_free)
        for unit in held:
            if not 0 <= unit < self.size or seen[unit]:
                raise InternalError(f"{self.name} {unit} is held twice, or held and free")
            seen[unit] = 1
        if not all(seen):
            raise InternalError(f"{self.name} {seen.index(0)} is neither free nor held: a leak")
