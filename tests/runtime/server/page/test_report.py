"""The engine's report, from a manifest made by hand."""

import json

from spark_engine import manifest
from spark_engine.interface import Limits, Precision
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.page.report import make_report
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.tensors import DType

LIMITS = Limits(max_seqs=4, max_context=64, pages=4, vocab=512)
INFO = EngineInfo("made", LIMITS, (1,), {"temperature": 0.5}, 1 << 20, 3, disk_bytes=7)
TACTIC = {
    "op": "linear",
    "bucket": "decode_b1.engine",
    "node": "layers.0.q",
    "nodes": 7,
    "chosen": "wide",
    "timed": True,
    "microseconds": {"wide": 3.5, "narrow": 2.5},
    "refused": {"tall": "too few rows"},
}
ONLY = {**TACTIC, "op": "sample", "chosen": None, "microseconds": {}}


def _manifest() -> manifest.Manifest:
    return manifest.Manifest(
        name="made",
        producer={"numpy": "2.0"},
        target="cpu",
        card="",
        executor="ort",
        model=manifest.ModelInfo("qwen3_5", 2, 8, 512, 1234),
        limits=LIMITS,
        dtypes=Precision(DType.F32, DType.F8E4M3, DType.F32),
        states=(),
        tables=(),
        buckets=(manifest.Bucket("decode", 1, 1, "decode_b1.engine", 100, cost_us=12.5),),
        memory=manifest.Memory(weights=10, kv=20, states=3, tables=4, arena=100),
        quantisation=(
            manifest.Quantised("layers.0.mlp.up", "fp8", 2),
            manifest.Quantised("layers.1.mlp.up", "fp8", 3),
            manifest.Quantised("layers.1.mlp.up", "bf16", 1),
            manifest.Quantised("lm_head", "bf16", 1),
        ),
        fusions={"decode": {"norm_quant": 2}},
        refusals=(manifest.Refusal("moe_norm", "layers.0", "there is no expert"),),
        tactics=(TACTIC, ONLY),
        ignored={"vision": 0},
        generation={"temperature": 0.5},
        eos_token_ids=(1,),
        fingerprint=manifest.Fingerprint("a", "b", "c", "d", "e"),
        files={
            manifest.WEIGHTS: manifest.FileDigest(10, ()),
            "decode_b1.engine": manifest.FileDigest(77, ("f",)),
        },
    )


def test_what_was_built_is_summarised() -> None:
    report = make_report(INFO, _manifest())
    assert json.loads(json.dumps(report)) == report
    assert report["name"] == "made" and report["limits"]["max_seqs"] == 4
    assert report["cache"] == {"budget_bytes": 1 << 20, "snapshots": 3, "disk_bytes": 7}
    assert report["memory"]["total"] == 137
    bucket = {"file": "decode_b1.engine", "family": "decode", "rows": 1, "tokens": 1}
    assert report["buckets"] == [{**bucket, "cost_us": 12.5, "arena_bytes": 100, "file_bytes": 77}]
    refusal = {"rule": "moe_norm", "node": "layers.0", "reason": "there is no expert"}
    assert report["refusals"] == [refusal]
    assert report["dtypes"] == {"activation": "f32", "kv": "f8e4m3", "state": "f32"}
    assert not {"files", "states", "tables", "digest"} & set(report)


def test_modules_are_grouped_across_layers_by_format() -> None:
    assert make_report(INFO, _manifest())["quantisation"] == [
        {"module": "layers.mlp.up", "format": "fp8", "modules": 2, "tensors": 5},
        {"module": "layers.mlp.up", "format": "bf16", "modules": 1, "tensors": 1},
        {"module": "lm_head", "format": "bf16", "modules": 1, "tensors": 1},
    ]


def test_of_a_tactics_times_the_chosen_ones_is_reported() -> None:
    timed, only = make_report(INFO, _manifest())["tactics"]
    assert timed["microseconds"] == 3.5 and timed["nodes"] == 7 and "refused" not in timed
    assert only["chosen"] is None and only["microseconds"] is None


def test_an_engine_without_a_manifest_tells_its_limits() -> None:
    report = make_report(INFO, None)
    assert report["generation"] == {"temperature": 0.5} and "memory" not in report
    assert report["chat"]["template_kwargs"] is None
    chat = ChatOptions(reasoning_effort="low", template_kwargs={"preserve_thinking": True})
    shown = make_report(INFO, None, chat)["chat"]
    assert shown["reasoning_effort"] == "low"
    assert shown["template_kwargs"] == {"preserve_thinking": True}
