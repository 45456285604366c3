"""`run_check`: decides which engines are compared, at which levels, and on which inputs.

The model level runs the engine as it is served. The layer level runs it with its residual stream as
outputs, which shows where a divergence starts. The op level runs every node alone. They are
compared with:

    nothing         the same graph and weights, computed by the ops' float64 references
    a checkpoint    the checkpoint built unfused, computed by the ops' float64 references
    an engine       that engine, as it is served

A native engine holds launches and no graph. A checkpoint given for it is built for the CPU with the
same fusions and dtypes, so that every value is rounded to bf16 where the kernels round it: compared
with one in f32, a router of a random network chooses other experts for most tokens. Its layers are
compared by their states, which both sides keep, and its nodes by running the launches of each over
the operands of the twin's node. The text level decodes greedily and counts the tokens that the two
sides choose differently. The record level runs every bucket over fixed prompts and compares the
tokens with those of the build's record; it needs no other side.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from spark_engine.check.engines.open_engines import (
    GRAPH,
    build_twin,
    by_reference,
    folder_of,
    has_graph,
    is_engine,
    is_fused,
    open_by_reference,
    open_engine,
    with_exposed_layers,
)
from spark_engine.check.engines.prompts import CheckSession, greedy_session, sessions
from spark_engine.check.levels import NO_RECORD, check_ops, check_record, compare_runs
from spark_engine.check.nodes.node_recorder import Recorder
from spark_engine.check.texts.reference_process import texts_in_process
from spark_engine.check.texts.repeat import Repeated, repeat
from spark_engine.check.texts.text import compare_texts, decode_rows
from spark_engine.check.verdicts.report import CheckReport, Level
from spark_engine.check.verdicts.thresholds import node_limits, thresholds_for
from spark_engine.engine_file import read_manifest
from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL
from spark_engine.progress import Progress, Say
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.executors.memory import BucketKey

LEVELS = ("model", "layer", "op", "text", "record")
RECORDED = (
    "The capital of France is Paris, and the",
    "Once upon a time there was a small fox that was afraid of the dark. One evening",
    "What is 7 plus 5? Explain your answer in one sentence.",
)


@dataclass(frozen=True)
class Other:
    """The other side: `shown` for whole runs, and `alone`, by reference, for single nodes.

    `alone` has the candidate's graph; None where there is none that references can compute.
    `folder`: the engine that `shown` computes by references; None if it does not.
    """

    label: str
    shown: Loaded
    alone: Loaded | None
    folder: Path | None = None


def run_check(
    engine: Path, against: Path | None, levels: Sequence[str], shown: Progress, seed: int = 0
) -> CheckReport:
    """Checks the engine folder `engine`; `shown` receives progress messages.

    Raises EngineError, CheckpointError, CapacityError or OptionError if a folder is unusable or the
    two engines cannot run the same launches.
    """
    report = CheckReport(str(engine), str(against or ""))
    if tuple(levels) == ("record",) and not read_manifest(engine).greedy.md5:
        raise OptionError(f"{engine}: {NO_RECORD}")  # before an engine is loaded
    shown.say(f"opening {engine}")
    with closing(open_engine(engine)) as candidate:
        record = check_record(candidate) if "record" in levels else None
        if isinstance(record, str):
            if tuple(levels) == ("record",):
                raise OptionError(f"{engine}: {record}")
            shown.say(f"without the record level: {record}")
        if compared := [level for level in levels if level != "record"]:
            with _other(candidate, against, shown.say) as other:
                _compare(report, candidate, other, compared, shown, seed)
        report.levels += [record] if isinstance(record, Level) else []
    return report


def run_repeat(engine: Path, count: int, shown: Progress, seed: int = 0) -> Repeated:
    """Repeats the same requests `count` times in the engine folder as it is served.

    Raises EngineError or CapacityError if it cannot be opened.
    """
    shown.say(f"opening {engine}")
    with closing(load(engine, threads=1, shown=shown)) as loaded:
        return repeat(loaded, str(engine), count, _recorded(loaded), shown, seed)


def _compare(
    report: CheckReport,
    candidate: Loaded,
    other: Other,
    levels: Sequence[str],
    shown: Progress,
    seed: int,
) -> None:
    plan = _sessions(candidate, other.shown, seed)
    recorder = None
    if "op" in levels and other.alone is not None:
        recorder = Recorder(other.alone, plan)
    elif "op" in levels:
        words = "the nodes of a native engine are compared only with its checkpoint"
        if tuple(levels) == ("op",):
            raise OptionError(f"{words}, and {report.against} is an engine")
        shown.say(f"without the op level: {words}")
    if "text" not in levels:
        _nodes_and_runs(report, candidate, other, recorder, plan, levels, shown)
        return
    common = _common(candidate, other.shown)
    texts = greedy_session(candidate.limits, common, seed, _recorded(candidate))
    rows = decode_rows(common, texts)
    limits = thresholds_for([folder_of(side).manifest for side in (candidate, other.shown)])
    # References are slow, and their results depend on no other level.
    with texts_in_process(other.shown, other.folder, texts, rows, shown.say) as truths:
        _nodes_and_runs(report, candidate, other, recorder, plan, levels, shown)
        decoded = (other.label, truths())
        level = compare_texts(candidate, decoded, texts, rows, limits, shown)
    report.levels.append(level)


def _nodes_and_runs(
    report: CheckReport,
    candidate: Loaded,
    other: Other,
    recorder: Recorder | None,
    plan: Sequence[CheckSession],
    levels: Sequence[str],
    shown: Progress,
) -> None:
    """The levels `op`, `model` and `layer`, which share launches."""
    manifests = [folder_of(side).manifest for side in (candidate, other.shown)]
    truth = other.shown
    runs = _runs(candidate, levels)
    if recorder is not None and other.alone is other.shown and runs:
        truth = recorder.recording
    elif recorder is not None:
        recorder.run(shown)
    if runs:
        limits = thresholds_for(manifests)
        report.levels += compare_runs(runs, (other.label, truth), plan, limits, shown)
    if recorder is not None:
        exact = node_limits(manifests[0].dtypes.activation)
        report.levels.insert(0, check_ops(candidate, recorder, exact, shown))


def _runs(candidate: Loaded, levels: Sequence[str]) -> list[tuple[str, Loaded]]:
    """The candidate by level. A native engine runs once, since its states exist once, on the
    device."""
    if not has_graph(candidate):
        return [(name, candidate) for name in ("layer", "model") if name in levels][:1]
    runs = [("model", candidate)] if "model" in levels else []
    return runs + ([("layer", with_exposed_layers(candidate))] if "layer" in levels else [])


def _refuse(candidate: Loaded, against: Path) -> None:
    if not has_graph(candidate) and read_manifest(against).executor != GRAPH:
        raise OptionError(
            f"{folder_of(candidate).path} and {against} are both native engines, and a process "
            "opens one at a time: give the checkpoint, or a CPU engine of it"
        )
    manifest = read_manifest(against)
    if manifest.executor != GRAPH and manifest.ranks > 1:
        raise OptionError(
            f"{against} is an engine of {manifest.ranks} GPUs, of which only one's logits are "
            f"read: swap the two (spark-check {against} --against {folder_of(candidate).path})"
        )


@contextmanager
def _other(candidate: Loaded, against: Path | None, say: Say) -> Iterator[Other]:
    if against is None:
        if not has_graph(candidate):
            raise OptionError(
                f"{folder_of(candidate).path} is a native engine and holds no graph that could be "
                "computed by reference: give --against its checkpoint or a CPU engine of it"
            )
        exact = by_reference(candidate)
        yield Other("float64 references", exact, exact, folder_of(candidate).path)
    elif is_engine(against):
        _refuse(candidate, against)
        alone = by_reference(candidate) if has_graph(candidate) else None
        yield Other(str(against), with_exposed_layers(open_engine(against)), alone)
    elif not has_graph(candidate):
        manifest = folder_of(candidate).manifest
        with tempfile.TemporaryDirectory(prefix="spark-check-") as where:
            say(f"building {against} as a graph")
            fused, ranks = is_fused(manifest), manifest.ranks
            twin = build_twin(against, candidate, Path(where) / "cpu", say, fused, ranks)
            label = f"{against}, float64 references, rounded alike"
            exact = open_by_reference(twin)
            yield Other(label, exact, exact, twin)
    else:
        manifest = folder_of(candidate).manifest
        with tempfile.TemporaryDirectory(prefix="spark-check-") as where:
            say(f"building {against} unfused, and as the engine was built")
            twins = [
                open_engine(build_twin(against, candidate, Path(where) / name, say, fuse, ranks))
                for name, fuse, ranks in (
                    ("unfused", False, 1),
                    ("same", is_fused(manifest), manifest.ranks),
                )
            ]
            label = f"{against}, unfused, float64 references"
            exact, same = (by_reference(twin) for twin in twins)
            yield Other(label, exact, same, folder_of(exact).path)


def _sessions(one: Loaded, other: Loaded, seed: int) -> list[CheckSession]:
    """Sessions that both engines can run. Raises OptionError if they have too little in common."""
    a, b = one.limits, other.limits
    if (a.vocab, a.page_size) != (b.vocab, b.page_size):
        raise OptionError(
            f"{a} and {b} differ in vocabulary or page size: give engines of one model"
        )
    # States are shown with their rings folded in, and without what drafts and snapshots add; texts
    # have no rows of images.
    alike = {"gdn_ring": a.gdn_ring, "drafts": a.drafts, "suffix": a.suffix}
    if a != replace(b, **alike, snapshots=a.snapshots, image_rows=a.image_rows):
        raise OptionError(
            f"the engines have different limits, so they cannot run the same tables: {a} and {b}; "
            "build both with the same --max-context, --max-seqs and --kv-tokens"
        )
    return sessions(a, _common(one, other), seed, _recorded(one))


def _common(one: Loaded, other: Loaded) -> list[BucketKey]:
    """Buckets of both engines. Raises OptionError unless one decodes and one prefills."""
    common = sorted(set(one.executors) & set(other.executors))
    if not {family for family, _ in common} >= {DECODE, PREFILL}:
        raise OptionError("the engines share no bucket: build both with one --decode and --prefill")
    return common


def _recorded(loaded: Loaded) -> list[list[int]]:
    """Real prompts, if the engine has a tokenizer."""
    folder = folder_of(loaded).tokenizer_path
    if folder is None or not (folder / "tokenizer.json").is_file():
        return []
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [[int(i) for i in tokenizer.encode(text).ids] for text in RECORDED]
