"""`spark-check` of engines of several ranks on a CPU: sound ones pass, a fault names its rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.check.check import LEVELS, run_check
from spark_engine.check.engines.open_engines import expose_layers, folder_of, open_engine
from spark_engine.check.engines.ranks import RanksExecutor, RankStates, Rendezvous
from spark_engine.check.verdicts.report import CheckReport, Level
from spark_engine.engine_file import read_manifest
from spark_engine.errors import ExecutorError
from spark_engine.manifest import StateInfo
from spark_engine.progress import Progress
from spark_engine.runtime.executors.executor import Specs
from spark_engine.segments import Segment, Segments
from spark_engine.tensors import DType, TensorSpec
from tests.check.faulty_engines import corrupt
from tests.checkpoints import write_checkpoint
from tests.runtime.ranks.test_rank_processes import AT_LENGTH

QUIET = Progress(None)
SHALLOW = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 128,
}
OPTIONS = Options(decode=(2,), prefill=(64,), max_context=67, max_seqs=2, kv_dtype="f32")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Of one rank, and of two (with a build record). The checkpoint is in the same folder."""
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "checkpoint", SHALLOW, format="nvfp4", seed=4)
    for ranks in (1, 2):
        options = replace(OPTIONS, tp=ranks)
        report = build(
            folder / "checkpoint",
            folder / str(ranks),
            options,
            lambda text: None,
            record=None if ranks > 1 else False,
        )
        assert not [note for note in report.notes if note.startswith("no record")]
    return {ranks: folder / str(ranks) for ranks in (1, 2)}


def _level(report: CheckReport, name: str) -> Level:
    return next(level for level in report.levels if level.name == name)


def _names(level: Level) -> set[str]:
    return {finding.name for finding in level.findings}


def test_a_sound_engine_of_two_ranks_agrees_with_its_references(engines: dict[int, Path]) -> None:
    report = run_check(engines[2], None, ("op", "layer", "record"), QUIET)
    assert report.passed, (report.first, report.headlines)
    shown = _names(_level(report, "layer"))
    assert shown >= {"logits", "layers.0.mixed", "layers.1.out", "token_counts"}
    assert {"layers.0.gdn_state", "layers.0.rank1.gdn_state", "layers.1.rank1.k_pages"} <= shown
    assert "rank1.token_counts" not in shown, "what all ranks have alike is shown once"
    nodes = _names(_level(report, "op"))
    first = {name for name in nodes if " of rank " not in name}
    assert nodes == first | {f"{name} of rank 1" for name in first} and len(first) > 30
    logits = next(f for f in _level(report, "layer").findings if f.name == "logits")
    assert 0 < logits.figures["rel_l2"] < 2e-5, "equal to the last bit is no comparison"
    record = read_manifest(engines[2]).greedy.md5
    assert _level(report, "record").launches == len(record) == 2


@AT_LENGTH
def test_it_says_what_one_rank_and_the_checkpoint_say(engines: dict[int, Path]) -> None:
    for other in (engines[1], engines[2], engines[2].parent / "checkpoint"):
        report = run_check(engines[2], other, LEVELS, QUIET)
        assert report.passed, (other, report.first, report.headlines)
        assert {level.name for level in report.levels} == {*LEVELS}
        assert _level(report, "text").findings[0].figures["tokens"] > 40
        shown = _names(_level(report, "layer"))
        assert shown >= {"logits", "layers.0.mixed", "layers.1.out", "last_tokens"}
        parts = {name for name in shown if name.endswith(("_state", "_pages"))}
        assert bool(parts) == (other == engines[2]), "what has other parts is not compared"


