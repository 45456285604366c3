"""Drawn checkpoints: the published tensors, sane values, and equal to what is written of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.published import folder_of
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.engine_file import open_folder
from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.files import open_checkpoint
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.open_model import describe, open_model
from spark_engine.models.synthetic import Synthetic
from spark_engine.models.weights.operands import projection
from spark_engine.plugins.formats import int4
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.tensors import DType
from tests import checkpoints
from tests.checkpoint_files import INT4, write_configs, write_drawn
from tests.models import nvidia_configs

CONFIGS = {  # published files, and what describes them in fewer words
    "qwen36-27b": nvidia_configs.pair("27B"),
    "qwen36-35b-a3b": nvidia_configs.pair("35B-A3B"),
    "27b:nvfp4-a4": nvidia_configs.w4a4(),
}
FORMATS = (
    *("modelopt_mixed", "bf16", "fp8_block", "ct_nvfp4_a4", "ct_fp8_channel", "gptq", "ct_int4"),
)


def folder(path: Path, format: str, moe: bool, seed: object = 1, head: bool = False) -> Path:
    """The configs of a small checkpoint without its weights, with a draft head if asked."""
    wide = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    config = checkpoints.text_config(moe, wide if moe else None)
    config |= {"mtp_num_hidden_layers": int(head)}
    drawn = checkpoints._draw(config, np.random.default_rng(0))
    names = [checkpoints._full(name, "model.language_model.") for name, _ in drawn]
    path.mkdir()
    write_configs(path, config, format, "model.language_model.", None, names)
    (path / "synthetic.json").write_text(json.dumps({"seed": seed}))
    return path


def drawn_of(path: Path) -> Synthetic:
    found = open_model(path).checkpoint
    assert isinstance(found, Synthetic)
    return found


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", FORMATS)
def test_written_shards_are_the_drawn_tensors(tmp_path: Path, format: str, moe: bool) -> None:
    drawn = drawn_of(folder(tmp_path / "drawn", format, moe))
    write_drawn(drawn, tmp_path / "written", 3)
    written = open_checkpoint(tmp_path / "written")
    assert set(written.tensors) == set(drawn.tensors) and len(written.maps) > 1
    for name in drawn.tensors:
        value = drawn.read(name)
        assert value.tobytes() == written.read(name).tobytes()
        assert value.dtype == written.read(name).dtype
        assert np.isfinite(value.astype(np.float64)).all(), name
    assert open_model(tmp_path / "written").parameters == open_model(tmp_path / "drawn").parameters


def test_globals_of_compressed_tensors_divide(tmp_path: Path) -> None:
    reader = drawn_of(folder(tmp_path / "m", "ct_nvfp4_a4", False))
    p = "model.language_model.layers.0.mlp.gate_proj"
    codes = reader.read(f"{p}.weight_packed")
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.stack([table[codes & 7], table[codes >> 4 & 7]], -1).reshape(len(codes), -1)
    values *= np.repeat(reader.read(f"{p}.weight_scale").astype(np.float32), 16, 1)
    values /= reader.read(f"{p}.weight_global_scale")
    assert np.sqrt(np.mean(values**2)) * np.sqrt(values.shape[1]) == pytest.approx(1, rel=0.03)
    assert reader.read(f"{p}.input_global_scale").item() == 2688 / 8


def test_a_tensor_depends_on_seed_and_name_alone(tmp_path: Path) -> None:
    one = drawn_of(folder(tmp_path / "one", "modelopt_mixed", False))
    other = drawn_of(folder(tmp_path / "two", "modelopt_mixed", False, seed=2))
    names = [n for n in one.tensors if n.endswith("gate_proj.weight")]
    found = {one.read(n).tobytes() for n in names} | {other.read(n).tobytes() for n in names}
    assert len(found) == 2 * len(names)
    assert one.read(names[0]).tobytes() == one.read(names[0]).tobytes()
    assert one.digest() != other.digest()


def test_projections_have_gain_one(tmp_path: Path) -> None:
    reader = drawn_of(folder(tmp_path / "m", "modelopt_mixed", False))
    p = "model.language_model.layers.0."
    q = reader.read(f"{p}linear_attn.in_proj_qkv.weight").astype(np.float32)
    q *= reader.read(f"{p}linear_attn.in_proj_qkv.weight_scale")
    assert np.std(q) * np.sqrt(q.shape[1]) == pytest.approx(1, rel=0.03)
    codes = reader.read(f"{p}mlp.gate_proj.weight")
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.stack([table[codes & 7], table[codes >> 4 & 7]], -1).reshape(len(codes), -1)
    scales = reader.read(f"{p}mlp.gate_proj.weight_scale").astype(np.float32)
    assert scales.min() >= 64
    values *= np.repeat(scales, 16, 1) * reader.read(f"{p}mlp.gate_proj.weight_scale_2")
    assert np.sqrt(np.mean(values**2)) * np.sqrt(values.shape[1]) == pytest.approx(1, rel=0.03)


def test_what_is_drawn_follows_from_the_kind(tmp_path: Path) -> None:
    reader = drawn_of(folder(tmp_path / "m", "bf16", True))
    p = "model.language_model."
    limits = {"norm": (-0.1, 0.1), "layers.0.linear_attn.norm": (0.9, 1.1)}
    limits |= {"layers.3.self_attn.q_norm": (-0.1, 0.1)}
    for module, (low, high) in limits.items():
        values = reader.read(f"{p}{module}.weight").astype(np.float32)
        assert low - 0.01 <= values.min() < values.max() <= high + 0.01
    decay, bias = (reader.read(f"{p}layers.0.linear_attn.{n}") for n in ("A_log", "dt_bias"))
    assert decay.min() >= -3 and decay.max() <= 1 and bias.min() >= -5 and bias.max() <= 0
    stds = {"embed_tokens": 1.0, "layers.0.mlp.gate": 0.2, "layers.0.mlp.shared_expert_gate": 0.09}
    for module, std in stds.items():
        values = reader.read(f"{p}{module}.weight").astype(np.float32)
        assert np.std(values) == pytest.approx(std, rel=0.2)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_an_engine_of_drawn_weights_runs_long(tmp_path: Path, moe: bool) -> None:
    path = folder(tmp_path / "drawn", "modelopt_mixed", moe)
    options = Options("cpu", decode=(1,), prefill=(64,), max_context=512, max_seqs=1)
    build(path, tmp_path / "engine", options, lambda text: None)
    manifest = open_folder(tmp_path / "engine", "cpu").manifest
    assert not build(path, tmp_path / "engine", options, lambda text: None).built
    (path / "synthetic.json").write_text('{"seed": 2}')
    assert build(path, tmp_path / "engine2", options, lambda text: None).manifest != manifest
    engine = Engine.open(tmp_path / "engine")
    params = SamplingParams(temperature=1.0, max_tokens=300, ignore_eos=True, seed=0, logprobs=0)
    engine.submit(Request(tuple(range(100)), params))
    events = []
    while not engine.idle:
        events += engine.step()
    engine.close()
    assert not any(e.message for e in events)
    logprobs = [e.logprob for e in events if e.logprob is not None]
    assert len(logprobs) == 300 and -9 < np.mean(logprobs) < -3  # of 512 ids: -6.2 if even


@pytest.mark.parametrize("model", CONFIGS)
def test_the_benchmarks_configs_are_the_published_ones(model: str) -> None:
    drawn, published = open_model(folder_of(model)), describe(*CONFIGS[model])
    # these configs have no vision_config
    text = {n: t for n, t in published.tensors.items() if not n.startswith("model.visual.")}
    assert len(published.tensors) - len(text) == 333 and drawn.tensors == text
    assert drawn.config == replace(published.config, vision=None)
    assert dict(drawn.table.modules) == dict(published.table.modules)
    assert drawn.table.kv_fp8 == published.table.kv_fp8 == (model != "27b:nvfp4-a4")
    assert drawn.checkpoint is not None
    norm = drawn.checkpoint.read("model.language_model.norm.weight")
    assert norm.dtype == DType.BF16.numpy and np.abs(norm.astype(np.float32)).max() <= 0.101


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_draft_head_is_drawn_as_declared(tmp_path: Path, format: str, moe: bool) -> None:
    """Plain where modelopt excludes it; what is written opens as the same."""
    drawn = folder(tmp_path / "drawn", format, moe, head=True)
    write_drawn(drawn_of(drawn), tmp_path / "written", 3)
    plain = format in ("bf16", "modelopt_mixed")
    wanted = "plain" if plain else "int4_g32" if format in INT4 else format.removeprefix("ct_")
    for model in (open_model(drawn), open_model(tmp_path / "written")):
        schemes = {s.value for s in model.table.drafts.values()}
        assert model.has_drafts and schemes == {wanted}
        if plain:
            assert len([n for n in model.tensors if n.startswith("mtp.")]) == (19 if moe else 15)
            assert model.checkpoint is not None
            fc = model.checkpoint.read("mtp.fc.weight").astype(np.float32)
            assert np.std(fc) * np.sqrt(fc.shape[1]) == pytest.approx(1, rel=0.03)
    config = json.loads((drawn / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 0
    (drawn / "config.json").write_text(json.dumps(config))
    assert not any(n.startswith("mtp.") for n in drawn_of(drawn).tensors)


@pytest.mark.parametrize("seed", [None, "one"])
def test_a_seed_that_is_no_number(tmp_path: Path, seed: object) -> None:
    with pytest.raises(CheckpointError, match="seed is"):
        open_model(folder(tmp_path / "m", "bf16", False, seed))


def test_an_unknown_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        drawn_of(folder(tmp_path / "m", "bf16", False)).read("nothing")


@pytest.mark.parametrize("size", ["27b", "35b-a3b"])
def test_a_whole_int4_layout_has_no_plain_projection_but_the_small_ones(size: str) -> None:
    found = open_model(folder_of(f"{size}:int4-all")).table.modules
    plain = {m.rpartition(".")[2] for m, scheme in found.items() if scheme is Scheme.PLAIN}
    assert plain == {"in_proj_a", "in_proj_b"}
    assert set(found.values()) == {Scheme.PLAIN, Scheme.INT4_G128}


@pytest.mark.parametrize("format", ["gptq", "ct_int4"])
def test_int4_weights_have_gain_one(tmp_path: Path, format: str) -> None:
    model = open_model(folder(tmp_path / "m", format, False))
    module = "layers.0.mlp.down_proj"
    found = projection(model, module, model.table[module])
    assert model.checkpoint is not None
    parts = [r.evaluate(model.checkpoint) for r in (found.weight, *found.scales.values())]
    w = int4.FORMAT.decode({"w": parts[0], "w_scale": parts[1]}) * parts[2][:, None]
    assert np.sqrt((w**2).mean()) == pytest.approx(256**-0.5, rel=0.03)
    # A mean of half a code's step, 0.11 of the deviation, would be all that deep layers compute.
    assert abs(w.mean()) < 0.03 * 256**-0.5
