"""Draft heads as files have them, as builds want them, and why a checkpoint has none."""

import json
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spark_engine.errors import OptionError
from spark_engine.interface import Limits
from spark_engine.models.build_network import build_network
from spark_engine.models.checkpoint.files import open_checkpoint
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.open_model import describe, open_model
from spark_engine.models.weights.draft_weights import head_rows
from spark_engine.models.weights.stored_model import Model
from tests.checkpoint_files import INT4
from tests.checkpoints import text_config, write_checkpoint
from tests.models import nvidia_configs
from tests.models.draft_run import DraftRun
from tests.models.edited_checkpoint import edited
from tests.models.reference_engine import F32, ReferenceEngine
from tests.models.test_drafts import CLEAR, SMALL, TOLERANCE
from tests.oracles import draft_truth

LIMITS = Limits(2, 64, 4, 160, drafts=2, gdn_ring=4, bias_slots=4, top_logprobs=2)
MARGIN = 3e-7  # of a rounding decision's border, as in test_parity_oracle.py
WIDE = {**SMALL, "hidden_size": 128, "moe_intermediate_size": 128}
ROUNDED = ("fp8", "fp8_block", "ct_fp8_channel")


def _agrees(truth: Path, model: Model, options: DraftOptions | None = None) -> ReferenceEngine:
    """The engine after rounds in which it drafted what the checkpoint `truth` drafts.

    Prompts are taken that have one right answer: where codes are rounded, none near a border.
    """
    options = options or DraftOptions()
    engine = ReferenceEngine(model, LIMITS, options)
    seen = 0
    for prompt in islice(_prompts(), 40):
        run = DraftRun(engine)
        run.prefill(prompt, (2,))
        made = run.round(2)
        want = draft_truth.draft(truth, run.tokens, 2, options.shortlist)
        if want.margin > MARGIN and want.gap > CLEAR:
            assert made.drafts == want.tokens
            assert draft_truth.near(made.draft_logits, want.logits, TOLERANCE)
            seen += 1
        if seen == 2:
            return engine
    raise AssertionError("no prompt has one right answer")


def _prompts():  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(3)
    while True:
        yield [int(i) for i in rng.integers(0, 160, 4)]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("head", ["bf16", "fp16", "f32", "nvfp4", "ct_nvfp4", *ROUNDED, *INT4])
def test_a_head_of_any_format_is_read_as_found(tmp_path: Path, head: str, moe: bool) -> None:
    """Whatever the rest is, and whatever the config says: here, that everything is W4A16."""
    split = "fused" if head in ("bf16", "fp16", "f32") else "split"
    base = "nvfp4"
    write_checkpoint(
        tmp_path, WIDE, base, moe=moe, head=head, head_experts=split, head_prefix="model."
    )
    model = open_model(tmp_path)
    assert model.has_drafts and model.layout.draft_prefix == "model."
    names = {
        "ct_nvfp4": "nvfp4",
        "ct_fp8_channel": "fp8_channel",
        **dict.fromkeys(INT4, "int4_g32"),
    }
    wanted = names.get(head, "plain" if split == "fused" else head)
    assert {s.value for s in model.table.drafts.values()} == {wanted}
    assert "mtp.fc" in model.table.drafts and "mtp.fc" not in model.table.modules
    _agrees(tmp_path, model)


@pytest.mark.parametrize("experts", ["fused", "split"])
def test_plain_experts_stacked_or_one_by_one(tmp_path: Path, experts: str) -> None:
    """Whichever the network's own are."""
    other = {"fused": "split", "split": "fused"}[experts]
    write_checkpoint(tmp_path, SMALL, "f32", moe=True, experts=other, head_experts=experts)
    model = open_model(tmp_path)
    assert model.layout.fused("mtp.layers.0.mlp.experts") is (experts == "fused")
    assert model.layout.fused("layers.0.mlp.experts") is (experts == "split")
    _agrees(tmp_path, model)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("dtype", ["fp8", "nvfp4"])
def test_a_plain_head_quantised_at_build(tmp_path: Path, dtype: str, moe: bool) -> None:
    """It drafts what a checkpoint drafts that stores the same codes and scales."""
    write_checkpoint(tmp_path / "plain", WIDE, "f32", moe=moe, seed=2)
    model = open_model(tmp_path / "plain")
    engine = ReferenceEngine(model, LIMITS, DraftOptions(dtype))
    _store_as(tmp_path / "plain", tmp_path / "coded", engine.weights, moe)
    coded = open_model(tmp_path / "coded")
    scheme = {"fp8": Scheme.FP8_BLOCK, "nvfp4": Scheme.NVFP4}[dtype]
    assert coded.has_drafts and {*coded.table.drafts.values()} == {scheme}
    engine = _agrees(tmp_path / "coded", model, DraftOptions(dtype))
    found = _agrees(tmp_path / "coded", coded)
    assert found.weights.keys() == engine.weights.keys()
    for name, weight in engine.weights.items():
        assert np.array_equal(weight, found.weights[name]), name


