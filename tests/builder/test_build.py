"""Builds of random checkpoints, end to end: what is fused, what is bit-equal, what survives."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.builder.build import build, rewrite_graph, verify_all
from spark_engine.builder.graph.graph_checks import launches_per_layer
from spark_engine.builder.graph.lower import facts_of, lower
from spark_engine.builder.plan.options import Options, resolve
from spark_engine.builder.report import BuildReport
from spark_engine.engine_file import open_folder, read_manifest
from spark_engine.errors import CheckpointError, EngineError, OptionError
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.offline.embedded import find_checkpoint
from spark_engine.tensors import Array
from tests.checkpoint_files import FORMATS
from tests.checkpoints import write_checkpoint
from tests.solo import Solo

SMALL = Options(decode=(1,), prefill=(128,), max_seqs=3, max_context=128)
QUANTISERS = {"fp8_quant", "fp8_block_quant", "nvfp4_quant"}
# 4 layers, 3 linear and 1 full: (norm_quant, act_quant, gated_norm_quant) by what is quantised.
ALL = {"fp8", "fp8_block", "nvfp4_a4"}
COUNTS = {
    "modelopt_mixed": {False: (8, 1, 3), True: (8, 1, 3)},  # mixers fp8, MLPs W4A16
    "ct_nvfp4_a4": {False: (7, 5, 3), True: (7, 1, 3)},  # in_proj_* of the linear layers plain
    **{name: {False: (8, 5, 3), True: (8, 1, 3)} for name in ALL},
    "ct_fp8_channel": {False: (9, 5, 3), True: (9, 1, 3)},  # the head too
}
BY_TOKEN = "ct_fp8_channel"  # a decode step's heads do not know the scale of their token
PLAIN = {False: (7, 0, 0), True: (7, 0, 0)}

SLOW = """
import sys
from pathlib import Path
from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
options = Options(decode=(1,), prefill=(128,), max_seqs=3, max_context=128)
build(Path(sys.argv[1]), Path(sys.argv[2]), options, lambda text: print(text, flush=True))
"""


def quiet(text: str) -> None:
    pass


def trace(folder: Path, decodes: int = 3) -> list[dict[str, Array]]:
    """Outputs and states after each launch: a prefill of two tiles, then `decodes` decode steps."""
    engine, found = load(folder, threads=1), []
    solo, ids = Solo(engine), np.random.default_rng(3).integers(0, 512, 70 + decodes).tolist()
    rows = engine.rows("decode")[0]
    for start in (0, *range(70, 70 + decodes)):
        family, size = ("decode", rows) if start else ("prefill", 2)
        solo.decode(ids[start], rows) if start else solo.prefill(ids[:70], size)
        buffers, specs = solo.memory.buffers(family, size, 0), engine.executors[family, size].specs
        kept = {s.name: buffers[s.name] for s in specs.outputs} | dict(solo.memory.states)
        found.append({name: array.copy() for name, array in kept.items()})
    return found


def run(checkpoint: Path, folder: Path, options: Options = SMALL) -> BuildReport:
    return build(checkpoint, folder, options, quiet)


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", format="fp8").path


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", FORMATS)
def test_fusions_of_every_format(tmp_path: Path, format: str, moe: bool) -> None:
    path = write_checkpoint(tmp_path / "model", format=format, moe=moe).path
    model = open_model(path)
    plan = resolve(SMALL, facts_of(model))
    norms, acts, gated = COUNTS.get(format, PLAIN)[moe]
    expected = {"merge_projections": 11, "shared_expert": 4 * moe, "norm_quant": norms}
    for family in ("decode", "prefill"):
        apart = format == BY_TOKEN and family == "decode"
        expected |= {"act_quant": acts - apart, "gated_norm_quant": gated - 3 * apart}
        graph = lower(model, plan, family)
        rewritten = rewrite_graph(model, plan, graph)
        verify_all({family: graph}, plan, "rewritten")
        decode = family == "decode"
        assert rewritten.counts == expected | {
            "gdn_decode": 3 * decode,
            "gdn_prefill": 3 * (not decode),
            "attention_decode": int(decode),
            "moe_norm": 3 * moe,  # the last layer's sum meets last_rows first
        }
        assert rewritten.refusals == ()
        ops = Counter(node.op for node in graph.graph.nodes)
        assert sum(ops[name] for name in QUANTISERS) == ops["fp8_quant"] == 4 * apart
        assert not {"Concat", "Gather", "Slice", "shared_gate"} & set(ops)
        layers = launches_per_layer(graph.graph)
        mlp = 3 if moe else 4  # norm, router, experts; or norm, gate_up, act, down
        # the last layer ends in an Add: its sum meets last_rows before the final norm
        # the delta net: of a decode in one launch, of a prefill its convolution and rule
        linear = (5 + apart if decode else 6) + mlp
        full = (5 + apart if decode else 6) + mlp  # attention and its gate are one launch
        if moe:  # experts and the next layer's norm are one launch, named after the norm
            assert layers == {0: linear - 1, 1: linear - 1, 2: linear - 1, 3: full}
        else:
            assert layers == {0: linear, 1: linear, 2: linear, 3: full}


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("format", FORMATS)
def test_fused_and_unfused_engines_are_bit_equal(tmp_path: Path, format: str, moe: bool) -> None:
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    split = format != "fp8"  # fp8 sees merged projections, modelopt_mixed unmerged ones
    path = write_checkpoint(
        tmp_path / "model", config, format, moe=moe, split_scales=split, kv_scales=moe
    ).path
    for name in ("fused", "plain"):
        run(path, tmp_path / name, replace(SMALL, decode=(3,), fuse=name == "fused"))
    fused, unfused = trace(tmp_path / "fused"), trace(tmp_path / "plain")
    for step, (one, two) in enumerate(zip(fused, unfused, strict=True)):
        for name in one:
            assert one[name].tobytes() == two[name].tobytes(), f"step {step}: {name}"
    assert all(np.isfinite(step["logits"]).all() for step in fused)
    assert len({step["logits"].tobytes() for step in fused}) == len(fused)


@pytest.mark.parametrize("fuse", [False, True])
def test_an_engine_with_rings_speaks_as_one_without(tmp_path: Path, fuse: bool) -> None:
    path = write_checkpoint(tmp_path / "model", format="fp8").path
    given = {**SMALL.to_json(), "fuse": fuse}
    ringed = run(path, tmp_path / "ringed", Options(**given | {"gdn_ring": 4})).manifest  # type: ignore[arg-type]
    plain = run(path, tmp_path / "plain", Options(**given)).manifest  # type: ignore[arg-type]
    assert (ringed.limits.gdn_ring, plain.limits.gdn_ring) == (4, 0)
    rings = [s.spec for s in ringed.states if s.spec.name.endswith(".gdn_ring")]
    assert len(ringed.states) - len(plain.states) == len(rings) == 3
    taken = [m.memory.states + m.memory.snapshots for m in (ringed, plain)]
    assert taken[0] - taken[1] == sum(s.nbytes for s in rings) > 0
    both = (trace(tmp_path / name, decodes=9) for name in ("ringed", "plain"))
    for one, two in zip(*both, strict=True):
        np.testing.assert_allclose(one["logits"], two["logits"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kv", "state"), [("bf16", "f16"), ("fp8", "bf16")])
def test_narrow_caches_run(tmp_path: Path, checkpoint: Path, kv: str, state: str) -> None:
    given = {**SMALL.to_json(), "kv_dtype": kv, "state_dtype": state}
    manifest = run(checkpoint, tmp_path / "narrow", Options(**given)).manifest  # type: ignore[arg-type]
    dtypes = {s.spec.name: s.spec.dtype.value for s in manifest.states}
    assert dtypes["layers.3.k_pages"] == {"bf16": "bf16", "fp8": "u8"}[kv]
    assert dtypes["layers.0.gdn_state"] == state
    run(checkpoint, tmp_path / "wide")
    for narrow, wide in zip(trace(tmp_path / "narrow"), trace(tmp_path / "wide"), strict=True):
        off = np.abs(narrow["logits"][-1] - wide["logits"][-1]).max()
        assert 0 < off < 0.12 * np.ptp(wide["logits"][-1])


def test_different_input_scales_are_refused_and_still_not_alone(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", format="fp8", split_scales=True).path
    report = run(path, tmp_path / "engine")
    assert report.manifest.fusions["decode"]["merge_projections"] == 3  # b and a of three layers
    reasons = {r.reason for r in report.manifest.refusals}
    assert len(report.manifest.refusals) == 8
    assert all("inputs quantised differently" in reason for reason in reasons)


def test_a_shared_expert_of_another_size_is_refused(tmp_path: Path) -> None:
    config = {"shared_expert_intermediate_size": 32}
    path = write_checkpoint(tmp_path / "model", config, moe=True).path
    manifest = run(path, tmp_path / "engine").manifest
    assert manifest.fusions["decode"]["shared_expert"] == 0
    assert [r.rule for r in manifest.refusals] == ["shared_expert"] * 4
    assert "bf16[64, 128], a routed expert's bf16[128, 128]" in manifest.refusals[0].reason


def test_debug_engines_show_every_layer_and_still_fuse(tmp_path: Path, checkpoint: Path) -> None:
    options = Options(**{**SMALL.to_json(), "debug": True})  # type: ignore[arg-type]
    report = run(checkpoint, tmp_path / "debug", options)
    run(checkpoint, tmp_path / "engine")
    assert report.manifest.fusions["decode"]["norm_quant"] == 9  # logits_all's
    shown, hidden = trace(tmp_path / "debug"), trace(tmp_path / "engine")
    for one, two in zip(shown, hidden, strict=True):
        assert {f"layers.{i}.out" for i in range(4)} | {"logits_all"} == set(one) - set(two)
        assert all(one[name].tobytes() == two[name].tobytes() for name in two)


def test_equal_builds_give_equal_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", format="modelopt_mixed", moe=True).path
    for seed in ("1", "2"):  # of Python's string hashes, which must decide nothing
        folder = tmp_path / seed / "engine"
        env = {**os.environ, "PYTHONHASHSEED": seed}
        words = [sys.executable, "-c", SLOW, str(path), str(folder)]
        subprocess.run(words, env=env, check=True, stdout=subprocess.DEVNULL)
    one, two = contents(tmp_path / "1" / "engine"), contents(tmp_path / "2" / "engine")
    assert one == two and len(one) == 5


def test_an_unchanged_build_is_a_no_op(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    assert run(checkpoint, folder).built
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    again = run(checkpoint, folder)
    assert not again.built
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_a_changed_option_rebuilds(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    run(checkpoint, folder)
    report = run(checkpoint, folder, Options(decode=(2,), prefill=(64,), max_context=64))
    assert report.built and not (folder / "decode_b1.engine").exists()
    assert open_folder(folder, "cpu").manifest.limits.max_seqs == 2


def test_a_changed_byte_of_the_checkpoint_rebuilds(tmp_path: Path, checkpoint: Path) -> None:
    folder, file = tmp_path / "engine", next(checkpoint.glob("*.safetensors"))
    run(checkpoint, folder)
    before = (folder / "weights.safetensors").read_bytes()
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    assert run(checkpoint, folder).built
    assert (folder / "weights.safetensors").read_bytes() != before


def test_a_damaged_engine_is_rebuilt(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    run(checkpoint, folder)
    good = contents(folder)
    (folder / "weights.safetensors").write_bytes(b"")
    assert run(checkpoint, folder).built
    assert contents(folder) == good


def test_the_report_counts_the_bytes_of_the_files(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "engine"
    shutil.copy(find_checkpoint() / "tokenizer.json", checkpoint)
    manifest = run(checkpoint, folder).manifest
    for name, digest in manifest.files.items():
        assert (folder / name).stat().st_size == digest.bytes
    assert set(manifest.files) == set(contents(folder)) - {"manifest.json"}
    assert "tokenizer/tokenizer.json" in manifest.files
    assert manifest.memory.weights == (folder / "weights.safetensors").stat().st_size
    engine = open_folder(folder, "cpu").engine(manifest.buckets[0])
    assert (
        sum(s.nbytes for s in engine.header.states)
        == manifest.memory.kv + manifest.memory.states + manifest.memory.snapshots
    )
    tables = {t.name: t.nbytes for t in manifest.tables}
    assert manifest.memory.tables == sum(tables.values())
    assert {s.name: s.nbytes for s in engine.header.inputs}.items() >= tables.items()
    assert manifest.memory.arena == max(b.arena_bytes for b in manifest.buckets) > 0


def test_the_payload_holds_no_weight(tmp_path: Path, checkpoint: Path) -> None:
    path = write_checkpoint(tmp_path / "wide", {"vocab_size": 8192}).path
    folder = tmp_path / "engine"
    manifest = run(path, folder).manifest
    largest = max((folder / b.file).stat().st_size for b in manifest.buckets)
    assert manifest.memory.weights > 4 << 20 and largest < 1 << 20


def test_manifest_of_a_build(tmp_path: Path) -> None:
    generation = {"eos_token_id": [5, 1], "temperature": 0.6}
    path = write_checkpoint(
        tmp_path / "model", format="modelopt_mixed", moe=True, generation=generation
    ).path
    manifest = run(path, tmp_path / "toy").manifest
    assert manifest.name == "toy" and manifest.executor == "ort" and manifest.tactics == ()
    assert manifest.generation == generation and manifest.eos_token_ids == (5, 1)
    formats = {q.module: q.format for q in manifest.quantisation}
    assert formats["layers.0.mlp.experts"] == "nvfp4" and formats["lm_head"] == "nvfp4"
    assert formats["layers.3.self_attn.q_proj"] == "fp8"
    tensors = {q.module: q.tensors for q in manifest.quantisation}
    assert tensors["layers.3.self_attn.q_proj"] == 3
    assert tensors["layers.0.mlp.experts"] == 8 * 3 * 4
    assert {s.unit for s in manifest.states if s.spec.name.endswith("_pages")} == {"page"}


@pytest.mark.parametrize("harm", ["cut", "no_config", "lost_tensor", "option"])
def test_what_cannot_be_built_writes_nothing(tmp_path: Path, checkpoint: Path, harm: str) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    options = SMALL
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "no_config":
        (checkpoint / "config.json").unlink()
    elif harm == "lost_tensor":
        config = json.loads((checkpoint / "config.json").read_text())
        config |= {"num_hidden_layers": 5, "layer_types": None}
        (checkpoint / "config.json").write_text(json.dumps(config))
    else:
        options = Options(max_context=1 << 30)
    with pytest.raises((CheckpointError, OptionError)):
        run(checkpoint, tmp_path / "out" / "engine", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("old", [False, True], ids=["none", "old"])
def test_a_killed_build_leaves_the_old_engine_or_none(tmp_path: Path, old: bool) -> None:
    rng = random.Random(5)
    folder = tmp_path / "engine"
    first = write_checkpoint(tmp_path / "first", seed=1).path
    second = write_checkpoint(tmp_path / "second", seed=2).path
    for stage in (2, 3, 5, 8, 9):  # lines read: hash, lower, rewrite, emit, write
        if old:
            run(first, folder)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        before = contents(folder)
        child = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(second), str(folder)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        with child.stdout:
            for _ in range(stage):
                assert child.stdout.readline()
            time.sleep(rng.uniform(0, 0.1) if stage > 7 else 0)
            os.kill(child.pid, signal.SIGKILL)
        child.wait()
        after = contents(folder)
        if after != before:  # it was done before the signal came
            assert open_folder(folder, "cpu").manifest.name == "engine"
        elif not old:
            with pytest.raises(EngineError):
                read_manifest(folder)
    assert run(second, folder).built or after != before
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []
    open_folder(folder, "cpu")
