"""The unfused graph: names, states, projections by scheme, quantisers, debug outputs."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine import interface
from spark_engine.errors import CheckpointError, GraphError, OptionError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import Network, build_network
from spark_engine.models.checkpoint.files import read_configs
from spark_engine.models.graph.writer import Writer
from spark_engine.models.open_model import describe, open_model
from spark_engine.models.weights import recipes
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import DType, TensorSpec
from tests.checkpoints import text_config, write_checkpoint
from tests.models import nvidia_configs
from tests.models.edited_checkpoint import edited

F32 = Precision(DType.F32, DType.F32, DType.F32)
BF16 = Precision(DType.BF16, DType.F8E4M3, DType.F32)


def _build(
    model: Model, family: str = "decode", precision: Precision = F32, debug: bool = False
) -> Network:
    return build_network(model, family, Limits(4, 256, 16, model.config.vocab), precision, debug)


def _made(tmp_path: Path, format: str = "bf16", **kwargs: Any) -> Model:
    write_checkpoint(tmp_path, kwargs.pop("config", None), format, **kwargs)
    return open_model(tmp_path)


def _ops(network: Network) -> Counter[str]:
    return Counter(node.op for node in network.graph.nodes)


@pytest.mark.parametrize("family", ["decode", "prefill"])
@pytest.mark.parametrize("moe", [False, True])
def test_inputs_and_outputs_are_the_contract(tmp_path: Path, family: str, moe: bool) -> None:
    model = _made(tmp_path, moe=moe)
    network = _build(model, family)
    limits = Limits(4, 256, 16, 512)
    shared = [*interface.steps(family), *interface.tables(limits)]
    states = [spec for spec, _ in network.states]
    names = {s.name for s in (*shared, *states)} | set(network.weights)
    assert {t.name for t in network.graph.inputs} == names
    assert {s.name for s in interface.common_states(limits)} <= {s.name for s in states}
    outputs = {s.name for s in interface.outputs(limits)} | {f"{s.name}.out" for s in states}
    assert {t.name for t in network.graph.outputs} == outputs
    for tensor in network.graph.inputs:
        if tensor.name in network.weights:
            spec = network.weights[tensor.name].spec
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype.numpy)


def test_states_and_their_units(tmp_path: Path) -> None:
    config = {"linear_value_head_dim": 64, "linear_num_value_heads": 6}
    network = _build(_made(tmp_path, config=config), precision=BF16)
    states = {spec.name: (spec, unit) for spec, unit in network.states}
    assert states["layers.0.conv_state"][0].shape == (5, 3, 2 * 2 * 32 + 6 * 64)
    assert states["layers.0.conv_state"][0].dtype is DType.BF16
    assert states["layers.0.gdn_state"][0].shape == (5, 6, 64, 32)
    spec, unit = states["layers.3.k_pages"]
    assert (spec.shape, spec.dtype, unit) == ((17, 2, 64, 64), DType.U8, "page")
    assert {n for n, (_, u) in states.items() if u == "page"} == {
        "layers.3.k_pages",
        "layers.3.v_pages",
    }


def test_families_differ_in_tile_and_recurrence_only(tmp_path: Path) -> None:
    model = _made(tmp_path, moe=True)
    decode, prefill = _build(model, "decode"), _build(model, "prefill")
    swap = {"gated_delta_step": "gated_delta_chunk"}
    assert [swap.get(n.op, n.op) for n in decode.graph.nodes] == [n.op for n in prefill.graph.nodes]
    assert decode.weights == prefill.weights
    assert {n.attrs["tile"] for n in prefill.graph.nodes if "tile" in n.attrs} == {64}


def test_equal_input_scales_share_a_quantiser(tmp_path: Path) -> None:
    one = _ops(_build(_made(tmp_path / "a", "fp8")))
    each = _ops(_build(_made(tmp_path / "b", "fp8", split_scales=True)))
    projections = 3 * 3 + 4 + 4 * 3
    assert one["fp8_linear"] == each["fp8_linear"] == projections
    assert each["fp8_quant"] == projections
    assert one["fp8_quant"] == 3 * 2 + 2 + 4 * 2  # qkv|z, out; q|k|v, o; gate|up, down


def test_block_quantisers_are_always_shared(tmp_path: Path) -> None:
    ops = _ops(_build(_made(tmp_path, "fp8_block")))
    assert ops["fp8_block_quant"] == 3 * 2 + 2 + 4 * 2


def test_debug_adds_outputs_and_changes_no_node_of_the_rest(tmp_path: Path) -> None:
    model = _made(tmp_path)
    plain, debug = _build(model), _build(model, debug=True)
    names = {t.name for t in plain.graph.outputs}
    extra = {t.name: t for t in debug.graph.outputs if t.name not in names}
    assert set(extra) == {"logits_all", *(f"layers.{i}.out" for i in range(4))}
    assert list(extra["logits_all"].shape) == ["tokens", 512]
    kept = {n.name: n.op for n in debug.graph.nodes}
    assert {n.name: n.op for n in plain.graph.nodes}.items() <= kept.items()
    assert debug.weights == plain.weights


def test_tied_head_reads_the_embedding(tmp_path: Path) -> None:
    network = _build(_made(tmp_path, config={"tie_word_embeddings": True}))
    assert "lm_head.weight" not in network.weights
    (logits,) = (node for node in network.graph.nodes if node.name == "logits")
    assert logits.inputs[1].name == "embed_tokens.weight"


def test_a_stored_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"tie_word_embeddings": True})
    with edited(tmp_path) as tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert open_model(tmp_path).config.tied
    with edited(tmp_path) as tensors:
        tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(CheckpointError, match="lm_head.weight differs.*tie_word_embeddings"):
        open_model(tmp_path)


def _value(model: Model, network: Network, name: str) -> list[float]:
    assert model.checkpoint is not None
    values: list[float] = network.weights[name].evaluate(model.checkpoint).ravel().tolist()
    return values


@pytest.mark.parametrize("names", ["modelopt", "compressed"])
def test_kv_scales(names: str, tmp_path: Path) -> None:
    name = "layers.3.self_attn.kv_scale"
    plain = _made(tmp_path / "a", "modelopt_mixed")
    assert plain.table.kv_fp8
    assert _value(plain, _build(plain, precision=BF16), name) == [1, 1]
    scaled = _made(tmp_path / "b", "modelopt_mixed", kv_scales=names)
    want = pytest.approx([0.04, 0.5])
    assert _value(scaled, _build(scaled, precision=BF16), name) == want
    assert _value(scaled, _build(scaled, precision=F32), name) == [1, 1]


@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale")])
@pytest.mark.parametrize("there", ["k", "v", "kv"])
def test_k_and_v_have_their_own_scales(tmp_path: Path, names: tuple[str, str], there: str) -> None:
    """modelopt's names and compressed-tensors'."""
    write_checkpoint(tmp_path)
    values = {"k": 0.0390625, "v": 0.5}
    with edited(tmp_path) as tensors:
        for side, name in zip("kv", names, strict=True):
            if side in there:
                value = np.array([values[side]], np.float32)
                tensors[f"model.layers.3.self_attn.{name}"] = value
    model = open_model(tmp_path)
    got = _value(model, _build(model, precision=BF16), "layers.3.self_attn.kv_scale")
    assert got == [values[side] if side in there else 1.0 for side in "kv"]


def test_norms_arrive_with_their_one(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, format="f32")
    model = open_model(tmp_path)
    network = _build(model)
    for name, plus in (("layers.0.input_layernorm", 1), ("layers.0.linear_attn.norm", 0)):
        stored = written.values[f"model.{name}.weight"]
        assert np.array_equal(_value(model, network, f"{name}.weight"), stored + np.float32(plus))


def test_yarn_scales_the_rotated_part_of_the_head_norms(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "factor": 4.0}
    rope["original_max_position_embeddings"] = 1024
    written = write_checkpoint(tmp_path, {"rope_parameters": rope}, "f32")
    model = open_model(tmp_path)
    name = "layers.3.self_attn.q_norm.weight"
    plain = 1 + written.values[f"model.{name}"]
    got = np.array(_value(model, _build(model), name))
    factor = 0.1 * np.log(4) + 1
    np.testing.assert_allclose(got[:16], plain[:16] * factor, rtol=1e-6)
    assert np.array_equal(got[16:], plain[16:])


@pytest.mark.parametrize("name", nvidia_configs.MODELS)
def test_published_models_lower_from_their_configs_alone(name: str) -> None:
    model = describe(*nvidia_configs.pair(name))
    network = _build(model, precision=BF16)
    text = sum(w.spec.nbytes for w in network.weights.values())
    assert model.parameters == {"27B": 26_895_998_464, "35B-A3B": 34_660_610_688}[name]
    expected = {"27B": 20_150_569_096, "35B-A3B": 20_825_156_824}[name]
    # f32 norms, and scales repeated per row, weigh a little more than what is stored.
    assert expected < text < 1.01 * expected
    assert dict(model.ignored) == {"vision": 333, "mtp": {"27B": 15, "35B-A3B": 19}[name]}


def test_contradictory_limits_and_families(tmp_path: Path) -> None:
    model = describe(text_config(False))
    for vocab in (9, 513):
        with pytest.raises(OptionError, match=f"vocabulary of {vocab}"):
            build_network(model, "decode", Limits(4, 256, 16, vocab), F32)
    with pytest.raises(OptionError, match="'chunk'"):
        build_network(model, "chunk", Limits(4, 256, 16, 512), F32)


def test_described_equals_opened(tmp_path: Path) -> None:
    """The graph needs no weights: only shared quantisers tell that values were there."""
    opened = _made(tmp_path, "nvfp4", moe=True)
    config, _, hf_quant, *_ = read_configs(tmp_path)
    described = describe(config, hf_quant)
    a, b = _build(opened), _build(described)
    assert _spelled(a) == _spelled(b)
    assert a.weights == b.weights


def _spelled(network: Network) -> list[tuple[str, Mapping[str, object], list[str]]]:
    return [(n.op, n.attrs, [t.name for t in n.inputs]) for n in network.graph.nodes]


def test_a_name_is_of_one_tensor_and_one_recipe(tmp_path: Path) -> None:
    w = Writer(describe(text_config(False)), "decode", Limits(4, 256, 16, 512), F32)
    one, two = (recipes.source(n, DType.F32, (2,)) for n in ("one", "two"))
    first = w.weight("a", one)
    assert w.weight("a", one) is first and [t.name for t in w.graph.inputs] == ["a"]
    with pytest.raises(GraphError, match="weight a has two recipes"):
        w.weight("a", two)
    with pytest.raises(GraphError, match="two tensors are named a"):
        w.input(TensorSpec("a", DType.F32, (2,)))
    with pytest.raises(GraphError, match="the decode graph has no tensor b yet"):
        w["b"]
