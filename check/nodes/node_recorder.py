"""Records what every node of two launches reads and writes, while references compute a session.

The two are the launches with the longest sequences, one of each family. Knows sessions and the
reference executor; judges nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from spark_engine.check.engines.live_rows import LiveRows
from spark_engine.check.engines.open_engines import folder_of
from spark_engine.check.engines.prompts import CheckSession
from spark_engine.check.engines.ranks import RanksExecutor
from spark_engine.check.engines.reference import Arrays, ReferenceExecutor, ReferenceStep
from spark_engine.check.engines.runner import SessionRunner, feeds
from spark_engine.check.nodes.compare_node import DefinedRows, Recorded, StateValue
from spark_engine.errors import InternalError
from spark_engine.interface import DECODE, PREFILL, STATE_OUT, tile_of
from spark_engine.manifest import StateInfo
from spark_engine.progress import Progress
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Executor, SynchronousExecutor
from spark_engine.runtime.executors.memory import BucketKey

Buffers = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch, node by node. `weights`: the names of operands that never change. `rank`: the
    rank of the nodes."""

    key: BucketKey
    nodes: list[Recorded]
    masks: DefinedRows
    weights: Collection[str]
    rank: int = 0


class Recorder:
    """Opens `loaded`, an engine of reference executors, and records two of its launches.

    `recording` must run the launches of all sessions in order, each once.
    """

    def __init__(self, loaded: Loaded, sessions: Sequence[CheckSession]) -> None:
        self.launches: list[RecordedLaunch] = []
        self._sessions = sessions
        launched = {launch.family for session in sessions for launch in session.launches}
        order = [PREFILL, DECODE, *sorted(launched - {PREFILL, DECODE})]
        self._wanted = [_longest(sessions, family) for family in order]
        self._states = folder_of(loaded).manifest.states
        self._weights = frozenset(folder_of(loaded).weights())
        self._at = 0
        executors = {
            key: _RecordingExecutor(key, one, self) for key, one in loaded.executors.items()
        }
        self.recording = replace(loaded, executors=executors)

    def run(self, shown: Progress) -> None:
        """Runs the launches that are needed, without comparing them."""
        needed = max(self._wanted) + 1
        with (
            SessionRunner("reference", self.recording) as runner,
            shown.track("op level, launches by reference", needed) as step,
        ):
            for _, feed in zip(range(needed), feeds(self._sessions), strict=False):
                runner.launch(feed)
                step()

    def launch(self, key: BucketKey, executor: Executor, buffers: Buffers) -> None:
        """Runs the next launch, and records its nodes by rank if it is one of the two."""
        parts, of = _parts(executor), [buffers]
        if isinstance(executor, RanksExecutor):
            of = executor.of(buffers)
        if self._at in self._wanted:
            masks = DefinedRows.of(buffers, tile_of(key[0]))
            for rank, (part, own) in enumerate(zip(parts, of, strict=True)):
                inputs = {spec.name: own[spec.name] for spec in part.specs.inputs}
                launch_recorder = _LaunchRecorder(inputs, self._states, self._weights)
                self.launches.append(
                    RecordedLaunch(key, launch_recorder.nodes, masks, self._weights, rank)
                )
                part.watch = launch_recorder.keep
        executor.run(buffers)
        for part in parts:
            part.watch = None
        self._at += 1


def _parts(executor: Executor) -> list[ReferenceExecutor]:
    """The recorded launch of each rank."""
    found = executor.parts if isinstance(executor, RanksExecutor) else (executor,)
    parts = [part for part in found if isinstance(part, ReferenceExecutor)]
    if len(parts) != len(found):
        raise InternalError("only reference executors report their nodes' operands")
    return parts


class _LaunchRecorder:
    """Records the nodes of one launch. Of states, only the rows and pages that it uses and their
    neighbours, since states are large; a write next to the right row is still seen."""

    def __init__(
        self, inputs: Buffers, states: Sequence[StateInfo], weights: Collection[str] = ()
    ) -> None:
        self.nodes: list[Recorded] = []
        self._weights = weights
        self._counts = {info.spec.name: info.spec.dims[0] for info in states}
        self._inputs = {name: array.copy() for name, array in inputs.items()}
        self._held: dict[str, StateValue] = {}

    def keep(self, step: ReferenceStep, operands: Arrays, results: Arrays, live: LiveRows) -> None:
        """One node, with values extended to the whole bucket. Step inputs and tables are the
        launch's, with the engine's row numbers."""
        if not self._held:
            for name, count in self._counts.items():
                self._held[name] = StateValue(name, live.numbers(name), count)
        aliases = step.op.aliases(step.attrs) if step.op is not None else {}
        for output, operand in aliases.items():
            if (held := self._held.get(step.inputs[operand])) is not None:
                self._held[step.outputs[output]] = held
        for name in step.outputs:
            if (held := self._held.get(name.removesuffix(STATE_OUT))) is not None:
                self._held[name] = held
        names = (*step.inputs, *step.outputs)
        states = {name: self._held[name] for name in names if name in self._held}

        def whole(name: str, array: NDArray[Any]) -> NDArray[Any]:
            if name in states:
                return live.owned(states[name].name, array)
            given = self._inputs.get(name)
            if given is None:
                return array if name in self._weights else live.padded(array)
            return given

        read = tuple(whole(n, a) for n, a in zip(step.inputs, operands, strict=True))
        made = tuple(whole(n, a) for n, a in zip(step.outputs, results, strict=True))
        self.nodes.append(Recorded(step, read, made, states))


class _RecordingExecutor(SynchronousExecutor):
    """An `Executor` that reports every launch to the recorder."""

    def __init__(self, key: BucketKey, inner: Executor, recorder: Recorder) -> None:
        self.specs = inner.specs
        self._key, self._inner, self._recorder = key, inner, recorder

    def run(self, buffers: Buffers) -> None:
        self._recorder.launch(self._key, self._inner, buffers)

    def close(self) -> None:
        self._inner.close()


def _longest(sessions: Sequence[CheckSession], family: str) -> int:
    """The index over all sessions of the first launch with the longest sequences."""
    launches = [launch for session in sessions for launch in session.launches]
    reach = [int(x.starts.sum() + x.counts.sum()) if x.family == family else -1 for x in launches]
    best = max(reach, default=-1)
    if best < 0:
        raise InternalError(f"no session launches a {family} bucket")
    return reach.index(best)
