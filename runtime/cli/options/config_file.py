"""The configuration file of `spark-run`: TOML with a key for each option (`--print-config`).

Knows the file's format; the options are the table's. Errors in a file name the line.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import tomli_w

from spark_engine.command import command, system_words
from spark_engine.errors import OptionError
from spark_engine.hints import near
from spark_engine.runtime.cli.options.option import Group, Option

HEAD = """\
# Options of spark-run, by group; `spark-run --config FILE` reads them. What is commented out is as
# by default. The command line and the environment override this file.
"""
F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text in quotes"}


def option(program: str, rows: Sequence[Option], help: str) -> Callable[[F], F]:
    """The decorator of `--config` for the command `program`: the file's values of `rows` become the
    defaults of the command's options."""

    def set_defaults(context: click.Context, _: click.Parameter, path: Path | None) -> None:
        if path is not None:
            with command(program):
                context.default_map = read(path, rows)

    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=set_defaults,
        help=help,
    )


def read(path: Path, rows: Sequence[Option]) -> dict[str, Any]:
    """The values of the file, by the options' names.

    Raises OptionError naming the file, the line, the key and the expected value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        given = tomllib.loads(text)
    except OSError as error:
        raise OptionError(f"--config: {system_words(error)}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"--config: {path} is not UTF-8 ({error})") from None
    except (ValueError, RecursionError) as error:  # also for a number of thousands of digits
        raise OptionError(f"{path}: {error}; a line is like `port = 8000`") from None
    known = {row.key: row for row in rows if row.of_file}
    return {
        known[k].name: _value(path, text, known[k], v)
        for k, v in _checked(path, text, given, known)
    }


def _checked(
    path: Path, text: str, given: Mapping[str, Any], known: Mapping[str, Option]
) -> list[tuple[str, Any]]:
    """The file's keys and values, all known. Raises OptionError."""
    for key, value in given.items():
        if key in known:
            continue
        where = _place(path, text, key)
        if isinstance(value, dict):
            words = f"[{key}] is a table; write options at the top level: port = 8000"
            raise OptionError(f"{where}: {words}")
        words = f"there is no option {key!r}{near(key.replace('_', '-'), list(known))}"
        raise OptionError(f"{where}: {words}; `spark-run --print-config` lists them all")
    return list(given.items())


def _value(path: Path, text: str, row: Option, value: Any) -> Any:
    """The value in the form of the command line. Raises OptionError."""
    where = _place(path, text, row.key)
    if row.listed:
        return tuple(
            _single(where, row, one) for one in (value if isinstance(value, list) else [value])
        )
    if row.many:
        if not isinstance(value, list):
            example = f'{row.key} = ["one", "two"]'
            raise OptionError(f"{where}: {row.key} is {_shown(row, value)}; give a list, {example}")
        return tuple(_single(where, row, one) for one in value)
    return _single(where, row, value)


def _single(where: str, row: Option, value: Any) -> Any:
    wanted = row.plain
    whole = wanted is float and type(value) is int  # 30 is accepted for 30.0
    if type(value) is not wanted and not whole:
        words = f"{row.key} is {_shown(row, value)}; it must be {_WORDS[wanted]}"
        raise OptionError(f"{where}: {words}")
    try:
        kind = click.types.convert_type(row.kind)
        return kind.convert(value, None, None)
    except click.BadParameter as error:
        raise OptionError(f"{where}: {row.key}: {error.message}") from None


def _shown(row: Option, value: Any) -> str:
    return "not shown" if row.secret else repr(value)


def _place(path: Path, text: str, key: str) -> str:
    """The file and, where it is found, the line of a key or a table."""
    name = re.escape(key)
    pattern = rf"""^[ \t]*\[*[ \t]*["']?{name}["']?[ \t]*[=.\]]"""
    found = re.search(pattern, text, re.MULTILINE)
    return f"{path}, line {text.count(chr(10), 0, found.start()) + 1}" if found else str(path)


def write(rows: Sequence[Option], values: Mapping[str, Any], given: Callable[[str], bool]) -> str:
    """A file with these values; `given` returns whether a name was given.

    Other options are comments, with their default or the form of their value.
    """
    lines = [HEAD]
    for group in Group:
        mine = [row for row in rows if row.group is group and row.of_file]
        if mine:
            lines.append(f"# --- {group.title} ---")
        for row in mine:
            lines += [f"# {row.help}", _line(row, values[row.name], given(row.name)), ""]
    return "\n".join(lines)


def _line(row: Option, value: Any, given: bool) -> str:
    if given and row.secret:
        return f"# {row.key} is given; it is not printed"
    if value is None or value == ():
        shape = f"[{row.shape}, ...]" if row.many else row.shape
        return f"# {row.key} = {shape}"
    shown = list(value) if row.many or row.listed else value
    if row.listed and len(value) == 1:
        (shown,) = value
    plain = shown if isinstance(shown, list | bool | int | float) else str(shown)
    line = tomli_w.dumps({row.key: plain}).rstrip("\n")
    return line if given else f"# {line}"
