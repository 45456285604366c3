"""Shell completion: a script for each shell, and what the commands answer it."""

import shutil
import subprocess
import tomllib

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from spark_engine.builder.cli import main as build
from spark_engine.runtime.cli.options import completion
from spark_engine.runtime.cli.options.run_options import OPTIONS
from spark_engine.runtime.cli.spark_run import main
from tests.repository import ROOT


def test_all_our_commands_are_completed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(completion.COMMANDS) == set(project["scripts"])


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_script_names_every_command_and_is_one_for_its_shell(shell: str) -> None:
    done = CliRunner().invoke(main, ["--completion", shell])
    assert done.exit_code == 0
    for name in completion.COMMANDS:
        assert name in done.stdout and completion.variable(name) in done.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True)


def test_another_shell_is_refused() -> None:
    done = CliRunner().invoke(main, ["--completion", "tcsh"])
    assert done.exit_code == 2 and "'tcsh' is not one of 'bash', 'zsh', 'fish'" in done.stderr


def test_options_and_choices_are_answered() -> None:
    asked = BashComplete(main, {}, "spark-run", completion.variable("spark-run"))
    flags = {item.value for item in asked.get_completions([], "--")}
    assert flags >= {row.flag for row in OPTIONS} | {"--config", "--print-config"}
    paces = {item.value for item in asked.get_completions(["--policy"], "")}
    assert paces == {"latency", "balanced", "throughput"}
    (path,) = asked.get_completions([], "eng")
    assert path.type == "file"


def test_targets_and_cards_are_answered() -> None:
    asked = BashComplete(build, {}, "spark-build", completion.variable("spark-build"))
    for option, start, words in (
        ("--target", "sm_9", {"sm_90a"}),
        ("--card", "h", {"h100", "h200"}),
        ("--state-dtype", "au", {"auto"}),
    ):
        assert {item.value for item in asked.get_completions([option], start)} == words
