"""Engines with a planted fault: copies with changed tensors, and digests that match them."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.builder.emit import seal
from spark_engine.engine_file import WEIGHTS, read_manifest
from spark_engine.weights_file import read_index


def corrupt(
    engine: Path, tensor: str, where: Path, change: Callable[[Any], Any], file: str = WEIGHTS
) -> Path:
    """A copy in which the tensor's bytes, of that file, are what `change` makes of them."""
    shutil.copytree(engine, where)
    entry = read_index(where / file)[tensor]
    data = np.memmap(where / file, np.uint8, "r+", entry.offset, (entry.spec.nbytes,))
    data[:] = change(data.copy())
    data.flush()
    seal(where, replace(read_manifest(where), files={}))
    return where


def scaled(engine: Path, where: Path, *tensors: str, by: float = 1.02) -> Path:
    """A copy in which these f32 tensors are larger by 2 %."""

    def change(data: Any) -> Any:
        return (data.view(np.float32) * np.float32(by)).view(np.uint8)

    for i, tensor in enumerate(tensors):
        engine = corrupt(engine, tensor, where.with_name(f"{where.name}{i}"), change)
    return engine
