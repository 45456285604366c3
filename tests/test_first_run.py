"""The script of a first run over fake commands: what it runs, how it ends, what it packs."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from spark_engine.bench import cli as bench
from spark_engine.builder import cli as builder
from spark_engine.builder import inspect
from spark_engine.builder.fetch import name_of
from spark_engine.check import cli as check
from spark_engine.runtime.cli import spark_run as runtime
from tests.repository import ROOT

SCRIPT = ROOT / "scripts" / "first_run_on_a_spark.sh"
COMMANDS: dict[str, click.Command] = {
    "spark-bench": bench.main,
    "spark-build": builder.main,
    "spark-check": check.main,
    "spark-inspect": inspect.main,
    "spark-run": runtime.main,
}
# Notes its arguments in NOTED; `doctor` exits with DOCTOR, a command with FAILS in its line with 7.
STUB = """#!/bin/bash
printf '%q ' "$(basename "$0")" "$@" >> "$NOTED"; echo >> "$NOTED"
echo "said by $(basename "$0") SAYS"
case "$(basename "$0")" in $HANGS) echo $$ > "$HUNG"; exec sleep 600 ;; esac
[ "$1" = doctor ] && exit "$DOCTOR"
case "$(basename "$0") $*" in *$FAILS*) exit 7 ;; esac
exit 0
"""
ALWAYS = ["install", "tests", "cross_build", "cpu_build", "cpu_answer"]
SMALL = ["gpu_tests", "timed_build", "timed_report", "tiny_check", "tiny_answer", "tiny_bench"]
NAMED = "build report doctor_of_it record answer bench_1 bench_8 bench_32 arena".split()


class Stubs:
    """A folder of fake commands, and the script over them. `doctor`: what it ends with; `fails`
    and `hangs`: part of the words of what does; `says`: what all say; `more` of the environment."""

    def __init__(
        self,
        folder: Path,
        hangs: str = "-nothing-",
        doctor: int = 0,
        fails: str = "-nothing-",
        says: str = "",
        more: Mapping[str, str] | None = None,
    ) -> None:
        bin_ = folder / "a venv" / "bin"
        bin_.mkdir(parents=True)
        for name in ("python", "pytest", *COMMANDS):
            (bin_ / name).write_text(STUB.replace("SAYS", says))
            (bin_ / name).chmod(0o755)
        self.out, self.noted = folder / "first", folder / "noted"
        self.given = {
            **os.environ, "VENV": str(bin_.parent), "OUT": str(self.out), "NOTED": str(self.noted),
            "DOCTOR": str(doctor), "FAILS": fails, "SPARK_API_KEY": "not-to-be-sent",
            "HANGS": hangs, "HUNG": str(folder / "hangs"), **(more or {}),
        }  # fmt: skip

    def run(self, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), *words]
        return subprocess.run(
            command, env=self.given, cwd=cwd, capture_output=True, text=True, timeout=300
        )

    def started(self) -> subprocess.Popen[bytes]:
        """In a new process group, as a shell starts it."""
        return subprocess.Popen([str(SCRIPT)], env=self.given, process_group=0)


def packed_in(path: Path) -> dict[str, bytes]:
    """The files of an archive by their names."""
    with tarfile.open(path) as archive:
        files = ((entry.name, archive.extractfile(entry)) for entry in archive)
        return {Path(name).name: file.read() for name, file in files if file}


class Ran:
    """How the script ended: its code, the steps' codes, what was called, what was packed."""

    def __init__(self, folder: Path, *words: str, cwd: Path = ROOT, **how: Any) -> None:
        stubs = Stubs(folder, **how)
        self.done, self.out = stubs.run(*words, cwd=cwd), stubs.out
        rows = (self.out / "steps.tsv").read_text().splitlines()[1:]
        self.steps = {row.split("\t")[0]: int(row.split("\t")[1]) for row in rows}
        self.calls = [shlex.split(line) for line in stubs.noted.read_text().splitlines()]
        self.packed = packed_in(Path(f"{self.out}.tar.gz"))


def test_the_page_has_every_step_in_its_order() -> None:
    """An owner reads it with the archive: docs/trust/first_run.md."""
    named = re.findall(
        r"^ *(?:if (?:! )?)?(?:step|fact) \"?([a-z_0-9$]+)", SCRIPT.read_text(), re.M
    )
    bench = [f"bench_{clients}" for clients in (1, 8, 32)]
    steps = [one for name in named for one in (bench if name == "bench_$clients" else [name])]
    page = (ROOT / "docs" / "trust" / "first_run.md").read_text()
    table = page.partition("| steps, in their order |")[2].partition("\n\n")[0]
    cells = (line.split("|")[1] for line in table.splitlines()[2:])
    assert [name for cell in cells for name in re.findall("`(.*?)`", cell)] == steps
    given = {"129", "130", "143"} | {str(code) for code in range(4)}
    assert given <= {*re.findall(r"\b\d+\b", page.partition("It ends with")[2].partition(".")[0])}


