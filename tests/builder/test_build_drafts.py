"""Engines with drafts: what is fused, stored once and left out."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build, rewrite_graph, verify_all
from spark_engine.builder.graph.graph_checks import launches_per_layer
from spark_engine.builder.graph.lower import facts_of, lower
from spark_engine.builder.plan.options import Options, resolve
from spark_engine.builder.report import BuildReport
from spark_engine.errors import OptionError
from spark_engine.models.drafter import with_drafter
from spark_engine.models.open_model import open_model
from tests.checkpoint_files import FORMATS
from tests.checkpoints import write_checkpoint
from tests.models.drafters import write_drafter

HEAD = {"mtp_num_hidden_layers": 1}
SMALL: dict[str, Any] = {"decode": (1,), "prefill": (128,), "max_seqs": 3, "max_context": 128}
QUANTISERS = {"fp8_quant", "fp8_block_quant", "nvfp4_quant"}


def run(checkpoint: Path, folder: Path, **wishes: Any) -> BuildReport:
    return build(checkpoint, folder, Options(**{**SMALL, **wishes}), lambda text: None)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", FORMATS)
def test_fusions_of_every_family(tmp_path: Path, format: str, moe: bool) -> None:
    """Three linear layers and a full one; the head has one more, for each draft once."""
    model = open_model(write_checkpoint(tmp_path / "model", HEAD, format, moe=moe).path)
    rounds = ((1, 1), (1, 2))
    plan = resolve(Options(**SMALL, drafts=2, verify=rounds), facts_of(model))
    assert plan.buckets.families(2) == ("decode", "prefill", "verify_k1", "verify_k2")
    graphs = {family: lower(model, plan, family) for family in plan.buckets.families(2)}
    verify_all(graphs, plan, "lowered")
    for family, graph in graphs.items():
        drafts = int(family[-1]) if family.startswith("verify") else 0
        done = rewrite_graph(model, plan, graph)
        verify_all({family: graph}, plan, "rewritten")
        counts, prefill = done.counts, family == "prefill"
        alone = [n.attrs for n in graph.graph.nodes if n.op in QUANTISERS]
        apart = format == "ct_fp8_channel" and not prefill  # heads do not know a token's scale
        assert done.refusals == () and alone == [{"by_token": 1}] * 4 * apart
        assert counts["gdn_decode"] == 3 * (not prefill)
        assert counts["gdn_prefill"] == 3 * prefill
        assert counts["attention_decode"] == (not prefill) * (1 + drafts)
        # k and v of the fill; q, k and v, and a dense MLP's gate and up, of each draft.
        assert counts["merge_projections"] == 12 + 2 * drafts
        assert counts["shared_expert"] == moe * (4 + drafts)
        assert counts["moe_norm"] == moe * (4 + drafts)  # the final norm is no longer behind rows
        layers = launches_per_layer(graph.graph)
        tiles = [n.attrs["tile"] for n in graph.graph.nodes if n.op == "attention_decode"]
        assert tiles == ([] if prefill else [1 + drafts] + [1] * drafts)
        if not prefill:
            assert layers == launches_per_layer(graphs["decode"].graph)
        drafted = launches_per_layer(graph.graph, "draft")
        # norm, qkv, attention, o, norm, router and experts with the norm, or three and the norm;
        # head, token, and the next draft's input and fc.
        per = 9 if moe else 11
        assert drafted == {i: per + 2 * (i < drafts - 1) for i in range(drafts)}


def test_heads_of_other_formats_are_fused_too(tmp_path: Path) -> None:
    """Every quantiser goes but that of the head's own input."""
    for head, dtype, alone in (
        ("fp8", "checkpoint", "fp8_quant"),
        ("fp8", "nvfp4", "fp8_quant"),  # what is quantised stays as it is
        ("", "fp8", "fp8_block_quant"),
    ):
        folder = tmp_path / f"model{head}"
        model = open_model(write_checkpoint(folder, HEAD, head=head).path)
        wishes = {**SMALL, "verify": ((1, 2),), "draft_dtype": dtype}
        plan = resolve(Options(**wishes, drafts=2), facts_of(model))
        graph = lower(model, plan, "verify_k2")
        rewrite_graph(model, plan, graph)
        verify_all({"verify_k2": graph}, plan, "rewritten")
        left = [n for n in graph.graph.nodes if n.op in QUANTISERS]
        assert {n.op for n in left} == {alone}
        assert [n.inputs[0].name for n in left] == ["mtp.input", "draft.0.mtp.input"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts") / "model"
    return write_checkpoint(path, HEAD, "modelopt_mixed", generation={"eos_token_id": [9]}).path


def test_a_manifest_of_an_engine_with_drafts(tmp_path: Path, checkpoint: Path) -> None:
    made = run(checkpoint, tmp_path / "drafting", verify=((1, 1), (3, 3), (1, 3)))
    manifest, plain = made.manifest, run(checkpoint, tmp_path / "plain", drafts=0).manifest
    assert (manifest.limits.drafts, plain.limits.drafts) == (3, 0)
    assert (manifest.limits.gdn_ring, plain.limits.gdn_ring) == (8, 0)
    files = [b.file for b in manifest.buckets if b.tile in (2, 4)]
    assert files == ["verify_b1_k1.engine", "verify_b1_k3.engine", "verify_b3_k3.engine"]
    assert {b.file: b.tokens for b in manifest.buckets}["verify_b3_k3.engine"] == 12
    states = {s.spec.name: s.spec.dims for s in manifest.states}
    assert states["drafts"] == (4, 3) and states["positions"] == (4,)
    assert states["mtp.k_pages"] == states["layers.3.k_pages"]
    rings = [dims for name, dims in states.items() if name.endswith(".gdn_ring")]
    assert {dims[1] for dims in rings} == {8 + 2 * 3 + 1} and len(rings) == 3
    modules = {q.module: (q.format, q.tensors) for q in manifest.quantisation}
    assert modules["mtp.fc"] == ("bf16", 1) and "mtp.fc" not in {
        q.module for q in plain.quantisation
    }
    assert plain.ignored["mtp"] > 10 and "mtp" not in manifest.ignored
    (taken, *_) = [note for note in made.notes if note.startswith("drafts take")]
    assert "of weights" in taken


def test_a_longer_round_costs_more(tmp_path: Path, checkpoint: Path) -> None:
    rounds = tuple((rows, k) for rows in (1, 3) for k in (1, 2, 3))
    manifest = run(checkpoint, tmp_path / "engine", verify=rounds).manifest
    cost = {b.file: b.cost_us for b in manifest.buckets}
    for rows in (1, 3):
        names = [f"decode_b{rows}", *(f"verify_b{rows}_k{k}" for k in (1, 2, 3))]
        found = [cost[f"{name}.engine"] for name in names]
        assert 0 < found[0] < found[1] < found[2] < found[3]


def test_the_head_is_stored_as_asked_and_once(tmp_path: Path, checkpoint: Path) -> None:
    from spark_engine.engine_file import open_folder

    sizes = {}
    for dtype in ("checkpoint", "fp8", "nvfp4"):
        run(checkpoint, tmp_path / dtype, draft_dtype=dtype, verify=((1, 1), (1, 3)))
        folder = open_folder(tmp_path / dtype, "cpu")
        head = {n: w for n, w in folder.weights().items() if n.startswith("mtp.")}
        sizes[dtype] = sum(w.nbytes for w in head.values())
        matrices = Counter(n.split("proj")[0] for n in head if n.endswith("down_proj.weight"))
        assert set(matrices.values()) == {1}
        formats = {q.module: q.format for q in folder.manifest.quantisation}
        stored = {"checkpoint": "bf16", "fp8": "fp8_block", "nvfp4": "nvfp4"}[dtype]
        assert formats["mtp.layers.0.mlp.up_proj"] == stored
    assert sizes["nvfp4"] < 0.4 * sizes["checkpoint"]
    assert 0.45 < sizes["fp8"] / sizes["checkpoint"] < 0.6


def test_a_shortlist_is_rows_of_the_head(tmp_path: Path, checkpoint: Path) -> None:
    from spark_engine.engine_file import open_folder

    run(checkpoint, tmp_path / "engine", draft_vocab=7)
    weights = open_folder(tmp_path / "engine", "cpu").weights()
    assert weights["mtp.shortlist"].tolist() == [*range(7), 9]
    (rows,) = [w for n, w in weights.items() if n == "mtp.head.weight"]
    ids = weights["mtp.shortlist"]
    assert np.array_equal(rows, np.asarray(weights["lm_head.weight"])[ids])


def test_drafts_of_a_checkpoint_without_a_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model").path
    with pytest.raises(OptionError, match=r"--drafts 2: .*mtp.*--drafts 0"):
        run(path, tmp_path / "engine", drafts=2)
    assert not (tmp_path / "engine").exists()
    made = run(path, tmp_path / "engine")
    assert made.manifest.limits.drafts == 0
    assert any("built without drafts" in note for note in made.notes)
    assert not any("built without drafts" in n for n in run(path, tmp_path / "e", drafts=0).notes)


@pytest.mark.parametrize("dtype", ["checkpoint", "nvfp4", "fp8"])
def test_fusions_of_a_block_drafter(tmp_path: Path, dtype: str) -> None:
    """Of each of two layers k and v of the fill; q, k and v, and the MLP's gate and up, of a block.
    A quantiser is alone behind the block's ops, which do not quantise."""
    written = write_checkpoint(tmp_path / "model")
    plain = open_model(written.path)
    sizes = {"head_dim": 64, "intermediate_size": 128}  # whole blocks of FP8 scales
    drafter = write_drafter(tmp_path / "drafter", written.config, **sizes)
    model = with_drafter(plain, drafter)
    wishes = {**SMALL, "drafts": 2, "verify": ((1, 2),), "draft_dtype": dtype}
    plan = resolve(Options(**wishes), facts_of(model))
    alone = resolve(Options(**SMALL), facts_of(plain))
    assert facts_of(model).weight_bytes > facts_of(plain).weight_bytes
    for family in ("decode", "prefill", "verify_k2"):
        graph = lower(model, plan, family)
        done = rewrite_graph(model, plan, graph)
        verify_all({family: graph}, plan, "rewritten")
        bare = "decode" if family == "verify_k2" else family
        network = rewrite_graph(plain, alone, lower(plain, alone, bare)).counts
        added = done.counts["merge_projections"] - network["merge_projections"]
        assert done.refusals == () and added == (6 if family == "verify_k2" else 2)
        left = [n.name for n in graph.graph.nodes if n.op in QUANTISERS]
        assert bool(left) == (dtype == "fp8") and all("dflash." in name for name in left)
