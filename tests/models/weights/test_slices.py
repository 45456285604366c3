"""Projections that are rows of a stored matrix: the bytes of a file that stores them one by one."""

import json
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.graph.lower import facts_of
from spark_engine.errors import CheckpointError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import build_network
from spark_engine.models.checkpoint.files import open_checkpoint
from spark_engine.models.checkpoint.tensor_list import Linear, Slice
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.families import registry
from spark_engine.models.open_model import describe, open_model, with_ranks
from spark_engine.models.weights import recipes
from spark_engine.models.weights.shards import of_rank
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import Array, DType
from tests.checkpoint_files import write_shards
from tests.checkpoints import write_checkpoint

CONFIG = {
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 64, "head_dim": 128},
    "mtp_num_hidden_layers": 1,
}
BF16 = Precision(DType.BF16, DType.BF16, DType.F32)
# Of each stored matrix its projections, in the order of their rows; those of the delta rule take
# turns, a key head at a time.
FUSED = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def _sizes(c: ModelConfig, leaf: str) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The units of a stored matrix, and each piece of a unit: its projection and rows."""
    if leaf == "in_proj_qkvz":
        key, value = c.key_dim, c.value_width // c.key_heads
        qkv, z = FUSED[leaf]
        return c.key_heads, ((qkv, key), (qkv, key), (qkv, value), (z, value))
    if leaf == "in_proj_ba":
        return c.key_heads, tuple((name, c.value_heads // c.key_heads) for name in FUSED[leaf])
    q, kv = 2 * c.heads * c.head_dim, c.kv_heads * c.head_dim
    return 1, tuple(zip(FUSED[leaf], (q, kv, kv), strict=True))


def _slice(c: ModelConfig, linear: Linear) -> Slice | None:
    parent, _, leaf = linear.module.rpartition(".")
    whole = next((whole for whole, parts in FUSED.items() if leaf in parts), None)
    if whole is None:
        return None
    if whole == "gate_up_proj":
        units, pieces = 1, tuple((name, linear.rows) for name in FUSED[whole])
    else:
        units, pieces = _sizes(c, whole)
    ends = np.cumsum([0, *(rows for _, rows in pieces)]).tolist()
    ranges = [
        (unit * ends[-1] + first, unit * ends[-1] + end)
        for (name, _), first, end in zip(pieces, ends[:-1], ends[1:], strict=True)
        for unit in range(units)
        if name == leaf
    ]
    return Slice(f"{parent}.{whole}", units * ends[-1], tuple(ranges))


def _sliced(c: ModelConfig, block: Any) -> Any:
    """The block with slices of matrices, as `FUSED` names them."""
    if isinstance(block, Linear):
        return replace(block, slice=_slice(c, block))
    if isinstance(block, tuple):
        return tuple(_sliced(c, part) for part in block)
    if is_dataclass(block) and not isinstance(block, type):
        found = {f.name: _sliced(c, getattr(block, f.name)) for f in fields(block)}
        return replace(block, **found)
    return block


def _part(make: Callable[[ModelConfig], Any], c: ModelConfig) -> Any:
    return _sliced(c, make(c))


@pytest.fixture
def sliced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes both families read fused matrices."""

    def patch() -> None:
        for name, family in registry._BY_NAME.items():
            parts = ("network", "draft_head")
            made: dict[str, Any] = {part: partial(_part, getattr(family, part)) for part in parts}
            monkeypatch.setitem(registry._BY_NAME, name, replace(family, **made))

    return patch


