"""A sequence is swapped out and in on every rank; a freed snapshot is freed on all."""

from collections.abc import Callable
from typing import Any

import pytest

from spark_engine.errors import ExecutorError
from spark_engine.interface import Limits
from spark_engine.runtime.ranks.leader import LeadStates
from tests.runtime.fake_executor import build_fake
from tests.runtime.ranks.fake_ranks import FakeGroup

LIMITS = Limits(3, 128, 6, 61, page_size=16, bias_slots=8, top_logprobs=3)


def test_a_swap_that_waits_for_a_device_is_watched() -> None:
    """Like a step: a swap waits for the stream, and both may hang."""
    group = FakeGroup([build_fake(LIMITS, (1,), (1,), lazy=False) for _ in range(2)])
    store, seen = group.loaded.device_states, []
    assert isinstance(store, LeadStates)
    save, restore = store.inner.save, store.inner.restore

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            seen.append(group.link.waits)
            return call(*given)

        return called

    def falls(*given: Any) -> Any:
        raise ExecutorError("the device has fallen")

    inner: Any = store.inner
    inner.save, inner.restore = watched(save), watched(restore)
    snapshot = store.save(0, [4])
    store.restore(snapshot, 2, [1])
    assert seen == [True, True] and not group.link.waits
    inner.save = falls
    group.link.fallen = ExecutorError("rank 1 says why")
    with pytest.raises(ExecutorError, match="rank 1 says why"):
        store.save(0, [4])
    assert not group.link.waits
