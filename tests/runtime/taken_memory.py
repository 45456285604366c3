"""How much is taken on a GPU, whoever else has its memory too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Taken = Callable[[], int]


def counting(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """What tells the bytes that are taken, from any zero on: those that the driver no longer has
    free; where the memory is the host's as well and every program moves that, those that all of
    `gpu`'s class have asked for and not given back, without what the driver takes for itself."""
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
