"""Engines for CUDA targets, built where no GPU is: tactics, packed weights, payloads, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder import build as straight_line  # noqa: E402
from spark_engine.builder.build import CUBINS, build  # noqa: E402
from spark_engine.builder.fingerprint import timed_on  # noqa: E402
from spark_engine.builder.native import gpu_timer, nvrtc  # noqa: E402
from spark_engine.builder.native.backend import NativeBackend  # noqa: E402
from spark_engine.builder.native.tactics import Work  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.device import gpu as device  # noqa: E402
from spark_engine.engine_file import open_folder, read_manifest  # noqa: E402
from spark_engine.errors import GraphError, OptionError  # noqa: E402
from spark_engine.kernel import CARDS, H200, Plan, Tactic  # noqa: E402
from spark_engine.plugins import registry  # noqa: E402
from spark_engine.runtime.executors.program import Program  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402

HEADS = {"linear_num_value_heads": 8}  # so that every projection has a multiple of 16 rows
WHOLE_BLOCKS = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
SIZES: dict[str, Any] = {"decode": (1, 4), "prefill": (128,), "max_seqs": 4, "max_context": 256}


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    """A folder in which builds find the kernels that any test compiled."""
    (tmp_path / CUBINS).symlink_to(cache)
    return tmp_path


def built(folder: Path, target: str = "sm_90a", **kwargs: Any) -> Path:
    wishes = {name: kwargs.pop(name) for name in ("invariant", "timing") if name in kwargs}
    options = Options(target=target, **{**SIZES, **kwargs.pop("sizes", {})}, **wishes)
    name = kwargs.pop("name", target)
    config = kwargs.pop("config_kwargs", HEADS)
    checkpoint = folder / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, config_kwargs=config, **kwargs)
    build(checkpoint, folder / name, options, lambda text: None)
    return folder / name


def body_of(payload: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + length]), payload[8 + length :]


def test_a_compiled_engine_is_whole(folder: Path) -> None:
    check_launches(folder, "sm_90a", "modelopt_mixed", sizes={"decode": (1,)})


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "format", ["bf16", "modelopt_mixed", "nvfp4_a4", "fp8_block", "ct_fp8_channel"]
)
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_every_launch_names_what_exists(folder: Path, target: str, format: str) -> None:
    config = WHOLE_BLOCKS if format == "fp8_block" else HEADS
    check_launches(folder, target, format, config_kwargs=config)


def check_launches(folder: Path, target: str, format: str, **kwargs: Any) -> None:
    """Builds an engine and looks at each launch, and at the memory that the manifest tells."""
    engine = open_folder(built(folder, target, format=format, **kwargs), target)
    weights = {name for name, _ in engine.weights().items()}
    for bucket in engine.manifest.buckets:
        file = engine.engine(bucket)
        body, images = body_of(file.payload)
        assert sum(body["cubins"]) == len(images)
        named = {
            "weight": weights,
            "state": {s.name for s in file.header.states},
            "input": {s.name for s in file.header.inputs},
            "output": {s.name for s in file.header.outputs},
        }
        for launch in body["launches"]:
            assert launch["kernel"] < len(body["kernels"])
            for kind, *rest in (body["operands"][i] for i in launch["args"]):
                assert kind not in named or rest[0] in named[kind], (launch["node"], kind, rest)
                if kind in ("arena", "zeroed"):
                    start, size = rest
                    assert 0 <= start < start + size <= body[f"{kind}_bytes"]
        program = Program.read(file.payload)
        assert (bucket.arena_bytes, bucket.zeroed_bytes) == (
            program.arena_bytes,
            program.zeroed_bytes,
        )
        logits = next(s for s in file.header.outputs if s.name == "logits")
        assert bucket.wide_bytes >= logits.nbytes or bucket.buffer_bytes > logits.nbytes
    memory, buckets = engine.manifest.memory, engine.manifest.buckets
    assert memory.buffers == sum(b.buffer_bytes for b in buckets) + max(
        b.wide_bytes for b in buckets
    )
    assert memory.arena == max(b.arena_bytes for b in buckets) + max(
        b.zeroed_bytes for b in buckets
    )


DRAFTING: dict[str, Any] = {
    "config_kwargs": {**HEADS, "mtp_num_hidden_layers": 1, "vocab_size": 2048},
    "sizes": {"decode": (1, 16), "max_seqs": 24},
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("format", ["bf16", "modelopt_mixed", "nvfp4_a4"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_every_launch_of_a_round_names_what_exists(folder: Path, target: str, format: str) -> None:
    check_launches(folder, target, format, **DRAFTING)
    manifest = read_manifest(folder / target)
    assert manifest.limits.drafts == 3 and manifest.limits.gdn_ring == 8
    assert [(b.rows, b.tile - 1) for b in manifest.buckets if b.family.startswith("verify")] == [
        *((r, 1) for r in (1, 16, 24)),
        *((r, 2) for r in (1, 16)),
        *((r, 3) for r in (1, 16, 24)),
    ]
    cost = {b.file: b.cost_us for b in manifest.buckets}
    assert 0 < cost["decode_b16.engine"] < cost["verify_b16_k1.engine"]
    assert cost["verify_b16_k2.engine"] < cost["verify_b16_k3.engine"]
    stored = {q.module: q.format for q in manifest.quantisation}
    assert stored["mtp.layers.0.mlp.up_proj"] == ("bf16" if format == "bf16" else "nvfp4")
    largest = max(manifest.buckets, key=lambda b: b.wide_bytes)
    assert largest.file == "verify_b24_k3.engine", "logits of every token"


@pytest.mark.usefixtures("uncompiled")
def test_a_chain_of_updates_is_one_state(folder: Path) -> None:
    """Every draft writes into the pages that the next one reads, and none is in the arena."""
    engine = open_folder(built(folder, format="modelopt_mixed", **DRAFTING), "sm_90a")
    (bucket,) = [b for b in engine.manifest.buckets if b.file == "verify_b1_k3.engine"]
    body, _ = body_of(engine.engine(bucket).payload)
    ops = ("append_kv", "attention_decode", "draft_token", "accept_drafts", "mark_tokens")
    named: dict[str, set[str]] = {}
    for launch in body["launches"]:
        if launch["op"] in ops and not launch["node"].startswith("layers."):
            operands = [body["operands"][i] for i in launch["args"]]
            states = [value for kind, value, *_ in operands if kind == "state"]
            named.setdefault(launch["op"], set()).update(states)
    pages = {"mtp.k_pages", "mtp.v_pages"}
    assert named["append_kv"] == named["attention_decode"] == pages
    assert named["draft_token"] == {"drafts"}
    assert named["accept_drafts"] == {"token_counts", "last_tokens", "positions"}
    held = {n: p for n, p in body["places"].items() if "pages" in n or n.endswith(".drafts")}
    assert held and all(kind == "state" for kind, *_ in held.values())
    assert held["draft.0.mtp.k_pages"] == ["state", "mtp.k_pages"]


@pytest.mark.usefixtures("uncompiled")
def test_rounds_of_an_invariant_build_take_decodes_order(folder: Path) -> None:
    """Of each node of the network itself; the head's nodes go by their own time."""
    path = built(folder, invariant=True, format="modelopt_mixed", **DRAFTING)
    by_node: dict[str, set[str]] = {}
    for row in read_manifest(path).tactics:
        # Attention's and the recurrence's tactics of one order differ by name.
        free = row["op"] in ("attention_decode", "gdn_decode")
        if not row["bucket"].startswith("prefill") and not free:
            by_node.setdefault(row["node"], set()).add(row["chosen"])
    own = {n: found for n, found in by_node.items() if not n.startswith(("mtp.", "draft."))}
    several = {node: found for node, found in own.items() if len(found) > 1}
    assert len(own) > 8 and not several, several


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("invariant", [False, True])
def test_tokens_of_a_round_go_at_once_but_in_an_invariant_build(
    folder: Path, invariant: bool
) -> None:
    """By recorded times they are faster; their bits are not those of a single token."""
    kinds = {"key": 16, "value": 32}
    served = {f"linear_num_{kind}_heads": n for kind, n in kinds.items()}
    served |= {f"linear_{kind}_head_dim": 128 for kind in kinds}
    wanted = {**DRAFTING, "config_kwargs": {**DRAFTING["config_kwargs"], **served}}
    path = built(folder, invariant=invariant, **wanted)
    found = {r["bucket"]: r for r in read_manifest(path).tactics if r["op"] == "gdn_decode"}
    several = found["verify_b24_k3.engine"]
    assert ("chunk" in several["chosen"]) != invariant
    assert any("chunk" in name for name in several["microseconds"]) != invariant
    assert "chunk" not in found["decode_b16.engine"]["chosen"]
    excluded = several["refused"].get("chunk", "")
    assert excluded.startswith("excluded by --invariant") == invariant


