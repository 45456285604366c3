"""How much memory is taken on a GPU, even where other programs share it."""

from collections.abc import Callable
from typing import Any

import pytest

Taken = Callable[[], int]


def counting(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Returns a counter of the bytes taken, from an arbitrary zero: those that the driver no longer
    reports as free. Where the memory is the host's too, every program moves that number: there it
    counts what all objects of `gpu`'s class allocated and did not free, without the driver's."""
    if not gpu.integrated:
        return lambda: -int(gpu.free_bytes)
    held: dict[int, int] = {}
    kind = type(gpu)
    allocate, free = kind.allocate, kind.free

    def counted(self: Any, nbytes: int) -> int:
        address: int = allocate(self, nbytes)
        held[address] = nbytes
        return address

    def freed(self: Any, address: int) -> None:
        free(self, address)
        del held[address]

    monkeypatch.setattr(kind, "allocate", counted)
    monkeypatch.setattr(kind, "free", freed)
    return lambda: sum(held.values())