def _fuse(c: ModelConfig, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of a file that stores the matrices of `FUSED`."""
    out = dict(tensors)
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        parent, _, first = module.rpartition(".")
        for whole, parts in FUSED.items():
            if first != parts[0]:
                continue
            found = {part: out.pop(f"{parent}.{part}.{suffix}") for part in parts}
            out[f"{parent}.{whole}.{suffix}"] = _joined(c, whole, found)
    return out


def _joined(c: ModelConfig, whole: str, parts: Mapping[str, Array]) -> Array:
    """Rows of the projections, or their scales, in the order of the stored matrix."""
    array = next(iter(parts.values()))
    if array.shape in ((), (1,)):
        return array
    if whole == "gate_up_proj":
        return np.concatenate(list(parts.values()))
    units, pieces = _sizes(c, whole)
    rows = {part: sum(n for name, n in pieces if name == part) * units for part in parts}
    at = dict.fromkeys(parts, 0)
    cut = []
    for name, n in pieces:  # [units, rows of the piece in a unit, ...]
        entries = units * n * len(parts[name]) // rows[name]
        piece = parts[name][at[name] : at[name] + entries]
        at[name] += entries
        cut.append(piece.reshape(units, entries // units, *piece.shape[1:]))
    joined = np.concatenate(cut, axis=1)
    return joined.reshape(-1, *joined.shape[2:])


def _tensors(folder: Path) -> dict[str, Array]:
    opened = open_checkpoint(folder)
    return {name: np.array(opened.read(name)) for name in opened.tensors}


def _write(folder: Path, format: str, rows: bool = False, **more: Any) -> tuple[Path, Path]:
    """The folders of two files with equal weights: projections one by one, and fused.

    The projections of a matrix have one scale of the tensor, as the matrix has; `rows`: FP8 has
    one of each row.
    """
    one, fused = folder / "one", folder / "fused"
    config = {**CONFIG, **more.pop("config", {})}
    for path in (one, fused):
        write_checkpoint(path, config, format, head_prefix="model.", **more)
    tensors = _tensors(one)
    rng = np.random.default_rng(7)
    for name in list(tensors):
        module, _, suffix = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        first = next((parts[0] for parts in FUSED.values() if leaf in parts), leaf)
        if tensors[name].shape in ((), (1,)) and first != leaf:
            tensors[name] = tensors[f"{parent}.{first}.{suffix}"]
        if rows and suffix == "weight_scale":
            scales = rng.uniform(0.5, 2, (len(tensors[f"{module}.weight"]), 1))
            tensors[name] = scales.astype(np.float32)
    write_shards(one, tensors, 1)
    write_shards(fused, _fuse(open_model(one).config, tensors), 1)
    for file in ("config.json", "hf_quant_config.json"):
        if (fused / file).is_file():
            text = (fused / file).read_text()
            for whole, parts in FUSED.items():
                text = text.replace(f'.{parts[0]}"', f'.{whole}"')
            (fused / file).write_text(text)
    return one, fused


def _bytes(model: Model, ranks: int, dtype: str) -> Iterator[tuple[str, bytes]]:
    """Every weight of every rank's graph with its draft head in that dtype, by name."""
    model = with_ranks(model, ranks, 64)
    assert model.checkpoint is not None
    limits = Limits(4, 256, 16, model.config.vocab, drafts=1, gdn_ring=4)
    draft = DraftOptions(dtype)
    made = build_network(model, "verify_k1", limits, BF16, draft=draft)
    for name, weight in made.weights.items():
        for rank in range(ranks):
            value = of_rank(weight.recipe, rank).evaluate(model.checkpoint)
            yield f"{name} {rank} {value.dtype} {value.shape}", value.tobytes()


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {}),
    ("bf16", {"draft_dtype": "nvfp4"}),
    ("f32", {"moe": True}),
    ("fp8", {"head": "fp8"}),
    ("fp8", {"rows": True}),
    ("fp8_block", {"head": "fp8_block"}),
    ("fp8_block", {"moe": True, "config": {"moe_intermediate_size": 256}}),
    ("nvfp4", {"head": "nvfp4"}),
    ("nvfp4_a4", {"moe": True, "config": {"moe_intermediate_size": 128}}),
    ("ct_nvfp4", {}),
)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("format", "more"), CASES)
def test_the_bytes_are_those_of_projections_that_are_stored_one_by_one(
    format: str, more: dict[str, Any], ranks: int, tmp_path: Path, sliced: Callable[[], None]
) -> None:
    given = dict(more)
    dtype = given.pop("draft_dtype", "checkpoint")
    shared = {"shared_expert_intermediate_size": 256} if "moe" in given else {}
    given["config"] = {**shared, **given.get("config", {})}
    one, fused = _write(tmp_path, format, **given)
    stored = open_model(one)
    want = dict(_bytes(stored, ranks, dtype))
    sliced()
    model = open_model(fused)
    leaves = {name.split(".")[-2] for name in model.tensors}
    assert leaves >= FUSED.keys() and not leaves & {p for parts in FUSED.values() for p in parts}
    found = dict(_bytes(model, ranks, dtype))
    assert found.keys() == want.keys()
    assert [name for name in want if found[name] != want[name]] == []
    assert model.parameters == stored.parameters
    if format == "bf16":  # a file of fused matrices has fewer scales
        bytes_of = [facts_of(with_ranks(m, ranks, 64)).weight_bytes for m in (stored, model)]
        assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize(
    ("rows", "ranges", "blocks"),
    [
        (384, ((0, 128), (256, 384)), ((0, 1), (2, 3))),
        (300, ((128, 256), (256, 300)), ((1, 2), (2, 3))),
        (64, ((0, 8), (32, 40)), ((0, 1),)),  # one block, the scale of all
        (300, ((256, 300), (0, 128)), ()),  # a short block would be in the middle
        (384, ((0, 64),), ()),
        (384, ((64, 128),), ()),
    ],
)
def test_ranges_in_blocks(rows: int, ranges: Any, blocks: Any) -> None:
    assert Slice("m", rows, ranges).blocks(128) == blocks


