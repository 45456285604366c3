"""Drives the buckets of an engine folder by hand: two sequences, prefill in pieces, then decode.

Knows the inputs of docs/graph.md; uses the `ort` executor and no scheduler.
"""

from pathlib import Path

import numpy as np

from spark_engine.engine_file import EngineFolder, open_folder
from spark_engine.manifest import Bucket
from spark_engine.runtime.executors.ort import OrtExecutor
from spark_engine.tensors import Array

Arrays = dict[str, Array]
SLOTS = (1, 0)
PAGES = ((2, 0), (1, 3))  # pages of each sequence


class Engine:
    """Every bucket of a folder over one set of states, which start as NaN or wild integers."""

    def __init__(self, path: Path) -> None:
        self.folder: EngineFolder = open_folder(path, "cpu")
        self.states = {s.spec.name: _wild(s.spec.dims, s.spec.dtype.numpy) for s in self._states}
        self.tables = {t.name: np.zeros(t.dims, t.dtype.numpy) for t in self.folder.manifest.tables}
        self.tables["page_table"].fill(-1)
        self.tables["bias_ids"].fill(-1)
        self.tables["sampling_f"][:] = (0.7, 0.9, 0.05, 1.1, 0.2, 0.1, 0, 0)
        self.tables["sampling_i"][:, 1] = 7  # the seed
        for slot, pages in zip(SLOTS, PAGES, strict=True):
            self.tables["page_table"][slot, : len(pages)] = pages

        self.executors: dict[str, OrtExecutor] = {}

    @property
    def _states(self) -> tuple:  # type: ignore[type-arg]
        return self.folder.manifest.states

    def bucket(self, family: str) -> Bucket:
        found = [b for b in self.folder.manifest.buckets if b.family == family]
        return max(found, key=lambda b: b.rows)

    def run(self, bucket: Bucket, steps: Arrays) -> Arrays:
        """One launch; returns copies of every output and state."""
        executor = self._open(bucket)
        outs = {s.name: np.zeros(s.dims, s.dtype.numpy) for s in executor.specs.outputs}
        executor.run({**self.states, **self.tables, **steps, **outs})
        return {name: array.copy() for name, array in {**outs, **self.states}.items()}

    def _open(self, bucket: Bucket) -> OrtExecutor:
        if bucket.file not in self.executors:
            file = self.folder.engine(bucket)
            executor = OrtExecutor(file.header, file.payload, self.folder.path, threads=1)
            self.executors[bucket.file] = executor
        return self.executors[bucket.file]


def trace(path: Path, lengths: tuple[int, int] = (70, 5), decodes: int = 3) -> list[Arrays]:
    """Outputs and states after each launch: two prefills, then `decodes` decode steps."""
    engine = Engine(path)
    rng = np.random.default_rng(3)
    vocab = engine.folder.manifest.limits.vocab
    prompts = [rng.integers(0, vocab, n).astype(np.int32) for n in lengths]
    done = [
        engine.run(engine.bucket("prefill"), _prefill(engine, p, i)) for i, p in enumerate(prompts)
    ]
    bucket = engine.bucket("decode")
    for step in range(decodes):
        starts = [n + step for n in lengths]
        done.append(engine.run(bucket, _decode(bucket.rows, starts)))
    return done


def _prefill(engine: Engine, prompt: Array, sequence: int) -> Arrays:
    """All of one prompt in one launch, tiles in order, the rest inert."""
    bucket = engine.bucket("prefill")
    tiles = -(-len(prompt) // bucket.tile)
    steps = _inert(bucket)
    steps["token_ids"][: len(prompt)] = prompt
    for i in range(tiles):
        steps["slots"][i] = steps["sources"][i] = SLOTS[sequence]
        steps["starts"][i] = i * bucket.tile
        steps["counts"][i] = min(bucket.tile, len(prompt) - i * bucket.tile)
    steps["emit"][tiles - 1] = 1
    engine.tables["prompt_lens"][SLOTS[sequence]] = len(prompt)
    return steps


def _decode(rows: int, starts: list[int]) -> Arrays:
    steps: Arrays = {n: np.full(rows, -1, np.int32) for n in ("token_ids", "slots")}
    steps |= {n: np.zeros(rows, np.int32) for n in ("starts", "counts", "emit")}
    for row, (slot, start) in enumerate(zip(SLOTS, starts, strict=True)):
        steps["slots"][row], steps["starts"][row] = slot, start
        steps["counts"][row] = steps["emit"][row] = 1
    return {**steps, "rope_offsets": np.zeros((rows, 1), np.int32)}


def _inert(bucket: Bucket) -> Arrays:
    steps = {n: np.zeros(bucket.rows, np.int32) for n in ("starts", "counts", "emit")}
    steps |= {n: np.full(bucket.rows, -1, np.int32) for n in ("slots", "sources", "saves")}
    steps["rope_offsets"] = np.zeros((bucket.rows, 3 * bucket.tile), np.int32)
    return {**steps, "token_ids": np.zeros(bucket.tokens, np.int32)}


def _wild(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    if dtype.kind in "iu":
        return np.full(shape, 7, dtype)
    return np.full(shape, np.nan, dtype)
