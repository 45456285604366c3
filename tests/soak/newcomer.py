"""A newcomer's walk: `python -m tests.soak.newcomer`, half a minute.

Builds the wheel, installs it with its dependencies into an empty environment, and makes the
mistakes that people make, each in a separate process: every one must end with the right exit
code and one line that names value and remedy. Prints a row for each.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.repository_checks.clean_install import bare_environment, clone_into, pip_into

FEW = ("--target", "cpu", "--decode", "1", "--prefill", "64", "--max-context", "256")
Words = tuple[str, ...]


class Walk:
    """The environment, and how many rows were not as they should be."""

    def __init__(self, home: Path) -> None:
        self.home, self.failed = home, 0
        self._venv = _install(home)
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("ORT_", "SPARK_", "PYTHON"))
        }
        self._env = {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        self.away = home / "away"
        self.away.mkdir()

    @property
    def checkpoint(self) -> Path:
        """The embedded model's, as it was installed."""
        return next(self._venv.rglob("models/tiny/checkpoint"))

    def start(self, *words: object, **env: str) -> subprocess.Popen[str]:
        """A command of ours, in an empty folder."""
        command = [str(self._venv / "bin" / str(words[0])), *map(str, words[1:])]
        return subprocess.Popen(
            command, cwd=self.away, env={**self._env, **env}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def expect(self, code: int, said: Words, *words: object, **env: str) -> str:
        """Runs it to its end; returns standard output."""
        return self.end(self.start(*words, **env), code, said)

    def end(self, process: subprocess.Popen[str], code: int, said: Words) -> str:
        """Waits, and holds exit code and words against what came.

        After an error the words are in the last line of standard error, the only one of ours.
        """
        out, err = process.communicate(timeout=300)
        lines = err.splitlines() or [""]
        ours = [line for line in lines if line.startswith("spark-")]
        text = lines[-1] if code else out + err
        good = process.returncode == code and all(word in text for word in said)
        good = good and "Traceback" not in err and (not code or ours == lines[-1:])
        self.failed += not good
        name = " ".join([Path(process.args[0]).name, *process.args[1:]])  # type: ignore[index,arg-type]
        print(f"{'ok ' if good else 'BAD'} {process.returncode:3d}  {name}\n      {lines[-1]}")
        if not good:
            print(f"      wanted {code} and {said}\n{err[-2000:]}")
        sys.stdout.flush()
        return out


def _install(home: Path) -> Path:
    """A venv that sees this interpreter's dependencies and holds our wheel."""
    clone, venv = home / "clone", home / "venv"
    clone_into(clone)
    bare_environment(venv)
    quiet = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "-o", home, clone]
    subprocess.run(build, **quiet)  # type: ignore[call-overload]
    (wheel,) = home.glob("*.whl")
    subprocess.run([*pip_into(venv), wheel], **quiet)  # type: ignore[call-overload]
    return venv


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of 4 MiB; None where none may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def names(walk: Walk) -> None:
    """Every command is there; tests/spark_engine/test_mistakes.py has the mistakes one by one."""
    for tool in ("spark-bench", "spark-build", "spark-run", "spark-check", "spark-inspect"):
        walk.expect(0, (f"{tool}, version",), tool, "--version")
    walk.expect(2, ("sm_90a",), "spark-build", walk.checkpoint, "--target", "sm90")
    for tool in ("spark-build", "spark-run", "spark-inspect"):
        more = ("--serve",) if tool == "spark-run" else ()
        remedy = "could not be fetched" if tool == "spark-build" else "spark-build Qwen/Qwen3.6-27B"
        walk.expect(2, (remedy,), tool, "Qwen/Qwen3.6-27B", *more)


def disks(walk: Walk) -> None:
    """A cache that cannot be written, a disk that is full, an engine that is cut."""
    cache = {"XDG_CACHE_HOME": "/proc/none"}
    walk.expect(2, ("/proc/none", "XDG_CACHE_HOME"), "spark-run", "--prompt", "a", **cache)
    with small_disk(walk.home / "disk") as disk:
        if disk is not None:
            said = (f"-o {disk}/e", "MiB are free", "another disk")
            walk.expect(2, said, "spark-build", walk.checkpoint, "-o", disk / "e", *FEW)
            walk.failed += list(disk.iterdir()) != []
    engine = walk.home / "engine"
    walk.expect(0, ("built",), "spark-build", walk.checkpoint, "-o", engine, *FEW)
    walk.expect(0, ("decode_b1.engine",), "spark-inspect", engine)
    weights = engine / "weights.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    walk.expect(2, (str(weights), "spark-build"), "spark-inspect", engine)
    walk.expect(2, (str(weights), "spark-build"), "spark-run", engine, "--prompt", "a")


def signals(walk: Walk) -> None:
    """Ctrl-C and SIGTERM while a build hashes, compiles or writes: nothing stays."""
    out = walk.home / "signals"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = walk.start("spark-build", walk.checkpoint, "-o", out / "e", "--target", "cpu")
        assert process.stderr is not None
        while "lower the network" not in (line := process.stderr.readline()):
            assert line, "the build ended before it lowered the network"
        process.send_signal(number)
        walk.end(process, code, ("spark-build: ",))
        left = [p.name for p in out.iterdir()]
        walk.failed += left != []
        print(f"      left behind: {left}")


def answers(walk: Walk) -> None:
    """The embedded model: built once, an answer, no event in the cache, a server that leaves."""
    said = ("thought: ", "answer: ", "tokens/s")
    walk.expect(0, said, "spark-run", "--chat", "What is 3 plus 4?", "--max-tokens", "64")
    found = [p.name for p in (walk.home / "cache").iterdir()]
    walk.failed += found != ["spark"]
    print(f"      in the cache: {found}")
    server = walk.start("spark-run", "--serve", "--port", "0")
    assert server.stderr is not None
    while "serving" not in (line := server.stderr.readline()) and line:
        print(f"      {line.rstrip()}")
    server.terminate()
    walk.end(server, 0, ())


def main() -> int:
    """The exit code: how many rows were not as they should be."""
    begin = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        walk = Walk(Path(folder))
        for part in (names, disks, signals, answers):
            part(walk)
    print(f"{walk.failed} wrong, {time.monotonic() - begin:.0f} s")
    return min(walk.failed, 100)


if __name__ == "__main__":
    sys.exit(main())
