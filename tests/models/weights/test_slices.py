"""Projections that are rows of a stored matrix: their blocks, refusals, and what of it is read.

That their bytes are those of projections one by one: tests/models/test_qwen3_next.py.
"""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.tensor_list import Slice
from spark_engine.models.open_model import describe, open_model
from spark_engine.models.weights import recipes
from spark_engine.tensors import Array, DType
from tests.models import next_files
from tests.models.edited_checkpoint import edited
from tests.models.test_qwen3_next import network_of

QKVZ = "model.layers.0.linear_attn.in_proj_qkvz.weight"


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


def test_a_slice_that_cuts_a_block_is_refused(tmp_path: Path) -> None:
    """Delta rules with 2 key heads of 64 rows, declared to have scales of blocks."""
    narrow = {"linear_key_head_dim": 64, "linear_value_head_dim": 32}
    folder = next_files.write(tmp_path, "bf16", config=narrow)[1]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with edited(folder) as tensors:
        tensors[QKVZ] = tensors[QKVZ].astype(DType.F8E4M3.numpy)
    words = (
        r"model\.layers\.0\.linear_attn\.in_proj_qkvz\.weight_scale_inv: a scale covers 128 rows, "
        r"and layers\.0\.linear_attn\.in_proj_qkv is rows 0 to 63 of 512, not whole blocks; "
        r"give an export that leaves layers\.0\.linear_attn\.in_proj_qkvz unquantised"
    )
    with pytest.raises(CheckpointError, match=words):
        open_model(folder)
    with pytest.raises(CheckpointError, match=words):
        describe(config)


def test_a_stored_matrix_that_is_short_is_named(tmp_path: Path) -> None:
    folder = next_files.write(tmp_path, "bf16")[1]
    with edited(folder) as tensors:
        tensors[QKVZ] = tensors[QKVZ][:-8]
    words = r"qkvz\.weight in model\.safetensors is bf16 \[1016, 128\]: expected .*\[1024, 128\]"
    with pytest.raises(CheckpointError, match=words):
        open_model(folder)
    with edited(folder) as tensors:
        del tensors[QKVZ]
    with pytest.raises(CheckpointError, match=r"^\S*in_proj_qkvz\.weight is missing.*; take"):
        open_model(folder)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bad_code_is_named_by_its_place_in_the_file(ranks: int, tmp_path: Path) -> None:
    folder = next_files.write(tmp_path, "fp8")[1]
    with edited(folder) as tensors:
        tensors[QKVZ][900, 3] = np.nan  # of z
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz\.weight\[900, 3\] is nan"):
        list(network_of(open_model(folder), "decode", ranks))


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
