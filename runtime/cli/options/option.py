"""An option of `spark-run`: its name, its group, the modes that use it, the field that it fills.

Knows click; knows no option. The options are the table of `runtime/cli/options/run_options.py`.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import click
import msgspec

from spark_engine.hints import explain

T = TypeVar("T")
FILE, DIRECTORY = click.Path(dir_okay=False), click.Path(file_okay=False)
# bool makes a flag
Kind: TypeAlias = "type[bool] | type[int] | type[float] | type[str] | click.ParamType[Any]"


class Finite(click.FloatRange):
    """A range of floats that refuses `nan` and `inf`."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number."""
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{found} is not a finite number.", param, ctx)
        return found


class Mode(enum.StrEnum):
    """The mode of a run; all but TERMINAL are options of the same name."""

    PROMPT = "prompt"
    PROMPT_IDS = "prompt_ids"
    CHAT = "chat"
    SERVE = "serve"
    BATCH = "batch"
    TERMINAL = "terminal"

    @property
    def flag(self) -> str:
        """The option as typed on the command line, or its description."""
        if self is Mode.TERMINAL:
            return "a chat on the terminal"
        return "--" + self.value.replace("_", "-")


ASKED_FOR = tuple(mode for mode in Mode if mode is not Mode.TERMINAL)
SERVING = frozenset({Mode.SERVE})
CHATS = frozenset({Mode.CHAT, Mode.TERMINAL})
ONE = frozenset({Mode.PROMPT, Mode.PROMPT_IDS, Mode.CHAT})  # one answer
APIS = frozenset({Mode.SERVE, Mode.BATCH})  # requests in the APIs' forms
MANY = APIS | {Mode.TERMINAL}
ANSWERING = frozenset(Mode) - APIS


class Group(enum.Enum):
    """A section of the help and of the file that `--print-config` prints: its title, its modes."""

    def __init__(self, title: str, modes: frozenset[Mode]) -> None:
        self.title = title
        self.modes = modes

    TASK = "Task", frozenset(Mode)
    ANSWER = "Sampling and output", ANSWERING
    ENGINE = "Engine", frozenset(Mode)
    MEASURING = "To measure (spark-bench passes on what follows --)", frozenset(Mode)
    SERVER = "Server (--serve)", SERVING
    SECURITY = "Access control", SERVING
    LOGGING = "Logs and traces", SERVING


@dataclass(frozen=True)
class Option:
    """An option of the command line and the configuration file.

    Attributes:
        fills: the class and the field that take the value, with the option's default; None where
            the command reads it by name.
        needs: another option's flag without which this has no effect, and a reason.
    """

    flag: str  # as it is typed, `--max-queue`; the file's key is the same without the dashes
    group: Group
    help: str
    kind: Kind = str  # of its value; bool makes a flag that is off by default
    fills: tuple[type, str] | None = None
    turn: Callable[[Any], object] | None = None  # converts the option's value to the field's
    many: bool = False  # may be given several times; the value is a tuple
    metavar: str | None = None
    envvar: str | None = None
    modes: frozenset[Mode] | None = None  # those that use it; None: those of its group
    needs: tuple[str, str] | None = None
    secret: bool = False  # its value is never printed
    of_file: bool = True  # whether the configuration file may have it
    listed: bool = False  # the file may have one value, or a list of them; the value is a tuple

    @property
    def key(self) -> str:
        """The key in the configuration file."""
        return self.flag.removeprefix("--")

    @property
    def name(self) -> str:
        """The name in the values of a run."""
        return self.key.replace("-", "_")

    @property
    def where(self) -> frozenset[Mode]:
        return self.group.modes if self.modes is None else self.modes

    @property
    def plain(self) -> type:
        """The type of its value: bool, int, float or str."""
        if isinstance(self.kind, type):
            return self.kind
        whole = isinstance(self.kind, click.IntRange)
        return int if whole else float if isinstance(self.kind, click.FloatRange) else str

    @property
    def shape(self) -> str:
        """The form of its value, in a word."""
        if isinstance(self.kind, click.Choice):
            return "|".join(f'"{choice}"' for choice in self.kind.choices)
        word = self.metavar or {int: "INTEGER", float: "NUMBER"}.get(self.plain, "TEXT")
        return f'"{word}"' if self.plain is str else word

    @property
    def default(self) -> Any:
        if self.kind is bool:
            return False
        found = None if self.fills is None else defaults(self.fills[0])[self.fills[1]]
        if self.many:
            return tuple(found or ())
        return found.value if isinstance(found, enum.Enum) else found

    def parameter(self) -> click.Option:
        many, default = self.many, self.default
        return click.Option(
            [self.flag, self.name],
            help=self.help,
            is_flag=self.kind is bool,
            type=None if self.kind is bool else self.kind,
            default=None if many and not default else default,
            multiple=many,
            metavar=self.metavar,
            envvar=self.envvar,
            show_default=self.is_given(default),
        )

    def is_given(self, value: Any) -> bool:
        """True if the value was given; 0 was."""
        return not (value is None or value is False or value == ())


