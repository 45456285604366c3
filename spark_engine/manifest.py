"""The manifest of an engine folder: what an engine is, as a tree of frozen values.

Knows the JSON form of docs/engine_file.md and its own digest; knows nothing about files other
than their names and digests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any, TypeAlias

from spark_engine.errors import EngineError
from spark_engine.interface import Limits, Precision
from spark_engine.tensors import TensorSpec
from spark_engine.typed import typed
from spark_engine.vision import VisionInfo

FORMAT = 9
WEIGHTS = "weights.safetensors"
SLOT, PAGE, SEQUENCE, IMAGE = "slot", "page", "sequence", "image"
MOST_RANKS = 1 << 10
MOST_ROWS = 1 << 12  # states, tables or buckets of an engine
OF_SLOTS = (SLOT, SEQUENCE)  # units with a row for each slot
UNITS = (*OF_SLOTS, PAGE, IMAGE)
NATIVE = "native"  # `executor` of an engine that launches our CUDA kernels
Json: TypeAlias = Any  # a value that json.dumps accepts


def weights_name(rank: int, ranks: int = 2) -> str:
    """The file of a rank's weights in an engine of so many ranks."""
    return WEIGHTS if ranks == 1 else f"weights.{rank}.safetensors"


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
    """One state. Axis 0 counts `unit`s; its last row is scratch.

    A "slot" is a sequence that runs, a "page" holds keys and values of some tokens. A "sequence"
    is the recurrent state of one: a row for each slot, then one for each snapshot. An "image" is a
    row of one.
    """

    spec: TensorSpec
    unit: str

    def to_json(self) -> Json:
        return {**self.spec.to_json(), "unit": self.unit}

    @property
    def row_bytes(self) -> int:
        return self.spec.nbytes // max(1, self.spec.dims[0])

    @classmethod
    def from_json(cls, row: Json) -> StateInfo:
        """The inverse of `to_json`. Raises KeyError, TypeError or ValueError when malformed."""
        if row["unit"] not in UNITS:
            raise ValueError(f"unit {row['unit']!r} is none of {UNITS}")
        spec = TensorSpec.from_json(row)
        if not spec.dims:
            raise ValueError(f"state {spec.name} has no axis")
        return cls(spec, row["unit"])


def snapshot_rows(states: Iterable[StateInfo]) -> int:
    """Rows that the states by sequence have beyond those of slots; 0 where there are none."""
    kept = tuple(states)
    rows = min((s.spec.dims[0] for s in kept if s.unit == SEQUENCE), default=0)
    slots = max((s.spec.dims[0] for s in kept if s.unit == SLOT), default=rows)
    return max(0, rows - slots)


def bytes_of(states: Iterable[StateInfo], *units: str) -> int:
    """Bytes of one row over all states of these units."""
    return sum(s.row_bytes for s in states if s.unit in units)


@dataclass(frozen=True)
class Bucket:
    """One `.engine` file: `rows` of up to `tile` tokens, of the tower of patches, and bytes of
    device memory."""

    family: str
    rows: int
    tile: int
    file: str
    arena_bytes: int  # scratch memory
    zeroed_bytes: int = 0  # scratch memory that every launch leaves zero
    buffer_bytes: int = 0  # inputs and outputs that are the bucket's own
    wide_bytes: int = 0  # outputs in the memory that all buckets share
    # Memory that every rank has at the same offsets, and the others read.
    symmetric_bytes: int = 0
    # Microseconds of one launch of it, as the build measured or predicted its nodes; the loop
    # chooses by it how many drafts a round verifies.
    cost_us: float = 0.0

    @property
    def tokens(self) -> int:
        return self.rows * self.tile


