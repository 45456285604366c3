"""The command that runs the rehearsal's parts: what they tell is kept, deaths and hangs too."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.repository import ROOT

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
from benchmarks.rehearsal import __main__ as rehearsal
from benchmarks.rehearsal import (
    check,
    cut_models,
    layers,
    ops,
    sanitized,
    skip_done_tests,
    source_digest,
    steps,
    tables,
)
from benchmarks.rehearsal import tests as gpu_tests
from benchmarks.rehearsal.other_process import Pulse
from benchmarks.rehearsal.reporter import Reporter
from benchmarks.result_files import CONFIGS, MODELS, read, write
from spark_engine.errors import ExecutorError
from spark_engine.kernel import GB10, H200
from spark_engine.kernel import rehearsal as rehearsed
from spark_engine.models.open_model import open_model

OPTIONS = {"rehearse": "sm_121a", "work": "/nowhere"}
PART = """
import json, os, sys, time
sys.path.insert(0, {root!r})
from benchmarks.rehearsal.reporter import Reporter
from spark_engine.errors import ExecutorError
def lose():
    raise ExecutorError("an illegal address")
reporter = Reporter()
reporter.head(sms=48, rehearses=os.environ["SPARK_REHEARSE"], given=reporter.options["work"])
print("a line of a library")
for label in ("a", "b", "c", "d"):
    if label in reporter.done:
        continue
    with reporter.trial(label):
        {fault}
        reporter.row(label, right=True, us=1.5)
