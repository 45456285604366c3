"""The command of all figures, over commands that only sleep: order, limits, what is kept."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.repository import ROOT

sys.path.append(str(ROOT))  # the benchmarks are scripts and not installed

from benchmarks.stages import book as books  # noqa: E402
from benchmarks.stages import machine as machines  # noqa: E402
from benchmarks.stages import order, runner, table  # noqa: E402
from benchmarks.stages.aims import aim_of  # noqa: E402
from benchmarks.stages.book import Book, Outcome  # noqa: E402
from benchmarks.stages.jobs import Job  # noqa: E402
from benchmarks.stages.machine import Machine, lacking  # noqa: E402
from benchmarks.stages.runner import Runner, Wishes  # noqa: E402
from benchmarks.stages.table import Stage, StageError  # noqa: E402

CARD = Machine(("0",), 16)
WORK = """
import sys, time
log, name, seconds = sys.argv[1:4]
open(log, "a").write(f"+{name}\\n")
if sys.argv[4:5] == ["--make"]:
    __import__("os").makedirs(sys.argv[5])
time.sleep(float(seconds))
open(log, "a").write(f"-{name}\\n")
print(name, "took", seconds)
"""


class Trial:
    """A table of fake commands in a folder, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, list[str]()
        self.log, self.out, self.engines = (folder / n for n in ("log", "out", "engines"))
        (folder / "work.py").write_text(WORK)
        self.said: list[str] = []

    def add(self, kind: str, name: str, seconds: float, command: str = "", **more: Any) -> None:
        script = shlex.join(["python", str(self.folder / "work.py"), str(self.log), name])
        rest = ["--make", "{engine}"] if kind == "engine" else []
        rest += [f"{{engine.{used}}}" for used in more.pop("uses", ())]
        command = command or " ".join([script, str(more.pop("sleeps", seconds)), *rest])
        row = {"name": name, "command": command, "seconds": seconds, "known": "made up"}
        row |= ({"timed": True} if kind == "stage" else {}) | {"gpus": 1} | more
        lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in row.items())
        self.rows.append(f"[[{kind}]]\n{lines}\n")

    def table(self) -> table.Table:
        path = self.folder / "table.toml"
        path.write_text("\n".join(self.rows))
        return table.read(path)

    def runner(self, limit: float = 60.0, jobs: int = 3, commit: str = "abc") -> Runner:
        self.engines.mkdir(exist_ok=True)
        wishes = Wishes(self.engines, limit, jobs)
        return Runner(self.table(), Book(self.out, commit), CARD, wishes, self.said.append)

    def run(self, *names: str, **more: Any) -> dict[str, str]:
        made = self.runner(**more)
        known = made._table
        made.run(known.chosen(names) if names else known.stages)
        rows = [r.split("\t") for r in (self.out / books.SUMMARY).read_text().splitlines()]
        assert rows[0] == [*books.HEADER]
        return {row[0]: row[1] for row in rows[1:]}

    def happened(self) -> list[str]:
        return self.log.read_text().split() if self.log.is_file() else []


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    monkeypatch.setattr(runner, "LOOK", 0.02)
    return Trial(tmp_path)


def stage(name: str, **more: Any) -> Stage:
    given = {"command": "sh", "seconds": 1.0, "known": "made up", "timed": True}
    return Stage(name, **{**given, **more})


# ---- the order -----------------------------------------------------------------------------------


