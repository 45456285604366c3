"""The bytes that a step must move, counted by hand."""

from functools import cache

import pytest

from benchmarks.byte_floors import H200_BANDWIDTH, LOGIT_BYTES, Floor, Work
from spark_engine.models.open_model import open_model
from tests.repository import ROOT

CONFIGS = ROOT / "benchmarks" / "configs"
BATCHES = (1, 8, 32, 64, 128)
# ms of a step at 4.3 TB/s, context 1,024, f32 state, fp8 KV, counted once by another program
COUNTED = {
    "qwen36-27b": (4.17, 4.73, 6.65, 9.21, 14.32),
    "qwen36-35b-a3b": (0.56, 1.60, 4.13, 6.16, 8.74),
}


@cache
def floor_of(model: str) -> Floor:
    return Floor(open_model(CONFIGS / model))


@pytest.mark.parametrize("model", COUNTED)
def test_floors_of_the_published_models(model: str) -> None:
    floor = floor_of(model)
    found = [floor.seconds(Work(n, 1024), H200_BANDWIDTH) * 1e3 for n in BATCHES]
    assert found == pytest.approx(COUNTED[model], rel=0.01)
    wide, narrow = floor.parts(Work(8, 1024)), floor.parts(Work(8, 1024, 2, 2))
    assert wide["attention"] * 2 == narrow["attention"]
    assert 1.9 < wide["gdn"] / narrow["gdn"] < 2  # the convolution's state stays bf16
    if "moe" in wide:
        parts = [floor.parts(Work(n, 1024))["moe"] for n in (1, 8, 10_000)]
        assert parts[0] < parts[1] < parts[2] == pytest.approx(30 * parts[0], rel=0.1)


def test_a_round_reads_the_experts_of_all_its_tokens_and_drafts_k_times() -> None:
    floor = floor_of("qwen36-35b-a3b")
    step, found = floor.parts(Work(8, 1024)), floor.round_parts(Work(8, 1024), 3, 1000)
    wide = floor.parts(Work(32, 1024))
    assert (found["moe"], found["sample"]) == (wide["moe"], wide["sample"])
    assert {part: found[part] for part in ("gdn", "attention", "linear-fp8")} == {
        part: step[part] for part in ("gdn", "attention", "linear-fp8")
    }
    assert found["draft"] == 3 * (1000 + 8 * floor.model.config.vocab * LOGIT_BYTES)
