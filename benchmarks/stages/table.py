"""The table of what `benchmarks.everything` runs: rows of TOML, read once and checked.

Knows what a row may say (docs at the top of `table.toml`) and no row by name. A row with `each` is
several: one for every mapping there, whose values stand for `{key}` in its strings, or for the
row's own keys. Raises StageError naming the row and what is wrong with it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("table.toml")
AIMS = ("decode", "seeds", "words")  # see `aims.py`
NEEDS = ("program", "module", "package", "file")  # see `machine.py`
GIVEN = ("out", "work", "commit")  # what a command may ask for, beside engines
LEAST, TIMES = 60.0, 2.0  # a row without a limit has its seconds so often, or so much more
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ASKED = re.compile(r"\{([^{}]*)\}")
Json = dict[str, Any]


class StageError(Exception):
    """A table, or a wish of the command line, that cannot be followed."""


@dataclass(frozen=True)
class Engine:
    """What stages share and one command makes: an engine folder.

    Attributes:
        command: `{engine}` in it is the folder.
        seconds, known: how long it takes, and where that is known from.
        gpus: how many it is made with.
        gib: of disk.
        needs: what must be there, by kind.
    """

    name: str
    command: str
    seconds: float
    known: str
    gpus: int = 1
    gib: float = 0.0
    limit: float = 0.0
    keep: tuple[str, ...] = ()  # files of the folder that go into the results
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def most(self) -> float:
        """Seconds after which it is ended."""
        return self.limit or max(TIMES * self.seconds, self.seconds + LEAST)


@dataclass(frozen=True)
class Stage:
    """One command that makes figures.

    Attributes:
        command: may ask for {out}, its folder; {work}, one that is thrown away; {commit};
            {engine.NAME}; {built.NAME}, the seconds that building it took.
        seconds, known: how long it takes, and where that is known from.
        timed: nothing runs beside it.
        gpus, cores: what it needs.
        limit: seconds after which it is ended; 0: by its `seconds`.
        writes: files in {out}; of the same name in benchmarks/results when they are kept.
        stdout: the file in {out} that gets standard output, beside errors in `output.txt`.
        of: which rows of those files are this stage's, by their fields.
        last: date, and commit, of the last run where its files do not say so.
        needs: what must be there, by kind.
        figure: a regular expression; what its groups find in the output is the figure. Where it
            finds nothing the stage has failed.
        aim: what the figure is to be, by where that stands.
    """

    name: str
    command: str
    seconds: float
    known: str
    timed: bool
    gpus: int = 1
    cores: int = 0
    limit: float = 0.0
    writes: tuple[str, ...] = ()
    stdout: str = ""
    of: Mapping[str, Any] = field(default_factory=dict)
    last: str = ""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    figure: str = ""
    aim: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that its command asks for, in order."""
        asked = (word.partition(".") for word in _ASKED.findall(self.command))
        return tuple(dict.fromkeys(name for kind, _, name in asked if kind in ("engine", "built")))

    @property
    def most(self) -> float:
        """Seconds after which it is ended."""
        return self.limit or max(TIMES * self.seconds, self.seconds + LEAST)


@dataclass(frozen=True)
class Table:
    """Engines by name, and stages in the order of the file."""

    engines: Mapping[str, Engine]
    stages: tuple[Stage, ...]

    def chosen(self, names: Sequence[str]) -> tuple[Stage, ...]:
        """The stages of these names in the order of the names; `decode_*` is all that begin so."""
        found: dict[str, Stage] = {}
        for name in names:
            same = [
                s
                for s in self.stages
                if s.name == name or (name.endswith("*") and s.name.startswith(name[:-1]))
            ]
            if not same:
                known = ", ".join(s.name for s in self.stages)
                raise StageError(f"there is no stage {name}; there are {known}")
            found |= {s.name: s for s in same}
        return tuple(found.values())


def read(path: Path = TABLE) -> Table:
    """The table of a file."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise StageError(f"{path}: {error}") from error
    unknown = sorted(set(data) - {"engine", "stage"})
    if unknown:
        raise StageError(f"{path}: [[{unknown[0]}]] is neither [[engine]] nor [[stage]]")
    engines = [_made(Engine, row) for one in data.get("engine", []) for row in _each(one)]
    stages = [_made(Stage, row) for one in data.get("stage", []) for row in _each(one)]
    for name in [row.name for row in (*engines, *stages)]:
        if not _NAME.fullmatch(name):
            raise StageError(f"{path}: {name!r} is no name: it is to be a folder's")
    table = Table({e.name: e for e in engines}, tuple(stages))
    for kind, rows in (("engine", engines), ("stage", stages)):
        twice = {r.name for r in rows if sum(o.name == r.name for o in rows) > 1}
        if twice:
            raise StageError(f"{path}: two rows [[{kind}]] are named {sorted(twice)[0]}")
    for row in (*engines, *stages):
        _check(row, table)
    return table


def fill(command: str, given: Mapping[str, str]) -> str:
    """The command with what it asks for."""
    return _ASKED.sub(lambda asked: given[asked[1]], command)


def _each(row: Json) -> Iterator[Json]:
    """The rows that one of the file stands for."""
    known = {f.name for f in (*fields(Stage), *fields(Engine))}
    base = {key: value for key, value in row.items() if key != "each"}
    for variant in row.get("each", [{}]):
        own = {key: value for key, value in variant.items() if key in known}
        yield {key: _put(value, variant) for key, value in (base | own).items()}


def _put(value: Any, variant: Json) -> Any:
    if isinstance(value, str):
        for key, given in variant.items():
            value = value.replace(f"{{{key}}}", str(given))
        return value
    if isinstance(value, list):
        return [_put(one, variant) for one in value]
    if isinstance(value, dict):
        return {key: _put(one, variant) for key, one in value.items()}
    return value


def _made(kind: type[Any], row: Json) -> Any:
    name = row.get("name", "without a name")
    unknown = sorted(set(row) - {f.name for f in fields(kind)})
    if unknown:
        raise StageError(f"row {name} says {unknown[0]!r}, which no row has")
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    try:
        return kind(**(row | lists))
    except TypeError as error:
        raise StageError(f"row {name}: {error}") from error


def _check(row: Engine | Stage, table: Table) -> None:
    """Raises StageError for what a row cannot mean."""
    asked = set(_ASKED.findall(row.command))
    engines = {f"{word}.{name}" for word in ("engine", "built") for name in table.engines}
    known = engines | set(GIVEN) if isinstance(row, Stage) else {"engine"}
    if asked - known:
        raise StageError(
            f"row {row.name} asks for {{{sorted(asked - known)[0]}}}; there are "
            f"{', '.join(sorted(known))}"
        )
    if row.seconds <= 0 or not row.known:
        raise StageError(f"row {row.name}: say its seconds, and in `known` where they are from")
    if set(row.needs) - set(NEEDS):
        raise StageError(f"row {row.name}: needs are of {', '.join(NEEDS)}")
    if isinstance(row, Engine):
        return
    if set(row.aim) - set(AIMS):
        raise StageError(f"row {row.name}: an aim is of {', '.join(AIMS)}")
    try:
        re.compile(row.figure)
    except re.error as error:
        raise StageError(f"row {row.name}: figure is no regular expression: {error}") from error