def test_what_has_no_result_comes_first_then_the_oldest(tmp_path: Path) -> None:
    told = (("a", "2026-01-02", "x"), ("b", "2026-01-02", "y"), ("b", "2026-01-03", "z"))
    rows = [{"model": m, "date": d, "commit": c} for m, d, c in told]
    (tmp_path / "both.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "head.json").write_text(json.dumps({"date": "2026-01-01", "rows": [{"n": 1}]}))
    (tmp_path / "bare.json").write_text('[{"n": 1}]')
    stages = [
        stage("b", writes=("both.json",), of={"model": "b"}),
        stage("a", writes=("both.json",), of={"model": "a"}),
        stage("by hand", writes=("bare.json",), last="2026-01-04 q"),
        stage("head", writes=("head.json",)),
        stage("c", writes=("both.json",), of={"model": "c"}),
        stage("no file", writes=("none.json",), last="2026-01-01"),
        stage("no card", gpus=0),
    ]
    found = order.by_value(stages, tmp_path, {"x": 9, "y": 3, "q": 0}.__getitem__)
    assert [s.name for s in found] == ["c", "no file", "head", "a", "b", "by hand", "no card"]


def test_engines_are_shared_and_nothing_is_beside_what_is_timed(trial: Trial) -> None:
    for name, seconds in (("one", 0.6), ("two", 1.5), ("three", 0.3)):
        trial.add("engine", name, seconds)
    trial.add("stage", "first", 0.2, uses=["one"])
    trial.add("stage", "second", 0.2, uses=["one", "two"])
    trial.add("stage", "test", 0.3, timed=False)
    trial.add("stage", "third", 0.2, uses=["two", "three"])
    codes = trial.run()
    assert set(codes.values()) == {"0"} and len(codes) == 7, codes
    events, open_ = trial.happened(), set[str]()
    for event in events:
        open_ ^= {event[1:]}
        if open_ & {"first", "second", "third"}:
            assert len(open_) == 1, events
    assert [events.count(f"+{name}") for name in ("one", "two", "three")] == [1, 1, 1]
    assert [e for e in events if e in ("+first", "+second", "+third")] == [
        "+first",
        "+second",
        "+third",
    ]
    kept = json.loads((trial.out / "build_one" / books.RESULT).read_text())
    assert kept["beside"] == ["test", "two"], "as the runner saw it, on a busy machine too"


def test_with_one_job_nothing_is_beside_anything(trial: Trial) -> None:
    trial.add("engine", "one", 0.2)
    trial.add("stage", "test", 0.2, timed=False)
    trial.add("stage", "late", 0.2, uses=["one"])
    trial.run(jobs=1)
    assert trial.happened() == ["+test", "-test", "+one", "-one", "+late", "-late"]


def test_a_long_stage_that_is_not_next_does_not_outlast_the_builds() -> None:
    engine = table.Engine("e", "make {engine}", 10.0, "made up")
    head, long = stage("head", command="go {engine.e}"), stage("long", timed=False, seconds=99.0)
    short = stage("short", timed=False, seconds=4.0)
    state = order.State({"e": engine}, [head, long, short])
    found = order.schedule(state, 3, 1000.0)
    assert [(p.row.name, p.begin) for p in found] == [
        ("e", 0), ("short", 0), ("head", 10), ("long", 11)]  # fmt: skip
    assert [p.row.name for p in order.schedule(order.State({"e": engine}, [head, long]), 3, 50)
            if p.late] == ["long"]  # fmt: skip


# ---- limits --------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


STUBBORN = r"""
trap '' TERM
setsid sh -c "trap '' TERM; echo \$\$ > {0}/a; sleep 60" &
(trap '' TERM; sleep 60) & echo $! > {0}/b
sleep 60
"""


def test_a_stage_is_ended_with_all_that_it_started(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.stages.jobs.GRACE", 0.3)
    monkeypatch.setattr(Job.end, "__defaults__", (0.3,))
    script = trial.folder / "stubborn.sh"
    script.write_text(STUBBORN.replace("{0}", str(trial.folder)))
    trial.add("stage", "stubborn", 0.1, f"sh {script}", limit=4.0)  # to start all that
    trial.add("stage", "next", 0.1)
    began = time.monotonic()
    assert trial.run() == {"stubborn": "limit", "next": "0"}
    assert time.monotonic() - began < 50, "and not the 60 that it sleeps"
    pids = [int((trial.folder / name).read_text()) for name in "ab"]
    assert not any(map(alive, pids)), "one ignored SIGTERM, one in a session of its own"


def test_what_a_stage_leaves_behind_is_ended_too(trial: Trial) -> None:
    path = trial.folder / "pid"
    script = trial.folder / "leaves.sh"
    script.write_text(f"setsid sleep 60 & echo $! > {path}")
    trial.add("stage", "leaves", 0.1, f"sh {script}")
    assert trial.run() == {"leaves": "0"} and not alive(int(path.read_text()))


def test_all_of_it_ends_within_its_limit(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SHARE", 0.5)  # of 12 s: for ending, on a busy machine
    trial.add("stage", "short", 0.1)
    trial.add("stage", "long", 100.0)
    trial.add("stage", "slower", 0.1, sleeps=60, limit=50)
    began = time.monotonic()
    assert trial.run(limit=12.0) == {"short": "0", "long": "no time", "slower": "cut"}
    assert 6.0 < time.monotonic() - began < 50.0
    assert "+long" not in trial.happened()


# ---- what is kept --------------------------------------------------------------------------------


def test_a_second_call_goes_on_with_what_is_missing(trial: Trial) -> None:
    trial.add("engine", "one", 0.1)
    trial.add("stage", "good", 0.1, uses=["one"])
    flag = trial.folder / "flag"
    trial.add("stage", "bad", 0.1, f"sh -c 'echo try; test -e {flag}'")
    assert trial.run() == {"build_one": "0", "good": "0", "bad": "1"}
    flag.touch()
    trial.add("stage", "more", 0.1, uses=["one"])
    codes = trial.run()
    assert codes == {"build_one": "0", "good": "0", "bad": "0", "more": "0"}
    assert [trial.happened().count(e) for e in ("+one", "+good", "+more")] == [1, 1, 1]
    assert (trial.out / "bad" / "earlier_1" / books.OUTPUT).read_text() == "try\n"
    with pytest.raises(StageError, match="holds results of commit abc, and this tree is def"):
        trial.runner(commit="def")


def test_an_engine_of_another_tree_is_built_again_and_anothers_folder_is_left(trial: Trial) -> None:
    trial.add("engine", "one", 0.1)
    trial.add("stage", "go", 0.1, uses=["one"])
    trial.run()
    trial.out = trial.folder / "other"
    trial.run(commit="def")
    assert trial.happened().count("+one") == 2
    trial.out, trial.engines = trial.folder / "third", trial.folder / "mine"
    (trial.engines / "one").mkdir(parents=True)
    assert trial.run() == {"go": "failed"} and (trial.engines / "one").is_dir()
    assert any("give another --engines" in words for words in trial.said)


def test_the_archive_is_whole_or_the_one_before(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.add("stage", "first", 0.1)
    trial.run()
    book = Book(trial.out, "abc")
    with tarfile.open(book.archive) as archive:
        names = {
            "out/summary.tsv",
            *(f"out/first/{n}" for n in ("command.txt", "output.txt", "result.json")),
        }
        assert names <= set(archive.getnames())
        told = archive.extractfile("out/first/output.txt")
        assert told is not None and told.read() == b"first took 0.1\n"
    before = book.archive.read_bytes()

    def breaks(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tarfile.TarFile, "addfile", breaks)
    with pytest.raises(OSError, match="no space"):
        book.end(Outcome("second", "0"))
    assert book.archive.read_bytes() == before


def test_a_signal_ends_it_and_leaves_what_there_is(trial: Trial) -> None:
    trial.add("stage", "first", 0.1, gpus=0)
    trial.add("stage", "long", 0.1, sleeps=60, limit=50, gpus=0)
    trial.add("stage", "never", 0.1, gpus=0)
    trial.table()
    words = [sys.executable, "-m", "benchmarks.everything", "--out", str(trial.out), "--table"]
    words += [str(trial.folder / "table.toml"), "--commit", "abc", "--stages", "first,long,never"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    last = time.monotonic() + 60
    while "+long" not in trial.happened() and time.monotonic() < last and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert trial.happened() == ["+first", "-first", "+long"]
    found = Book(trial.out, "abc").outcomes
    assert {name: o.code for name, o in found.items()} == {"first": "0", "long": "cut"}
    with tarfile.open(trial.folder / "out.tar.gz") as archive:
        kept = archive.extractfile("out/summary.tsv")
        assert kept is not None and b"long\tcut" in kept.read()
    assert json.loads((trial.out / "machine.json").read_text())["calls"][0]["commit"] == "abc"


# ---- what goes wrong -----------------------------------------------------------------------------


def test_what_cannot_run_here_says_why(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def why(**more: Any) -> str:
        return lacking(stage("s", **more), CARD)

    assert why() == ""
    assert why(gpus=2) == "needs 2 GPUs; nvidia-smi shows 1"
    assert why(cores=99) == "needs 99 cores; there are 16"
    assert "compute-sanitizer-x is not installed" in why(
        command="compute-sanitizer-x --tool memcheck"
    )
    assert "pip install -e ." in why(command="spark-nothing x")
    assert why(needs={"package": ["no-such-thing"]}).startswith(
        "no-such-thing has no installed metadata"
    )
    assert why(needs={"module": ["nothing.at_all"]}) == "Python has no module nothing.at_all here"
    assert why(needs={"file": ["no/such"]}) == "there is no no/such"
    assert why(needs={"file": ["docs"], "module": ["json"], "package": ["pytest"]}) == ""
    trial.add("engine", "one", 0.1, gpus=2)
    trial.add("stage", "wide", 0.1, uses=["one"])
    trial.add("stage", "good", 0.1)
    assert trial.run() == {"wide": "skip", "good": "0"} and "+one" not in trial.happened()


def test_a_build_that_fails_beside_others_is_tried_alone(trial: Trial) -> None:
    trial.add("engine", "one", 0.3, "sh -c 'mkdir {engine}; sleep 0.3; exit 4'")
    trial.add("engine", "two", 0.6)
    trial.add("stage", "first", 0.1, uses=["one"])
    trial.add("stage", "second", 0.1, uses=["two"])
    assert trial.run() == {"build_one": "4", "build_two": "0", "first": "failed", "second": "0"}
    assert (trial.out / "build_one" / "earlier_1").is_dir(), "there was a second try"
    assert json.loads((trial.out / "build_one" / books.RESULT).read_text())["beside"] == []


def test_an_end_without_a_figure_is_none(trial: Trial) -> None:
    trial.add("stage", "skipped", 0.1, "echo 3 skipped in 1 s", figure=r"(\d+ passed)")
    trial.add("stage", "passed", 0.1, "echo 3 passed in 1 s", figure=r"(\d+ passed)")
    assert trial.run() == {"skipped": "failed", "passed": "0"}
    assert Book(trial.out, "abc").outcomes["passed"].figure == "3 passed"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": "go {engine.none}"}, r"asks for \{engine.none\}"),
        ({"figure": "("}, "no regular expression"),
        ({"wants": 1}, "'wants', which no row has"),
        ({"known": ""}, "where they are from"),
        ({"needs": {"gpu": ["x"]}}, "needs are of"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    row = {"name": "s", "command": "go", "seconds": 1, "known": "k", "timed": True} | more
    needs = row.pop("needs", None)
    text = "[[stage]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in row.items())
    text += "\nneeds = { gpu = ['x'] }" if needs else ""
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(StageError, match=says):
        table.read(tmp_path / "t.toml")


def test_the_table_of_the_project() -> None:
    known = table.read()
    assert {name for s in known.stages for name in s.engines} == set(known.engines)
    for row in known.stages:
        aim_of(row)
        words = row.command.split()
        if "-m" in words and words[0] == "python":
            name = words[words.index("-m") + 1]
            path = ROOT / name.replace(".", "/")
            assert name == "pytest" or path.with_suffix(".py").is_file(), row.name
        for word in words:
            assert (
                not word.startswith(("tests/", "benchmarks/", "models/")) or (ROOT / word).exists()
            ), word
    assert [s.name for s in known.chosen(["steps_*", "linears"])] == [
        "steps_27b",
        "steps_35b",
        "linears",
    ]
    with pytest.raises(StageError, match="there is no stage nothing"):
        known.chosen(["nothing"])


def test_commands_see_their_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr(machines.card_of, "card", lambda n: {} if n in ("0", "1") else None)
    assert machines.here().gpus == ("3", "5")
    told = machines.told(Machine(("0",), 2), "abc")["cards"]
    assert told == [{"number": "0", "idle": None, "others": []}]
    assert machines.environment(stage("s"), ("5",))["CUDA_VISIBLE_DEVICES"] == "5"
    assert machines.words_of("python -m x")[0] == sys.executable
    assert os.path.basename(machines.words_of("spark-check e")[0]) == "spark-check"


def test_a_tree_without_git_is_told_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("SPARK_COMMIT", raising=False)
    assert machines.commit_here() == "unknown"
    monkeypatch.setenv("SPARK_COMMIT", "1234abcd")
    assert machines.commit_here() == "1234abcd"
