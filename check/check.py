"""`run_check`: which engines are compared at which level, and on what.

The model level runs the engine as it is served. The layer level runs it with its residual stream
shown, which tells where a divergence begins. The op level takes every node out and runs it alone.
What they are held against:

    nothing given   the same graph and weights by the ops' float64 references
    a checkpoint    the checkpoint built unfused, by the ops' float64 references
    an engine       that engine, as it is served
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from spark_engine.check.engines import (
    Say,
    build_twin,
    by_reference,
    folder_of,
    is_engine,
    marked,
    open_engine,
)
from spark_engine.check.levels import check_ops, compare_runs
from spark_engine.check.prompts import Session, sessions
from spark_engine.check.report import Report
from spark_engine.check.thresholds import load, thresholds_for
from spark_engine.errors import OptionError
from spark_engine.runtime.load import Loaded

LEVELS = ("model", "layer", "op")
RECORDED = (
    "The capital of France is Paris, and the",
    "Once upon a time there was a small fox who was afraid of the dark. One evening",
    "What is 7 plus 5? Explain your answer in one sentence.",
)


@dataclass(frozen=True)
class Other:
    """The other side: `shown` for runs, and `alone`, of the same graph, for single nodes."""

    label: str
    shown: Loaded
    alone: Loaded


def run_check(
    engine: Path, against: Path | None, levels: Sequence[str], say: Say, seed: int = 0
) -> Report:
    """Checks the engine folder `engine`.

    Raises EngineError, CheckpointError, CapacityError or OptionError when one of the folders is
    unusable or the two engines cannot run the same launches.
    """
    report = Report(str(engine), str(against or ""))
    candidate = open_engine(engine)
    with _other(candidate, against, say) as other:
        manifests = [folder_of(side).manifest for side in (candidate, other.shown)]
        plan = _sessions(candidate, other.shown, seed)
        runs = [("model", candidate)] if "model" in levels else []
        runs += [("layer", marked(candidate))] if "layer" in levels else []
        if runs:
            say(f"running {sum(len(s.launches) for s in plan)} launches")
            limits = thresholds_for(manifests)
            report.levels += compare_runs(runs, (other.label, other.shown), plan, limits)
        if "op" in levels:
            say("running every node of one decode and one prefill bucket alone")
            limits = load(manifests[0].dtypes.activation.value)
            report.levels.append(check_ops(candidate, other.alone, plan, limits))
    return report


@contextmanager
def _other(candidate: Loaded, against: Path | None, say: Say) -> Iterator[Other]:
    if against is None:
        yield Other("float64 references", by_reference(candidate), candidate)
    elif is_engine(against):
        yield Other(str(against), marked(open_engine(against)), candidate)
    else:
        manifest = folder_of(candidate).manifest
        fused = any(sum(counts.values()) for counts in manifest.fusions.values())
        with tempfile.TemporaryDirectory(prefix="spark-check-") as where:
            say(f"building {against} unfused, and as the engine was built")
            twins = [
                open_engine(build_twin(against, manifest, Path(where) / name, say, fuse=fuse))
                for name, fuse in (("unfused", False), ("same", fused))
            ]
            label = f"{against}, unfused, float64 references"
            yield Other(label, by_reference(twins[0]), twins[1])


def _sessions(one: Loaded, other: Loaded, seed: int) -> list[Session]:
    """Sessions that both can run. Raises OptionError when the engines have too little in common."""
    a, b = one.limits, other.limits
    if (a.vocab, a.page_size) != (b.vocab, b.page_size):
        raise OptionError(f"the engines differ in vocabulary or page size: {a} and {b}")
    if a != b:
        raise OptionError(
            f"the engines have other limits, so they cannot run the same tables: {a} and {b}; "
            "build both with the same --max-context, --max-seqs and --kv-tokens"
        )
    common = sorted(set(one.executors) & set(other.executors))
    if {family for family, _ in common} != {"decode", "prefill"}:
        raise OptionError("the engines share no bucket of each family; build them with the same")
    return sessions(a, common, seed, _recorded(one))


def _recorded(loaded: Loaded) -> list[list[int]]:
    """Real prompts, where the engine has a tokenizer."""
    folder = folder_of(loaded).tokenizer_path
    if folder is None or not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [[int(i) for i in tokenizer.encode(text).ids] for text in RECORDED]
