"""benchmarks/accuracy: what it compares, over short texts."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import engines
from benchmarks.accuracy.choices import Choice
from benchmarks.accuracy.engines import CHUNK
from benchmarks.accuracy.measure import Saved, compared
from benchmarks.accuracy.state_error import state_errors
from spark_engine.engine_file import read_manifest
from tests import checkpoints


def test_a_prefilled_text_ends_as_one_decoded_from_its_start(tmp_path: Path) -> None:
    """Up to the order of sums; and states of f16 come nearer to that than those of bf16."""
    config, values = engines.random_weights(tmp_path)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], (1, CHUNK + 8))
    checkpoint = engines.save(tmp_path / "checkpoint", config, values, "bf16")

    def last(state: str, judged: int) -> list[engines.Logits]:
        choice = Choice("", state=state)
        folder = engines.engine(tmp_path, checkpoint, choice, 1, drafts=0, max_context=CHUNK + 64)
        return [np.stack([*engines.logits(folder, ids.astype(np.int32), judged)][-8:])]

    whole = last("f32", CHUNK + 8)
    found = [compared(whole, last(state, 8))["kl"] for state in ("f32", "f16", "bf16")]
    assert whole[0].shape == (8, 1, config["vocab_size"])
    assert 0 <= found[0] < 1e-8 < found[1] < found[2] / 4


@pytest.mark.parametrize(
    ("format", "others"),
    [
        ("ct_mlp_a8", "nvfp4 fp8_channel"),
        ("ct_mlp_a4", "nvfp4 nvfp4_a4"),
        ("ct_int4_g128", "int4_sym_g128"),
    ],
)
def test_the_formats_that_only_it_writes_are_read(tmp_path: Path, format: str, others: str) -> None:
    """Their values are as near to the weights as the format says."""
    config, values = engines.random_weights(tmp_path)
    stored, read, _ = checkpoints.store(values, format)
    engines.save(tmp_path / "checkpoint", config, values, format)
    folder = engines.engine(
        tmp_path, tmp_path / "checkpoint", Choice(""), 1, drafts=0, max_context=64
    )
    formats = {q.format for q in read_manifest(folder).quantisation}
    assert formats >= set(others.split())
    name = "model.layers.0.mlp.down_proj.weight"
    off = np.linalg.norm(read[name] - values[name]) / np.linalg.norm(values[name])
    assert 0.05 < off < 0.12
    assert stored.keys() != values.keys()


def test_divergence_is_of_the_first_from_the_other() -> None:
    first = [np.log(np.array([[[0.5, 0.5]], [[0.25, 0.75]]], np.float32))]
    other = [np.log(np.array([[[0.25, 0.75]], [[0.75, 0.25]]], np.float32)) + 3]
    found = compared(first, other)
    kl = [0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), 0.5 * np.log(3)]
    assert found["tokens"] == 2 and found["top1"] == 0.0
    assert found["kl"] == pytest.approx(np.mean(kl), rel=1e-6)


def test_states_of_f16_are_between_those_of_f32_and_bf16() -> None:
    found = {(r["state"], r["every"]): r["error"] for r in state_errors([64])}
    f32, f16, ring, each = (found[k] for k in (("f32", 8), ("f16", 8), ("bf16", 8), ("bf16", 1)))
    for row in zip(f32, f16, ring, each, strict=True):  # type: ignore[call-overload]
        assert 0 < row[0] < row[1] / 100 < row[2] / 400 and row[2] < row[3]


def test_a_run_continues_where_it_was(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "rows.json")
    saved.add("random", "f16 states", {"asked": 100, "context": 64})
    again = Saved(tmp_path / "rows.json")
    assert again.has("random", "f16 states", 100, 64) and again.has("random", "f16 states", 50, 64)
    assert not again.has("random", "f16 states", 101, 64)
    assert not again.has("random", "f16 states", 100, 128) and not again.has("embedded", "", 1)
    again.add("random", "f16 states", {"asked": 200, "context": 64})
    assert [row["asked"] for row in Saved(tmp_path / "rows.json").rows] == [200]
