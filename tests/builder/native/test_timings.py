"""The timing cache: kept by machine and content, and harmless when it is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine.builder.native.tactics import Work
from spark_engine.builder.native.timings import Machine, Timings, digest_of, driver_version, key_of
from spark_engine.kernel import Launch, Plan, Tactic
from spark_engine.tensors import DType, TensorSpec

HERE = Machine("NVIDIA H200", "580.95", "13.0")
X = TensorSpec("x", DType.BF16, (4, 64))
WORK = Work("linear", None, {"dtype": "bf16"}, (X,), (X,), frozenset({0}))
PLAN = Plan((Launch("k", (1, 1, 1), (32, 1, 1), (), defines=(("N", "1"),)),))
TACTIC = Tactic("a", "a.cu", lambda *_: None, lambda *_: PLAN, lambda *_: 1.0)


def test_times_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "timings.json"
    first = Timings(path, HERE)
    assert first.get("k") is None and first.notes == []
    first.put("k", 2.5e-6)
    first.save()
    again = Timings(path, HERE)
    assert again.get("k") == 2.5e-6 and again.notes == []
    assert [p.name for p in path.parent.iterdir()] == ["timings.json"]


@pytest.mark.parametrize("field", ["gpu", "driver", "compiler"])
def test_another_machines_times_are_noted_kept_and_not_used(tmp_path: Path, field: str) -> None:
    path = tmp_path / "timings.json"
    theirs = Timings(path, replace(HERE, **{field: "other"}))
    theirs.put("k", 1e-6)
    theirs.save()
    mine = Timings(path, HERE)
    assert mine.get("k") is None
    assert "other" in mine.notes[0] and "not used" in mine.notes[0]
    mine.put("k", 3e-6)
    mine.save()
    assert Timings(path, replace(HERE, **{field: "other"})).get("k") == 1e-6
    assert Timings(path, HERE).get("k") == 3e-6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "null",
        '{"format": 3, "machines": {}}',
        '{"format": 2}',
        '{"format": 2, "machines": {"m": 3}}',
        '{"format": 2, "machines": {"m": {"k": "fast"}}}',
        '{"format": 2, "machines": {"m": {"k": -1}}}',
        '{"format": 2, "machines": {"m": {"k": NaN}}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_noted_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timings.json"
    path.write_text(text)
    made = Timings(path, HERE)
    assert "timed again" in made.notes[0] and made.get("k") is None
    made.put("k", 1e-6)
    made.save()
    assert json.loads(path.read_text())["machines"] == {HERE.label: {"k": 1e-6}}


def test_a_file_that_cannot_be_read_or_written_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "timings.json"
    path.mkdir()
    made = Timings(path, HERE)
    assert "not readable" in made.notes[0]
    made.put("k", 1e-6)
    made.save()
    assert "were not kept" in made.notes[1]
    assert list(tmp_path.iterdir()) == [path], "nothing half-written is left"


def test_a_key_changes_with_all_that_a_time_depends_on() -> None:
    files = {"a.cu": "kernel", "h.cuh": "header"}
    texts = digest_of(files)
    base = key_of(WORK, TACTIC, PLAN, texts)
    assert texts == digest_of(dict(reversed(files.items())))
    (launch,) = PLAN.launches
    others = [
        key_of(replace(WORK, attrs={"dtype": "f32"}), TACTIC, PLAN, texts),
        key_of(replace(WORK, ins=(replace(X, shape=(5, 64)),)), TACTIC, PLAN, texts),
        key_of(replace(WORK, ins=(replace(X, dtype=DType.F32),)), TACTIC, PLAN, texts),
        key_of(replace(WORK, cold=frozenset()), TACTIC, PLAN, texts),
        key_of(replace(WORK, context=2047), TACTIC, PLAN, texts),
        key_of(WORK, replace(TACTIC, name="b"), PLAN, texts),
        key_of(WORK, TACTIC, Plan((replace(launch, defines=(("N", "2"),)),)), texts),
        key_of(WORK, TACTIC, Plan((replace(launch, grid=(2, 1, 1)),)), texts),
        key_of(WORK, TACTIC, PLAN, digest_of({**files, "h.cuh": "changed"})),
    ]
    assert len({base, *others}) == 1 + len(others)
    assert key_of(replace(WORK, ins=(replace(X, name="z"),)), TACTIC, PLAN, texts) == base


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC "
            "2023\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  "
            "(dvs-builder@U16-I3-B03-4-3)  Thu Jan  9 23:07:27 UTC 2025\n",
            "570.86.15",
        ),
        (
            "NVRM version: NVIDIA UNIX aarch64 Kernel Module  535.161.07  Sat Feb 17 22:21:45 UTC "
            "2024\n",
            "535.161.07",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  "
            "(dvs-builder@U22-I3-AM28-33-2)  Tue Sep 23 10:11:16 UTC 2025\n",
            "580.95.05",
        ),
        ("NVRM version: something else 1.2\n", None),
    ],
    ids=["x86_64", "open x86_64", "aarch64", "open aarch64", "unknown"],
)
def test_the_drivers_version_is_not_the_machines_name(line: str, version: str | None) -> None:
    assert driver_version(line) == version
