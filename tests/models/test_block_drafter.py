"""Graphs with a block drafter against the independent float64 computation, round by round.

Every launch runs by the references of its ops, as in test_drafts.py.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spark_engine.builder.build import planned
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.graph_checks import Subject, verify
from spark_engine.builder.plan.options import Options
from spark_engine.errors import CheckpointError
from spark_engine.interface import Limits, Precision
from spark_engine.models.build_network import build_network
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.drafter import with_drafter
from spark_engine.models.open_model import open_model
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType
from tests.checkpoints import text_config, write_checkpoint
from tests.models.draft_run import DraftRun, Round
from tests.models.drafters import write_drafter
from tests.models.reference_engine import ReferenceEngine
from tests.oracles import draft_truth
from tests.oracles.block_truth import Drafter
from tests.repository import ROOT

SMALL = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "hidden_size": 64,
    "vocab_size": 160,
    "intermediate_size": 96,
}
TARGET = text_config(False, SMALL)
TOLERANCE = 2e-5  # of the range of what is compared
CLEAR = 1e-4  # the least distance of two scores that decide on a draft
WINDOW = 40  # shorter than most contexts here


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("block")
    write_checkpoint(path / "checkpoint", SMALL, "f32", seed=5)
    write_drafter(path / "drafter", TARGET, sliding_window=WINDOW)
    return path / "checkpoint", path / "drafter"


def _run(folders: tuple[Path, Path], drafts: int, options: DraftOptions | None = None) -> DraftRun:
    limits = Limits(2, 192, 8, 160, drafts=drafts, gdn_ring=4, bias_slots=4, top_logprobs=2)
    model = with_drafter(open_model(folders[0]), folders[1])
    return DraftRun(ReferenceEngine(model, limits, options or DraftOptions()))


def _prompt(length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(length).integers(0, 160, length)]


def _check(folders: tuple[Path, Path], run: DraftRun, made: Round, **variant: object) -> None:
    """What a round drafted, and the context's keys and values, are what the definition says."""
    truth = Drafter(*folders).draft(run.tokens, max(len(made.drafts), 1), **variant)  # type: ignore[arg-type]
    assert draft_truth.near(made.logits, truth.target[-made.accepted :], TOLERANCE)
    for i, (keys, values) in enumerate(zip(truth.keys, truth.values, strict=True)):
        for name, held in (("k_pages", keys), ("v_pages", values)):
            found = run.pages_of(f"dflash.layers.{i}.{name}")[: len(held)]
            assert draft_truth.near(found, held, TOLERANCE)
    if made.drafts:
        assert truth.gap > CLEAR, "two ids draw level; take another seed"
        assert draft_truth.near(made.draft_logits, truth.logits, TOLERANCE)
        assert made.drafts == truth.tokens


@pytest.mark.parametrize("drafts", [1, 4, 7])
@pytest.mark.parametrize(("length", "ends"), [(1, ()), (30, ()), (65, (13,)), (110, (37, 101))])
def test_rounds_are_the_definition(
    folders: tuple[Path, Path], length: int, ends: tuple[int, ...], drafts: int
) -> None:
    """Rounds without drafts, with the drafter's own, and with some that hold."""
    run = _run(folders, drafts)
    run.prefill(_prompt(length), ends)
    for right in (None, None, drafts, 0, None):
        given = None
        if right is not None:
            given = draft_truth.continuation(folders[0], run.tokens, drafts)
            given[right:] = [(t + 1) % 160 for t in given[right:]]
        made = run.round(drafts, given)
        assert right is None or made.accepted == right + 1
        _check(folders, run, made)


def test_rounds_of_any_number_keep_the_context(folders: tuple[Path, Path]) -> None:
    """Rounds without drafts between others, and fewer drafts than the state holds."""
    run = _run(folders, 7)
    run.prefill(_prompt(70), (41,))
    for drafts in (2, 0, 0, 7, 1, 0, 5):
        _check(folders, run, run.round(drafts))


