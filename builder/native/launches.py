"""Lists the launches of a native bucket for `spark-inspect`: kernels, and their sources.

Knows the payload's JSON (docs/engine_file.md), the ops and the folders of their sources; runs
nothing. Finds a launch's kernel, its op's reference, and the log of measured variants in the
sources.
"""

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spark_engine.builder.native.cuda_sources import SOURCES, entry, logs
from spark_engine.errors import OptionError
from spark_engine.kernel import NCCL
from spark_engine.manifest import NATIVE, Bucket, Json, Manifest
from spark_engine.plugins.registry import REGISTRY

STANDARD = "https://onnx.ai/onnx/operators/onnx__{}.html"  # defines the standard operators


@dataclass(frozen=True)
class Launched:
    """One launch: the graph's node, its op and tactic, the kernel and its source.

    `operands`: (kind, name) of its named arguments: weights, states, inputs, outputs.
    """

    node: str
    op: str
    tactic: str
    symbol: str
    source: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    operands: tuple[tuple[str, str], ...]

    @property
    def kernel(self) -> str:
        """`plugins/kernels/gemm/linear_bf16_mma.cu:25`, or the library that runs it."""
        if self.source == NCCL:
            return "NCCL"
        return _at(*entry(self.symbol, self.source))

    @property
    def reference(self) -> str:
        """The op's numpy reference, or the page that defines a standard operator."""
        op = REGISTRY.get(self.op)
        if op is None:
            return STANDARD.format(self.op)
        reference = inspect.unwrap(op.reference)
        return _at(Path(inspect.getfile(reference)), reference.__code__.co_firstlineno)

    @property
    def logs(self) -> tuple[str, ...]:
        return () if self.source == NCCL else logs(self.source)


def bucket_of(manifest: Manifest, name: str) -> Bucket:
    """The bucket with this file name, with or without its suffix. Raises OptionError with all
    names."""
    if manifest.executor != NATIVE:
        raise OptionError(f"--bucket: {manifest.target} has no CUDA launches; name a GPU's engine")
    for bucket in manifest.buckets:
        if name in (bucket.file, bucket.file.partition(".")[0]):
            return bucket
    names = ", ".join(bucket.file for bucket in manifest.buckets)
    raise OptionError(f"--bucket {name}: the engine has no such bucket; its buckets are {names}")


def launches(payload: bytes) -> tuple[Launched, ...]:
    length = int.from_bytes(payload[:8], "little")
    body = json.loads(payload[8 : 8 + length])
    operands = body["operands"]
    return tuple(
        _launched(row, body["kernels"][row["kernel"]], [operands[i] for i in row["args"]])
        for row in body["launches"]
    )


def _launched(row: Json, kernel: Json, args: Iterable[Json]) -> Launched:
    return Launched(
        node=row["node"],
        op=row["op"],
        tactic=row["tactic"],
        symbol=kernel["symbol"],
        source=kernel["source"],
        grid=tuple(row["grid"]),
        block=tuple(row["block"]),
        operands=tuple((a[0], a[1]) for a in args if isinstance(a[-1], str) and len(a) > 1),
    )


def listing(found: Iterable[Launched]) -> str:
    """All launches of a bucket, a line each."""
    rows = [("launch", "node", "op", "tactic", "kernel", "blocks", "threads")]
    for number, launch in enumerate(found):
        names = (launch.node, launch.op, launch.tactic, launch.symbol)
        rows.append((str(number), *names, _times(launch.grid), _times(launch.block)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def describe(found: tuple[Launched, ...], number: int, tactics: Iterable[Json], file: str) -> str:
    """One launch with the places of its kernel, its reference and its log of variants.

    Raises OptionError for a number that the bucket lacks.
    """
    if not 0 <= number < len(found):
        raise OptionError(f"--launch {number}: give 0 to {len(found) - 1}, the launches of {file}")
    launch = found[number]
    lines = [
        ("launch", f"{number} of {len(found)} in {file}: {launch.node}"),
        ("op", f"{launch.op}, tactic {launch.tactic}"),
        ("kernel", f"{launch.kernel} ({launch.symbol})"),
        ("reference", launch.reference),
        ("variants", ", ".join(launch.logs)),
        ("weights", ", ".join(name for kind, name in launch.operands if kind == "weight")),
    ]
    chosen = (file, launch.op, launch.tactic)
    rows = [row for row in tactics if (row["bucket"], row["op"], row["chosen"]) == chosen]
    lines += [("timed", _timed(row)) for row in rows]
    return "\n".join(f"{name:10}{text}" for name, text in lines)


def _timed(row: Json) -> str:
    """`stream 12.3 us, skinny 14.5 us (measured; 30 nodes, the first layers.0.mlp…)`."""
    times = ", ".join(f"{name} {us:g} us" for name, us in row["microseconds"].items())
    how = "measured" if row["timed"] else "predicted"
    return f"{times} ({how}; {row['nodes']} nodes, the first {row['node']})"


def _at(path: Path, line: int) -> str:
    """From the folder that holds `plugins/`: in a clone, the repository's root."""
    return f"{path.resolve().relative_to(SOURCES.resolve().parents[1])}:{line}"


def _times(dims: tuple[int, int, int]) -> str:
    return "x".join(map(str, dims))
