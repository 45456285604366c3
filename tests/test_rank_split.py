"""The split of a rank's step: kinds of launches, and ranks that time theirs when rank 0 does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from spark_engine.builder.native.launches import Launched
from spark_engine.runtime.ranks.messages import Table, Tables
from spark_engine.runtime.ranks.spawn import RankSpec
from tests.repository import ROOT
from tests.runtime.ranks.test_follower import KEY, LIMITS, STATES, Noting, tables

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks import rank_split, rank_split_follower  # noqa: E402
from benchmarks.kernel_split import Timed  # noqa: E402


def launched(layer: int, symbol: str) -> Launched:
    return Launched(
        f"layers.{layer}.mlp.y", "moe", "each", symbol, "a.cu", (2, 3, 1), (64, 1, 1), ()
    )


def test_equal_launches_are_one_kind() -> None:
    found = [launched(i, symbol) for i in (0, 1) for symbol in ("up", "down")]
    timed = [Timed(one.node, one.symbol, us) for one, us in zip(found, (5, 3, 7, 1.5), strict=True)]
    up, down = rank_split.kinds(found, timed, 2.0, {"layers.*.mlp.y": 1.5})
    assert (up["symbol"], up["launches"], up["us"], up["ms"]) == ("up", 2, 4.0, 0.008)
    assert (down["symbol"], down["us"], down["ms"]) == ("down", 0.5, 0.001)  # 1.5 - 2 is not there
    assert up["floor_ms"] == 0.003 and down["floor_ms"] == 0.0
    assert up["blocks"] == (6, 64)
    text = rank_split.told([up, down]).splitlines()
    assert len(text) == 4 and text[-1].split() == ["all", "4", "0.009", "0.003"]


def test_a_rank_times_what_rank_0_names(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []
    files = [SimpleNamespace(family="decode", rows=rows, file=f"{rows}.engine") for rows in (1, 2)]
    monkeypatch.setattr(sys, "argv", ["", msgspec.json.encode(RankSpec("e", 1, 2)).decode()])
    monkeypatch.setattr(
        rank_split_follower, "read_manifest", lambda path: SimpleNamespace(buckets=files, path=path)
    )
    monkeypatch.setattr(
        rank_split_follower, "read_engine", lambda path: SimpleNamespace(payload=path)
    )
    monkeypatch.setattr(rank_split_follower, "time_launches", lambda *given: timed.append(given))
    one = Noting()
    follower = rank_split_follower.SplitFollower({KEY: one}, STATES, tables(LIMITS), None, one)
    row = np.full(4, 7, np.int32).tobytes()
    follower.follow(
        [Tables([Table("page_table", [1], row), Table("split.bucket", [2], b"decode")])]
    )
    assert timed == [(one, Path("e/2.engine"))]
    assert (follower.memory.tables["page_table"][1] == 7).all()
