"""Engines for CUDA targets, built where no GPU is: tactics, packed weights, payloads, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder import native, nvrtc  # noqa: E402
from spark_engine.builder.build import CUBINS, build  # noqa: E402
from spark_engine.builder.options import Options  # noqa: E402
from spark_engine.engine_file import open_folder  # noqa: E402
from spark_engine.errors import OptionError  # noqa: E402
from spark_engine.kernel import H200  # noqa: E402
from spark_engine.runtime.executors.program import Program  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

HEADS = {"linear_num_value_heads": 8}  # so that every projection has a multiple of 16 rows
SIZES: dict[str, Any] = {"decode": (1, 4), "prefill": (128,), "max_seqs": 4, "max_context": 256}


@pytest.fixture
def folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose compiled kernels the tests of this file share."""
    cubins = tmp_path_factory.getbasetemp() / "cubins"
    cubins.mkdir(exist_ok=True)
    (tmp_path / CUBINS).symlink_to(cubins)
    return tmp_path


def built(folder: Path, target: str = "sm_90a", **kwargs: Any) -> Path:
    """An engine of a random checkpoint."""
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


@pytest.mark.parametrize("format", ["bf16", "modelopt_mixed", "nvfp4_a4", "fp8_block"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_121a"])
def test_every_launch_names_what_exists(folder: Path, target: str, format: str) -> None:
    try:
        engine = open_folder(built(folder, target, format=format), target)
    except OptionError as error:
        pytest.skip(str(error))
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
            for kind, value, *size in launch["args"]:
                assert kind not in named or value in named[kind], (launch["node"], kind, value)
                if kind in ("arena", "zeroed"):
                    assert 0 <= value < value + size[0] <= body[f"{kind}_bytes"]
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


def test_launches_whose_blocks_wait_for_one_another_are_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over cubins that hold nothing: the records do not depend on them."""
    nothing = nvrtc.Cubin(b"nothing", {})
    monkeypatch.setattr(
        native, "compile_jobs", lambda jobs, *_: {(j.source, j.defines): nothing for j in jobs}
    )
    wider = {**HEADS, "intermediate_size": 4096}
    engine = open_folder(built(folder, config_kwargs=wider), "sm_90a")
    found = set()
    for bucket in engine.manifest.buckets:
        program = Program.read(engine.engine(bucket).payload)
        for record in program.launches:
            if record.resident:
                found.add(program.kernels[record.kernel].symbol)
                assert math.prod(record.shape.grid) <= H200.sms
    assert found == {"linear"}, found


def test_tactics_stand_in_the_manifest(folder: Path) -> None:
    manifest = open_folder(built(folder), "sm_90a").manifest
    assert manifest.executor == "native"
    rows = {(r["op"], r["bucket"]): r for r in manifest.tactics}
    assert rows["embed", "decode_b1.engine"]["chosen"] == "rows"
    assert sum(r["nodes"] for r in manifest.tactics if r["op"] == "linear") > 10
    mixer = rows["gdn_decode", "decode_b4.engine"]
    assert mixer["microseconds"][mixer["chosen"]] == min(mixer["microseconds"].values())
    assert mixer["timed"] is False and mixer["chosen"] not in mixer["refused"]
    assert manifest.producer["nvrtc"] == nvrtc.compiler_version()


def test_an_invariant_build_takes_one_order_in_all_buckets(folder: Path) -> None:
    engine = open_folder(built(folder, name="invariant", invariant=True), "sm_90a")
    by_node: dict[str, set[str]] = {}
    for row in engine.manifest.tactics:
        family = row["bucket"].split("_")[0]
        by_node.setdefault(f"{family} {row['node']}", set()).add(row["chosen"])
    assert all(len(chosen) == 1 for chosen in by_node.values()), by_node


def test_timing_needs_the_gpu_it_builds_for(folder: Path) -> None:
    if nvrtc.present_target() is not None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(OptionError, match="--timing needs the GPU it builds for: sm_90a"):
        built(folder, timing=True)


def test_equal_builds_give_equal_files(folder: Path) -> None:
    images = []
    for name in ("a", "b"):
        (folder / name).mkdir()
        engine = built(folder / name, sizes={"decode": (1,), "prefill": (64,)})
        images.append({p.name: p.read_bytes() for p in engine.iterdir() if p.is_file()})
    assert {k for k in images[0] if images[0][k] != images[1][k]} <= {"manifest.json"}


def test_a_tied_heads_weight_is_kept_both_ways(folder: Path) -> None:
    engine = built(folder, config_kwargs={**HEADS, "tie_word_embeddings": True})
    weights = open_folder(engine, "sm_90a").weights()
    plain, packed = weights["embed_tokens.weight"], weights["embed_tokens.weight:linear"]
    assert np.array_equal(
        np.sort(plain.view(np.uint16).ravel()), np.sort(packed.view(np.uint16).ravel())
    )


def test_an_op_without_tactic_is_named_with_the_reason(folder: Path) -> None:
    with pytest.raises(
        OptionError, match=r"no CUDA tactic yet for: linear \(.*128x200.*--target cpu"
    ):
        built(folder, config_kwargs={"intermediate_size": 200})
    assert not (folder / "sm_90a").exists()
