"""Engines of several ranks against the same checkpoint's engine of one, in every format.

Sums over ranks are rounded in another order, so logits agree to float32's last digits; ranks among
themselves agree bit for bit. Where activations are rounded to a few bits, prompts are short: a
value on the border between two codes may fall to either side.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.load import load
from tests.checkpoints import write_checkpoint
from tests.ranks import Rendezvous, open_ranks
from tests.solo import Solo

TOLERANCE = 2e-5  # of the range of the logits
SHALLOW = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
BLOCKS = {"linear_key_head_dim": 128, "linear_value_head_dim": 64, "head_dim": 64}
WIDE = {"num_experts": 4, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
QUICK = {("nvfp4", True), ("fp8_block", False)}
EVERY = "SPARK_EVERY_FORMAT"  # in the environment: `make ranks`
ROUNDED = ("fp8", "fp8_block", "nvfp4_a4", "modelopt_mixed", "ct_nvfp4_a4")
OPTIONS = Options(decode=(1,), prefill=(64,), max_context=192, max_seqs=2, kv_dtype="f32")


def _runs(folder: Path, ranks: int, ids: list[int], options: Options = OPTIONS) -> list[Solo]:
    path = folder.with_name(f"tp{ranks}")
    build(folder, path, replace(options, tp=ranks), lambda text: None)
    rendezvous = Rendezvous(ranks)
    engines = open_ranks(path, rendezvous) if ranks > 1 else [load(path, threads=1)]
    return rendezvous.run(lambda rank: Solo(engines[rank]).read(ids))


def _agree(one: Solo, several: list[Solo]) -> None:
    truth = np.stack(one.logits)
    found = np.concatenate([np.stack(solo.logits) for solo in several], axis=1)
    assert np.isfinite(found).all()
    assert np.abs(found - truth).max() <= TOLERANCE * np.ptp(truth)
    for solo in several:
        assert solo.tokens == several[0].tokens == [int(row.argmax()) for row in found]


def _ids(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(5).integers(0, 512, length)]


def _only_at_length(rest: bool) -> None:
    if rest and EVERY not in os.environ:
        pytest.skip("make ranks runs it")


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", ["bf16", "nvfp4", "ct_nvfp4", *ROUNDED])
def test_two_ranks_are_one(format: str, moe: bool, tmp_path: Path) -> None:
    _only_at_length((format, moe) not in QUICK)
    changes: dict[str, Any] = {**SHALLOW, **(BLOCKS | (WIDE if moe else {}))}
    write_checkpoint(tmp_path / "c", changes, format, moe=moe)
    ids = _ids(7 if format in ROUNDED else 71)
    (one,) = _runs(tmp_path / "c", 1, ids)
    _agree(one, _runs(tmp_path / "c", 2, ids))


@pytest.mark.parametrize("ranks", [2, 4])
def test_kv_heads_are_shared_and_a_tied_head_is_cut(ranks: int, tmp_path: Path) -> None:
    """Two ranks to a KV head, four key heads, experts stacked in the file."""
    _only_at_length(ranks == 2)
    heads = {
        "num_key_value_heads": ranks // 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
    changes = {**SHALLOW, **heads, "tie_word_embeddings": True}
    write_checkpoint(tmp_path / "c", changes, "f32", moe=True, experts="fused")
    (one,) = _runs(tmp_path / "c", 1, _ids(71))
    _agree(one, _runs(tmp_path / "c", ranks, _ids(71)))


def test_a_rank_scales_its_part_of_a_token(tmp_path: Path) -> None:
    """So several round otherwise than one, by steps of e4m3, and all of them alike."""
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, SHALLOW, "ct_fp8_channel", seed=11)
    (one,), several = (_runs(folder, ranks, _ids(5)) for ranks in (1, 2))
    truth = np.stack(one.logits)
    found = np.concatenate([np.stack(solo.logits) for solo in several], axis=1)
    assert 0 < np.linalg.norm(found - truth) <= 0.15 * np.linalg.norm(truth)
    assert several[0].tokens == several[1].tokens == [int(row.argmax()) for row in found]