@pytest.mark.usefixtures("uncompiled")
def test_launches_with_blocks_that_wait_for_one_another_are_recorded(folder: Path) -> None:
    wider = {**HEADS, "intermediate_size": 8192}
    engine = open_folder(built(folder, config_kwargs=wider), "sm_90a")
    found = set()
    for bucket in engine.manifest.buckets:
        read = Program.read(engine.engine(bucket).payload)
        for record in read.launches:
            if record.resident:
                found.add(read.kernels[record.kernel].symbol)
                assert math.prod(record.shape.grid) <= H200.sms
    assert found == {"linear"}, found


@pytest.mark.usefixtures("uncompiled")
def test_tactics_are_in_the_manifest(folder: Path) -> None:
    manifest = open_folder(built(folder), "sm_90a").manifest
    assert (manifest.executor, manifest.card) == ("native", "h200")
    rows = {(r["op"], r["bucket"]): r for r in manifest.tactics}
    assert rows["embed", "decode_b1.engine"]["chosen"] == "rows"
    assert sum(r["nodes"] for r in manifest.tactics if r["op"] == "linear") > 10
    mixer = rows["gdn_decode", "decode_b4.engine"]
    assert mixer["microseconds"][mixer["chosen"]] == min(mixer["microseconds"].values())
    assert mixer["timed"] is False and mixer["chosen"] not in mixer["refused"]
    assert manifest.producer["nvrtc"] == nvrtc.compiler_version()