def test_a_head_and_a_drafter_take_turns(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Rounds of up to three drafts make the head's, those of more, or of the most, the drafter's;
    both read every token of the sequence."""
    config = SMALL | {"mtp_num_hidden_layers": 1}
    path = write_checkpoint(tmp_path / "checkpoint", config, "f32", seed=5).path
    for most, rounds in ((7, (2, 7, 0, 3, 3, 5, 1, 7, 2)), (3, (2, 3, 0, 1, 3))):
        run = _run((path, folders[1]), most)
        run.prefill(_prompt(70), (41,))
        for drafts in rounds:
            given = draft_truth.continuation(path, run.tokens, drafts)
            given[drafts - 1 :] = [(t + 1) % 160 for t in given[drafts - 1 :]]
            made = run.round(drafts, given if run.held >= drafts > 1 else None)
            truth = draft_truth.draft(path, run.tokens, max(drafts, 1))
            for name, held in (("mtp.k_pages", truth.keys), ("mtp.v_pages", truth.values)):
                assert draft_truth.near(run.pages_of(name)[: len(held)], held, TOLERANCE)
            if drafts > 3 or drafts in (0, most):
                _check((path, folders[1]), run, made)
                continue
            _check((path, folders[1]), run, replace(made, drafts=[]))
            assert truth.gap > CLEAR and made.drafts == truth.tokens
            assert draft_truth.near(made.draft_logits, truth.logits, TOLERANCE)


def test_the_known_mistakes_are_seen(folders: tuple[Path, Path]) -> None:
    """Taps of the layer behind, another window, no convolutions, a context that is not filled; and
    the selector is not the largest logit."""
    run = _run(folders, 7)
    run.prefill(_prompt(70), (41,))
    made = run.round(7)
    _check(folders, run, made)
    for variant in ({"off": 1}, {"window": WINDOW - 1}, {"convolved": False}, {"empty": 35}):
        with pytest.raises(AssertionError):
            _check(folders, run, made, **variant)
    truth = Drafter(*folders).draft(run.tokens, 7)
    assert truth.plain != truth.tokens
    far = Drafter(*folders).draft(run.tokens, 7, empty=len(run.tokens) - WINDOW)
    assert far.tokens == truth.tokens, "no token beyond the window is seen"


def test_drafts_of_a_shortlist(folders: tuple[Path, Path]) -> None:
    listed = tuple(range(3, 160, 4))
    run = _run(folders, 4, DraftOptions(shortlist=listed))
    run.prefill(_prompt(50))
    for _ in range(2):
        made = run.round(4)
        assert set(made.drafts) <= {*listed}
        _check(folders, run, made, shortlist=listed)


REFUSED = {
    "another width": ({"hidden_size": 128}, "its hidden_size is 128, the model has 64"),
    "another vocabulary": ({"vocab_size": 512}, "its vocab_size is 512"),
    "another depth": ({"num_target_layers": 64}, "its num_target_layers is 64, the model has 4"),
    "a tap that is not there": ({"target_layer_ids": [1, 3]}, r"\[1, 3\]; they must ascend"),
    "taps in disorder": ({"target_layer_ids": [2, 1]}, "must ascend"),
    "the first version": ({"architectures": ["DFlashDraftModel"]}, "has no selector"),
    "causal": ({"is_causal": None}, "is_causal is None; supported: False"),
    "full attention": ({"layer_types": ["full_attention"]}, "full_attention; all must be"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type is 'yarn'"),
    "no rank": ({"selector_rank": None}, "selector_rank is None: the key is required"),
    "another target": ({"target_model": "Qwen/Qwen3.6-27B"}, "trained for Qwen/Qwen3.6-27B"),
    "no object": ({"rope_parameters": "yarn"}, "config.json is malformed"),
    "a mask outside": ({"mask_token_id": 160}, "mask_token_id is 160, which is no id"),
}


@pytest.mark.parametrize("label", REFUSED)
def test_a_drafter_of_another_model_is_refused(tmp_path: Path, label: str) -> None:
    overrides, words = REFUSED[label]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL, "f32").path
    config = json.loads((checkpoint / "config.json").read_text())
    named = config | {"_name_or_path": "Qwen/Qwen3.8-27B"}
    (checkpoint / "config.json").write_text(json.dumps(named))
    write_drafter(tmp_path / "right", TARGET, target_model="qwen/Qwen3.8-27B-base")
    with_drafter(open_model(checkpoint), tmp_path / "right")
    write_drafter(tmp_path / "drafter", TARGET)
    text = json.loads((tmp_path / "drafter" / "config.json").read_text())
    nested = text["dflash_config"]
    nested |= {k: overrides[k] for k in overrides if k in nested}
    text |= {k: v for k, v in overrides.items() if k not in nested}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(text))
    with pytest.raises(CheckpointError, match=words):
        with_drafter(open_model(checkpoint), tmp_path / "drafter")


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8"])
def test_projections_are_quantised_as_they_are_read(folders: tuple[Path, Path], dtype: str) -> None:
    """Convolutions, selector and norms stay; the drafts' logits are near those of plain weights."""
    plain, other = (_run(folders, 4, DraftOptions(d)) for d in ("checkpoint", dtype))
    made = []
    for run in (plain, other):
        run.prefill(_prompt(50))
        made.append(run.round(4).draft_logits)
    assert isinstance(other.engine, ReferenceEngine)
    scaled = {n for n in other.engine.weights if n.startswith("dflash.") and "scale" in n}
    modules = {n.rpartition(".")[0] for n in scaled} - {"dflash"}
    layers = [f"dflash.layers.{i}" for i in range(2)]
    inside = [f"self_attn.{n}_proj" for n in "qkvo"]
    inside += [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    assert modules == {"dflash.fc", *(f"{layer}.{name}" for layer in layers for name in inside)}
    assert not draft_truth.near(made[1], made[0], 1e-3)
    assert np.corrcoef(made[0].ravel(), made[1].ravel())[0, 1] > 0.8


def test_what_a_folder_must_hold(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    checkpoint, whole = folders
    options = Options("cpu", drafter=str(tmp_path), draft_dtype="checkpoint")
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors = load_file(whole / "model.safetensors")
    name = "layers.1.mlp_conv.base_kernel"
    kept = {n: a for n, a in tensors.items() if n != name}
    nan = tensors["fc.weight"].copy()
    nan[3, 5] = np.nan
    for changed, words in (
        (kept, f"{name} is missing"),
        (kept | {name: tensors[name][:1]}, r"base_kernel in \S+ is f32 \[1, 2, 64\]: exp"),
        (tensors | {"lm_head.weight": nan}, "lm_head.weight is no tensor of a drafter"),
        (tensors | {"fc.weight": nan}, "dflash.fc.weight.*3.*5"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"^--drafter {tmp_path}: .*{words}"):
            planned(checkpoint, options)
    for file, text in (("model.safetensors", "cut"), ("config.json", "{")):
        (tmp_path / file).write_text(text)
        with pytest.raises(CheckpointError, match=f"^--drafter {tmp_path}: {file}: "):
            planned(checkpoint, options)
    model, plan = planned(checkpoint, Options("cpu", drafter=str(whole)))
    assert model.has_drafts and plan.limits.drafts == 7


@pytest.mark.parametrize("dtype", ["checkpoint", "nvfp4"])
def test_the_published_drafter_is_lowered(dtype: str) -> None:
    """Its file has 81 tensors of 3,848,808,960 bytes."""
    folder = ROOT / "benchmarks" / "configs"
    model = with_drafter(open_model(folder / "qwen36-27b"), folder / "qwen38-27b-dflash2")
    own = [spec for name, spec in model.tensors.items() if name.startswith("dflash.")]
    assert (len(own), sum(spec.nbytes for spec in own)) == (81, 3_848_808_960)
    limits = Limits(4, 256, 16, model.config.vocab, drafts=7, gdn_ring=8)
    bf16 = Precision(DType.BF16, DType.F8E4M3, DType.F32)
    for family in ("prefill", "decode", "verify_k7"):
        network = build_network(model, family, limits, bf16, draft=DraftOptions(dtype))
        network.graph.toposort()
        graph = FamilyGraph(family, network.graph, dict(network.weights), network.states)
        verify(Subject.of(graph, limits, REGISTRY), "lowered")
    assert model.drafter is not None and model.drafter.taps == (5, 19, 33, 47, 61)
