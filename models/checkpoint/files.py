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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

from spark_engine import hints
from spark_engine.errors import CheckpointError
from spark_engine.tensors import Array, DType

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")
AGAIN = "download this file again"
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
    """An open folder. `maps` holds one read-only memory map per shard; nothing is copied.

    `config`, `generation` and `hf_quant` are the parsed JSON files, {} where absent.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    hf_quant: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    maps: Mapping[str, Array]

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
        for file in CONFIGS:
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


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a folder with config.json and safetensors, one file or sharded with an index.

    Reads the JSON files and the headers only. Raises CheckpointError, naming tensor, file and
    remedy, if a file is missing, cut short or malformed, a tensor appears twice or has an unknown
    dtype, or if index and shards disagree.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(hints.no_checkpoint(folder))
    configs = [read_json(folder / file, required=file == CONFIGS[0]) for file in CONFIGS]
    index = read_json(folder / INDEX, required=False)
    files = _index_files(folder, index) if index else [_single(folder)]
    for file in files:
        if not (folder / file).is_file():
            _fail(file, f"the shard is missing from {folder}", AGAIN)
    tensors = _merge(_header(folder / file) for file in files)
    maps = {file: np.memmap(folder / file, dtype=np.uint8, mode="r") for file in files}
    if index:
        _check_index(index["weight_map"], tensors)
    config, generation, hf_quant = configs
    return Checkpoint(folder, config, generation, hf_quant, tensors, MappingProxyType(maps))


def _fail(file: str, what: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{file}: {what}; {remedy}")


def _remedy(folder: Path) -> str:
    if words := hints.gguf(folder):
        return words
    if (folder / "manifest.json").is_file():
        return f"that is an engine already: run it with `spark-run {folder}`"
    return "give a Hugging Face checkpoint folder"


def read_json(file: Path, required: bool) -> dict[str, Any]:
    """The object in a JSON file; {} where it is absent and not required.

    Raises CheckpointError if it is required and missing, or holds no object.
    """
    if not file.is_file():
        if required:
            _fail(file.name, f"missing from {file.parent}", _remedy(file.parent))
        return {}
    text = file.read_bytes()
    refuse_pointer(file, text)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail(file.name, f"is not JSON ({error})", AGAIN)
    if not isinstance(row, dict):
        _fail(file.name, f"holds a {type(row).__name__}, not an object", AGAIN)
    return row


def _single(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if SINGLE in found or len(found) == 1:
        return SINGLE if SINGLE in found else found[0]
    if found:
        _fail(INDEX, f"missing, with {len(found)} shards such as {found[0]}", AGAIN)
    others = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf")]
    what = f"only {sorted(others)[0]} is there" if others else "there are no weights"
    _fail(SINGLE, f"missing from {folder}: {what}", "give a checkpoint saved as safetensors")


def _index_files(folder: Path, index: Mapping[str, Any]) -> list[str]:
    table = index.get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
        _fail(INDEX, "has no weight_map of tensor to file", AGAIN)
    files = sorted(set(table.values()))
    for file in files:
        if Path(file).name != file:
            _fail(INDEX, f"names {file!r}, which is not a plain file name", "do not trust it")
    if (folder / SINGLE).is_file() and SINGLE not in files:
        _fail(
            SINGLE, f"is in a folder with {INDEX}, which does not name it", "remove one of the two"
        )
    return files


def refuse_pointer(file: Path, start: bytes) -> None:
    """Raises CheckpointError for a file that Git LFS has not fetched; `start`: its first bytes."""
    if hints.is_lfs_pointer(start):
        what = "is a Git LFS pointer, its content was not fetched"
        _fail(file.name, what, f"run `git lfs pull` in {file.parent}")


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
            rows = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            json.loads(file.read(length), object_pairs_hook=_refuse_repeats)
    except (SafetensorError, ValueError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        what = f"its {path.stat().st_size} bytes are no whole safetensors file ({reason})"
        _fail(path.name, f"{what}: cut short or damaged", AGAIN)
    tensors: list[StoredTensor] = []
    at = 8 + length
    for name, dtype, shape in rows:
        if dtype not in DTYPES:
            known = ", ".join(DTYPES)
            what = f"tensor {name} has dtype {dtype!r}"
            _fail(path.name, what, f"supported are {known}: requantise it")
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
            _fail(t.file, f"tensor {t.name} is also in {other}", "remove the file that is not part")
        tensors[t.name] = t
    return MappingProxyType(tensors)


def _check_index(table: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in table.items():
        if name not in tensors:
            _fail(file, f"tensor {name} is missing, though {INDEX} says it is here", AGAIN)
        if tensors[name].file != file:
            what = f"tensor {name} is in {tensors[name].file}, not here as {INDEX} says"
            _fail(file, what, f"take {INDEX} and shards from one source")
    extra = next((t for name, t in tensors.items() if name not in table), None)
    if extra is not None:
        what = f"tensor {extra.name} is not listed in {INDEX}"
        _fail(extra.file, what, f"take {INDEX} and shards from one source")


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
