"""The three levels of a check: whole model, layer by layer, op by op.

Each takes opened engines and returns a `Level`. Knows Polygraphy's comparator; builds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray
from polygraphy.comparator import Comparator, RunResults
from polygraphy.logger import G_LOGGER

from spark_engine.check.compare import Compare, Verdict
from spark_engine.check.engines import folder_of
from spark_engine.check.observe import layer_of, place
from spark_engine.check.operators import Bodies, Masks, Recorded, judge
from spark_engine.check.prompts import Session
from spark_engine.check.reference import ReferenceExecutor, Step
from spark_engine.check.report import Finding, Level
from spark_engine.check.runner import SessionRunner, feeds
from spark_engine.check.thresholds import Thresholds
from spark_engine.errors import InternalError
from spark_engine.interface import TILE
from spark_engine.runtime.load import Loaded
from spark_engine.runtime.memory import Memory

Buffers = Mapping[str, NDArray[Any]]


def compare_runs(
    name: str,
    candidate: tuple[str, Loaded],
    reference: tuple[str, Loaded],
    sessions: Sequence[Session],
    thresholds: Thresholds,
) -> Level:
    """Runs both over all sessions, launch by launch, and compares everything both show."""
    level = Level(name, candidate[0], reference[0], asdict(thresholds))
    labels = [f"{s.label}, launch {i}" for s in sessions for i in range(len(s.launches))]
    runners = [SessionRunner(label, loaded) for label, loaded in (candidate, reference)]
    findings: dict[str, Finding] = {}
    compare = Compare(thresholds)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        stream = Comparator.run(runners, list(feeds(sessions)), streaming=True)
        for label, results in zip(labels, stream, strict=True):
            verdicts = _verdicts(results, compare)
            level.launches += 1
            for verdict in verdicts:
                finding = findings.setdefault(verdict.name, Finding(verdict.name))
                finding.add(verdict.passed, verdict.reason, label, verdict.figures)
                if not verdict.passed and not level.first:
                    level.first = _where(verdict.name)
    level.findings = sorted(findings.values(), key=lambda f: place(f.name))
    return level


def check_ops(loaded: Loaded, sessions: Sequence[Session], thresholds: Thresholds) -> Level:
    """Every node of one decode and one prefill bucket alone, on operands of a real launch."""
    level = Level("op", "executor", "float64 reference", asdict(thresholds))
    folder = folder_of(loaded)
    weights = folder.weights()
    states = [info.spec.name for info in loaded.states]
    for family in ("prefill", "decode"):
        session, index = _fullest(sessions, family)
        launch = session.launches[index]
        key = (family, launch.rows)
        recorded, buffers = _record(loaded, session, index)
        bucket = next(b for b in folder.manifest.buckets if (b.family, b.rows) == key)
        bodies = Bodies(folder.engine(bucket).payload, weights)
        masks = Masks.of(buffers, TILE[family], states)
        level.launches += 1
        for one in recorded:
            finding = Finding(f"{family} {one.step.name}")
            for verdict in judge(one, bodies.run(one), masks, thresholds):
                label = f"{one.step.kind}, output {verdict.name}"
                finding.add(verdict.passed, verdict.reason, label, verdict.figures)
            level.findings.append(finding)
            if not finding.passed and not level.first:
                level.first = f"{one.step.kind} {one.step.name}"
    return level


def _verdicts(results: RunResults, compare: Compare) -> list[Verdict]:
    """The comparison of one launch, in the order in which a network computes."""
    accuracy = Comparator.compare_accuracy(results, compare_func=compare)
    (iterations,) = accuracy[0].values()
    verdicts = list(iterations[0].values())
    return sorted(verdicts, key=lambda v: place(v.name))


def _where(name: str) -> str:
    layer = layer_of(name)
    return name if layer is None else f"layers.{layer} ({name})"


def _fullest(sessions: Iterable[Session], family: str) -> tuple[Session, int]:
    """The launch with most tokens, of the smallest bucket among equals."""
    found = [
        (int(launch.counts.sum()), -launch.rows, i, session)
        for session in sessions
        for i, launch in enumerate(session.launches)
        if launch.family == family
    ]
    if not found:
        raise InternalError(f"no session launches a {family} bucket")
    best = max(found, key=lambda row: row[:2])
    return best[3], best[2]


def _record(loaded: Loaded, session: Session, index: int) -> tuple[list[Recorded], Buffers]:
    """Runs a session by reference up to launch `index`; every node of that launch."""
    folder = folder_of(loaded)
    recorded: list[Recorded] = []
    watching = False

    def watch(
        step: Step, operands: tuple[NDArray[Any], ...], results: tuple[NDArray[Any], ...]
    ) -> None:
        if watching:
            recorded.append(Recorded(step, operands, results))

    executors = {
        (b.family, b.rows): ReferenceExecutor(file.header, file.payload, folder.path, watch=watch)
        for b in folder.manifest.buckets
        for file in [folder.engine(b)]
    }
    memory = Memory(loaded.states, loaded.tables, {k: e.specs for k, e in executors.items()})
    for i, launch in enumerate(session.launches[: index + 1]):
        watching = i == index
        buffers = memory.buffers(launch.family, launch.rows, 0)
        for name, array in {**session.tables, **launch.feed()}.items():
            buffers[name].view(array.dtype)[...] = array
        executors[launch.family, launch.rows].run(buffers)
    return recorded, buffers
