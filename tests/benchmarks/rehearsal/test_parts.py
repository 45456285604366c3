"""The command that runs the rehearsal's parts: what they tell is kept, deaths and hangs too."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.repository import ROOT

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
from benchmarks.rehearsal import __main__ as rehearsal
from benchmarks.rehearsal import cut_models, ops, sanitized, tables
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


@pytest.mark.parametrize("resume", [False, True])
def test_right_rows_of_an_earlier_call_stay_where_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    monkeypatch.setattr(rehearsal.run_part, "__defaults__", (part(tmp_path, "pass"),))
    rows = [{"label": "a", "right": True, "us": 7.0}, {"label": "b", "right": False}]
    kept = tmp_path / "ops.json.xz"
    write(kept, {"rows": rows})
    monkeypatch.setattr(rehearsal, "present", lambda: H200)
    words = ["rehearsal", "--part", "ops", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words + ["--resume"] * resume)
    assert rehearsal.main() == 0
    found = {row["label"]: (row["us"], row.get("card")) for row in read(kept)["rows"]}
    new = dict.fromkeys("abcd", (1.5, H200.card.product))
    assert found == (new | {"a": (7.0, None)} if resume else new)


def test_a_lost_gpu_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter([])
    with pytest.raises(ExecutorError), reporter.trial("x"):
        raise ExecutorError("an illegal address")
    started, row = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert started == {"begin": "x"} and row["row"]["right"] is False


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


def test_the_tables_say_what_was_found_and_what_was_not_run(tmp_path: Path) -> None:
    assert tables.rehearsed(tmp_path) == "Not run yet."
    head = {"kind": "green context", "multiprocessors": 48, "seen": [48, 48], "date": "d"}
    rows = {
        "ops": [
            {"label": "linear/m16/1x2", "right": True, "us": 3.0, "spills": 8},
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
