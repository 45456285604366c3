"""The host's staging copies of buffers, for steps that are in flight on a device.

Knows arrays and an event; knows no launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_engine.device.gpu import Event
from spark_engine.tensors import Array, Bytes


@dataclass(frozen=True)
class Staging:
    """Pinned copies of one set of host buffers, and when their last launch is done."""

    buffers: Mapping[str, Array]
    steps: Bytes
    outputs: Bytes
    done: Event
    fed: tuple[tuple[str, Array], ...]  # views of `steps`
    read: tuple[tuple[str, Array], ...]  # views of `outputs`
