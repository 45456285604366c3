"""A draft head with damaged values: left out with the reason, unless drafts are asked for."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build, planned
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CheckpointError, OptionError
from spark_engine.models.build_network import build_network
from spark_engine.models.weights.draft_weights import head_fault
from tests.checkpoints import write_checkpoint
from tests.models.drafters import write_drafter
from tests.models.edited_checkpoint import edited
from tests.models.test_drafts import SMALL

GPU = Options(target="sm_121a")


def _written(path: Path, head: str, name: str = "", code: float | None = None) -> Path:
    """A checkpoint with a head in that format, and one element of it changed."""
    write_checkpoint(path, SMALL | {"hidden_size": 128}, "bf16", head=head)
    with edited(path) as tensors:
        if name:
            tensors[name].reshape(-1)[-1:] = np.array(code).astype(tensors[name].dtype)
    return path


@pytest.mark.parametrize("head", ["bf16", "fp16", "f32", "fp8", "fp8_block", "nvfp4"])
def test_a_sound_head_is_built_in(tmp_path: Path, head: str) -> None:
    model, plan = planned(_written(tmp_path, head), GPU)
    assert head_fault(model) == "" and plan.draft and not plan.notes


@pytest.mark.parametrize(
    ("head", "name", "value"),
    [
        *((head, "mtp.fc.weight", np.nan) for head in ("bf16", "fp16", "f32", "fp8", "fp8_block")),
        *((head, "mtp.norm.weight", np.inf) for head in ("bf16", "f32", "fp8")),
        ("fp8_block", "mtp.layers.0.mlp.up_proj.weight_scale_inv", -1.0),
        ("nvfp4", "mtp.layers.0.mlp.up_proj.weight_scale", np.nan),
        ("nvfp4", "mtp.layers.0.mlp.up_proj.weight_scale_2", 0.0),
    ],
)
def test_a_damaged_head_is_left_out(tmp_path: Path, head: str, name: str, value: float) -> None:
    model, plan = planned(_written(tmp_path, head, name, value), GPU)
    assert plan.draft is None and plan.limits.drafts == 0 and not model.has_drafts
    (note,) = plan.notes
    assert note.startswith(f"the checkpoint's draft head is not used: {name}")
    assert note.endswith(": built without drafts")


def test_a_drafter_is_built_next_to_a_sound_head(tmp_path: Path) -> None:
    """And alone where the head is damaged, which the report says."""
    config = json.loads((_written(tmp_path / "sound", "bf16") / "config.json").read_text())
    _written(tmp_path / "damaged", "bf16", "mtp.fc.weight", np.nan)
    text = config.get("text_config", config)
    drafter = str(write_drafter(tmp_path / "d", text, target_layer_ids=[0]))
    states = {}
    for name in ("sound", "damaged"):
        model, plan = planned(tmp_path / name, replace(GPU, drafter=drafter))
        network = build_network(model, "verify_k2", plan.limits, plan.precision)
        states[name] = {spec.name for spec, _ in network.states if "dflash" in spec.name}
        assert ("mtp.k_pages" in {s.name for s, _ in network.states}) == (name == "sound")
        assert [note for note in plan.notes if "mtp.fc.weight" in note] == [
            note for note in plan.notes if note.endswith(": the drafter alone drafts")
        ]
        assert bool(plan.notes) == (name == "damaged") and plan.limits.drafts == 7
    assert states["sound"] == states["damaged"] and len(states["sound"]) == 4


def test_a_damaged_head_that_is_asked_for_is_refused(tmp_path: Path) -> None:
    path = _written(tmp_path / "model", "fp8", "mtp.fc.weight", np.nan)
    few = {"decode": (1,), "prefill": (64,), "max_seqs": 1, "max_context": 64}
    with pytest.raises(CheckpointError, match=r"mtp.fc.weight\[127, 255\] is nan"):
        build(path, tmp_path / "engine", Options(drafts=1, **few), lambda text: None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="--draft-dtype: the checkpoint's draft head is not used"):
        planned(path, Options(target="sm_121a", draft_dtype="checkpoint"))
    assert planned(path, Options(target="sm_121a", drafts=0))[1].notes == ()
