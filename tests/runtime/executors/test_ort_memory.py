"""Memory of an engine on the CPU against its plan, measured in a separate process."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.engine_file import open_folder, read_manifest
from spark_engine.interface import DECODE
from spark_engine.runtime.offline import embedded
from spark_engine.vision import VISION
from tests.checkpoints import write_checkpoint
from tests.oracles import test_parity_vision
from tests.repository import ROOT

CHECKPOINT = ROOT / "models" / "tiny" / "checkpoint"
# Few pages, so that the plan is mostly the sessions' memory.
FEW = Options(target="cpu", decode=(8,), prefill=(64,), max_seqs=8, max_context=256, kv_tokens=2048)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 4096}  # 57 MiB as f32
SCRIPT = """
import json, os, sys
from pathlib import Path
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.vision import Image

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

start, before = kib("VmHWM"), kib("RssAnon")
engine = Engine.open(Path(sys.argv[1]))
held = kib("RssAnon") - before
limits = engine.loaded.limits
length = min(limits.max_context - 9, limits.pages * limits.page_size // limits.max_seqs - 9)
for first in range(limits.max_seqs):  # all slots at once, and nearly all pages
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.submit(Request(tuple(3 + (first + i) % 500 for i in range(length)), params))
if engine.loaded.vision is not None:
    image = Image(1, 4, 4, bytes(16 * 3072), bytes(16))
    ids = (3, *[engine.loaded.vision.image_id] * 16, 3)
    engine.submit(Request(ids, params, images=(image,)))
while not engine.idle:
    engine.step()
print(json.dumps({"held": held << 10, "most": kib("VmHWM") - start << 10}))
"""


def _measured(engine: Path) -> dict[str, int]:
    """(current bytes, peak bytes) of an engine."""
    env = {**os.environ, "PYTHONPATH": ""}
    words = [sys.executable, "-c", SCRIPT, str(engine)]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")
@pytest.mark.parametrize("format", ["embedded", "f32", "bf16", "fp8_block"])
def test_the_plan_covers_what_is_measured_and_not_much_more(tmp_path: Path, format: str) -> None:
    """The embedded model is NVFP4, and small next to the memory of a session's nodes. It is built
    as the first `spark-run` does."""
    if format == "embedded":
        embedded.build(CHECKPOINT, tmp_path / "engine")
    else:
        path = write_checkpoint(tmp_path / "model", SIZES, format).path
        build(path, tmp_path / "engine", FEW, lambda text: None)
    memory = read_manifest(tmp_path / "engine").memory
    found = _measured(tmp_path / "engine")
    planned = memory.buffers + memory.kv + memory.states + memory.snapshots + memory.tables
    assert 0.5 * memory.buffers < found["held"] <= planned, (found, memory)
    assert found["most"] <= memory.total <= 2 * found["most"], (found, memory)
    assert format != "embedded" or memory.total <= 400 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")
def test_more_buckets_of_a_family_take_no_more_memory(tmp_path: Path) -> None:
    """They share its session, which has the matrices once."""
    path = write_checkpoint(tmp_path / "model", SIZES, "bf16").path
    held, files = [], set()
    for i, decode in enumerate(((8,), (1, 2, 3, 4, 5, 6, 7, 8))):
        build(path, tmp_path / str(i), replace(FEW, decode=decode), lambda text: None)
        held.append(read_manifest(tmp_path / str(i)).memory.total)
        folder = open_folder(tmp_path / str(i), "cpu")
        buckets = (b for b in folder.manifest.buckets if b.family == DECODE)
        files |= {folder.engine(bucket).payload for bucket in buckets}
    assert held[0] == held[1] and len(files) == 1
    few, many = (_measured(tmp_path / str(i))["most"] for i in range(2))
    assert many <= few + (8 << 20), (few, many)  # a matrix's copies are 57 MiB


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")
def test_buckets_of_the_tower_hold_no_copy_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_heads": 8}
    monkeypatch.setitem(test_parity_vision.KINDS, "dense", test_parity_vision.SIZES | sizes)
    monkeypatch.setattr("spark_engine.builder.plan.images.CPU_SIZES", (16, 64))
    test_parity_vision.write(tmp_path, "dense")
    options = replace(FEW, decode=(1,), max_seqs=1, max_image_pixels=256 * 256, drafts=0)
    build(tmp_path, tmp_path / "engine", options, lambda text: None)
    manifest = read_manifest(tmp_path / "engine")
    towers = [b for b in manifest.buckets if b.family == VISION]
    as_f32 = 4 * (3 * 12 * 768**2)  # bytes: 81 MiB in each of the three buckets
    assert len(towers) == 3 and sum(b.buffer_bytes for b in towers) < as_f32 / 2
    memory, found = manifest.memory, _measured(tmp_path / "engine")
    planned = memory.buffers + memory.kv + memory.states + memory.tables
    assert found["held"] <= planned + as_f32 // 4, (found, memory)
    assert found["most"] <= memory.total <= 2 * found["most"], (found, memory)
