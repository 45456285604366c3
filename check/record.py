"""What every node of two launches reads and writes, taken while references compute a session.

The two are the launches whose sequences reach furthest, one of each family. Knows sessions and the
reference executor; judges nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from spark_engine.check.engines import folder_of
from spark_engine.check.judge import Masks, Recorded
from spark_engine.check.progress import Track
from spark_engine.check.prompts import Session
from spark_engine.check.reference import ReferenceExecutor, Step
from spark_engine.check.runner import SessionRunner, feeds
from spark_engine.errors import InternalError
from spark_engine.interface import tile_of
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.runtime.executors.memory import BucketKey

Buffers = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Taken:
    """One launch, node by node; `weights` are the names of operands that never change."""

    key: BucketKey
    nodes: list[Recorded]
    masks: Masks
    weights: Collection[str]


class Recorder:
    """Opens `loaded`, an engine of reference executors, so that two of its launches are recorded.

    `watched` is to run the launches of all sessions in their order, each once.
    """

    def __init__(self, loaded: Loaded, sessions: Sequence[Session]) -> None:
        self.taken: list[Taken] = []
        self._sessions = sessions
        self._wanted = [_longest(sessions, family) for family in ("prefill", "decode")]
        self._states = [info.spec.name for info in loaded.states]
        self._weights = frozenset(folder_of(loaded).weights())
        self._at = 0
        executors = {
            key: _Watched(key, executor, self)
            for key, executor in loaded.executors.items()
            if isinstance(executor, ReferenceExecutor)
        }
        if len(executors) != len(loaded.executors):
            raise InternalError("only reference executors tell what their nodes read")
        self.watched = replace(loaded, executors=executors)

    def run(self, track: Track) -> None:
        """Runs as many launches as are needed, for the nodes alone."""
        needed = max(self._wanted) + 1
        with (
            SessionRunner("reference", self.watched) as runner,
            track("op level, launches by reference", needed) as step,
        ):
            for _, feed in zip(range(needed), feeds(self._sessions), strict=False):
                runner.launch(feed)
                step()

    def launch(self, key: BucketKey, executor: ReferenceExecutor, buffers: Buffers) -> None:
        """Runs the next launch, and keeps its nodes if they are wanted."""
        if self._at in self._wanted:
            taken = Taken(key, [], Masks.of(buffers, tile_of(key[0]), self._states), self._weights)
            self.taken.append(taken)

            def keep(
                step: Step, operands: tuple[NDArray[Any], ...], results: tuple[NDArray[Any], ...]
            ) -> None:
                taken.nodes.append(Recorded(step, operands, results))

            executor.watch = keep
        executor.run(buffers)
        executor.watch = None
        self._at += 1


class _Watched:
    """The protocol of `runtime/executors/executor.py`, told to the recorder."""

    def __init__(self, key: BucketKey, inner: ReferenceExecutor, recorder: Recorder) -> None:
        self._key, self._inner, self._recorder = key, inner, recorder

    @property
    def specs(self) -> Specs:
        return self._inner.specs

    def run(self, buffers: Buffers) -> None:
        self._recorder.launch(self._key, self._inner, buffers)

    def launch(self, buffers: Buffers) -> Wait:
        self.run(buffers)
        return lambda: None

    def close(self) -> None:
        self._inner.close()


def _longest(sessions: Sequence[Session], family: str) -> int:
    """The launch, counted over all sessions, whose sequences reach furthest; the first of them."""
    launches = [launch for session in sessions for launch in session.launches]
    reach = [int(x.starts.sum() + x.counts.sum()) if x.family == family else -1 for x in launches]
    best = max(reach, default=-1)
    if best < 0:
        raise InternalError(f"no session launches a {family} bucket")
    return reach.index(best)