def table(
    group: Group, owner: type | None = None, modes: frozenset[Mode] | None = None
) -> Callable[..., Option]:
    """Makes rows of a group that fill `owner`, if any: the field of the flag's name, or `field`.
    `modes`: theirs, if they are not the group's."""

    def row(flag: str, text: str, kind: Kind = str, field: str = "", **more: Any) -> Option:
        name = field or flag.removeprefix("--").replace("-", "_")
        fills = None if owner is None else (owner, name)
        if kind in (FILE, DIRECTORY):
            more.setdefault("metavar", "FILE" if kind is FILE else "FOLDER")
        return Option(flag, group, text, kind, fills, **{"modes": modes, **more})

    return row


def defaults(kind: Any) -> dict[str, Any]:
    """The default of each field of a dataclass or a Struct that has one."""
    if issubclass(kind, msgspec.Struct):
        rows = msgspec.structs.fields(kind)
        return {row.name: row.default for row in rows if row.default is not msgspec.NODEFAULT}
    known = dataclasses.fields(kind)
    return {row.name: row.default for row in known if row.default is not dataclasses.MISSING}


def fill(kind: type[T], rows: Sequence[Option], values: Mapping[str, Any], **more: object) -> T:
    """A `kind` made from `more` and from the values of the options that fill its fields."""
    given = dict(more)
    for row in rows:
        if row.fills is not None and row.fills[0] is kind:
            value = values[row.name]
            given[row.fills[1]] = value if row.turn is None else row.turn(value)
    return kind(**given)


def why_idle(row: Option, mode: Mode, values: Mapping[str, Any]) -> str | None:
    """Why the option has no effect in this mode; None where it has."""
    if mode in row.where:
        if row.needs is None or values[row.needs[0].removeprefix("--").replace("-", "_")]:
            return None
        return f"without {row.needs[0]}, {row.needs[1]}: add {row.needs[0]}"
    if mode is Mode.SERVE:
        return "with --serve: clients say it in each request"
    if mode is Mode.BATCH and row.where <= ANSWERING:
        return "with --batch: each line's body says it"
    if row.where == SERVING:
        return f"without --serve: leave it out, or serve instead of {mode.flag}"
    others = " and ".join(other.flag for other in Mode if other in row.where)
    return f"with {mode.flag}; it is for {others}"


class Grouped(click.Command):
    """A command with help by group; `rows` has the groups of its options."""

    def __init__(self, *args: Any, rows: Sequence[Option] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self._group = {row.name: row.group.title for row in rows}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does; NoSuchOption for another server's option names ours."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            words = error.message + explain(error.option_name)
            raise click.NoSuchOption(error.option_name, words, error.possibilities, ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {group.title: [] for group in Group}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                title = self._group.get(parameter.name or "", "General")
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