def test_without_a_gpu_it_goes_as_far_as_cross_building(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "owner/name", doctor=1)
    assert ran.done.returncode == 3, ran.done.stderr
    assert list(ran.steps) == ALWAYS and set(ran.steps.values()) == {0}
    assert "the rest needs one" in ran.done.stdout
    assert b"said by spark-build" in ran.packed["cross_build.txt"]
    assert b"said by spark-run" in ran.packed["doctor_json.txt"]
    assert not Path(f"{ran.out}.engines").exists()


def test_on_a_spark_it_times_checks_and_measures(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "owner/name")
    assert ran.done.returncode == 0, ran.done.stdout
    assert list(ran.steps) == [*ALWAYS, *SMALL, *NAMED, "doctor_after"]
    assert {f"{step}.txt" for step in ran.steps} <= set(ran.packed)
    assert b"not-to-be-sent" not in b"".join(ran.packed.values())
    for name, *words in ran.calls:
        if name in COMMANDS:  # an option that is no longer there would be seen here
            _parse(COMMANDS[name], words)


def _parse(command: click.Command, words: list[str]) -> None:
    with command.make_context("x", list(words)) as context:
        if isinstance(command, click.Group):
            name, inner, rest = command.resolve_command(context, list(words))
            assert inner is not None
            inner.make_context(name, rest, parent=context)


def test_a_step_that_fails_is_noted_and_the_others_run(tmp_path: Path) -> None:
    ran = Ran(tmp_path, fails="spark-check")
    assert ran.done.returncode == 1
    assert ran.steps == {**dict.fromkeys([*ALWAYS, *SMALL], 0), "tiny_check": 7}
    assert "ended with 7" in ran.done.stdout


def test_a_model_that_cannot_be_built_ends_its_part(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "owner/name", fails="owner/name")
    assert ran.done.returncode == 1 and list(ran.steps) == [*ALWAYS, *SMALL, "build"]