"""


def part(tmp_path: Path, fault: str) -> Any:
    """What starts a part in which `fault` is done before each row."""
    path = tmp_path / "part.py"
    path.write_text(PART.format(root=str(ROOT), fault=fault))
    return lambda name, words: [sys.executable, str(path), *words]


def run(tmp_path: Path, fault: str, silence: float = 200.0) -> tuple[bool, dict[str, Any]]:
    """Whether all was right, and the file that was kept."""
    found = rehearsal.Found(tmp_path / "out" / "x.json.xz")
    right = rehearsal.run_part("x", found, OPTIONS, silence, part(tmp_path, fault))
    return right, read(found.path)


def test_what_a_part_tells_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, kept = run(tmp_path, "pass")
    assert right and [row["label"] for row in kept["rows"]] == ["a", "b", "c", "d"]
    assert (kept["sms"], kept["rehearses"], kept["given"]) == (48, "sm_121a", "/nowhere")
    printed = capsys.readouterr().out
    assert "right a: us 1.5" in printed and "a line of a library" in printed


def test_one_that_fails_is_wrong_and_the_others_run(tmp_path: Path) -> None:
    right, kept = run(tmp_path, "assert label != 'b', 'off by one'")
    assert not right
    assert {row["label"]: row["right"] for row in kept["rows"]} == dict(
        a=True, b=False, c=True, d=True
    )
    assert kept["rows"][1]["note"] == "AssertionError: off by one"


@pytest.mark.parametrize(
    ("fault", "silence", "says"),
    [
        ("os._exit(9) if label == 'b' else None", 200.0, "ended with code 9"),
        ("reporter._lose() if label == 'b' else None", 200.0, "AttributeError"),
        ("lose() if label == 'b' else None", 200.0, "ExecutorError: an illegal address"),
        ("time.sleep(60) if label == 'b' else None", 8.0, "hung: it said nothing for 8 s"),
    ],
)
def test_a_part_that_dies_or_hangs_is_resumed_behind_it(
    tmp_path: Path, fault: str, silence: float, says: str
) -> None:
    right, kept = run(tmp_path, fault, silence)
    rows = {row["label"]: row for row in kept["rows"]}
    assert not right and sorted(rows) == ["a", "b", "c", "d"]
    assert says in rows["b"]["note"] and not rows["b"]["right"]
    assert all(rows[label]["right"] for label in "acd")


def test_one_that_dies_before_it_begins_is_not_tried_for_ever(tmp_path: Path) -> None:
    starts: list[Sequence[str]] = []

    def start(name: str, words: Sequence[str]) -> list[str]:
        starts.append(words)
        return [sys.executable, "-c", "raise SystemExit(3)"]

    found = rehearsal.Found(tmp_path / "x.json")
    assert not rehearsal.run_part("x", found, OPTIONS, 200.0, start)
    assert len(starts) <= rehearsal.TRIES
    assert found.rows["the part itself"]["note"] == "it ended with code 3"


def test_a_part_that_never_ends_is_not_right(tmp_path: Path) -> None:
    """Each try tells a row and dies behind it: all rows are right, and the part was given up."""
    reporter: list[Sequence[str]] = []

    def start(name: str, words: Sequence[str]) -> list[str]:
        reporter.append(words)
        row = f'{{"row": {{"label": "{len(reporter)}", "right": true}}}}'
        return [sys.executable, "-c", f"print('{row}', flush=True); raise SystemExit(3)"]

    found = rehearsal.Found(tmp_path / "x.json")
    assert not rehearsal.run_part("x", found, OPTIONS, 200.0, start)
    assert len(found.rows) == len(reporter) == rehearsal.TRIES and "gave_up" in found.head


def test_rows_of_other_sources_are_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with today's digest are kept; those of the older file, which have none, are not."""
    held = {"a": "1", "b": "2", "c": "3", "d": "4"}
    path = tmp_path / "part.py"
    script = PART.format(root=str(ROOT), fault="pass")
    path.write_text(
        script.replace("reporter = Reporter()", f"reporter = Reporter(); reporter.hold({held})")
    )
    command: Any = lambda part, words: [sys.executable, str(path), *words]  # noqa: E731
    monkeypatch.setattr(rehearsal.run_part, "__defaults__", (command,))
    rows = [
        {"label": "a", "right": True, "us": 7.0, "digest": "1"},
        {"label": "b", "right": True, "us": 7.0, "digest": "of another kernel"},
        {"label": "c", "right": True, "us": 7.0},
        {"label": "gone", "right": True, "us": 7.0, "digest": "5"},
    ]
    kept = tmp_path / "ops.json.xz"
    write(kept, {"rows": rows})
    monkeypatch.setattr(rehearsal, "present", lambda: H200)
    monkeypatch.setattr(sys, "argv", ["rehearsal", "--part", "ops", "--out", str(tmp_path)])
    assert rehearsal.main() == 0
    found = {
        row["label"]: (row["us"], row["digest"], row.get("card")) for row in read(kept)["rows"]
    }
    card = H200.card.product
    new = {label: (1.5, digest, card) for label, digest in (("b", "2"), ("c", "3"), ("d", "4"))}
    assert found == {"a": (7.0, "1", None)} | new
    assert "3 rows are of other sources, b the first: measured again" in capsys.readouterr().out


def test_what_died_in_this_call_is_not_tried_again_for_want_of_a_digest(tmp_path: Path) -> None:
    held = dict.fromkeys("abcd", "1")
    fault = f"reporter.hold({held}); os._exit(9) if label == 'b' else None"
    right, kept = run(tmp_path, fault)
    rows = {row["label"]: row for row in kept["rows"]}
    assert not right and sorted(rows) == ["a", "b", "c", "d"] and "gave_up" not in kept
    assert "digest" not in rows["b"] and rows["c"]["digest"] == "1"


def test_a_digest_is_of_the_kernel_its_headers_and_the_launch() -> None:
    (work, *_) = next(found for _, _, found in ops.works(GB10, {"embed"}))
    first = source_digest.of_plan(work)
    assert first == source_digest.of_plan(work) and len(first) == 16
    launch = work.plan.launches[0]
    other = replace(work.plan, launches=(replace(launch, defines=(*launch.defines, ("X", "1"))),))
    assert source_digest.of_plan(replace(work, plan=other)) != first
    texts = source_digest._texts(work.tactic.source)
    assert len(texts) > 1, "with its headers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_digest, "_texts", lambda name: texts | {"a_header.cuh": "// changed"})
        assert source_digest.of_plan(work) != first