@pytest.mark.usefixtures("uncompiled")
def test_an_invariant_build_takes_one_order_in_all_buckets(folder: Path) -> None:
    engine = open_folder(built(folder, name="invariant", invariant=True), "sm_90a")
    assert engine.manifest.invariant and not open_folder(built(folder), "sm_90a").manifest.invariant
    by_node: dict[str, set[str]] = {}
    for row in engine.manifest.tactics:
        family = row["bucket"].split("_")[0]
        by_node.setdefault(f"{family} {row['node']}", set()).add(row["chosen"])
    assert all(len(chosen) == 1 for chosen in by_node.values()), by_node


def test_only_the_card_that_is_built_for_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = object.__new__(NativeBackend)
    backend._target = CARDS["h100"]
    monkeypatch.setattr(device, "present", lambda: H200)
    options = Options(target="sm_90a", card="h100", gpu=CARDS["h100"])
    assert backend._times(None) is False and timed_on(options) == ""
    with pytest.raises(OptionError, match=r"sm_90a \(h100\) is .*this machine has sm_90a \(h200\)"):
        backend._times(True)
    monkeypatch.setattr(device, "present", lambda: CARDS["h100"])
    assert backend._times(None) is True and backend._times(False) is False


def test_timing_needs_the_gpu_it_builds_for(folder: Path) -> None:
    if device.architecture() is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(OptionError, match="--timing needs the GPU it builds for: sm_90a"):
        built(folder, timing=True)


@pytest.mark.usefixtures("uncompiled")
def test_equal_builds_give_equal_files(folder: Path) -> None:
    """The next test compares kernels."""
    images = []
    for name in ("a", "b"):
        engine = built(folder / name, sizes={"decode": (1,), "prefill": (64,)})
        images.append({p.name: p.read_bytes() for p in engine.iterdir() if p.is_file()})
    assert {k for k in images[0] if images[0][k] != images[1][k]} <= {"manifest.json"}


