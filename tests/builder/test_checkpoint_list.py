"""`spark-build --list`: text, JSON, and what is said without a checkpoint."""

import json

from click.testing import CliRunner

from spark_engine.builder import checkpoint_list
from spark_engine.builder.cli import main

WHOLE = {
    "context": 32768,
    "machines": ["Spark", "24 GB"],
    "checkpoints": [
        {
            "name": "a/b",
            "weights": "bf16",
            "gb": 1.25,
            "sequences": {"Spark": 7, "24 GB": 0},
            "targets": ["sm_90a"],
            "speeds": [{"card": "H200", "how": "measured", "users": {"1": "9.5", "8": "60"}}],
            "tested": "layout",
        }
    ],
}


def test_the_list_is_a_line_a_checkpoint() -> None:
    names = [row["name"] for row in checkpoint_list.listed()["checkpoints"]]
    result = CliRunner().invoke(main, ["--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()[1:-2]] == names
    assert "nvidia/Qwen3.8-27B-NVFP4" in names


def test_the_list_as_json_is_the_packaged_one() -> None:
    result = CliRunner().invoke(main, ["--list", "--json"])
    assert json.loads(result.output) == checkpoint_list.listed()


def test_a_line_by_hand() -> None:
    head, row, _, note = checkpoint_list.lines(WHOLE)
    assert row.split("  ")[0] == "a/b" and row.split()[2:] == (
        "1.2 7 – 9.5 / 60 measured sm_90a layout".split()
    )
    assert head.index("Spark") == row.index("7") and "sequences of 32,768 tokens" in note


def test_without_a_checkpoint_the_list_is_named() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 2 and "Missing argument 'CHECKPOINT'; --list" in result.output
