"""The manifest of an engine folder: what an engine is, as a tree of frozen values.

Knows the JSON form of docs/engine_file.md and its own digest; knows nothing about files other
than their names and digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from spark_engine.errors import EngineError
from spark_engine.interface import Limits, Precision
from spark_engine.tensors import DType, TensorSpec

FORMAT = 1
Json: TypeAlias = Any  # a value that json.dumps accepts


@dataclass(frozen=True)
class ModelInfo:
    """The network in five numbers; `parameters` counts the compiled (text) part."""

    model_type: str
    layers: int
    hidden: int
    vocab: int
    parameters: int


@dataclass(frozen=True)
class StateInfo:
    """One state. Axis 0 counts `unit`s ("slot" or "page"); its last row is scratch."""

    spec: TensorSpec
    unit: str

    def to_json(self) -> Json:
        """`{"name", "dtype", "shape", "unit"}`."""
        return {**self.spec.to_json(), "unit": self.unit}

    @classmethod
    def from_json(cls, row: Json) -> StateInfo:
        """The inverse of `to_json`."""
        return cls(TensorSpec.from_json(row), str(row["unit"]))


@dataclass(frozen=True)
class Bucket:
    """One `.engine` file: `rows` of up to `tile` tokens. `arena_bytes` is its scratch memory."""

    family: str
    rows: int
    tile: int
    file: str
    arena_bytes: int

    @property
    def tokens(self) -> int:
        """Token capacity of one launch."""
        return self.rows * self.tile


@dataclass(frozen=True)
class Memory:
    """Bytes an engine needs at run time; `arena` is the largest bucket's."""

    weights: int
    kv: int
    states: int
    tables: int
    arena: int

    @property
    def total(self) -> int:
        """Bytes of everything together."""
        return self.weights + self.kv + self.states + self.tables + self.arena

    def to_json(self) -> Json:
        """The fields and their total."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Quantised:
    """How one module's `tensors` checkpoint tensors are stored; `format` is "bf16", "fp8", …"""

    module: str
    format: str
    tensors: int


@dataclass(frozen=True)
class Refusal:
    """A fusion that did not happen, and the sentence why."""

    rule: str
    node: str
    reason: str


@dataclass(frozen=True)
class Fingerprint:
    """Hex sha256 of everything an engine is made from; `all` covers the other four."""

    checkpoint: str
    options: str
    toolchain: str
    plugins: str
    all: str


@dataclass(frozen=True)
class FileDigest:
    """A file's length and the hex sha256 of each 64 MiB of it (an empty file has none)."""

    bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`; the field names are its keys (docs/engine_file.md)."""

    name: str
    producer: Mapping[str, str]
    target: str
    executor: str
    model: ModelInfo
    limits: Limits
    dtypes: Precision
    states: tuple[StateInfo, ...]
    tables: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    memory: Memory
    quantisation: tuple[Quantised, ...]
    fusions: Mapping[str, Mapping[str, int]]
    refusals: tuple[Refusal, ...]
    tactics: tuple[Json, ...]
    ignored: Mapping[str, int]
    generation: Mapping[str, Json]
    eos_token_ids: tuple[int, ...]
    fingerprint: Fingerprint
    files: Mapping[str, FileDigest]

    def to_json(self) -> Json:
        """The JSON object without its `digest`."""
        row = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {**row, "format": FORMAT}

    def encode(self) -> bytes:
        """The bytes of `manifest.json`: canonical JSON that holds its own digest."""
        row = self.to_json()
        return canonical_json({**row, "digest": _digest(row)})


def canonical_json(value: Json) -> bytes:
    """JSON with sorted keys, one space of indent and a final newline: equal values, equal bytes.

    Raises ValueError for NaN or infinity.
    """
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


def decode_manifest(data: bytes, where: str, remedy: str) -> Manifest:
    """The manifest in `data`, which must be exactly what `Manifest.encode` writes.

    `where` names the file and `remedy` what to do, for the messages of EngineError, which is
    raised for JSON that does not parse, a newer format, any changed byte, or a missing key.
    """
    row = parse_json(data, where, remedy)
    check_format(row, where)
    try:
        body = {k: v for k, v in row.items() if k != "digest"}
        intact = row.get("digest") == _digest(body) and canonical_json(row) == data
        manifest = _manifest(body) if intact else None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise EngineError(f"{where} is malformed ({error!r}); {remedy}") from error
    if manifest is None:
        raise EngineError(f"{where} was changed after it was written; {remedy}")
    return manifest


def parse_json(data: bytes, where: str, remedy: str) -> dict[str, Json]:
    """The JSON object in `data`. Raises EngineError when it is anything else."""
    try:
        row = json.loads(data)
    except ValueError as error:
        raise EngineError(f"{where} does not hold valid JSON ({error}); {remedy}") from error
    if not isinstance(row, dict):
        raise EngineError(f"{where} holds a {type(row).__name__}, not an object; {remedy}")
    return row


def check_format(row: Mapping[str, Json], where: str) -> None:
    """Raises EngineError unless the format number is one that this version reads."""
    number = row.get("format")
    if isinstance(number, int) and number > FORMAT:
        raise EngineError(
            f"{where} has format {number}, and this version reads up to {FORMAT}: "
            "upgrade spark-engine, or rebuild the engine with this version's spark-build"
        )
    if number != FORMAT:
        raise EngineError(f"{where} has format {number!r}: rebuild the engine with spark-build")


def _digest(row: Mapping[str, Json]) -> str:
    return hashlib.sha256(canonical_json(row)).hexdigest()


def _plain(value: object) -> Json:
    """A field as JSON: objects that know their form say it, dataclasses become dicts."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Precision):
        return {k: v.value for k, v in vars(value).items()}
    if hasattr(value, "__dataclass_fields__"):
        return {f: _plain(getattr(value, f)) for f in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def _manifest(row: Mapping[str, Json]) -> Manifest:
    parts = {
        "model": ModelInfo(**row["model"]),
        "limits": Limits.from_json(row["limits"]),
        "dtypes": Precision(**{k: DType(v) for k, v in row["dtypes"].items()}),
        "states": tuple(StateInfo.from_json(s) for s in row["states"]),
        "tables": tuple(TensorSpec.from_json(t) for t in row["tables"]),
        "buckets": tuple(Bucket(**b) for b in row["buckets"]),
        "memory": Memory(**{k: v for k, v in row["memory"].items() if k != "total"}),
        "quantisation": tuple(Quantised(**q) for q in row["quantisation"]),
        "refusals": tuple(Refusal(**r) for r in row["refusals"]),
        "tactics": tuple(row["tactics"]),
        "eos_token_ids": tuple(row["eos_token_ids"]),
        "fingerprint": Fingerprint(**row["fingerprint"]),
        "files": {k: FileDigest(v["bytes"], tuple(v["chunks"])) for k, v in row["files"].items()},
    }
    return Manifest(**{**{f.name: row[f.name] for f in fields(Manifest)}, **parts})
