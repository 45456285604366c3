"""The tensors that a checkpoint must hold: its network's list, stored by their schemes.

Knows which tensors hold a projection of each scheme in each dialect. Parts of a network other than
text (the vision tower) may be missing. Knows no name of a
network and no file: `check_tensors` compares names, dtypes and shapes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.layout import Layout
from spark_engine.models.checkpoint.quant_schemes import IDLE, SUFFIXES, Dialect, Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable
from spark_engine.models.checkpoint.tensor_list import (
    PLAIN,
    Linear,
    Row,
    Shape,
    Stored,
    Tensor,
    ValueKind,
    of_kind,
)
from spark_engine.tensors import DType

SCALE = (DType.F32, DType.BF16, DType.F16, DType.F8E8M0)
SCALAR: tuple[Shape, ...] = ((), (1,), (1, 1))
TEXT, MTP, VISION, OTHER = "text", "mtp", "vision", "other"
# Names of tensors that no text needs: of a reward model's head, and of audio.
ASIDE = ("score.", "v_head.", "audio_tower.", "model.audio_tower.", "model.audio_projector.")
STACK_SCALE = "_scale_inv"  # of stacked experts in FP8 blocks, after the tensor's name


@dataclass(frozen=True)
class Expected:
    """One tensor of a file: the dtypes and shapes it may have, the usual one first.

    `row` is the entry of the network's list that it stores, or stores a part of. `need`:
    "required"; "usual" (exporters write it, a model is read without it); "rare" (read if there).
    `scheme` is that of its module, `part` what it belongs to: text, mtp (the draft head), or what
    is left out of every graph.
    """

    name: str
    dtypes: tuple[DType, ...]
    shapes: tuple[Shape, ...]
    row: Row
    need: str = "required"
    scheme: Scheme = Scheme.PLAIN
    part: str = TEXT

    @property
    def nbytes(self) -> int:
        """Bytes in the usual dtype and shape."""
        return math.prod(self.shapes[0]) * self.dtypes[0].itemsize

    def __str__(self) -> str:
        shapes = " or ".join(str(list(s)) for s in self.shapes)
        return f"{'/'.join(self.dtypes)} {shapes} ({self.scheme})"


def expected_tensors(
    rows: Iterable[Row], plain: DType, table: QuantTable, layout: Layout, part: str = TEXT
) -> Mapping[str, Expected]:
    """Every tensor by its name in the file; `plain` is the usual dtype of unquantised tensors.

    `part`: of rows that name none.

    Raises CheckpointError when a quantised projection's columns do not split into groups, or
    stacked experts are declared to be quantised.
    """
    dtypes = (plain, *(d for d in PLAIN if d is not plain))
    found: list[Expected] = []
    listed = list(rows)
    stacked = {
        t.module for t in of_kind(listed, ValueKind.STACKED_EXPERTS) if layout.fused(t.module)
    }
    for row in listed:
        if isinstance(row, Linear):
            if row.group not in stacked:
                dialect = table.dialect_of(row.module)
                found += _projection(row, table[row.table_key], dialect, dtypes, layout)
        elif row.kind is not ValueKind.STACKED_EXPERTS or row.module in stacked:
            found += _unquantised(row, table, dtypes, layout)
    named = (e if e.part != TEXT or part == TEXT else replace(e, part=part) for e in found)
    return {tensor.name: tensor for tensor in named}


def usual(expected: Mapping[str, Expected], *parts: str) -> list[Expected]:
    """The tensors an exporter of this layout writes, of the given parts (default: all)."""
    return [e for e in expected.values() if e.need != "rare" and (not parts or e.part in parts)]


def check_tensors(
    expected: Mapping[str, Expected],
    tensors: Mapping[str, Stored],
    ignored: Mapping[str, tuple[str, ...]],
) -> Mapping[str, int]:
    """Compares a file's tensors with the table; returns how many are of each ignored part.

    `ignored`: the prefixes of names by part; tensors with these prefixes are optional. Raises
        CheckpointError with the first missing, unknown, mistyped or misshapen text tensor, how many
        there are, and what to do.
    """
    parts = {name: _part(name, ignored) for name in tensors}
    faults = misfits(expected, tensors, TEXT)
    unknown = [n for n in tensors if n not in expected and not parts[n]]
    faults += [f"{n} in {tensors[n].file} is not a tensor of this network" for n in unknown]
    if faults:
        rest = f", and {len(faults) - 1} more tensors do not fit" if len(faults) > 1 else ""
        raise CheckpointError(
            f"{faults[0]}{rest}; take config.json, the quantisation config and the weights from "
            "one export, and download damaged files again"
        )
    counts = Counter(p for name, p in parts.items() if p != OTHER or name not in expected)
    return {part: counts[part] for part in (*ignored, OTHER) if part != OTHER or counts[OTHER]}


def misfits(
    expected: Mapping[str, Expected], tensors: Mapping[str, Stored], part: str
) -> list[str]:
    """A sentence for each tensor of a part that is missing, mistyped or misshapen."""
    faults: list[str] = []
    for name, want in ((n, e) for n, e in expected.items() if e.part == part):
        got = tensors.get(name)
        if got is None and want.need == "required":
            faults.append(f"{name} is missing: expected {want}")
        elif got and (got.dtype not in want.dtypes or tuple(got.shape) not in want.shapes):
            found = f"{got.dtype} {list(got.shape)}"
            faults.append(f"{name} in {got.file} is {found}: expected {want}")
    return faults


def _part(name: str, ignored: Mapping[str, tuple[str, ...]]) -> str:
    """The ignored part that the name belongs to, or ""."""
    parts = (part for part, starts in ignored.items() if name.startswith(starts))
    return next(parts, OTHER if name.startswith(ASIDE) or name.endswith(IDLE) else "")


def _unquantised(
    row: Tensor, table: QuantTable, plain: tuple[DType, ...], layout: Layout
) -> Iterator[Expected]:
    """A tensor that is no projection. Raises CheckpointError for stacked experts that are declared
    quantised, unless in FP8 blocks as transformers saves them."""
    name, scheme = layout.file_name(row.name), table[row.module]
    if row.part != TEXT:
        yield Expected(name, plain, (row.shape,), row, "usual", part=row.part)
    elif row.kind is ValueKind.CACHE_SCALE:
        yield Expected(name, SCALE, SCALAR, row, "rare")
    elif row.kind is not ValueKind.STACKED_EXPERTS or scheme is Scheme.PLAIN:
        need = "rare" if row.kind is ValueKind.TIED_HEAD else "required"
        yield Expected(name, plain, (row.shape,), row, need)
    elif scheme is Scheme.FP8_BLOCK:
        *stack, n, k = row.shape
        blocks = (*stack, -(-n // 128), -(-k // 128))
        yield Expected(name, (DType.F8E4M3,), (row.shape,), row, scheme=scheme)
        yield Expected(f"{name}{STACK_SCALE}", SCALE, (blocks,), row, scheme=scheme)
    else:
        raise CheckpointError(
            f"{scheme} experts in 3-D tensors are not read ({row.module}): give an export that "
            "stores quantised experts one by one"
        )


def _projection(
    linear: Linear, scheme: Scheme, dialect: Dialect, plain: tuple[DType, ...], layout: Layout
) -> Iterator[Expected]:
    """The tensors that hold one projection, or the matrix of which it is a slice."""
    n, k = linear.stored.rows, linear.columns
    module, suffixes = layout.file_name(linear.stored.module), SUFFIXES[dialect]
    # Calibration may meet no token of an expert; its input's scale is then borrowed.
    calibrated = "usual" if linear.group else "required"

    def tensor(
        suffix: str, dtypes: tuple[DType, ...], shapes: tuple[Shape, ...], need: str = "required"
    ) -> Expected:
        return Expected(f"{module}.{suffix}", dtypes, shapes, linear, need, scheme)

    if scheme is Scheme.PLAIN:
        yield tensor("weight", plain, ((n, k),))
    elif scheme in (Scheme.FP8, Scheme.FP8_CHANNEL):
        static, one, rows = scheme is Scheme.FP8, SCALAR, ((n, 1), (n,), (1, n))
        yield tensor("weight", (DType.F8E4M3,), ((n, k),))
        yield tensor("weight_scale", SCALE, (*one, *rows) if static else (*rows, *one))
        if static:
            yield tensor("input_scale", SCALE, SCALAR, calibrated)
    elif scheme is Scheme.FP8_BLOCK:
        blocks = (-(-n // 128), -(-k // 128))
        if not linear.stored.blocks(128):
            first, end = next((a, b) for a, b in linear.stored.ranges if a % 128 or b % 128)
            raise CheckpointError(
                f"{module}.{suffixes.block_scale}: a scale covers 128 rows, and {linear.module} is "
                f"rows {first} to {end - 1} of {n}, not whole blocks; give an export that leaves "
                f"{linear.stored.module} unquantised"
            )
        yield tensor("weight", (DType.F8E4M3,), ((n, k),))
        shapes: tuple[Shape, ...] = (blocks,)
        if dialect is Dialect.MODELOPT:
            shapes = ((blocks[0], 1, blocks[1], 1), blocks)
        yield tensor(suffixes.block_scale, (DType.BF16, DType.F32, *SCALE[2:]), shapes)
    elif scheme.group:
        _check_groups(linear, scheme.group)
        for suffix, dtypes, shape, need in _int4(n, k, scheme, dialect):
            yield tensor(suffix, dtypes, (shape,), need)
    else:
        _check_groups(linear, 16)
        unread = "rare" if dialect is Dialect.COMPRESSED else "usual"
        need = calibrated if scheme is Scheme.NVFP4_A4 else unread
        yield tensor(suffixes.fp4_weight, (DType.U8,), ((n, k // 2),))
        yield tensor("weight_scale", (DType.F8E4M3,), ((n, k // 16),))
        yield tensor(suffixes.fp4_global, SCALE, SCALAR)
        yield tensor(suffixes.fp4_input, SCALE, SCALAR, need)


def _check_groups(linear: Linear, size: int) -> None:
    if linear.columns % size:
        kind = "NVFP4" if size == 16 else "int4"
        raise CheckpointError(
            f"{linear.module}: {linear.columns} columns do not split into {kind} groups of {size}; "
            "leave it unquantised"
        )


def _int4(
    n: int, k: int, scheme: Scheme, dialect: Dialect
) -> Iterator[tuple[str, tuple[DType, ...], Shape, str]]:
    """Suffix, dtypes, shape and need of the tensors of an int4 projection (int4_tensors.py)."""
    words, scale, groups = (DType.I32,), (DType.F16, DType.BF16, DType.F32), k // scheme.group
    if dialect is Dialect.COMPRESSED:
        yield "weight_packed", words, (n, k // 8), "required"
        yield "weight_scale", scale, (n, groups), "required"
        if not scheme.symmetric:
            yield "weight_zero_point", words, (-(-n // 8), groups), "required"
        yield "weight_shape", (DType.I64, DType.I32), (2,), "usual"
        yield "weight_g_idx", words, (k,), "rare"
        return
    awq = dialect is Dialect.AWQ
    yield "qweight", words, (k, -(-n // 8)) if awq else (k // 8, n), "required"
    yield "qzeros", words, (groups, -(-n // 8)), "required"
    yield "scales", scale, (groups, n), "required"
    yield "g_idx", words, (k,), "rare" if awq else "usual"
