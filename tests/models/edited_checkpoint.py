"""The tensors of a checkpoint, changed in place."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spark_engine.models.checkpoint.files import open_checkpoint
from tests.checkpoint_files import Array, write_shards


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Array]]:
    """Copies of the tensors by name; at the end they are written, as one file."""
    opened = open_checkpoint(path)
    tensors = {name: np.array(opened.read(name)) for name in opened.tensors}
    yield tensors
    write_shards(path, tensors, 1)
