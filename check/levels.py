"""The levels of a check: whole model, layer by layer, op by op, and the build's record.

Each takes opened engines and returns a `Level`. Builds nothing.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spark_engine.builder.native.launches import launches
from spark_engine.check.build_record import greedy, machine
from spark_engine.check.engines.open_engines import folder_of, has_graph, own_executor
from spark_engine.check.engines.prompts import CheckSession
from spark_engine.check.engines.reference import ReferenceStep, graphs_of
from spark_engine.check.engines.runner import SessionRunner, feeds
from spark_engine.check.nodes.compare_node import Recorded, compare_node, module_of
from spark_engine.check.nodes.native_nodes import NativeNodes
from spark_engine.check.nodes.node_recorder import RecordedLaunch, Recorder
from spark_engine.check.nodes.operators import NodeBodies
from spark_engine.check.verdicts.compare import Compare, Verdict
from spark_engine.check.verdicts.defined_values import layer_of, place
from spark_engine.check.verdicts.report import Finding, Level
from spark_engine.check.verdicts.thresholds import NodeLimits, Thresholds
from spark_engine.progress import Progress
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.vision import VISION
from spark_engine.weights_file import map_weights

NO_RECORD = "the build did not run this engine (spark-build --record does, where it can)"


def compare_runs(
    candidates: Sequence[tuple[str, Loaded]],
    reference: tuple[str, Loaded],
    sessions: Sequence[CheckSession],
    thresholds: Thresholds,
    shown: Progress,
) -> list[Level]:
    """Runs reference and candidates over all sessions, launch by launch; returns a level per
    candidate.

    Compares everything that a candidate and the reference both show, except states that they divide
    differently, as one rank and two do.
    """
    levels = [Level(name, reference[0], asdict(thresholds)) for name, _ in candidates]
    labels = [f"{s.label}, launch {i}" for s in sessions for i in range(len(s.launches))]
    runners = [SessionRunner(*pair) for pair in (*candidates, reference)]
    compare = Compare(thresholds)
    cut = _cut(candidates[0][1], reference[1])
    names = ", ".join(name for name, _ in candidates)
    with ExitStack() as active, shown.track(f"{names} level, launches", len(labels)) as step:
        *tried, truth = [active.enter_context(runner) for runner in runners]
        # Not Polygraphy's Comparator: it imports every framework that it finds, for seconds.
        for label, feed in zip(labels, feeds(sessions), strict=True):
            want = truth.launch(feed)
            for level, runner in zip(levels, tried, strict=True):
                found = runner.launch(feed)
                got = {name: array for name, array in found.items() if name not in cut}
                _take(level, label, compare(got, want).values())
            step()
    for level in levels:
        level.findings.sort(key=lambda f: place(f.name))
        level.settle(_where, thresholds.outliers)
    return levels


def _cut(one: Loaded, other: Loaded) -> set[str]:
    """States with different shapes on both sides, because other ranks have the rest of one."""
    shapes = {info.spec.name: info.spec.shape[1:] for info in other.states}
    return {
        info.spec.name
        for info in one.states
        if shapes.get(info.spec.name, info.spec.shape[1:]) != info.spec.shape[1:]
    }


def check_ops(loaded: Loaded, recorder: Recorder, limits: NodeLimits, shown: Progress) -> Level:
    """Checks every node of one decode and one prefill bucket of `loaded` alone.

    `recorder` has the operands and results of the same graph with known weights, computed by
    reference. Raises OptionError if the engine has other nodes.
    """
    level = Level("op", "float64 references, node by node", asdict(limits))
    # Of a native engine, this process has rank 0's part only.
    recorded_launches = [one for one in recorder.launches if has_graph(loaded) or not one.rank]
    with shown.track("op level, nodes", sum(len(one.nodes) for one in recorded_launches)) as step:
        for one in recorded_launches:
            level.launches += not one.rank
            alone, has = _alone(loaded, one)
            for recorded in one.nodes:
                if not has(recorded.step):
                    step()
                    continue
                level.findings.append(_finding(recorded, alone.run(recorded), one, limits))
                step()
    level.settle(lambda f: f"{f.module} ({f.name})", 0)
    return level


class _Alone(Protocol):
    def run(self, recorded: Recorded) -> tuple[NDArray[Any], ...]: ...


def _alone(
    loaded: Loaded, launch: RecordedLaunch
) -> tuple[_Alone, Callable[[ReferenceStep], bool]]:
    """The runner of a bucket's single nodes, by the engine's executor, and the nodes that it can
    run.

    If several GPUs share an engine, some nodes wait for other ranks, and are another op than the
    twin's node of that name: these are left out.
    """
    folder = folder_of(loaded)
    bucket = next(b for b in folder.manifest.buckets if (b.family, b.rows) == launch.key)
    payload = folder.engine(bucket).payload
    if has_graph(loaded):
        weights = map_weights(folder.weights_of(launch.rank))
        specs = [info.spec for info in loaded.states if info.unit == "image"]
        shapes = {s: (2, *map(int, s.shape[1:])) for s in specs}
        unread = {s.name: np.full(shape, np.nan, s.dtype.numpy) for s, shape in shapes.items()}
        graphs = graphs_of(payload, folder.manifest.ranks)
        return NodeBodies(graphs, weights, unread), lambda step: True
    alone = NativeNodes(own_executor(loaded, launch.key), payload, launch.weights)
    if folder.manifest.ranks == 1:
        return alone, lambda step: True
    ops = {one.node: one.op for one in launches(payload)}
    return alone, lambda step: ops.get(step.name) == step.kind


def _finding(
    recorded: Recorded,
    results: tuple[NDArray[Any], ...],
    launch: RecordedLaunch,
    limits: NodeLimits,
) -> Finding:
    step, family = recorded.step, launch.key[0]
    module = module_of(recorded, launch.weights)
    of_rank = f" of rank {launch.rank}" if launch.rank else ""
    finding = Finding(f"{family} {step.name}{of_rank}", f"{family} {step.kind}", module=module)
    for verdict in compare_node(recorded, results, launch.masks, limits):
        finding.add(verdict, f"{step.kind}, output {verdict.name}")
    return finding


def _take(level: Level, label: str, verdicts: Iterable[Verdict]) -> None:
    """Adds one launch's verdicts."""
    level.launches += 1
    known = {finding.name: finding for finding in level.findings}
    for verdict in verdicts:
        finding = known.get(verdict.name)
        if finding is None:
            finding = Finding(verdict.name, re.sub(r"^layers\.\d+\.", "layers.*.", verdict.name))
            level.findings.append(finding)
        finding.add(verdict, label)


