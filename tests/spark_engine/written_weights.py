"""Writes a file of weights from arrays, as a build does from recipes."""

from collections.abc import Iterable
from pathlib import Path

from spark_engine.tensors import Array
from spark_engine.weights_file import WeightLayout, fill_weights


def write_weights(path: Path, layout: WeightLayout, arrays: Iterable[Array]) -> None:
    """`arrays`: in the layout's order."""
    fill_weights(path, layout, dict(zip(layout.entries, arrays, strict=True)).__getitem__, 1)