def test_a_kernel_compiled_twice_is_the_same_code() -> None:
    op = registry.get("embed")
    plan = next(w for case in cuda_node.cases_of(op) for w in cuda_node.planned(op, case, H200))
    (job,) = nvrtc.jobs_of([(plan.tactic.source, plan.plan)])
    first, second = (nvrtc.compile(job, H200) for _ in range(2))
    assert first.code == second.code and len(first.code) > 1000


@pytest.mark.usefixtures("uncompiled")
def test_a_tied_heads_weight_is_kept_in_both_layouts(folder: Path) -> None:
    engine = built(folder, config_kwargs={**HEADS, "tie_word_embeddings": True})
    weights = open_folder(engine, "sm_90a").weights()
    plain, packed = weights["embed_tokens.weight"], weights["embed_tokens.weight:linear"]
    assert np.array_equal(
        np.sort(plain.view(np.uint16).ravel()), np.sort(packed.view(np.uint16).ravel())
    )


def test_an_op_without_tactic_is_named_with_the_reason(folder: Path) -> None:
    words = (
        r"(?s)tactic yet for linear\n.*128x200.*\nno GPU target serves linear of this size: k = "
    )
    with pytest.raises(OptionError, match=words):
        built(folder, config_kwargs={"intermediate_size": 200})
    assert not (folder / "sm_90a").exists()


def test_what_packing_spoils_is_seen_before_a_tactic_is_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(straight_line, "pack_all", lambda graphs: None)
    with pytest.raises(GraphError, match="graph, stage packed, layouts: .* which is not packed"):
        built(folder)


class ByRows:
    """A fake timer: a launch takes a second, and one more for each row of its first operand
    beyond `free`; rows are rounded up to a multiple of `grain`."""

    free, grain, notes = 0, 1, ()

    def __init__(self, *given: Any, compiled: nvrtc.Compiler) -> None:
        self.asked = 0
        for say in given[3:]:
            say("another engine is waited for")

    def __enter__(self) -> ByRows:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was opened."""

    def __call__(self, work: Work, tactic: Tactic, plan: Plan) -> float:
        self.asked += 1
        dims = work.ins[0].dims
        rows = -(-(dims[0] if dims else 1) // self.grain) * self.grain
        return 1.0 + max(rows - self.free, 0)

    def whole(self, variants: Any) -> list[float]:
        return [1.0 for _ in variants]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("free", "grain", "added"), [(0, 1, True), (1 << 20, 1, False), (0, 4, False)]
)
def test_a_build_that_times_adds_the_sizes_that_pay(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, grain: int, added: bool
) -> None:
    monkeypatch.setattr(NativeBackend, "_times", lambda self, requested: True)
    monkeypatch.setattr(gpu_timer, "GpuTimer", type("T", (ByRows,), {"free": free, "grain": grain}))
    sizes = {"decode": None, "prefill": None, "max_seqs": 8}
    requested = Options(target="sm_90a", **{**SIZES, **sizes})
    write_checkpoint(folder / "checkpoint", config_kwargs=HEADS)
    messages: list[str] = []
    report = build(folder / "checkpoint", folder / "sm_90a", requested, messages.append)
    manifest, said = report.manifest, " ".join(report.notes)
    assert "another engine is waited for" in messages
    assert ("decode_b6 of 7 finer buckets save a tenth of a launch" in said) is added
    rows = {f: {b.rows for b in manifest.buckets if b.family == f} for f in ("decode", "prefill")}
    assert rows["decode"] >= {1, 2, 4, 8} and rows["prefill"] >= {1, 2, 4, 8, 16, 32, 64}
    assert (6 in rows["decode"]) is added
    assert all((folder / "sm_90a" / b.file).is_file() for b in manifest.buckets)
    tuned = {row["bucket"] for row in manifest.tactics}
    assert tuned == {b.file for b in manifest.buckets}