def _lay(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_digest_of_a_script_is_of_the_product_and_of_what_it_reads(tmp_path: Path) -> None:
    _lay(tmp_path, {
        "plugins/x/x.cu": "a",
        "benchmarks/__init__.py": "",
        "benchmarks/part.py": "from benchmarks import graphs\nrun('benchmarks.named')",
        "benchmarks/graphs.py": "import numpy\nfrom tests.checkpoints import draw",
        "benchmarks/named.py": "",
        "tests/conftest.py": "",
        "tests/checkpoints.py": "import tests.helper.deep",
        "tests/helper/deep.py": "",
        "tests/helper/fake.cuh": "",
        "tests/test_other.py": "import tests.checkpoints",
    })  # fmt: skip
    known = lambda: source_digest.of_script(Path("benchmarks/part.py"), tmp_path)  # noqa: E731
    first = known()
    assert len(first) == 16
    for name in ("plugins/x/notes.md", "tests/test_other.py", "benchmarks/tables.py",
                 "check/check.py"):  # fmt: skip
        _lay(tmp_path, {name: "says other things"})
        assert known() == first, f"{name} does not count"
    seen = {first}
    for name in ("plugins/x/x.cu", "benchmarks/graphs.py", "benchmarks/named.py",
                 "tests/helper/deep.py", "tests/helper/fake.cuh", "tests/conftest.py"):  # fmt: skip
        path = tmp_path / name
        path.write_text(path.read_text() + "\n# changed\n")
        seen.add(known())
    (tmp_path / "plugins/x/x.cu").rename(tmp_path / "plugins/x/y.cu")
    assert len({*seen, known()}) == 8
    _lay(tmp_path, {"benchmarks/named.py": "from spark_engine.check.check import run_check"})
    checking = known()
    _lay(tmp_path, {"check/check.py": "and others"})
    assert known() != checking, "spark-check counts where it is used"


def test_the_tests_for_a_gpu_are_found_with_the_sources_of_each() -> None:
    files = gpu_tests.files()
    assert {
        "tests/benchmarks/test_launch_times.py",
        "tests/plugins/delta_rule/test_cuda_gdn.py",
    } <= {*files}
    assert not {*gpu_tests.ALONE, *gpu_tests.LEFT_OUT} & {*files}
    of = {gpu_tests.of_test(f"{file}::test_x") for file in (*files, *gpu_tests.ALONE)}
    assert len(of) == len(files) + len(gpu_tests.ALONE) and "" not in of
    assert gpu_tests.of_test("tests/test_that_is_gone.py::test_x") == ""


def test_a_kept_row_of_a_test_that_is_gone_is_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, here = "tests/test_that_is_gone.py::test_x", "tests/spark_engine/test_kernel.py::test_x"
    done = tmp_path / "done.json"
    done.write_text(json.dumps({gone: "0123", here: gpu_tests.of_test(here)}))
    reporter = Reporter([str(done), "{}"])
    reporter.hold(gpu_tests.of_test)
    assert reporter.done == {here}
    assert json.loads(capsys.readouterr().out) == {"stale": [gone]}


def test_a_lost_gpu_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter([])
    with pytest.raises(ExecutorError), reporter.trial("x"):
        raise ExecutorError("an illegal address")
    started, row = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert started == {"begin": "x"} and row["row"]["right"] is False


def test_where_nothing_can_be_run_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = replace(H200, card=replace(H200.card, sms=40))
    for here, target, says in (
        (None, "sm_121a", "no GPU can be used here"),
        (H200, "sm_12", "--target sm_12 is not known; there are "),
        (few, "sm_121a", "40 multiprocessors, fewer than the 48"),
    ):
        monkeypatch.setattr(rehearsal, "present", lambda here=here: here)
        monkeypatch.setattr(sys, "argv", ["x", "--target", target, "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit, match=says):
            rehearsal.main()
    assert not (tmp_path / "out").exists()


def test_another_process_counts_as_long_as_it_computes(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "lock")
    assert not pulse.beats(), "it has not started"
    (tmp_path / "lock").touch()
    assert pulse.beats() and not pulse.beats()
    os.utime(tmp_path / "lock")
    assert pulse.beats()
    assert not Pulse(tmp_path / "lock").beats(), "what an earlier one did"


def test_skipped_tests_are_named_with_their_reason(tmp_path: Path) -> None:
    kept = {"skipped": {"needs two GPUs": 3}, "rows": [{"label": "a", "right": True}]}
    write(tmp_path / "tests.json.xz", kept)
    assert "skipped: 3 (needs two GPUs)." in tables.rehearsed(tmp_path)


def test_words_of_the_command_line(tmp_path: Path) -> None:
    args = rehearsal.arguments(["--part", "ops,steps", "--steps", "12"])
    assert (args.part, args.steps, args.target) == ("ops,steps", 12, "sm_121a")
    with pytest.raises(SystemExit):
        rehearsal.arguments(["--part", "op"])
    modules = [rehearsal.module_of(part, ())[3].replace(".", "/") for part in rehearsal.PARTS]
    assert all((ROOT / f"{module}.py").is_file() for module in modules)


def test_every_case_has_a_tactic_there_as_on_the_other_gpu() -> None:
    few = [op for op in ops.registry.OPS if op.name in ("linear", "moe_grouped", "nvfp4_linear")]
    few_ops = SimpleNamespace(OPS=few)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "registry", few_ops)
        here, there = (
            [ops.label_of(w) for _, _, found in ops.works(target) for w in found]
            for target in (rehearsed(GB10, H200), GB10)
        )
    assert here == there and len(here) == len(set(here)) > 10


def test_the_cut_models_have_a_layer_of_each_kind_and_the_published_sizes(tmp_path: Path) -> None:
    for model in MODELS:
        whole = open_model(CONFIGS / model)
        small = open_model(cut_models.cut(model, tmp_path / model))
        assert small.config.layers == ("linear_attention", "full_attention")
        assert small.config.hidden == whole.config.hidden
        published = {
            name.rpartition(".layers.")[2]: (tensor.dtype, tensor.shape)
            for name, tensor in whole.checkpoint.tensors.items()
            if not name.startswith("mtp")
        }
        for name, tensor in small.checkpoint.tensors.items():
            if ".layers." in name:
                layer, _, rest = name.rpartition(".layers.")[2].partition(".")
                same = published[f"{cut_models.KEPT[int(layer)]}.{rest}"]
                assert (tensor.dtype, tensor.shape) == same, name


@pytest.mark.parametrize(
    ("said", "name", "right"),
    [
        ("64 of 64 texts same, 0 differ (0 at a near tie), 9 of 9 logits", "a_invariant", True),
        ("64 of 64 texts same, 0 differ (0 at a near tie), 8 of 9 logits", "a_invariant", False),
        ("63 of 64 texts same, 1 differ (1 at a near tie), 9 of 9 logits", "a_invariant", False),
        ("60 of 64 texts same, 4 differ (4 at a near tie), 2 of 9 logits", "a_plain", True),
        ("60 of 64 texts same, 4 differ (3 at a near tie), 2 of 9 logits", "a_plain", False),
        ("nothing", "a_plain", False),
    ],
)
def test_what_a_trial_of_batches_must_say(said: str, name: str, right: bool) -> None:
    assert check.served(said, name) is right


def test_a_bucket_is_summed_up_by_node(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [["mlp.down", "linear", "m16", "k"], ["norm", "norm_quant", "rows", "n"]]
    bucket = {"kinds": kinds, "launches": [[0, 3.0], [1, 1.0], [0, 4.0]]}
    assert layers.of_kinds(bucket) == [
        ("mlp.down", "linear", "m16", 2, 7.0),
        ("norm", "norm_quant", "rows", 1, 1.0),
    ]
    findings = [
        {"name": "x", "passed": True, "figures": {"rel_l2": 0.1, "cosine": 0.9}, "reason": ""},
        {"name": "y", "passed": False, "figures": {"rel_l2": 0.3, "cosine": 1.0}, "reason": "far"},
    ]
    level = {"findings": findings, "passed": False, "launches": 7}
    check.tell_level(Reporter([]), "m/op", level)
    row = json.loads(capsys.readouterr().out)["row"]
    assert row["worst"] == {"rel_l2": 0.3, "cosine": 0.9} and row["failed"] == 1
    assert not row["right"] and row["note"] == "y: far"


def test_named_tests_are_left_out_and_skips_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "done").write_text('["a::x"]')
    items = [SimpleNamespace(nodeid=n) for n in ("a::x", "a::y")]
    skip_done_tests.pytest_collection_modifyitems(items)
    assert len(items) == 2
    monkeypatch.setenv(skip_done_tests.DONE, str(tmp_path / "done"))
    skip_done_tests.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["a::y"]
    teller = gpu_tests.Teller(Reporter([]))
    common = {"nodeid": "a::y", "duration": 1.25, "longrepr": ("a.py", 3, "Skipped: why")}
    for when, skipped, failed in (("setup", True, False), ("call", False, False),
                                  ("teardown", False, False), ("setup", False, True)):  # fmt: skip
        passed = not (skipped or failed)
        outcome = {"skipped": skipped, "failed": failed, "passed": passed}
        teller.pytest_runtest_logreport(SimpleNamespace(when=when, **outcome, **common))
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[0] == {"head": {"skipped": {"why": 1}}}
    assert [s["row"]["right"] for s in said[1:]] == [True, False]


class FakeEngine:
    """Every request ends after three steps; the last answer of a lone one may differ."""

    def __init__(self, rots: bool = False) -> None:
        self.loaded = SimpleNamespace(limits=SimpleNamespace(vocab=50))
        self.going: dict[int, int] = {}
        self.next, self.rots, self.most = 0, rots, 0

    def submit(self, request: Any) -> int:
        self.next += 1
        self.going[self.next] = 3
        self.most = max(self.most, len(self.going))
        return self.next

    @property
    def idle(self) -> bool:
        return not self.going

    def step(self) -> list[Any]:
        finish = steps.FinishReason
        made = []
        for id_ in list(self.going):
            self.going[id_] -= 1
            over = not self.going[id_]
            token = self.next if self.rots else 7
            made.append(SimpleNamespace(request_id=id_, token=token, message="",
                                        finish=finish.LENGTH if over else None))  # fmt: skip
            if over:
                del self.going[id_]
        return made

    def cancel(self, id_: int) -> None:
        self.going.pop(id_, None)

    def close(self) -> None:
        """As an engine."""


@pytest.mark.parametrize("rots", [False, True])
def test_steps_are_counted_and_the_first_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, rots: bool
) -> None:
    engine = FakeEngine(rots)
    monkeypatch.setattr(steps.Engine, "open", lambda folder, options: engine)
    monkeypatch.setattr(steps, "check_idle", lambda engine: None)
    rows = [*steps.run(Path("x"), 2, 40)]
    assert [(row["steps"], row["same"]) for row in rows] == [(40, not rots)] * 2
    assert 9 <= engine.most <= 16


@pytest.mark.parametrize("lost", [False, True])
def test_the_share_that_fails_is_the_one_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: bool
) -> None:
    """Shares 0 and 1 were there already; 2 is right, 3 fails, and 4 has no engine to run on."""
    closed: list[bool] = []

    def shares(folder: Path, count: int) -> Any:
        assert count == 3
        try:
            yield {"same": True, "steps": 40}
            raise ExecutorError("lost") if lost else RuntimeError("request 7: x")
        finally:
            closed.append(True)

    monkeypatch.setattr(steps, "run", shares)
    asked = ["embedded/2", "embedded/3", "embedded/4"]
    with pytest.raises(ExecutorError) if lost else nullcontext():
        steps.tell_shares(Reporter([]), asked, lambda: Path("x"), lambda: True)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["begin"] for line in said if "begin" in line] == asked[:2]
    rows = [line["row"] for line in said if "row" in line]
    assert [(row["label"], row["right"]) for row in rows] == [
        ("embedded/2", True),
        ("embedded/3", False),
    ]
    assert closed == [True]