def test_the_fault_of_another_rank_is_found_and_named(
    engines: dict[int, Path], tmp_path: Path
) -> None:
    """By its checkpoint, which is computed on one rank."""
    tensor = "layers.1.self_attn.o_proj.weight"

    def change(data: Any) -> Any:
        data[:16] = 0
        return data

    bad = corrupt(engines[2], tensor, tmp_path / "bad", change, "weights.1.safetensors")
    report = run_check(bad, engines[2].parent / "checkpoint", ("op", "layer"), QUIET)
    assert not report.passed
    failed = {f.name for f in _level(report, "op").findings if not f.passed}
    assert failed == {f"{f} layers.1.self_attn.o_proj.y of rank 1" for f in ("decode", "prefill")}
    assert _level(report, "layer").first == "layers.1 (layers.1.mixed)"
    assert "layers.0.gdn_state" not in _names(_level(report, "layer")), "one rank has it whole"


def test_marks_between_segments_are_outputs_and_pass_no_more(engines: dict[int, Path]) -> None:
    folder = folder_of(open_engine(engines[2]))
    file = folder.engine(folder.manifest.buckets[0])
    exposed = expose_layers(file, folder.manifest)
    added = {s.name for s in exposed.header.outputs} - {s.name for s in file.header.outputs}
    assert added == {f"layers.{i}.{part}" for i in (0, 1) for part in ("mixed", "out")}
    segments = Segments.decode(exposed.payload)
    assert not added & {spec.name for spec in segments.values}
    made = [name for s in segments.steps if isinstance(s, Segment) for name in s.outputs]
    assert len(made) == len(set(made)) and added <= set(made)


def test_states_of_all_ranks_are_saved_and_restored() -> None:
    spec = TensorSpec("layers.0.gdn_state", DType.F32, (4, 2))
    counts = TensorSpec("token_counts", DType.I32, (3, 5))
    states = RankStates([StateInfo(spec, "sequence"), StateInfo(counts, "slot")], 2)
    assert [info.spec.name for info in states.shown] == [
        *("layers.0.gdn_state", "token_counts", "layers.0.rank1.gdn_state")
    ]
    for rank, one in enumerate(states.of):
        one.arrays[spec.name][1], one.arrays[counts.name][1] = 3 + rank, 7
    saved = states.save(1, [])
    assert (
        saved.rows["layers.0.gdn_state"][0] == 3 and saved.rows["layers.0.rank1.gdn_state"][0] == 4
    )
    for one in states.of:
        for array in one.arrays.values():
            array[...] = -1
    states.restore(saved, 2, [])
    for rank, one in enumerate(states.of):
        assert (one.arrays[spec.name][2] == 3 + rank).all()
        assert (one.arrays[counts.name][2] == 7).all() and (one.arrays[spec.name][1] == -1).all()


def test_logits_of_all_ranks_are_shown_next_to_each_other() -> None:
    """Where each has those of its ids alone."""

    class Half:
        def __init__(self, rank: int) -> None:
            outputs = TensorSpec("logits", DType.F32, (2, 3)), TensorSpec("ok", DType.I32, (2,))
            self.specs, self.rank = Specs((), (), outputs), rank

        def run(self, buffers: Any) -> None:
            buffers["logits"][...] = self.rank + np.arange(3) / 10
            buffers["ok"][...] = self.rank

    halves: list[Any] = [Half(0), Half(1)]
    made = RanksExecutor(halves, RankStates([], 2), Rendezvous(2), vocab=6)
    buffers = {s.name: np.full(s.dims, -1, s.dtype.numpy) for s in made.specs.outputs}
    made.run(buffers)
    np.testing.assert_allclose(buffers["logits"], [[0, 0.1, 0.2, 1, 1.1, 1.2]] * 2, rtol=1e-6)
    assert buffers["ok"].tolist() == [0, 0], "of the rest rank 0's are shown"


def test_a_rank_that_fails_ends_the_others_and_is_what_is_raised() -> None:
    rendezvous = Rendezvous(3)

    def fails() -> None:
        raise ExecutorError("rank 1 has no such bucket")

    waits = [rendezvous.comms[0].barrier, fails, rendezvous.comms[2].barrier]
    with pytest.raises(ExecutorError, match="has no such bucket"):
        rendezvous.run(waits)
    rendezvous.close()
