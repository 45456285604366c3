"""Engines of several ranks for a GPU, built where none is, and what a build refuses to split."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.graph.edit import add_node, variable
from spark_engine.builder.graph.rewrite import RewriteContext, rewrite
from spark_engine.builder.native.launches import launches
from spark_engine.builder.plan.options import Options
from spark_engine.builder.rules.sum_norm import REDUCE_NORM
from spark_engine.engine_file import open_folder, read_manifest
from spark_engine.errors import EngineError, InternalError, OptionError
from spark_engine.kernel import Plan
from spark_engine.op import DOMAIN
from spark_engine.plugins.registry import REGISTRY
from spark_engine.runtime.executors.program import Program
from spark_engine.segments import Collective, Segment, Segments
from spark_engine.tensors import DType, TensorSpec
from spark_engine.weights_file import map_weights
from tests.checkpoints import write_checkpoint
from tests.repository import ROOT

TINY = ROOT / "models" / "tiny" / "checkpoint"
SIZES: dict[str, Any] = {"decode": (1, 4), "prefill": (128,), "max_seqs": 4, "max_context": 256}
MEETS = ("all_reduce", "sample", "gather_logits", "reduce_norm_quant")
HEADS = {
    "linear_num_value_heads": 32,  # so that the projection of each rank has 16 rows
    "linear_num_key_heads": 8,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}


def built(
    folder: Path,
    ranks: int,
    target: str,
    config: dict[str, Any] = HEADS,
    options: dict[str, Any] = SIZES,
    **more: Any,
) -> Path:
    if not (folder / "c").exists():
        write_checkpoint(folder / "c", config, **more)
    wishes = Options(target=target, tp=ranks, **options)
    build(folder / "c", folder / f"{target}.{ranks}", wishes, lambda text: None)
    return folder / f"{target}.{ranks}"


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_launches_know_rank_and_peers(tmp_path: Path, target: str) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    engine = open_folder(built(tmp_path, 2, target, format="nvfp4"), target)
    for bucket in engine.manifest.buckets:
        payload = engine.engine(bucket).payload
        body = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        for row in body["launches"]:
            row["args"] = [body["operands"][i] for i in row["args"]]
        found = [row for row in body["launches"] if row["resident"] and row["op"] in MEETS]
        # The last layer's sum meets last_rows before a norm, and stays apart.
        assert [row["op"] for row in found] == ["reduce_norm_quant"] * 3 + [*MEETS[:2]]
        assert found[-1]["node"] == "next_tokens"
        assert all(row["args"][-2:] == [["peers"], ["rank"]] and row["resident"] for row in found)
        others = [row for row in body["launches"] if row not in found]
        assert not any(["peers"] in row["args"] for row in others)
        assert bucket.symmetric_bytes == body["symmetric_bytes"] > 16384
    assert not engine.manifest.across_hosts
    most = max(b.symmetric_bytes for b in engine.manifest.buckets)
    alone = max(b.arena_bytes for b in engine.manifest.buckets)
    assert engine.manifest.memory.arena >= most + alone


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
@pytest.mark.parametrize("invariant", [False, True])
def test_ranks_of_several_hosts_call_a_library(
    tmp_path: Path, target: str, invariant: bool
) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    wishes = {**SIZES, "across_hosts": True, "invariant": invariant}
    path = built(tmp_path, 2, target, options=wishes, format="nvfp4")
    engine = open_folder(path, target)
    for bucket in engine.manifest.buckets:
        payload = engine.engine(bucket).payload
        program = Program.read(payload)
        calls = [k.symbol for k in program.kernels if k.cubin is None]
        assert set(calls) == {"all_reduce", "all_gather"}
        rows = launches(payload)
        nodes = [row for row in rows if row.source == "nccl"]
        assert [row.op for row in nodes] == ["all_reduce"] * 4 + ["gather_logits"]
        assert {row.kernel for row in nodes} == {"NCCL"} and not any(row.logs for row in nodes)
        for before, after in pairwise(program.launches):
            if program.kernels[before.kernel].cubin is None:
                assert not after.shape.pdl, "nothing begins early behind a library's call"
        assert any(r.shape.pdl for r in program.launches)
        laid = [row.symbol for row in rows if row.op == "gather_logits"]
        assert laid == (["all_gather"] if bucket.rows == 1 else ["all_gather", "side_by_side"])
        assert bucket.symmetric_bytes == 0
    assert engine.manifest.across_hosts
    assert not replace(engine.manifest, ranks=1).across_hosts
    assert not replace(engine.manifest, executor="ort").across_hosts


def test_hosts_are_for_ranks_on_gpus(tmp_path: Path) -> None:
    for target, ranks, words in (("cpu", 2, "cpu engines with --tp run"), ("sm_90a", 1, "--tp")):
        with pytest.raises(OptionError, match=f"--across-hosts is for GPUs .*{words}"):
            built(tmp_path, ranks, target, options={**SIZES, "across_hosts": True})


def test_what_reads_peers_is_not_built_for_several_hosts() -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native.program import BucketTactics, check_across
    from spark_engine.builder.native.tactics import TacticChoice

    def bucket(symmetric: int) -> BucketTactics:
        choice = TacticChoice(None, Plan((), symmetric=symmetric), 0.0, {})
        node: Any = SimpleNamespace(op="reads")
        return BucketTactics(None, None, ((node, choice),))  # type: ignore[arg-type]

    check_across([bucket(0)])
    with pytest.raises(InternalError, match="--across-hosts: reads read memory of other ranks"):
        check_across([bucket(0), bucket(96)])


def test_a_cpus_bucket_is_cut_where_ranks_meet(tmp_path: Path) -> None:
    engine = open_folder(built(tmp_path, 2, "cpu"), "cpu")
    assert engine.manifest.ranks == 2
    shares = engine.manifest.shares
    assert (shares["KV heads"], shares["attention heads"]) == ((1, 2), (2, 4))
    assert shares["ids of the vocabulary"] == (256, 512)
    for bucket in engine.manifest.buckets:
        file = engine.engine(bucket)
        steps = Segments.decode(file.payload).steps
        met = [step.op for step in steps if isinstance(step, Collective)]
        assert met == ["all_reduce"] * 4 + ["gather_logits", "gather_rows"]
        runs = [step for step in steps if isinstance(step, Segment)]
        assert len(runs) == 6 and b"weights.1." in runs[0].of_rank(1)
        assert not any(b"weights.0." in run.of_rank(1) for run in runs)
        assert {o for run in runs for o in run.outputs} >= {*file.header.aliases}
        for cut in (file.payload[:-1], file.payload + b"x", b"\x00" * 64):
            with pytest.raises(EngineError, match="rebuild the engine"):
                Segments.decode(cut)


def test_the_weights_of_ranks_are_parts_of_those_of_one(tmp_path: Path) -> None:
    whole = map_weights(built(tmp_path, 1, "cpu") / "weights.safetensors")
    path = built(tmp_path, 4, "cpu")
    assert read_manifest(path).weights_files == tuple(f"weights.{r}.safetensors" for r in range(4))
    ranks = [dict(map_weights(path / name)) for name in read_manifest(path).weights_files]
    firsts = [int(rank.pop("sampling.first_id")[0]) for rank in ranks]
    assert firsts == [0, 128, 256, 384]
    assert [rank.keys() for rank in ranks] == [whole.keys()] * 4
    by_columns = "layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(np.hstack([r[by_columns] for r in ranks]), whole[by_columns])
    for rows in ("lm_head.weight", "layers.0.linear_attn.A_log"):
        np.testing.assert_array_equal(np.concatenate([r[rows] for r in ranks]), whole[rows])
    for all_have in ("embed_tokens.weight", "norm.weight"):
        assert all((r[all_have] == whole[all_have]).all() for r in ranks)
    # q, k, v next to each other: 8 heads of 32 each, and 32 of values.
    name = "layers.0.linear_attn.conv1d.weight"
    ends = [(0, 256), (256, 512), (512, 1536)]
    for i, rank in enumerate(ranks):
        parts = [np.array_split(whole[name][a:b], 4)[i] for a, b in ends]
        np.testing.assert_array_equal(rank[name], np.concatenate(parts))


@pytest.mark.parametrize(
    ("ranks", "format", "config", "words"),
    [
        (3, "bf16", {}, "4 attention heads do not divide by 3; choose from 1, 2, 4:"),
        (9, "bf16", {}, "give 1 to 8 ranks"),
        (0, "bf16", {}, "give 1 to 8 ranks"),
        (4, "bf16", {"num_key_value_heads": 6, "num_attention_heads": 12}, "6 KV heads neither"),
        (2, "fp8_block", {}, r"would be cut into \d+ (rows|columns), and 128 are stored together"),
        (4, "nvfp4", {"intermediate_size": 32}, "cut into 8 columns, and 16 are stored together"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(
    ranks: int, format: str, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    more = {"linear_num_key_heads": 4, **config}
    with pytest.raises(OptionError, match=words):
        built(tmp_path, ranks, "cpu", {**HEADS, **more}, format=format)


def test_a_draft_head_is_quantised_whole_and_then_cut(tmp_path: Path) -> None:
    """So that each group has the scale that it has on one rank."""
    wishes: dict[str, Any] = {
        "draft_dtype": "nvfp4",
        "drafts": 1,
        "decode": (1,),
        "verify": ((1, 1),),
    }
    found = []
    for ranks in (1, 2):
        options = Options("cpu", prefill=(64,), max_context=128, max_seqs=1, tp=ranks, **wishes)
        path = tmp_path / str(ranks)
        build(TINY, path, options, lambda text: None)
        found.append([map_weights(path / name) for name in read_manifest(path).weights_files])
    (whole,), ranked = found
    name = "mtp.layers.0.self_attn.o_proj."
    for suffix in ("weight", "weight_scale"):
        parts = [rank[name + suffix].view(np.uint8) for rank in ranked]
        np.testing.assert_array_equal(np.hstack(parts), whole[name + suffix].view(np.uint8))
    assert all((rank[name + "w_scale2"] == whole[name + "w_scale2"]).all() for rank in ranked)
    with pytest.raises(OptionError, match="mtp.* would be cut .* 128 are stored together"):
        options = Options("cpu", tp=2, **{**wishes, "draft_dtype": "fp8"})
        build(TINY, tmp_path / "refused", options, lambda text: None)


def test_a_sum_that_others_read_stays_apart_and_so_does_one_between_hosts() -> None:
    """x -> all_reduce -> a norm with a residual; or two norms, which both read the sum."""

    def graph(across: int, shared: bool) -> list[str]:
        rows = ("tokens", 64)
        x, residual, other = (
            variable(TensorSpec(n, DType.BF16, rows)) for n in ("x", "residual", "other")
        )
        weight = variable(TensorSpec("weight", DType.F32, (64,)))
        made = gs.Graph(opset=23, inputs=[x, residual, other, weight])
        total = gs.Variable("x.sum", DType.BF16.numpy, list(rows))
        made.nodes.append(
            gs.Node("all_reduce", "x.sum", {"ranks": 2, "across": across}, [x], [total], DOMAIN)
        )
        attrs = {"eps": 1e-6, "add": 1, "keep": 1, "quant": "none", "n": 1}
        for i, before in enumerate([residual, other][: 1 + shared]):
            ends: list[Any] = [f"y{i}", f"s{i}"]
            operands = [before, weight, total]
            made.nodes.append(add_node(REGISTRY, f"norm{i}", "norm_quant", operands, ends, **attrs))
            made.outputs += made.nodes[-1].outputs
        context = RewriteContext(made, {}, {}, REGISTRY)  # type: ignore[arg-type]
        found = rewrite(context, (REDUCE_NORM,))
        for node in made.nodes:
            if node.op == "reduce_norm_quant":
                assert [t.name for t in node.inputs] == ["x", "weight", "residual"]
        return [node.op for node in made.nodes] + [r.reason for r in found.refusals]

    assert graph(0, False) == ["reduce_norm_quant"]
    apart = ["all_reduce", "norm_quant"]
    assert graph(1, False) == [*apart, "its ranks are on several hosts"]
    assert graph(0, True) == [*apart, "norm_quant", *["x.sum is also read alone"] * 2]