@dataclass(frozen=True)
class Memory:
    """Bytes an engine needs at run time, on each of its ranks.

    Buckets run one after the other, so `arena` is the largest scratch memory of each kind, and
    `buffers` all buckets' separate buffers and the largest wide outputs. `states` are those of
    slots and of images, `snapshots` the rows beyond them.
    """

    weights: int
    kv: int
    states: int
    tables: int
    arena: int
    buffers: int = 0
    snapshots: int = 0

    @classmethod
    def of(
        cls,
        weights: int,
        states: Iterable[StateInfo],
        tables: Iterable[TensorSpec],
        buckets: Iterable[Bucket],
    ) -> Memory:
        """The plan of such an engine. States by page are the KV cache."""
        kept, all_ = list(states), list(buckets)
        arena, zeroed, wide, symmetric = (
            max((getattr(b, name) for b in all_), default=0)
            for name in ("arena_bytes", "zeroed_bytes", "wide_bytes", "symmetric_bytes")
        )
        snapshots = snapshot_rows(kept) * bytes_of(kept, SEQUENCE)
        return cls(
            weights=weights,
            kv=sum(s.spec.nbytes for s in kept if s.unit == PAGE),
            states=sum(s.spec.nbytes for s in kept if s.unit != PAGE) - snapshots,
            tables=sum(t.nbytes for t in tables),
            arena=arena + zeroed + symmetric,
            buffers=sum(b.buffer_bytes for b in all_) + wide,
            snapshots=snapshots,
        )

    @property
    def total(self) -> int:
        kept = self.kv + self.states + self.tables + self.snapshots
        return self.weights + kept + self.arena + self.buffers

    def to_json(self) -> Json:
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
class Greedy:
    """What the buckets generated from fixed prompts at the build: the md5 of their tokens by the
    bucket's name, and the machine they ran on. Empty if the build did not run the engine."""

    machine: str = ""
    md5: Mapping[str, str] = field(default_factory=dict)


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
    card: str  # its memory and multiprocessors were planned for; empty for the CPU
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
    rope: str = "default"  # the rope type, and how far it extends the model's positions
    invariant: bool = False  # a sequence's bits do not depend on the bucket it runs in
    greedy: Greedy = Greedy()
    ranks: int = 1  # that share each tensor; memory is that of one of them
    shares: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # of a rank, and of how many
    vision: VisionInfo | None = None  # how images become rows of `image_rows`; None: it reads none

    @property
    def weights_files(self) -> tuple[str, ...]:
        return tuple(weights_name(rank, self.ranks) for rank in range(self.ranks))

    @property
    def quantised_kinds(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Modules and tensors by a module's name within a layer, and by format."""
        kinds: dict[tuple[str, str], tuple[int, int]] = {}
        for row in self.quantisation:
            leaf = ".".join(part for part in row.module.split(".") if not part.isdigit())
            modules, tensors = kinds.get((leaf, row.format), (0, 0))
            kinds[leaf, row.format] = modules + 1, tensors + row.tensors
        return kinds

    @property
    def across_hosts(self) -> bool:
        """True if its GPUs may be in several hosts: ranks read no memory of each other, and NCCL
        connects them."""
        shown = any(bucket.symmetric_bytes for bucket in self.buckets)
        return self.executor == NATIVE and self.ranks > 1 and not shown

    def to_json(self) -> Json:
        return {**plain_fields(self), "format": FORMAT}

    def encode(self) -> bytes:
        """The bytes of `manifest.json`: canonical JSON that holds its own digest."""
        row = self.to_json()
        digest = hashlib.sha256(canonical_json(row)).hexdigest()
        return canonical_json({**row, "digest": digest})


def canonical_json(value: Json) -> bytes:
    """JSON with sorted keys, one space of indent and a final newline: equal values, equal bytes.

    Raises ValueError for NaN or infinity.
    """
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return (text + "\n").encode()


@lru_cache(4)  # a start reads one several times
def decode_manifest(data: bytes, where: str, remedy: str) -> Manifest:
    """The manifest in `data`, which `Manifest.encode` wrote.

    `where` names the file and `remedy` what to do, for the messages of EngineError, which is
    raised for JSON that does not parse, a newer format, any changed byte, or a missing key.
    """
    row = parse_json(data, where, remedy)
    check_format(row, where)
    try:
        digest = row.pop("digest", None)
        body = data.replace(f'\n "digest": "{digest}",\n'.encode(), b"\n", 1)  # as it was hashed
        intact = hashlib.sha256(body).hexdigest() == digest
        manifest = _manifest(row) if intact else None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise EngineError(f"{where} is malformed ({error!r}); {remedy}") from error
    if manifest is None:
        raise EngineError(f"{where} was changed after it was written; {remedy}")
    return manifest


def parse_json(data: bytes | str, where: str, remedy: str) -> dict[str, Json]:
    """The JSON object in `data`. Raises EngineError when it is anything else."""
    try:
        row = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{where} is not valid JSON ({error}); {remedy}") from error
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


def plain_fields(value: Any) -> dict[str, Json]:
    """A dataclass as a JSON object."""
    return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}


def _plain(value: object) -> Json:
    """A field as JSON: objects that know their form say it, dataclasses become dicts."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Precision):
        return {k: v.value for k, v in vars(value).items()}
    if hasattr(value, "__dataclass_fields__"):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def _manifest(row: Mapping[str, Json]) -> Manifest:
    total = row["memory"].pop("total")
    manifest = typed(Manifest, {k: v for k, v in row.items() if k != "format"}, "")
    if not 1 <= manifest.ranks <= MOST_RANKS:
        raise ValueError(f"ranks is {manifest.ranks}; it must be 1 to {MOST_RANKS}")
    for name in ("states", "tables", "buckets"):
        if (count := len(getattr(manifest, name))) > MOST_ROWS:
            raise ValueError(f"{name} has {count} rows; at most {MOST_ROWS} are read")
    missing = [name for name in manifest.weights_files if name not in manifest.files]
    if missing:
        raise ValueError(f"files has no {', '.join(missing)}")
    if len({manifest.files[name].bytes for name in manifest.weights_files}) > 1:
        raise ValueError("the ranks' weights are not of one size")
    unlisted = [b.file for b in manifest.buckets if b.file not in manifest.files]
    if unlisted:
        raise ValueError(f"buckets name {unlisted}, which `files` does not have")
    parts = (manifest.states, manifest.tables, manifest.buckets)
    planned = Memory.of(manifest.files[manifest.weights_files[0]].bytes, *parts)
    if (manifest.memory, total) != (planned, planned.total):
        raise ValueError(f"memory is {manifest.memory}, {total}, for what takes {planned}")
    return manifest
