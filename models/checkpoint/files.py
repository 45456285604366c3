"""A Hugging Face folder, opened lazily: headers read by safetensors, tensors as views of a map.

Knows the index file and the folder's JSON files. Knows no model: expected_tensors.py checks which
tensors there are. Every fault of the files is found here, before anything else happens.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from spark_engine import hints
from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint import foreign_formats
from spark_engine.models.checkpoint.weight_files import (
    AGAIN,
    INDEX,
    LORA,
    adds,
    fail,
    is_adapter,
    weight_files,
)
from spark_engine.models.config.vision import PREPROCESSOR, PROCESSOR
from spark_engine.tensors import Array, DType

CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")
DTYPES = {
    "F32": DType.F32,
    "F16": DType.F16,
    "BF16": DType.BF16,
    "F8_E4M3": DType.F8E4M3,
    "U8": DType.U8,
    "I32": DType.I32,
    "I64": DType.I64,
    "BOOL": DType.BOOL,
}
MOST_JSON = 128 << 20  # bytes of a JSON file; an index of 100,000 tensors has a tenth of it
_HASH_ALL = 256 << 20  # bytes; below this the digest covers every byte of a file
_SAMPLE = 64 << 10  # bytes of each tensor above it


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor: `offset` in bytes from the start of `file` (a name in the
    folder)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """The weights of a folder. `maps` holds one read-only memory map per shard; nothing is copied.

    `notes` are sentences about files and tensors that are missing or not read.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    maps: Mapping[str, Array]
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    def read(self, name: str) -> Array:
        """A read-only view of the tensor's bytes in its own dtype and shape.

        Raises CheckpointError when there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {name}; {AGAIN}s")
        t = self.tensors[name]
        raw = self.maps[t.file][t.offset : t.offset + t.nbytes]
        return raw.view(t.dtype.numpy).reshape(t.shape)

    def digest(self) -> str:
        """SHA-256 over the JSON files, every header and the weights' bytes.

        Of a shard of 256 MiB or more only 64 KiB of each tensor are read: its first and last
        32 KiB. An edit elsewhere in such a shard is not detected. Other names, dtypes, shapes and
        sizes are, and so is another training run or another quantisation.
        """
        total = hashlib.sha256()
        for file in (*CONFIGS, PREPROCESSOR, PROCESSOR):
            if (self.path / file).is_file():
                total.update(file.encode() + b"\0" + (self.path / file).read_bytes())
        by_file: dict[str, list[StoredTensor]] = {file: [] for file in sorted(self.maps)}
        for tensor in self.tensors.values():
            by_file[tensor.file].append(tensor)
        for file, tensors in by_file.items():
            data = self.maps[file]
            total.update(f"\0{file}\0{data.nbytes}\0".encode())
            for part in _sampled(data, tensors):
                total.update(part)
        return total.hexdigest()


def read_configs(folder: Path) -> list[dict[str, Any]]:
    """The JSON files `CONFIGS`, {} where absent.

    Raises CheckpointError if there is no config.json, or one is malformed.
    """
    if not folder.is_dir():
        raise CheckpointError(hints.no_checkpoint(folder))
    return [read_json(folder / file, required=file == CONFIGS[0]) for file in CONFIGS]


def read_index(folder: Path) -> Mapping[str, str] | None:
    """The file of each tensor, by the folder's index; None without one."""
    index = read_json(folder / INDEX, required=False)
    if not index:
        return None
    table = index.get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
        fail(INDEX, "has no weight_map of tensor to file", AGAIN)
    return table


def open_checkpoint(path: Path | str, optional: tuple[str, ...] = ()) -> Checkpoint:
    """Opens the safetensors of a folder, one file or several, with or without an index. `optional`:
    how names of tensors begin that may be missing although the index has them, or be there although
    it has not.

    Reads the index and the headers only. Raises CheckpointError, naming tensor, file and remedy, if
    a file is missing, cut short or malformed, a tensor appears twice or has an unknown dtype, or if
    index and shards disagree.
    """
    folder = Path(path)
    table = read_index(folder)
    there = {p.name for p in folder.glob("*.safetensors") if p.is_file()}
    files, notes = weight_files(folder, there, table, optional)
    shards = {file: _header(folder / file) for file in files}
    notes += _others(folder, there, shards, optional, table is not None)
    tensors = _merge(shards.values())
    maps = {file: np.memmap(folder / file, dtype=np.uint8, mode="r") for file in shards}
    if table is not None:
        notes += _check_index(table, tensors, optional)
    return Checkpoint(folder, tensors, MappingProxyType(maps), notes=tuple(notes))


def read_json(file: Path, required: bool) -> dict[str, Any]:
    """The object in a JSON file; {} where it is absent and not required.

    Raises CheckpointError if it is required and missing, or holds no object.
    """
    if not file.is_file():
        if required:
            if words := hints.other_format(file.parent):
                raise CheckpointError(words)
            engine = (file.parent / "manifest.json").is_file()
            run = f"that is an engine already: run it with `spark-run {file.parent}`"
            give = "give a Hugging Face checkpoint folder"
            if cached := sorted(file.parent.glob(f"snapshots/*/{file.name}")):
                give = f"give {cached[0].parent}"  # of the hub's cache
            fail(file.name, f"missing from {file.parent}", run if engine else give)
        return {}
    if (size := file.stat().st_size) > MOST_JSON:
        fail(file.name, f"has {size} bytes, more than {MOST_JSON}", AGAIN)
    text = file.read_bytes()
    refuse_pointer(file, text)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        fail(file.name, f"is not JSON ({error})", AGAIN)
    if not isinstance(row, dict):
        fail(file.name, f"holds a {type(row).__name__}, not an object", AGAIN)
    return row


