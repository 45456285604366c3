"""A network's list of tensors: what it counts, and which tensors of a file belong to a module."""

from pathlib import Path

import pytest

from spark_engine.models.checkpoint.tensor_list import Linear, Tensor, tensors_of
from spark_engine.models.families.registry import FAMILIES, family_of
from spark_engine.models.open_model import describe, open_model
from tests.checkpoints import text_config, write_checkpoint


@pytest.mark.parametrize(
    ("moe", "tied", "experts"),
    [
        (False, False, "split"),
        (False, True, "split"),
        (True, False, "split"),
        (True, True, "fused"),
    ],
)
def test_every_weight_is_counted_once(tmp_path: Path, moe: bool, tied: bool, experts: str) -> None:
    config = {"tie_word_embeddings": tied}
    written = write_checkpoint(tmp_path, config, moe=moe, experts=experts, kv_scales=True)
    assert open_model(tmp_path).parameters == sum(v.size for v in written.values.values())


def test_tensors_of_a_module(tmp_path: Path) -> None:
    """Scales count, those of the cache too; the experts of a layer are one module."""
    write_checkpoint(tmp_path / "a", format="modelopt_mixed", moe=True, kv_scales=True)
    counts = open_model(tmp_path / "a").tensors_by_module()
    assert counts["layers.0.mlp.experts"] == 8 * 3 * 4
    assert counts["layers.3.self_attn.q_proj"] == 3
    assert counts["layers.3.self_attn.k_proj"] == 4
    assert counts["lm_head"] == 4
    write_checkpoint(tmp_path / "b", moe=True, experts="fused")
    assert open_model(tmp_path / "b").tensors_by_module()["layers.0.mlp.experts"] == 2


@pytest.mark.parametrize("moe", [False, True])
def test_a_list_names_each_tensor_once_in_the_order_of_the_layers(moe: bool) -> None:
    model = describe(text_config(moe))
    names = [f"{r.module}.weight" if isinstance(r, Linear) else r.name for r in model.rows]
    assert len(set(names)) == len(names)
    layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
    assert layers == sorted(layers) and set(layers) == {0, 1, 2, 3}
    network = family_of(model.config).network(model.config)
    assert model.rows == tuple(tensors_of(network))
    first = next(tensors_of(network))
    assert isinstance(first, Tensor) and first.shape == (512, 128)


def test_no_two_families_answer_to_one_name() -> None:
    names = [n for f in FAMILIES for n in (*f.model_types, *f.architectures)]
    assert len(set(names)) == len(names)
    assert all(f.name in f.model_types for f in FAMILIES)
