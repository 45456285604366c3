"""Generated traces with several ranks: every launch of the others has rank 0's outputs."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.interface import Limits
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.ranks import leader
from spark_engine.runtime.ranks.follower import Follower
from spark_engine.runtime.ranks.messages import InputPiece, LaunchBucket
from spark_engine.vision import VISION
from tests.runtime.engine import test_traces
from tests.runtime.fake_executor import VOCAB, build_fake
from tests.runtime.generated import tried
from tests.runtime.ranks.fake_ranks import FakeGroup

RANKS = 2


def check_ranks(trace: test_traces.Trace, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the trace on rank 0 of RANKS; returns the number of compared launches."""
    groups = []

    def build(*args: object, lazy: bool = True, **more: object) -> object:
        fakes = [build_fake(*args, lazy=lazy, **more) for _ in range(RANKS)]  # type: ignore[arg-type]
        if not lazy:  # not the reference that runs alone
            return fakes[0]
        groups.append(FakeGroup(fakes))
        return groups[-1].loaded

    with monkeypatch.context() as patch:
        patch.setattr(test_traces, "build_fake", build)
        patch.setattr(test_traces, "poison_free", lambda engine: None)
        test_traces.check_trace(trace)
    (group,) = groups
    count = group.check()
    gc.collect()
    assert group.snapshots == 0
    return count


@tried(1 / 7)
@given(test_traces.traces(most_drafts=3))
def test_other_ranks_do_what_rank_0_does(trace: test_traces.Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_ranks(trace, patch)


@tried(1 / 7)
@given(test_traces.forks())
def test_other_ranks_keep_the_same_prompts(trace: test_traces.Trace) -> None:
    with pytest.MonkeyPatch.context() as patch:
        check_ranks(trace, patch)


@tried(1 / 20)
@given(trace=test_traces.forks(), seed=st.integers(0, 2**32))
def test_other_ranks_see_the_same_images(trace: test_traces.Trace, seed: int) -> None:
    """In packets of bounded size, without what a bucket has behind the image."""
    sizes = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader, "PIECE", 1000)
        encode = leader.messages.encode
        patch.setattr(
            leader.messages, "encode", lambda orders: (sizes.append(orders), encode(orders))[1]
        )
        check_ranks(test_traces.pictured(trace, seed), patch)
    sent = [o for orders in sizes for o in orders if isinstance(o, InputPiece | LaunchBucket)]
    assert max(len(o.data if isinstance(o, InputPiece) else o.inputs) for o in sent) <= 4000
    launched = [o for o in sent if isinstance(o, LaunchBucket) and o.family == VISION]
    assert all(o.live and o.live <= 15 * 4 for o in launched)


def test_drafts_prefixes_masks_and_swaps_of_one_trace_reach_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen conversations over pages for four; every third one has a grammar."""
    limits = Limits(
        *(8, 340, 40, VOCAB), page_size=16, bias_slots=8, top_logprobs=3, drafts=3, snapshots=9
    )
    stem = [i * 7 % VOCAB for i in range(100)]
    arrivals = tuple(
        test_traces.Arrival(
            Request(
                (*stem[: 100 - 30 * (i % 2)], *((i + j) % VOCAB for j in range(20 + i))),
                SamplingParams(max_tokens=70, ignore_eos=True, seed=i),
                constraint=ConstraintSpec(grammar=f"5,{i + 1}") if i % 3 == 0 else None,
            ),
            step=5 * i,
            cancel_after=None,
            follows=2 if i % 4 == 3 else 0,
        )
        for i in range(16)
    )
    options = EngineOptions(depth=1, swap_bytes=1 << 30)
    trace = test_traces.Trace(limits, (1, 2, 4, 8), (1, 2, 4), options, arrivals, depths=4)
    rests, launch_rest = [], Follower._launch_rest

    def counted(follower: Follower) -> None:
        rests.append(follower)
        launch_rest(follower)

    monkeypatch.setattr(Follower, "_launch_rest", counted)
    assert check_ranks(trace, monkeypatch) > 200 and len(rests) > 50
    watch, _ = test_traces.replay(trace)
    stats = watch.engine.stats()
    assert stats["prefix_hits"] and stats["preempted_swap"], stats
    assert sum(stats["accepted_by_position"])  # type: ignore[call-overload]
