"""Generated traces with other ranks: every launch of theirs puts out what rank 0's does."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, given, settings

from tests.runtime.engine import test_traces
from tests.runtime.engine.test_traces import Trace, check_trace, forks, traces
from tests.runtime.fake import build_fake
from tests.runtime.ranks.fake_ranks import FakeGroup

RANKS = 2


def check_ranks(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> int:
    """The trace on rank 0 of RANKS; launches that were compared."""
    groups = []

    def build(*args: object, lazy: bool = True, **more: object) -> object:
        fakes = [build_fake(*args, lazy=lazy, **more) for _ in range(RANKS)]  # type: ignore[arg-type]
        if not lazy:  # the one that runs alone, to compare with
            return fakes[0]
        groups.append(FakeGroup(fakes))
        return groups[-1].loaded

    with monkeypatch.context() as patch:
        patch.setattr(test_traces, "build_fake", build)
        patch.setattr(test_traces, "poison_free", lambda engine: None)
        check_trace(trace)
    (group,) = groups
    count = group.check()
    gc.collect()
    assert group.snapshots == 0
    return count


@settings(
    max_examples=settings().max_examples // 7,  # 14; 140 in `make soak`
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(traces(most_drafts=3))
def test_other_ranks_do_what_rank_0_does(trace: Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_ranks(trace, patch)


@settings(
    max_examples=settings().max_examples // 7,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(forks())
def test_other_ranks_keep_the_same_prompts(trace: Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_ranks(trace, patch)