def test_where_nothing_can_be_installed_that_is_sent_back(tmp_path: Path) -> None:
    ran = Ran(tmp_path, fails="pip install")
    assert ran.done.returncode == 1 and ran.steps == {"install": 7}


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    given = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run([str(SCRIPT)], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "move it away" in done.stderr


def _refused(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The script where it must not begin: no step was called, nothing was written."""
    stubs = Stubs(folder, more=more)
    done = stubs.run(*words)
    assert not stubs.noted.exists() and not stubs.out.exists()
    return done


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_not_a_checkpoint(word: str, tmp_path: Path) -> None:
    done = _refused(tmp_path, word)
    assert done.returncode == 0 and "first_run_on_a_spark.sh [CHECKPOINT]" in done.stdout
    assert "LIMIT=7200" in done.stdout and "set -u" not in done.stdout


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    done = _refused(tmp_path / "1", "--limit=5")
    assert done.returncode == 2 and "--limit=5 is no option" in done.stderr
    assert "[CHECKPOINT]" in done.stderr and not done.stdout
    done = _refused(tmp_path / "2", "owner/name", "other")
    assert done.returncode == 2 and "(owner/name other): give one" in done.stderr


@pytest.mark.parametrize("limit", ["abc", "0", "1h", "-5"])
def test_a_limit_is_a_number_of_seconds(limit: str, tmp_path: Path) -> None:
    done = _refused(tmp_path, LIMIT=limit)
    assert done.returncode == 2 and f"LIMIT={limit} is no number of seconds" in done.stderr


@pytest.mark.parametrize(
    "word",
    [
        "owner/name",
        "owner/name@v1",
        "https://huggingface.co/owner/name/tree/main",
        "https://huggingface.co/owner/name/",
        "www.hf.co/owner/name",
    ],
)
def test_an_engine_is_named_as_spark_build_names_it(word: str, tmp_path: Path) -> None:
    hub = name_of(Path(word))
    assert hub is not None and hub.partition("@")[0] == "owner/name"
    calls = Ran(tmp_path, word).calls
    assert ["spark-build", word, "-o", "engines/name"] in calls
    assert ["spark-inspect", "engines/name"] in calls


def test_ctrl_c_ends_the_step_and_packs_what_there_is(tmp_path: Path) -> None:
    """As a terminal sends it: to the script's group alone, in which the step is not."""
    with Stubs(tmp_path, "spark-run").started() as script:
        began = time.monotonic()
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() - began < 120 and script.poll() is None
            time.sleep(0.05)
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(timeout=120) == 130
    step = int((tmp_path / "hangs").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(step, 0)
    packed = packed_in(Path(f"{tmp_path / 'first'}.tar.gz"))
    assert b"cpu_answer\t130\tended" in packed["steps.tsv"] and "cpu_build.txt" in packed
    assert not (tmp_path / "first.engines").exists()


def test_keys_are_cut_out_of_what_the_steps_said(tmp_path: Path) -> None:
    home = tmp_path / "hub"
    home.mkdir()
    (home / "token").write_text("hf_of_the_hub_itself\n")
    given = {"HF_TOKEN": "hf_0123456789", "HF_HOME": str(home), "PIP_X": "https://me:pass@index/"}
    ran = Ran(tmp_path, doctor=1, says="$HF_TOKEN hf_of_the_hub_itself $PIP_X", more=given)
    whole = b"".join(ran.packed.values())
    assert ran.done.returncode == 3 and b"[cut out]" in whole and b"@index/" in whole
    for key in (b"hf_0123456789", b"hf_of_the_hub_itself", b"me:pass"):
        assert key not in whole


SMI = """==============NVSMI LOG==============
Driver Version                            : 580.95.05
GPU 0000000F:01:00.0
    Product Name                          : NVIDIA GB10
    Serial Number                         : 1650525001234
    GPU UUID                              : GPU-01234567-89ab-cdef-0123-456789abcdef
    Platform Info
        Chassis Serial Number             : 77777
        GPU Fabric GUID                   : 0x5555
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 4242
            Type                          : C
            Name                          : /opt/secret-project/bin/python
    Capabilities
        EGM                               : disabled
"""


def test_the_archive_does_not_identify_the_machine(tmp_path: Path) -> None:
    bin_, home = tmp_path / "bin", tmp_path / "ann"
    bin_.mkdir()
    home.mkdir()
    (bin_ / "nvidia-smi").write_text(f"#!/bin/bash\ncat << 'END'\n{SMI}END\n")
    (bin_ / "nvidia-smi").chmod(0o755)
    more = {"PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(home)}
    says = "$HOME/models ${HOME}s GPU-01234567-89ab-cdef-0123-456789abcdef"
    packed = Ran(tmp_path, doctor=1, says=says, more=more).packed
    gpu = packed["gpu.txt"].decode()
    for word in ("1650525001234", "77777", "0x5555", "4242", "secret", "Process", "GPU-0"):
        assert word not in gpu, word
    assert "580.95.05" in gpu and "NVIDIA GB10" in gpu and "EGM" in gpu
    assert f"~/models {home}s [cut out]".encode() in packed["doctor.txt"]


def test_half_an_environment_does_not_stay(tmp_path: Path) -> None:
    """As `python3 -m venv` leaves one without the package python3-venv: with a python, no pip."""
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/bash\n[ "$1" = - ] && exec {sys.executable} "$@"\n'
        'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 1\n'
    )
    python.chmod(0o755)
    venv = tmp_path / "made here"
    given = {**os.environ, "VENV": str(venv), "OUT": str(tmp_path / "x"), "PYTHON": str(python)}
    done = subprocess.run([str(SCRIPT)], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and not venv.exists() and "venv\t1" in done.stdout
    assert (tmp_path / "x.tar.gz").exists()


def test_an_archive_that_does_not_fit_is_written_elsewhere(tmp_path: Path) -> None:
    """tar fails in OUT's folder, as on a full disk."""
    other, bin_ = tmp_path / "other", tmp_path / "bin"
    other.mkdir()
    bin_.mkdir()
    (bin_ / "tar").write_text(
        '#!/bin/bash\n[ "$2" = "$OUT.tar.gz" ] && exit 2\nexec /bin/tar "$@"\n'
    )
    (bin_ / "tar").chmod(0o755)
    more = {"TMPDIR": str(other), "PATH": f"{bin_}:{os.environ['PATH']}"}
    stubs = Stubs(tmp_path, doctor=1, more=more)
    done = stubs.run()
    (archive,) = other.iterdir()
    assert done.returncode == 3 and f"send back {archive}" in done.stdout
    assert "cpu_build.txt" in packed_in(archive)


def test_a_folder_is_named_from_where_the_owner_is(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    ran = Ran(tmp_path, "my model", cwd=tmp_path)
    assert ran.done.returncode == 0, ran.done.stderr
    build = next(c for c in ran.calls if "engines/my model" in c and c[0] == "spark-build")
    assert build[1] == str(tmp_path / "my model")


def test_a_doctor_that_breaks_is_not_a_machine_without_a_gpu(tmp_path: Path) -> None:
    ran = Ran(tmp_path, doctor=124)
    assert ran.done.returncode == 1 and "doctor_no_load.txt" in ran.packed
