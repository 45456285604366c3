"""What was found, complete on disk after every stage: a folder a stage, a summary, one archive.

Knows files. A stage's folder holds `command.txt`, `output.txt`, what its command wrote, and last of
all `result.json`: without that it did not end. A second try moves the first one's files into
`earlier_N`, so that rows of a stage that was cut off are kept.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.stages.table import Json, StageError

SUMMARY, MACHINE, RESULT = "summary.tsv", "machine.json", "result.json"
COMMAND, OUTPUT, EARLIER = "command.txt", "output.txt", "earlier_"
DONE, FAILED, LIMIT, CUT, SKIP, LATE = "0", "failed", "limit", "cut", "skip", "no time"
HEADER = ("stage", "code", "seconds", "figure")
LARGE = 256 << 20  # bytes of a file that the archive leaves out


@dataclass(frozen=True)
class Outcome:
    """How a stage, or a build, ended.

    Attributes:
        code: its exit code; LIMIT: its time was over; CUT: all time was over, or somebody ended it;
            SKIP, LATE: it was not begun; FAILED: it ended well and said no figure.
        figure: one line, or why there is none.
        beside: what ran at some time beside it.
    """

    name: str
    code: str
    seconds: float = 0.0
    figure: str = ""
    commit: str = ""
    beside: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether it need not be run again."""
        return self.code == DONE


class Book:
    """The folder of one commit's results, that of an earlier call too."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder, self.commit = folder, commit
        self.outcomes: dict[str, Outcome] = {}
        for path in sorted(folder.glob(f"*/{RESULT}")):
            kept = json.loads(path.read_text())
            self.outcomes[kept["name"]] = Outcome(**{**kept, "beside": tuple(kept["beside"])})
        others = {o.commit for o in self.outcomes.values()} - {commit}
        if others:
            raise StageError(
                f"{folder} holds results of commit {', '.join(sorted(others))}, and this tree is "
                f"{commit}: give another --out, or --commit if it is the same"
            )

    def note(self, machine: Json) -> None:
        """Adds what this call's machine is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / MACHINE
        calls = json.loads(path.read_text())["calls"] if path.is_file() else []
        _write(path, json.dumps({"calls": [*calls, machine]}, indent=1) + "\n")

    def done(self, name: str) -> bool:
        """Whether a stage was run to its end."""
        return name in self.outcomes and self.outcomes[name].done

    def begin(self, name: str, words: Sequence[str]) -> Path:
        """An empty folder for the stage; what an earlier try left is kept beside."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        old = [path for path in folder.iterdir() if not path.name.startswith(EARLIER)]
        if old:
            number = 1 + sum(path.name.startswith(EARLIER) for path in folder.iterdir())
            (aside := folder / f"{EARLIER}{number}").mkdir()
            for path in old:
                shutil.move(path, aside / path.name)
        _write(folder / COMMAND, shlex.join(words) + "\n")
        return folder

    def end(self, outcome: Outcome) -> None:
        """Everything is on disk when this returns."""
        self.outcomes[outcome.name] = outcome
        folder = self.folder / outcome.name
        if folder.is_dir():  # one that was not begun has none, and is tried again next time
            _write(folder / RESULT, json.dumps(asdict(outcome), indent=1) + "\n")
        self.save()

    def save(self) -> None:
        """Writes the summary and the archive, each whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [(o.name, o.code, f"{o.seconds:.1f}", o.figure) for o in self.outcomes.values()]
        lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in (HEADER, *rows))
        _write(self.folder / SUMMARY, "\n".join(lines) + "\n")
        self.pack()

    @property
    def archive(self) -> Path:
        """Beside the folder."""
        return self.folder.with_name(f"{self.folder.name}.tar.gz")

    def pack(self) -> None:
        """The folder as it is, in one file; a file that still grows is as long as it was read."""
        part = self.archive.with_name(f"{self.archive.name}.part")
        with tarfile.open(part, "w:gz", compresslevel=6) as archive:
            for path in _files(self.folder):
                try:
                    data = path.read_bytes()
                except OSError:  # thrown away meanwhile
                    continue
                name = Path(self.folder.name) / path.relative_to(self.folder)
                known = tarfile.TarInfo(str(name))
                known.size, known.mtime = len(data), int(time.time())
                archive.addfile(known, io.BytesIO(data))
        os.replace(part, self.archive)


def _files(folder: Path) -> Iterable[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGE:
            yield path


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)