def _store_as(plain: Path, path: Path, weights: Mapping[str, NDArray[Any]], moe: bool) -> None:
    """The checkpoint with the head's projections as `weights` has them, in modelopt's names."""
    shutil.copytree(plain, path)
    with edited(path) as tensors:
        for module in [n.removesuffix(".weight") for n in tensors if n.startswith("mtp.")]:
            if f"{module}.weight_scale" in weights:
                stored = (weights[f"{module}.{s}"] for s in _suffixes(weights, module))
                tensors |= _coded(module, *stored)
        if moe:
            tensors |= _experts(weights)
            for name in ("gate_up_proj", "down_proj"):
                del tensors[f"mtp.layers.0.mlp.experts.{name}"]


def _suffixes(weights: Mapping[str, NDArray[Any]], module: str) -> list[str]:
    return [s for s in ("weight", "weight_scale", "w_scale2") if f"{module}.{s}" in weights]


def _coded(module: str, codes: Any, scale: Any, whole: Any = None) -> dict[str, NDArray[Any]]:
    if whole is None:
        return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}
    assert (whole == whole[0]).all()
    rows = {"weight": codes, "weight_scale": scale, "weight_scale_2": whole[0]}
    return {f"{module}.{suffix}": np.asarray(value) for suffix, value in rows.items()}