def test_the_tables_say_what_was_found_and_what_was_not_run(tmp_path: Path) -> None:
    assert tables.rehearsed(tmp_path) == "Not run yet."
    head = {"kind": "green context", "multiprocessors": 48, "seen": [48, 48], "date": "d"}
    rows = {
        "ops": [
            {"label": "linear/m16/1x2", "right": True, "us": 3.0, "spills": 8, "digest": "1"},
            {"label": "linear/m16/3x4", "right": False, "note": "off\n  by one"},
        ],
        "layers": [
            {"label": "m/op/linear", "right": True, "findings": 3, "failed": 0,
             "worst": {"rel_l2": 0.0123}, "card": "H200"},
            {"label": "m/decode 8", "right": True, "graph_ms": 2.5,
             "kinds": [["mlp.down", "linear", "m16", 2, 700.0]]},
        ],
        "steps": [
            {"label": f"m/{i}", "right": True, "steps": 20000, "median_ms": 0.5, "most_ms": 9.0 - i}
            for i in range(2)
        ],
    }  # fmt: skip
    for part, found in rows.items():
        kept = {**(head if part == "ops" else {}), "rows": found}
        write(tmp_path / f"{part}.json.xz", kept)
    lines = tables.rehearsed(tmp_path).splitlines()
    (undated,) = (
        line for line in lines if line.startswith("Measured before rows carried a digest")
    )
    assert undated.endswith("next run: ops 1, layers 2, steps 2.")
    for line in (
        "| every tactic over its op's cases | 2 | 1 | "
        ", green context, blocks on 48 multiprocessors | d |",
        "| the other tests that need a GPU | – | not run |  |  |",
        "| ops | linear/m16/3x4 | off by one |",
        "| linear | m16 | 2 | 1 | 3.0 to 3.0 | 8 |",
        "| m | linear | 3 |  | 0.012 |  |",
        "m, decode 8 rows: 2.500 ms as a graph",
        "| mlp.down | linear | m16 | 2 | 0.700 |",
        "| m | 40,000 | 0.5 | 9.0 | yes |",
        "Rows by the card that they were measured on: layers 1 on an H200.",
    ):
        assert line in lines, (line, lines)


