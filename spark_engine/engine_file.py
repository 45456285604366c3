"""The engine folder on disk: read, write, verify (docs/engine_file.md).

Knows the `.engine` container, digests, and what a reader must refuse. Knows no executor: the
payload is bytes.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath

from spark_engine import hints
from spark_engine.errors import EngineError
from spark_engine.manifest import (
    FORMAT,
    Bucket,
    FileDigest,
    Json,
    Manifest,
    canonical_json,
    check_format,
    decode_manifest,
    parse_json,
    plain_fields,
)
from spark_engine.manifest import WEIGHTS as WEIGHTS
from spark_engine.progress import Advance, ignore
from spark_engine.tensors import Array, TensorSpec
from spark_engine.typed import typed
from spark_engine.weights_file import map_weights

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
MOST_MANIFEST = 16 << 20  # bytes: ten times the longest of a served model
CHUNK_BYTES = 64 << 20

_PIECE_BYTES = 4 << 20  # read at once, per thread


@dataclass(frozen=True)
class EngineHeader:
    """What one `.engine` file reads and writes. Shapes are bound; `aliases` maps out -> in."""

    executor: str
    target: str
    family: str
    rows: int
    tile: int
    inputs: tuple[TensorSpec, ...]  # steps and tables
    states: tuple[TensorSpec, ...]  # those of `aliases` also an output named `<state>.out`
    outputs: tuple[TensorSpec, ...]
    aliases: Mapping[str, str]

    def to_json(self) -> dict[str, Json]:
        """The header without the payload's length and digest."""
        return {**plain_fields(self), "format": FORMAT}


@dataclass(frozen=True)
class EngineFile:
    """One `.engine` file, read and checked."""

    header: EngineHeader
    payload: bytes


@dataclass(frozen=True)
class EngineFolder:
    """A folder of which every byte was verified when it was opened, except the deferred files.

    `on_chunk` is called for each chunk of those that is verified.
    """

    path: Path
    manifest: Manifest
    deferred: frozenset[str] = frozenset()
    on_chunk: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def weights_path(self) -> Path:
        """The safetensors file, rank 0's where there are several."""
        return self.weights_of(0)

    def weights_of(self, rank: int) -> Path:
        return self.path / self.manifest.weights_files[rank]

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder of the tokenizer's files, or None when the checkpoint had none."""
        folder = self.path / TOKENIZER
        return folder if folder.is_dir() else None

    def engine(self, bucket: Bucket) -> EngineFile:
        """Reads the bucket's file. Raises EngineError when it is not intact."""
        path = self.path / bucket.file
        data = _read(path, _remedy(self.path))
        if bucket.file not in self.deferred:
            return _decode(path, data)
        for index, at in enumerate(range(0, len(data), CHUNK_BYTES)):
            digest = hashlib.sha256(memoryview(data)[at : at + CHUNK_BYTES]).hexdigest()
            self.check_chunk(bucket.file, index, digest)
        return _decode(path, data, hashed=True)

    def check_chunk(self, name: str, index: int, found: str) -> None:
        """Holds the hex sha256 of a file's chunk of CHUNK_BYTES against the manifest's.

        For the deferred files of `open_folder`; whatever reads them calls it. Raises EngineError.
        """
        _check_chunk(self.path, name, self.manifest.files[name], index, found)
        self.on_chunk()

    def weights(self) -> dict[str, Array]:
        """Every weight as a read-only array over the mapped file."""
        return map_weights(self.weights_path)


def encode_engine(header: EngineHeader, payload: bytes) -> bytes:
    digest = hashlib.sha256(payload).hexdigest()
    row = {**header.to_json(), "payload_bytes": len(payload), "payload_sha256": digest}
    text = canonical_json(row)
    return len(text).to_bytes(8, "little") + text + payload


def read_engine(path: Path) -> EngineFile:
    """Reads and checks one `.engine` file.

    Raises EngineError when it is missing, cut, changed, or of a newer format.
    """
    return _decode(path, _read(path, _remedy(path.parent)))


