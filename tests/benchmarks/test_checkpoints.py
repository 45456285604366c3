"""The list of checkpoints: published sizes, the planner's memory, and the packaged rows."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks import checkpoints
from benchmarks.published import CHECKPOINTS, FORMATS, SIZES, Published, folder_of
from benchmarks.rehearsal.gb10 import tables
from benchmarks.weightless_plan import options, plan_of
from spark_engine.builder.checkpoint_list import listed
from spark_engine.builder.plan.budget import SHARE, WEIGHTS, WORKSPACE, Needs
from spark_engine.kernel import GB10
from spark_engine.models.open_model import open_model

SERVED = {row["name"]: row for row in listed()["checkpoints"]}
# without experts by the thousand
QUICK = [row for row in CHECKPOINTS if "-a" not in row.layout.partition(":")[0]]
A4, WIDEN, A16 = "nvfp4_linear_a4", "nvfp4_widen", "nvfp4_linear"
PUBLISHED_GB = {  # of the files, without 0.92 of vision
    "nvidia/Qwen3.6-27B-NVFP4": 21.92 - 0.92,
    "nvidia/Qwen3.8-27B-NVFP4": 21.9 - 0.92,
    "Qwen/Qwen3.8-27B-FP8": 30.9 - 0.92,
}


@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_packaged_rows_are_the_planners(row: Published) -> None:
    """Both where a checkpoint is served and where it is not."""
    known, kept = checkpoints.described(row), SERVED.get(row.name)
    found = kept and {key: value for key, value in kept.items() if key not in ("targets", "speeds")}
    assert found == known, "run python -m benchmarks.checkpoints"


def test_rows_are_in_order_and_say_where_their_speed_is_from() -> None:
    assert list(SERVED) == [row.name for row in CHECKPOINTS if row.name in SERVED]
    for row in SERVED.values():
        for speed in row["speeds"]:
            assert speed["how"] == ("predicted" if speed["card"] == "Spark" else "measured")
        spark = [s for s in row["speeds"] if s["card"] == "Spark"]
        assert bool(spark) == ("sm_121a" in row["targets"] and row["sequences"]["Spark"] > 0)


@pytest.mark.parametrize("row", CHECKPOINTS, ids=lambda row: row.name)
def test_packaged_speeds_are_the_newest_measured_and_predicted(row: Published) -> None:
    """README and docs/performance.md take theirs from the same rows."""
    speeds = SERVED.get(row.name, {"speeds": []})["speeds"]
    kept = [speed for speed in speeds if speed["how"] == "measured"]
    assert kept == checkpoints.measured(row), "run python -m benchmarks.checkpoints"
    if row.name in checkpoints.MEASURED:
        first = next(speed for speed in speeds if speed["card"] == "Spark")["users"]
        assert [*first.values()] == [*tables.first(checkpoints.MEASURED[row.name])]


@pytest.mark.parametrize("size", [s for s in SIZES if s != "80b-a3b"])
def test_sizes_have_the_parameters_of_their_names(size: str) -> None:
    model = open_model(folder_of(f"{size}:bf16"))
    billions = float(re.match(r"[\d.]+", size)[0])  # type: ignore[index]
    assert model.parameters == pytest.approx(billions * 1e9, rel=0.07)


@pytest.mark.parametrize("name", PUBLISHED_GB)
def test_gigabytes_are_those_of_the_published_files(name: str) -> None:
    assert SERVED[name]["gb"] == pytest.approx(PUBLISHED_GB[name], abs=0.15)


def test_qwen38_is_planned_on_both_targets() -> None:
    """Of 64 layers gate_up and down, and the head: FP4 products, or their inputs' values."""
    for target, wanted in (("sm_121a", {A4: 129}), ("sm_90a", {WIDEN: 129, A16: 129})):
        given = options(target, decode=(8,), prefill=(1024,), verify=None, drafts=0, max_seqs=8)
        for bucket in plan_of("27b:nvfp4-a4", given).values():
            ops = Counter(node.op for node in bucket.nodes)
            assert {op: ops[op] for op in (A4, WIDEN, A16) if op in ops} == wanted


def test_every_size_and_format_is_published() -> None:
    sizes, formats = zip(*(row.layout.split(":") for row in CHECKPOINTS), strict=True)
    assert {*sizes} == {*SIZES} and {*FORMATS} - {*formats} == {"int4-all"}


def test_sequences_by_hand() -> None:
    """Weights, the workspace, and one sequence more than run: the scratch rows."""
    needs = Needs(weights=10 << 30, slot=1 << 30, page=1 << 30)
    fixed = int(WEIGHTS * needs.weights) + WORKSPACE
    memory = int((fixed + (4 + 3 * 2 + 1 << 30)) / SHARE) + 2
    card = replace(GB10, card=replace(GB10.card, memory=memory))
    assert checkpoints.sequences(card, needs, pages_each=2) == 3
    less = replace(GB10, card=replace(GB10.card, memory=memory - (1 << 27)))
    assert checkpoints.sequences(less, needs, pages_each=2) == 2
    assert checkpoints.sequences(card, replace(needs, weights=40 << 30), pages_each=2) == 0