def test_each_plan_is_in_one_share_of_the_sanitizer() -> None:
    found = [*ops.works(GB10, {"embed", "rms_norm"})]
    labels = sorted(ops.label_of(work) for _, _, plans in found for work in plans)
    cut = sanitized.shares(found, set(), 3)
    assert sorted(label for share in cut.values() for label in share) == labels
    assert max(map(len, cut.values())) == 3 and {n.split("/")[0] for n in cut} == {
        "embed",
        "rms_norm",
    }
    done = {next(iter(cut))}
    assert sanitized.shares(found, done, 3).keys() == cut.keys() - done
    reporter = Reporter([])
    assert ops.asked(found, reporter) == found
    reporter.options["ops"] = [found[0][0].name]
    assert {op.name for op, _, _ in ops.asked(found, reporter)} == {found[0][0].name}


@pytest.mark.parametrize(
    ("log", "code", "right", "says", "ran"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, True, "", True),
        ("========= ERROR SUMMARY: 0 errors", 0, False, "1 of 1 never ran: embed/rows/one", False),
        ("===== Error: Race reported\n===== RACECHECK SUMMARY: 2 hazards displayed (2 errors)", 0,
         False, "2 found: ===== Error: Race reported", True),
        ("========= COMPUTE-SANITIZER", 0, False, "no summary in the sanitizer's log", True),
        ("========= ERROR SUMMARY: 0 errors", 1, False, "code 1: a lost GPU", True),
    ],
)  # fmt: skip
def test_a_share_is_right_by_the_sanitizers_own_sum(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    code: int,
    right: bool,
    says: str,
    ran: bool,
) -> None:
    script = tmp_path / "compute-sanitizer"
    words = 'cp "$8" "$(dirname "$8")/ran.json"; ' if ran else ""
    words += f'printf %s "{log}" > "$4"; [ {code} = 0 ] || echo "a lost GPU" >&2; exit {code}'
    script.write_text(f"#!/bin/sh\n{words}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kept = tmp_path / "logs" / "one.log"
    found, note = sanitized.sanitize("racecheck", ["embed/rows/one"], kept)
    assert found is right and note.startswith(says)
    assert kept.is_file() is ("found" in says)
