"""The three levels of a check: whole model, layer by layer, op by op.

Each takes opened engines and returns a `Level`. Knows Polygraphy's comparator; builds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from numpy.typing import NDArray
from polygraphy.comparator import Comparator
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
    candidates: Sequence[tuple[str, Loaded]],
    reference: tuple[str, Loaded],
    sessions: Sequence[Session],
    thresholds: Thresholds,
) -> list[Level]:
    """Runs all over all sessions, launch by launch; a level per candidate, which names it.

    Everything that a candidate and the reference both show is compared.
    """
    levels = [Level(name, reference[0], asdict(thresholds)) for name, _ in candidates]
    labels = [f"{s.label}, launch {i}" for s in sessions for i in range(len(s.launches))]
    runners = [SessionRunner(*pair) for pair in (*candidates, reference)]
    compare = Compare(thresholds)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        stream = Comparator.run(runners, list(feeds(sessions)), streaming=True)
        for label, results in zip(labels, stream, strict=True):
            # Not by compare_accuracy: it computes statistics of every array for a log.
            *shown, (truth,) = results.values()
            for level, (one,) in zip(levels, shown, strict=True):
                _take(level, label, compare(one, truth).values())
    for level in levels:
        level.findings.sort(key=lambda f: place(f.name))
        level.settle(_where, thresholds.stray)
    return levels


def check_ops(
    loaded: Loaded, truth: Loaded, sessions: Sequence[Session], thresholds: Thresholds
) -> Level:
    """Every node of one decode and one prefill bucket of `loaded` alone.

    Operands and results are recorded from `truth`, the same graph with weights beyond doubt,
    computed by reference; it may be `loaded` itself.
    """
    level = Level("op", "float64 references, node by node", asdict(thresholds))
    folder = folder_of(loaded)
    weights = folder.weights()
    states = [info.spec.name for info in loaded.states]
    for family in ("prefill", "decode"):
        session, index = _fullest(sessions, family)
        recorded, buffers = _record(truth, session, index)
        key = (family, session.launches[index].rows)
        bucket = next(b for b in folder.manifest.buckets if (b.family, b.rows) == key)
        bodies = Bodies(folder.engine(bucket).payload, weights)
        masks = Masks.of(buffers, TILE[family], states)
        level.launches += 1
        for one in recorded:
            finding = Finding(f"{family} {one.step.name}", f"{family} {one.step.kind}")
            for verdict in judge(one, bodies.run(one), masks, thresholds):
                label = f"{one.step.kind}, output {verdict.name}"
                finding.add(verdict, label)
            level.findings.append(finding)
    level.settle(lambda f: f.name, 0)
    return level


def _take(level: Level, label: str, verdicts: Iterable[Verdict]) -> None:
    """Adds one launch's verdicts."""
    level.launches += 1
    known = {finding.name: finding for finding in level.findings}
    for verdict in verdicts:
        finding = known.get(verdict.name)
        if finding is None:
            finding = Finding(verdict.name, _any_layer(verdict.name))
            level.findings.append(finding)
        finding.add(verdict, label)


def _any_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)


def _where(finding: Finding) -> str:
    layer = layer_of(finding.name)
    return finding.name if layer is None else f"layers.{layer} ({finding.name})"


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
