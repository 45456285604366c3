"""The tensors a checkpoint must hold, from its config and quantisation table alone.

Knows every tensor name of the text network in its stored forms, and recognises the vision tower
(`model.visual.*`) and the multi-token-prediction head (`mtp.*`), which are counted, reported and
not compiled. Knows no file: `check_tensors` compares names, dtypes and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.layout import HEAD, Layout, Shape, linears
from spark_engine.models.checkpoint.quant_schemes import Dialect, Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable
from spark_engine.models.config.model_config import FULL, ModelConfig
from spark_engine.models.families.ignored import mtp_tensors, vision_tensors
from spark_engine.tensors import DType

PLAIN = (DType.BF16, DType.F16, DType.F32)
SCALE = (DType.F32, DType.BF16, DType.F16)
SCALAR: tuple[Shape, ...] = ((), (1,))
FIRST = 10  # faults listed one by one; the rest are counted
KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "v_scale")
_NVFP4_NAMES = {
    False: ("weight", "weight_scale_2", "input_scale"),
    True: ("weight_packed", "weight_global_scale", "input_global_scale"),
}
_VISION = ("model.visual.", "visual.")
_MTP = "mtp."


@dataclass(frozen=True)
class Expected:
    """One tensor: the dtypes and shapes it may have, the usual one first.

    `need`: "required"; "usual" (exporters write it, nothing reads it); "rare" (read if there).
    `scheme` is that of its module, `part` is text, vision or mtp.
    """

    name: str
    dtypes: tuple[DType, ...]
    shapes: tuple[Shape, ...]
    need: str = "required"
    scheme: Scheme = Scheme.PLAIN
    part: str = "text"

    @property
    def nbytes(self) -> int:
        """Bytes in the usual dtype and shape."""
        return math.prod(self.shapes[0]) * self.dtypes[0].itemsize

    def __str__(self) -> str:
        shapes = " or ".join(str(list(s)) for s in self.shapes)
        return f"{'/'.join(self.dtypes)} {shapes} ({self.scheme})"


class Stored(Protocol):
    """What a file says of a tensor (`checkpoint.StoredTensor`)."""

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> str: ...


def expected_tensors(
    config: ModelConfig, table: QuantTable, layout: Layout
) -> Mapping[str, Expected]:
    """Every tensor by its name in the file.

    Raises CheckpointError when a quantised projection's columns do not split into groups.
    """
    plain = (config.dtype, *(d for d in PLAIN if d is not config.dtype))
    rows: dict[str, Expected] = {}
    for name, shape in _unquantised(config):
        rows[name] = Expected(layout.file_name(name), plain, (shape,))
    fused = layout.fused_experts and config.moe is not None
    for module, shape in linears(config):
        if fused and ".experts." in module:
            continue
        scheme = table[_table_key(module)]
        for row in _stored(module, shape, scheme, table.dialect, plain):
            rows[row.name] = _in_file(row, layout)
    if fused:
        rows |= {r.name: _in_file(r, layout) for r in _fused(config, table, plain)}
    rows |= {r.name: _in_file(r, layout) for r in _kv_scales(config)}
    if config.tied:  # some exporters store the tied head again; `models/open_model.py` compares it
        head = f"{HEAD}.weight"
        rows[head] = Expected(head, plain, ((config.vocab, config.hidden),), "rare")
    found = {row.name: row for row in rows.values()}
    for part, tensors in (("vision", vision_tensors(config)), ("mtp", mtp_tensors(config))):
        found |= {n: Expected(n, plain, (s,), "usual", part=part) for n, s in tensors}
    return found


def usual(expected: Mapping[str, Expected], *parts: str) -> list[Expected]:
    """The tensors an exporter of this layout writes, of the given parts (default: all)."""
    return [e for e in expected.values() if e.need != "rare" and (not parts or e.part in parts)]


def check_tensors(
    expected: Mapping[str, Expected], tensors: Mapping[str, Stored]
) -> Mapping[str, int]:
    """Compares a file's tensors with the table; returns how many are vision and mtp.

    Raises CheckpointError listing every missing, unknown, mistyped or misshapen text tensor
    (the first ten, and how many there are), with what to do.
    """
    faults: list[str] = []
    for name, want in expected.items():
        if name in tensors and want.part == "text":
            faults += _misfit(want, tensors[name])
        elif name not in tensors and want.part == "text" and want.need == "required":
            faults.append(f"{name} is missing: expected {want}")
    unknown = [n for n in tensors if n not in expected and not ignored_part(n)]
    faults += [f"{n} in {tensors[n].file} is not a tensor of this network" for n in unknown]
    if faults:
        raise CheckpointError(_report(faults))
    parts = [ignored_part(name) for name in tensors]
    return {"vision": parts.count("vision"), "mtp": parts.count("mtp")}


def ignored_part(name: str) -> str:
    """ "vision" or "mtp" for tensors that are recognised and left alone, else ""."""
    if name.startswith(_MTP):
        return "mtp"
    return "vision" if name.startswith(_VISION) else ""


def _misfit(want: Expected, got: Stored) -> list[str]:
    if got.dtype in want.dtypes and tuple(got.shape) in want.shapes:
        return []
    return [f"{want.name} in {got.file} is {got.dtype} {list(got.shape)}: expected {want}"]


def _report(faults: Sequence[str]) -> str:
    lines = "".join(f"\n  {fault}" for fault in faults[:FIRST])
    rest = f"\n  and {len(faults) - FIRST} more" if len(faults) > FIRST else ""
    return (
        f"{len(faults)} tensors do not fit config.json and the quantisation config:{lines}{rest}\n"
        "Take the config files and the weights from one export, and download missing or damaged "
        "files again"
    )


def _in_file(row: Expected, layout: Layout) -> Expected:
    return Expected(layout.file_name(row.name), row.dtypes, row.shapes, row.need, row.scheme)


def _table_key(module: str) -> str:
    head, found, _ = module.partition(".experts.")
    return head + ".experts" if found else module


def _unquantised(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    """Embedding, norms, convolutions, decay parameters and routers."""
    yield "embed_tokens.weight", (config.vocab, config.hidden)
    yield "norm.weight", (config.hidden,)
    for i, kind in enumerate(config.layers):
        p = f"layers.{i}."
        yield f"{p}input_layernorm.weight", (config.hidden,)
        yield f"{p}post_attention_layernorm.weight", (config.hidden,)
        if kind == FULL:
            yield f"{p}self_attn.q_norm.weight", (config.head_dim,)
            yield f"{p}self_attn.k_norm.weight", (config.head_dim,)
        else:
            yield f"{p}linear_attn.conv1d.weight", (config.conv_channels, 1, config.conv_kernel)
            yield f"{p}linear_attn.A_log", (config.value_heads,)
            yield f"{p}linear_attn.dt_bias", (config.value_heads,)
            yield f"{p}linear_attn.norm.weight", (config.value_dim,)
        if config.moe is not None:
            yield f"{p}mlp.gate.weight", (config.moe.experts, config.hidden)
            yield f"{p}mlp.shared_expert_gate.weight", (1, config.hidden)


def _stored(
    module: str, shape: tuple[int, int], scheme: Scheme, dialect: Dialect, plain: tuple[DType, ...]
) -> Iterator[Expected]:
    """The tensors that hold one projection, named without prefix."""
    n, k = shape

    def row(
        suffix: str, dtypes: tuple[DType, ...], shapes: tuple[Shape, ...], need: str = "required"
    ) -> Expected:
        return Expected(f"{module}.{suffix}", dtypes, shapes, need, scheme)

    compressed = dialect is Dialect.COMPRESSED
    if scheme is Scheme.PLAIN:
        yield row("weight", plain, (shape,))
    elif scheme is Scheme.FP8:
        yield row("weight", (DType.F8E4M3,), (shape,))
        yield row("weight_scale", SCALE, (*SCALAR, (n, 1), (n,)))
        yield row("input_scale", SCALE, SCALAR)
    elif scheme is Scheme.FP8_BLOCK:
        suffix = "weight_scale" if compressed else "weight_scale_inv"
        yield row("weight", (DType.F8E4M3,), (shape,))
        yield row(suffix, (DType.BF16, DType.F32), ((-(-n // 128), -(-k // 128)),))
    else:
        yield from _nvfp4(row, module, shape, scheme, compressed)


def _nvfp4(
    row: Callable[..., Expected],
    module: str,
    shape: tuple[int, int],
    scheme: Scheme,
    compressed: bool,
) -> Iterator[Expected]:
    n, k = shape
    if k % 16:
        raise CheckpointError(
            f"{module}: {k} columns do not split into NVFP4 groups of 16; leave it unquantised"
        )
    f32 = (DType.F32,)
    reads_input = scheme is Scheme.NVFP4_A4
    names = _NVFP4_NAMES[compressed]
    yield row(names[0], (DType.U8,), ((n, k // 2),))
    yield row("weight_scale", (DType.F8E4M3,), ((n, k // 16),))
    yield row(names[1], f32, SCALAR)
    unread = "rare" if compressed else "usual"
    yield row(names[2], f32, SCALAR, "required" if reads_input else unread)


def _fused(config: ModelConfig, table: QuantTable, plain: tuple[DType, ...]) -> Iterator[Expected]:
    moe = config.moe
    if moe is None:
        return
    for i in range(len(config.layers)):
        module = f"layers.{i}.mlp.experts"
        if table[module] is not Scheme.PLAIN:
            raise CheckpointError(
                f"{module} is fused into 3-D tensors and declared {table[module]}; quantised "
                "experts are read one by one: give an export that stores them so"
            )
        up, down = (2 * moe.intermediate, config.hidden), (config.hidden, moe.intermediate)
        yield Expected(f"{module}.gate_up_proj", plain, ((moe.experts, *up),))
        yield Expected(f"{module}.down_proj", plain, ((moe.experts, *down),))


def _kv_scales(config: ModelConfig) -> Iterator[Expected]:
    """Calibrated scales of an FP8 cache: modelopt's names, and compressed-tensors'."""
    for i, kind in enumerate(config.layers):
        for name in KV_SCALES if kind == FULL else ():
            yield Expected(f"layers.{i}.self_attn.{name}", SCALE, SCALAR, "rare")
