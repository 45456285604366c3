"""`--device N` in every command that uses a GPU."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from spark_engine.builder import cli as build_cli
from spark_engine.check import cli as check_cli
from spark_engine.device.choice import ORDER, VISIBLE, choose
from spark_engine.errors import OptionError
from spark_engine.runtime.cli import spark_run as run_cli


def _host(folder: Path, gpus: int) -> Path:
    for name in (*(f"nvidia{i}" for i in range(gpus)), "nvidiactl", "nvidia-uvm", "null"):
        (folder / name).touch()
    return folder


def test_the_card_is_the_only_one_that_cuda_sees(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    assert choose(environ, 3, _host(tmp_path, 4)) == "3"
    assert environ == {VISIBLE: "3", ORDER: "PCI_BUS_ID"}


def test_it_counts_within_what_may_be_seen(tmp_path: Path) -> None:
    environ = {VISIBLE: "5, GPU-77"}
    assert choose(environ, 1, _host(tmp_path, 8)) == "GPU-77"
    assert environ == {VISIBLE: "GPU-77"}, "ids keep the order they were given in"


def test_no_choice(tmp_path: Path) -> None:
    environ = {VISIBLE: "5,6"}
    assert choose(environ, None, _host(tmp_path, 8)) == "5" and environ == {VISIBLE: "5,6"}
    assert choose({}, None) is None


@pytest.mark.parametrize(
    ("environ", "gpus", "number", "words"),
    [
        ({}, 2, 2, "--device is 2; this host has 2 GPUs: give 0 to 1"),
        ({}, 1, 1, "--device is 1; this host has one GPU: give 0, or leave it out"),
        ({VISIBLE: "3"}, 8, 1, f"{VISIBLE} is '3': give 0, or leave it out"),
        ({VISIBLE: ""}, 8, 0, f"{VISIBLE} is empty: name GPUs"),
    ],
)
def test_a_card_that_is_not_there(
    environ: dict[str, str], gpus: int, number: int, words: str, tmp_path: Path
) -> None:
    before = dict(environ)
    with pytest.raises(OptionError, match=words.replace("(", r"\(")):
        choose(environ, number, _host(tmp_path, gpus))
    assert environ == before


def test_without_nodes_the_driver_is_left_to_say_so(tmp_path: Path) -> None:
    assert choose({}, 7, _host(tmp_path, 0)) == "7"


def test_every_command_takes_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VISIBLE, "0")
    away = str(tmp_path / "away")
    for main, more in (
        (build_cli.main, [away]),
        (check_cli.main, [away]),
        (run_cli.main, [away, "--prompt", "a"]),
        (run_cli.main, [away, "--serve"]),
        (run_cli.main, ["doctor"]),
    ):
        words = more[:1] if more == ["doctor"] else []
        found = CliRunner().invoke(main, [*words, "--device", "4", *more[len(words) :]])
        assert found.exit_code == 2 and "--device is 4" in found.output, found.output