def _decode(path: Path, data: bytes, hashed: bool = False) -> EngineFile:
    """A file's bytes, which the manifest's digest covered if they are `hashed`."""
    remedy = _remedy(path.parent)
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise EngineError(f"{path} is cut off inside its header; {remedy}")
    row = parse_json(data[8 : 8 + length], str(path), remedy)
    check_format(row, str(path))
    payload = data[8 + length :]
    if len(payload) != row.get("payload_bytes"):
        raise EngineError(
            f"{path} holds {len(payload)} payload bytes, not {row.get('payload_bytes')}; {remedy}"
        )
    if not hashed and hashlib.sha256(payload).hexdigest() != row.get("payload_sha256"):
        raise EngineError(f"{path} was changed after it was written; {remedy}")
    try:
        header = typed(EngineHeader, {f.name: row[f.name] for f in fields(EngineHeader)})
        for spec in (*header.inputs, *header.states, *header.outputs):
            _ = spec.dims  # raises where one is not bound
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{path} has a malformed header ({error!r}); {remedy}") from error
    return EngineFile(header, payload)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the folder `path`; no other file is read.

    Raises EngineError when it is missing, changed, or of a newer format.
    """
    remedy = _remedy(path)
    if not (path / MANIFEST).exists():
        raise EngineError(hints.no_engine(path))
    where = path / MANIFEST
    try:
        size = where.stat().st_size
    except OSError as error:
        raise EngineError(f"{where} cannot be read ({error.strerror}); {remedy}") from error
    if size > MOST_MANIFEST:
        words = f"{where} has {size} bytes; at most {MOST_MANIFEST} are read"
        raise EngineError(f"{words}; {remedy}")
    return decode_manifest(_read(where, remedy), str(where), remedy)


def open_folder(
    path: Path,
    target: str,
    deferred: Collection[str] = (),
    advance: Advance = ignore,
    manifest: Manifest | None = None,
) -> EngineFolder:
    """Opens the engine at `path` for the machine's `target`, after verifying every byte.

    Of the files named in `deferred` only the length is verified here: their reader must call
    `check_chunk` for each chunk. Several threads call `advance` with the number of verified chunks
    and that of all. `manifest`: the folder's, where it was read before. Raises EngineError, naming
    the file and the remedy, for a newer format, another target, or a file that is missing, of a
    wrong length, or changed.
    """
    manifest = manifest or read_manifest(path)
    if manifest.target != target:
        raise EngineError(
            f"{path} was built for {manifest.target!r} and this machine runs {target!r}: "
            f"rebuild with `spark-build CHECKPOINT -o {path} --target {target}`"
        )
    total = sum(len(digest.chunks) for digest in manifest.files.values())
    done = itertools.count(1)  # `next` of it is atomic

    def on_chunk() -> None:
        advance(next(done), total)

    verify_files(path, manifest.files, deferred, on_chunk)
    return EngineFolder(path, manifest, frozenset(deferred), on_chunk)


def verify_files(
    path: Path,
    files: Mapping[str, FileDigest],
    deferred: Collection[str] = (),
    on_chunk: Callable[[], None] = lambda: None,
) -> None:
    """Compares every file below `path` with its digest, chunks in parallel.

    Only the length of `deferred` ones. Raises EngineError naming the first file (by name) that is
    missing, cut or changed.
    """
    for name, digest in sorted(files.items()):
        _check_length(path, name, digest)
    names = sorted(set(files) - set(deferred))
    jobs = [(name, i) for name in names for i in range(len(files[name].chunks))]
    with _pool() as pool:
        found = pool.map(lambda job: _hash_chunk(path / job[0], job[1]), jobs)
        for (name, i), chunk in zip(jobs, found, strict=True):
            _check_chunk(path, name, files[name], i, chunk)
            on_chunk()


def _check_chunk(path: Path, name: str, digest: FileDigest, index: int, found: str) -> None:
    if found != digest.chunks[index]:
        at = f"between bytes {index * CHUNK_BYTES} and {(index + 1) * CHUNK_BYTES}"
        raise EngineError(f"{path / name} was changed {at}; {_remedy(path)}")


def digest_file(path: Path, on_chunk: Callable[[int], None] = lambda nbytes: None) -> FileDigest:
    """The length of a file and the digest of each chunk, hashed in parallel.

    `on_chunk` is called with the bytes of each chunk that is done.
    """
    size, chunks = path.stat().st_size, []
    with _pool() as pool:
        for chunk in pool.map(lambda i: _hash_chunk(path, i), range(-(-size // CHUNK_BYTES))):
            chunks.append(chunk)
            on_chunk(min(CHUNK_BYTES, size - (len(chunks) - 1) * CHUNK_BYTES))
    return FileDigest(size, tuple(chunks))


def _check_length(path: Path, name: str, digest: FileDigest) -> None:
    inside = PurePosixPath(name)
    if inside.is_absolute() or ".." in inside.parts:
        raise EngineError(f"{path / MANIFEST} names {name!r}, outside the folder; {_remedy(path)}")
    file = path / name
    try:
        found = file.is_file() and file.stat()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise EngineError(f"{path / MANIFEST} names {name!r}: {error}; {_remedy(path)}") from error
    if not found:
        raise EngineError(f"{file} is missing; {_remedy(path)}")
    size = found.st_size
    if size != digest.bytes or len(digest.chunks) != -(-size // CHUNK_BYTES):
        raise EngineError(f"{file} has {size} bytes, not {digest.bytes}; {_remedy(path)}")


def _hash_chunk(path: Path, index: int) -> str:
    """Hex sha256 of one chunk; read in pieces, so that few threads need little memory."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(index * CHUNK_BYTES)
        left = CHUNK_BYTES
        while left and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "digest")


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({error.strerror}); {remedy}") from error


def _remedy(folder: Path) -> str:
    return f"rebuild the engine with `spark-build CHECKPOINT -o {folder}`"


def has_text(folder: Path) -> bool:
    """True if an engine folder has a tokenizer; without one an engine takes token ids only."""
    return (folder / TOKENIZER / "tokenizer.json").exists()