def _where(finding: Finding) -> str:
    layer = layer_of(finding.name)
    return finding.name if layer is None else f"layers.{layer} ({finding.name})"


def check_record(loaded: Loaded) -> Level | str:
    """Checks that every bucket generates the tokens of the record; or why that is not possible.

    On another machine than the build's a near tie may have another result, which is no error.
    """
    folder = folder_of(loaded)
    kept, here = folder.manifest.greedy, machine(loaded)
    if not kept.md5:
        return NO_RECORD
    if kept.machine != here:
        return f"the record was made on {kept.machine}, and this is {here}"
    level = Level("record", f"its build's, on {kept.machine}", {})
    level.launches = len(kept.md5)
    if has_graph(loaded):  # with the threads and buckets of the build
        text = [b for b in folder.manifest.buckets if b.family != VISION]
        least = len(kept.md5) < len(text)
        with closing(load(folder.path, threads=1, cache_bytes=0, least=least)) as alike:
            found = greedy(alike).md5
    else:
        found = greedy(loaded).md5
    for name, wanted in kept.md5.items():
        same = found.get(name) == wanted
        finding = Finding(name, "greedy text")
        words = "" if same else "other tokens than when it was built"
        finding.add(Verdict(name, words, hard=not same), found.get(name, ""))
        level.findings.append(finding)
    level.settle(lambda f: f.name, 0)
    return level
