"""The runner of the table: order, builds, limits, what is kept, and what is done again."""

import re
from pathlib import Path

import pytest

from benchmarks import run_table
from tests.repository import ROOT

TABLE = """
[[engine]]
name = "e_{m}"
command = "sh -c 'mkdir {engine}; echo built >> {engine}/log'"
limit = 60
each = [{ m = "a" }]

[[stage]]
name = "first_{m}"
command = "sh -c 'cat {engine.e_a}/log; echo ms {n}; test -e {out}/../go'"
gpus = 0
limit = 60
figure = '(ms) ([0-9]+)'
each = [{ m = "a", n = 3 }, { m = "b", n = 4 }]

[[stage]]
name = "slow"
command = "sleep 600"
gpus = 0
limit = 0.5

[[stage]]
name = "cards"
command = "sh -c 'exit 9'"
gpus = 99
limit = 60
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "t.toml").write_text(TABLE)
    return ["--table", str(tmp_path / "t.toml"), "--out", str(tmp_path / "out")]


def test_stages_run_once_and_failed_ones_again(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_table.main([*words, "--stages", "first_*"]) == 1
    assert "first_a: code 1" in (printed := capsys.readouterr().out)
    assert printed.count("build_e_a: code 0") == 1, "both stages share it"
    (out / "go").touch()
    assert run_table.main([*words, "--stages", "first_*"]) == 0
    assert (tmp_path / "out.engines" / "e_a" / "log").read_text() == "built\n"
    last = (out / "summary.tsv").read_text().splitlines()[-1].split("\t")
    assert (last[0], last[1], last[4]) == ("first_b", "0", "ms 4")
    capsys.readouterr()
    assert run_table.main([*words, "--stages", "first_*"]) == 0
    assert not capsys.readouterr().out, "all was done"
    run_table.main([*words, "--list"])
    assert re.findall(r"(\w+) +(done|at most)", capsys.readouterr().out) == [
        ("first_a", "done"),
        ("first_b", "done"),
        ("slow", "at most"),
        ("cards", "at most"),
    ]


def test_a_limit_ends_a_stage_and_missing_gpus_skip_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_table.main([*words, "--stages", "cards,slow"]) == 1
    skipped, ended = capsys.readouterr().out.splitlines()
    assert skipped.startswith("cards: needs 99 GPUs") and ended.startswith("slow: code 124, ")


def test_the_tables_commands_name_what_exists() -> None:
    data = run_table.tomllib.loads(run_table.TABLE.read_text())
    engines = run_table.rows_of(data, "engine")
    stages = run_table.rows_of(data, "stage")
    assert len(stages) > 50
    for row in (*engines.values(), *stages.values()):
        for _, name in run_table._ASKED.findall(row["command"]):
            assert name in engines, row["name"]
        left = set(re.findall(r"\{([^{}]*)\}", run_table._ASKED.sub("", row["command"])))
        assert left <= {"out", "engine"}, row["name"]
        for module in re.findall(r"-m (benchmarks|tests)((?:\.\w+)+)", row["command"]):
            path = ROOT.joinpath(*"".join(module).split("."))
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), path
        for path in re.findall(r"(?:tests|benchmarks|models)/[\w./-]+", row["command"]):
            assert (ROOT / path).exists(), f"{row['name']}: {path}"
        re.compile(row.get("figure", ""))
