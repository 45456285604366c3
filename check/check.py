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
    """The other side of a comparison: as run whole, and as run to show its layers."""

    label: str
    served: Loaded
    shown: Loaded


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
        manifests = [folder_of(side).manifest for side in (candidate, other.served)]
        limits = thresholds_for(manifests)
        plan = _sessions(candidate, other.served, seed)
        served, shown = ("served", candidate), ("layers shown", candidate)
        if "model" in levels:
            say(f"model: {sum(len(s.launches) for s in plan)} launches")
            pair = (other.label, other.served)
            report.levels.append(compare_runs("model", served, pair, plan, limits))
        if "layer" in levels:
            say("layer: the same with the residual stream shown")
            pair = (other.label, other.shown)
            shown = ("layers shown", marked(candidate))
            report.levels.append(compare_runs("layer", shown, pair, plan, limits))
        if "op" in levels:
            say("op: every node of one decode and one prefill bucket alone")
            alone = load(manifests[0].dtypes.activation.value)
            report.levels.append(check_ops(candidate, plan, alone))
    return report


@contextmanager
def _other(candidate: Loaded, against: Path | None, say: Say) -> Iterator[Other]:
    if against is None:
        computed = by_reference(candidate)
        yield Other("float64 reference", computed, computed)
    elif is_engine(against):
        loaded = open_engine(against)
        yield Other(str(against), loaded, marked(loaded))
    else:
        with tempfile.TemporaryDirectory(prefix="spark-check-") as where:
            manifest = folder_of(candidate).manifest
            twin = open_engine(build_twin(against, manifest, Path(where), say, fuse=False))
            computed = by_reference(twin)
            yield Other(f"{against}, unfused, float64 reference", computed, computed)


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
    return [list(tokenizer.encode(text).ids) for text in RECORDED]
