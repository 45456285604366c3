"""The host's pinned copies of buffers, for steps in flight on a device.

Knows arrays and an event; knows no launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_engine.device.gpu import Event
from spark_engine.tensors import Array, Bytes


@dataclass(frozen=True)
class Staging:
    """Pinned copies of one set of host buffers; `done`: their last launch has ended."""

    buffers: Mapping[str, Array]
    steps: Bytes
    outputs: Bytes
    done: Event
    fed: tuple[tuple[str, Array], ...]  # views of `steps`
    read: tuple[tuple[str, Array], ...]  # views of `outputs`
