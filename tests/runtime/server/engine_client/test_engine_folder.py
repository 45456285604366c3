"""Options of an engine's drafts and prefix cache, and their lines in the log."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.errors import OptionError
from spark_engine.interface import Limits
from spark_engine.manifest import StateInfo
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.policy.pacing import PrefillPolicy
from spark_engine.runtime.server.engine_client import engine_folder as assets
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.tensors import DType, TensorSpec

PLAIN, DRAFTING = Limits(2, 64, 2, 32), Limits(2, 64, 2, 32, drafts=3)


def test_more_drafts_than_the_engine_has_are_refused() -> None:
    for asked in (None, 0, 1, 3):
        assets.check_drafts(asked, DRAFTING)
    for asked in (None, 0):
        assets.check_drafts(asked, PLAIN)
    with pytest.raises(OptionError, match="--drafts is 4; this engine makes at most 3 a round"):
        assets.check_drafts(4, DRAFTING)
    with pytest.raises(OptionError, match="--drafts is 1; this engine has no draft head"):
        assets.check_drafts(1, PLAIN)


def test_what_is_said_at_the_start() -> None:
    said = [assets.describe_drafts(asked, DRAFTING) for asked in (None, 3, 1, 0)]
    up_to = [" with up to 3 drafts a round"] * 2
    assert said == [*up_to, " with up to 1 draft a round", " without its drafts"]
    assert assets.describe_drafts(2, DRAFTING, fixed=True) == " with 2 drafts a round"
    assert [assets.describe_drafts(asked, PLAIN) for asked in (None, 0)] == ["", ""]


ROW, PAGE = 3 << 20, 1 << 20  # bytes
STATES = (
    StateInfo(TensorSpec("layers.0.gdn_state", DType.F32, (9, ROW // 4)), "sequence"),
    StateInfo(TensorSpec("layers.1.k_pages", DType.F32, (9, PAGE // 4)), "page"),
)


def _asked(monkeypatch: pytest.MonkeyPatch, asked: int | None, executor: str, rows: int) -> None:
    limits = Limits(2, 64, 2, 32, snapshots=rows)
    manifest = SimpleNamespace(states=STATES, executor=executor, limits=limits)
    monkeypatch.setattr(assets, "read_manifest", lambda folder: manifest)
    assets.check_cache(asked, Path())


def test_a_prefix_cache_that_could_hold_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for executor, rows in (("ort", 5), ("native", 0)):
        for asked in (None, 0, ROW + PAGE, 1 << 60):
            _asked(monkeypatch, asked, executor, rows)
        with pytest.raises(OptionError, match="--cache-gib is .*; a prefix takes 0.0039 GiB"):
            _asked(monkeypatch, ROW + PAGE - 1, executor, rows)
    for asked in (None, 0):
        _asked(monkeypatch, asked, "ort", 0)
    with pytest.raises(OptionError, match="--cache-gib is 1; this engine was built without memory"):
        _asked(monkeypatch, 1 << 30, "ort", 0)


def test_what_is_said_of_a_prefix_cache() -> None:
    info = EngineInfo("e", PLAIN, (1,))
    assert assets.describe_cache(info) == ", without a prefix cache"
    pages = EngineInfo("e", PLAIN, (1,), {}, 3 << 29)
    assert assets.describe_cache(pages) == ", with a prefix cache of up to 1.50 GiB"
    both = EngineInfo("e", PLAIN, (1,), {}, 3 << 29, 7)
    words = ", with a prefix cache of up to 1.50 GiB (7 states)"
    assert assets.describe_cache(both) == words
    kept = EngineInfo("e", PLAIN, (1,), {}, 3 << 29, 7, disk_bytes=1 << 30)
    assert assets.describe_cache(kept) == words + ", and 1.00 GiB on disk"


def test_what_was_asked_for_and_cannot_be_had_is_said() -> None:
    costs = (("decode", 3000.0), ("decode", 9000.0), ("prefill", 20000.0), ("prefill", 7000.0))
    buckets = [SimpleNamespace(family=name, cost_us=us) for name, us in costs]
    manifest: Any = SimpleNamespace(buckets=buckets)

    def said(cache: int | None, itl_ms: float | None, known: Any = manifest) -> list[str]:
        options = EngineOptions(policy=PrefillPolicy(itl_ms=itl_ms), cache_bytes=cache)
        return [*assets.unmet(options, EngineInfo("x", PLAIN, (), {}, cache_bytes=ROW), known)]

    for cache, itl_ms in ((None, None), (0, 10.0), (ROW, 1e9)):
        assert said(cache, itl_ms) == []
    (much,) = said(8 << 30, None)
    assert much.startswith("--cache-gib is 8; ") and "fit 0.00 GiB" in much
    (short,) = said(None, 9.9)
    assert short.startswith("--itl-ms is 9.9; a step of one row takes 10 ms with a prefill, 3 to")
    assert said(None, 0.001, SimpleNamespace(buckets=[])) == [], "no bucket, no time"