def _experts(weights: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    p = "mtp.layers.0.mlp.experts"
    out: dict[str, NDArray[Any]] = {}
    for e in range(8):
        w13, w2 = (
            [
                weights[f"{p}.{n}{s}"][e]
                for s in ("", "_scale", "_scale2")
                if f"{p}.{n}{s}" in weights
            ]
            for n in ("w13", "w2")
        )
        halves = [np.split(part, 2) for part in w13]
        out |= _coded(f"{p}.{e}.gate_proj", *(half[0] for half in halves))
        out |= _coded(f"{p}.{e}.up_proj", *(half[1] for half in halves))
        out |= _coded(f"{p}.{e}.down_proj", *w2)
    return out


def test_what_is_quantised_already_stays(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, WIDE, "f32", head="nvfp4")
    model = open_model(tmp_path)
    assert _built(model, DraftOptions("fp8")).weights == _built(model, DraftOptions()).weights


def _built(model: Model, options: DraftOptions, limits: Limits = LIMITS) -> Any:
    return build_network(model, "verify_k2", limits, F32, draft=options)


@pytest.mark.parametrize("format", ["f32", "bf16", "nvfp4", "tied"])
def test_a_shortlist_drafts_from_its_rows(tmp_path: Path, format: str) -> None:
    """In the head's own format; ids that are not in it are never drafted."""
    config = {**SMALL, "tie_word_embeddings": format == "tied"}
    write_checkpoint(tmp_path, config, "f32" if format == "tied" else format)
    options = DraftOptions(shortlist=(0, 3, 17, 64, 65, 101, 159))
    engine = _agrees(tmp_path, open_model(tmp_path), options)
    assert engine.weights["mtp.shortlist"].dtype == np.int32
    assert engine.weights["mtp.shortlist"].tolist() == list(options.shortlist or ())
    whole = "embed_tokens" if format == "tied" else "lm_head"
    for suffix in _suffixes(engine.weights, "mtp.head"):
        rows = engine.weights[f"{whole}.{suffix}"][list(options.shortlist or ())]
        assert np.array_equal(engine.weights[f"mtp.head.{suffix}"], rows)


def test_rows_of_an_fp8_head() -> None:
    """Row by row; blocks have no scale of a row."""
    config = text_config(False, {"mtp_num_hidden_layers": 1})
    model = describe(config, {"quantization": {"quant_algo": "FP8", "exclude_modules": ["mtp*"]}})
    rows = head_rows(model, "lm_head", (1, 5, 9))
    assert rows.weight.shape == (3, 128) and rows.scales["weight_scale"].shape == (3,)
    assert rows.input_scale is not None
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    blocks = describe(config | {"quantization_config": block | {"modules_to_not_convert": ["mtp"]}})
    with pytest.raises(OptionError, match="scales cover 128 rows"):
        head_rows(blocks, "lm_head", (1, 5, 9))


@pytest.mark.parametrize("name", nvidia_configs.MODELS)
def test_published_heads(name: str) -> None:
    """15 and 19 tensors, unquantised in an NVFP4 checkpoint; stacked experts."""
    model = describe(*nvidia_configs.pair(name))
    assert model.has_drafts and {*model.table.drafts.values()} == {Scheme.PLAIN}
    head = [n for n in model.tensors if n.startswith("mtp.")]
    assert len(head) == {"27B": 15, "35B-A3B": 19}[name]
    limits = Limits(4, 256, 16, model.config.vocab, drafts=2, gdn_ring=8)
    network = _built(model, DraftOptions(), limits)
    held = sum(w.spec.nbytes for n, w in network.weights.items() if n.startswith("mtp."))
    stored = sum(model.tensors[n].nbytes for n in head)
    assert stored < held < 1.01 * stored  # f32 norms
    for dtype, part in (("fp8", 0.5), ("nvfp4", 0.5625 / 2)):  # of bf16
        small = _built(model, DraftOptions(dtype), limits)
        held = sum(w.spec.nbytes for n, w in small.weights.items() if n.startswith("mtp."))
        assert part * stored < held < 1.03 * part * stored


def _note(path: Path, **changes: object) -> str:
    """Why the checkpoint has no head; it opens, and graphs without drafts are built."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    model = open_model(path)
    assert not model.has_drafts and not model.table.drafts
    build_network(model, "decode", Limits(2, 64, 4, 160), F32)
    with pytest.raises(OptionError) as caught:
        _built(model, DraftOptions())
    assert str(caught.value) == f"2 drafts are asked for, but {model.draft_note}"
    return model.draft_note


def test_heads_that_are_not_computed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, "f32")
    assert "mtp_num_hidden_layers is 2" in _note(tmp_path, mtp_num_hidden_layers=2)
    assert "mtp_num_hidden_layers is 0" in _note(tmp_path, mtp_num_hidden_layers=0)
    note = _note(tmp_path, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=True)
    assert "mtp_use_dedicated_embeddings is true" in note


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_head_that_config_json_does_not_name(tmp_path: Path, prefix: str, moe: bool) -> None:
    """Its tensors say that it is there."""
    write_checkpoint(tmp_path, SMALL, "f32", moe=moe, head_prefix=prefix)
    named = open_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["mtp_num_hidden_layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = open_model(tmp_path)
    assert model.has_drafts and model.config == named.config and model.expected == named.expected
    assert not describe(config).has_drafts  # without files there are no such tensors
    stripped = {n: None for n in open_checkpoint(tmp_path).tensors if "mtp." in n}
    _rewrite(tmp_path, stripped)
    note = _note(tmp_path)
    assert note == (
        "neither config.json (mtp_num_hidden_layers) nor the files (mtp.*) have a draft head"
    )


def _rewrite(path: Path, changes: Mapping[str, NDArray[Any] | None]) -> None:
    with edited(path) as tensors:
        for name, value in changes.items():
            tensors.pop(name, None)
            tensors |= {} if value is None else {name: value}


def test_heads_that_are_not_whole(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, "f32")
    norm = np.zeros(64, np.float32)
    _rewrite(tmp_path, {"mtp.norm.weight": None})
    assert "mtp.norm.weight is missing" in _note(tmp_path)
    _rewrite(tmp_path, {"mtp.norm.weight": norm[:8]})
    assert "mtp.norm.weight in model.safetensors is f32 [8]" in _note(tmp_path)
    _rewrite(tmp_path, {"mtp.norm.weight": norm, "mtp.embed_tokens.weight": norm})
    assert "mtp.embed_tokens.weight is not a tensor of a draft head" in _note(tmp_path)
    _rewrite(tmp_path, {"mtp.embed_tokens.weight": None})
    assert open_model(tmp_path).has_drafts
    stripped = {n: None for n in open_checkpoint(tmp_path).tensors if n.startswith("mtp.")}
    _rewrite(tmp_path, stripped)
    assert "hold no tensor of the draft head" in _note(tmp_path)


def test_experts_of_a_head_that_are_not_alike(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, "f32", moe=True, head="nvfp4", head_experts="split")
    name = "mtp.layers.0.mlp.experts.3.up_proj"
    plain: dict[str, NDArray[Any] | None] = {f"{name}.weight": np.zeros((64, 64), np.float32)}
    lost = ("weight_scale", "weight_scale_2", "input_scale")
    _rewrite(tmp_path, plain | {f"{name}.{suffix}": None for suffix in lost})
    assert f"{name} is plain" in _note(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DraftOptions("int4"), "draft dtype 'int4'"),
        (DraftOptions(shortlist=()), "ids from 0 to 159"),
        (DraftOptions(shortlist=(1, 160)), "ids from 0 to 159"),
        (DraftOptions(shortlist=(-1, 3)), "ids from 0 to 159"),
        (DraftOptions(shortlist=(3, 3)), "must ascend"),
        (DraftOptions(shortlist=(3, 1)), "must ascend"),
    ],
)
def test_options_that_cannot_be_honoured(
    tmp_path: Path, options: DraftOptions, message: str
) -> None:
    write_checkpoint(tmp_path, SMALL, "f32")
    with pytest.raises(OptionError, match=message):
        _built(open_model(tmp_path), options)


def test_drafts_need_a_ring(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, "f32")
    with pytest.raises(OptionError, match="replay ring"):
        _built(open_model(tmp_path), DraftOptions(), Limits(2, 64, 4, 160, drafts=2))