def _others(
    folder: Path,
    there: Collection[str],
    shards: dict[str, list[StoredTensor]],
    optional: tuple[str, ...],
    index: bool,
) -> list[str]:
    """Adds the folder's other files that belong to the model to `shards`, and returns notes."""
    known = {t.name for shard in shards.values() for t in shard}
    notes = []
    for file in sorted(set(there) - set(shards)):
        if is_adapter(file):
            notes.append(f"{file} is not applied: {LORA} if its effect is wanted")
            continue
        try:
            tensors = _header(folder / file)
        except CheckpointError as error:
            notes.append(f"{file} is not read: {error}")
            continue
        names = [t.name for t in tensors]
        if adds(names, known, optional, index):
            shards[file] = tensors
            known.update(names)
            notes.append(f"{file} is read too, though no index names it")
        else:
            where = f" in {min(shards)}" if shards else ""
            notes.append(f"{file} is not read: it is no part of the model{where}")
    return notes


def refuse_pointer(file: Path, start: bytes) -> None:
    """Raises CheckpointError for a file that Git LFS has not fetched; `start`: its first bytes."""
    if hints.is_lfs_pointer(start):
        what = "is a Git LFS pointer, its content was not fetched"
        fail(file.name, what, f"run `git lfs pull` in {file.parent}")


def _header(path: Path) -> list[StoredTensor]:
    """The tensors of one file, by safetensors, in the order of their bytes.

    safetensors checks the header's size and form, dtypes, shapes, and that the tensors cover the
    rest of the file without a gap or an overlap; it accepts a name that appears twice.
    """
    with path.open("rb") as file:
        refuse_pointer(path, file.read(64))
    try:
        with safe_open(path, framework="numpy") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            if (opened.metadata() or {}).get("format") == "mlx":
                raise foreign_formats.refused("MLX", path.name, "its metadata")
            rows = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            json.loads(file.read(length), object_pairs_hook=_refuse_repeats)
    except (SafetensorError, ValueError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        what = f"its {path.stat().st_size} bytes are no whole safetensors file ({reason})"
        fail(path.name, f"{what}: cut short or damaged", AGAIN)
    tensors: list[StoredTensor] = []
    at = 8 + length
    for name, dtype, shape in rows:
        if dtype not in DTYPES:
            format = foreign_formats.DTYPES.get(dtype, f"{dtype} weights")
            value = f"tensor {name} has dtype {dtype!r}"
            raise foreign_formats.refused(format, path.name, value)
        tensors.append(StoredTensor(name, DTYPES[dtype], shape, path.name, at))
        at += tensors[-1].nbytes
    return tensors


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> None:
    counts = Counter(name for name, _ in pairs)
    if len(counts) != len(pairs):
        raise ValueError(f"{counts.most_common(1)[0][0]} appears twice")


def _merge(shards: Iterable[list[StoredTensor]]) -> Mapping[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for t in (t for shard in shards for t in shard):
        if t.name in tensors:
            other = tensors[t.name].file
            fail(t.file, f"tensor {t.name} is also in {other}", "remove the file that is not part")
        tensors[t.name] = t
    return MappingProxyType(tensors)


def _check_index(
    table: Mapping[str, str], tensors: Mapping[str, StoredTensor], optional: tuple[str, ...]
) -> list[str]:
    """A note about optional tensors that the index names and no file has. Raises CheckpointError
    where index and files differ otherwise."""
    absent = [name for name in table if name not in tensors and name.startswith(optional)]
    for name, file in table.items():
        if name not in tensors and not name.startswith(optional):
            fail(file, f"tensor {name} is missing, though {INDEX} says it is here", AGAIN)
        if name in tensors and tensors[name].file != file:
            what = f"tensor {name} is in {tensors[name].file}, not here as {INDEX} says"
            fail(file, what, f"take {INDEX} and shards from one source")
    for extra in (t for n, t in tensors.items() if n not in table and not n.startswith(optional)):
        what = f"tensor {extra.name} is not listed in {INDEX}"
        fail(extra.file, what, f"take {INDEX} and shards from one source")
    if not absent:
        return []
    return [f"{INDEX} names {len(absent)} tensors that no file has, {absent[0]} first: not needed"]


def _sampled(data: Array, tensors: Iterable[StoredTensor]) -> Iterable[bytes | memoryview[int]]:
    if data.nbytes < _HASH_ALL:
        yield data.data
        return
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    yield data[: 8 + length].tobytes()
    half = _SAMPLE // 2
    for t in sorted(tensors, key=lambda t: t.offset):
        end = t.offset + t.nbytes
        middle = min(t.offset + half, end)
        yield data[t.offset : middle].tobytes()
        yield data[max(middle, end - half) : end].tobytes()