def test_a_slice_that_cuts_a_block_is_refused(tmp_path: Path, sliced: Callable[[], None]) -> None:
    """Delta rules with 2 key heads of 64 rows, declared to have scales of blocks."""
    narrow = {"linear_key_head_dim": 64, "linear_value_head_dim": 32}
    folder = _write(tmp_path, "bf16", config=narrow)[1]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = _tensors(folder)
    for name in [n for n in tensors if n.endswith("_proj_qkvz.weight")]:
        tensors[name] = tensors[name].astype(DType.F8E4M3.numpy)
    write_shards(folder, tensors, 1)
    sliced()
    words = (
        r"model\.layers\.0\.linear_attn\.in_proj_qkvz\.weight_scale_inv: a scale covers 128 rows, "
        r"and layers\.0\.linear_attn\.in_proj_qkv is rows 0 to 63 of 512, not whole blocks; "
        r"give an export that leaves layers\.0\.linear_attn\.in_proj_qkvz unquantised"
    )
    with pytest.raises(CheckpointError, match=words):
        open_model(folder)
    with pytest.raises(CheckpointError, match=words):
        describe(config)


def test_a_stored_matrix_that_is_short_is_named(tmp_path: Path, sliced: Callable[[], None]) -> None:
    folder = _write(tmp_path, "bf16")[1]
    tensors = _tensors(folder)
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    tensors[name] = tensors[name][:-8]
    write_shards(folder, tensors, 1)
    sliced()
    words = r"qkvz\.weight in model\.safetensors is bf16 \[1016, 128\]: expected .*\[1024, 128\]"
    with pytest.raises(CheckpointError, match=words):
        open_model(folder)
    del tensors[name]
    write_shards(folder, tensors, 1)
    with pytest.raises(CheckpointError, match=r"^\S*in_proj_qkvz\.weight is missing.*; take"):
        open_model(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_code_is_named_by_its_place_in_the_file(
    ranks: int, tmp_path: Path, sliced: Callable[[], None]
) -> None:
    folder = _write(tmp_path, "fp8")[1]
    tensors = _tensors(folder)
    tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"][900, 3] = np.nan  # of z
    write_shards(folder, tensors, 1)
    sliced()
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz\.weight\[900, 3\] is nan"):
        list(_bytes(open_model(folder), ranks, "checkpoint"))


def test_only_the_rows_of_a_slice_are_read(tmp_path: Path) -> None:
    """One range is a view of the file; of several only they are copied."""
    np.arange(4096 * 1024, dtype=np.float32).tofile(tmp_path / "x")
    stored = np.memmap(tmp_path / "x", np.float32, "r", shape=(4096, 1024))  # 16 MiB

    class File:
        def read(self, name: str) -> Array:
            return stored

    source = recipes.source("x", DType.F32, stored.shape)
    view = recipes.take(source, ((8, 4000),)).evaluate(File())
    assert np.shares_memory(view, stored)
    tracemalloc.start()
    rows = recipes.take(source, ((3072, 3200), (0, 128))).evaluate(File())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.1 * rows.nbytes
    np.testing.assert_array_equal(rows, np.concatenate([stored[3072:3200], stored[:128]]))
