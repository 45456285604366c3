"""The configuration file: every option, errors with their line, and what is printed can be read."""

import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from spark_engine.errors import OptionError
from spark_engine.runtime.cli.options import config_file
from spark_engine.runtime.cli.options.option import Option
from spark_engine.runtime.cli.options.run_options import FOLDER, OF_FILE, OPTIONS
from spark_engine.runtime.cli.spark_run import main


def _run(*words: object, **env: str) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], env=env)


def _sample(row: Option) -> Any:
    """A value of the option that is not its default."""
    if row.listed:
        return ("one", "x=two")
    if isinstance(row.kind, click.Choice):
        return next(c for c in row.kind.choices if c != row.default)
    if isinstance(row.kind, click.Path):
        path = row.kind.convert(__file__ if row.kind.file_okay else "/", None, None)
        return (path, path) if row.many else path
    one: Any = {bool: True, int: 3, float: 0.5, str: 'a "b"\n[c]\n# d'}[row.plain]
    return (one, "z") if row.many else one


def _file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "spark.toml").write_text(text)
    return tmp_path / "spark.toml"


def test_what_is_printed_is_read_again(tmp_path: Path) -> None:
    values = {row.name: _sample(row) for row in OF_FILE}
    text = config_file.write(OF_FILE, values, lambda name: True)
    read = config_file.read(_file(tmp_path, text), OF_FILE)
    assert read == {k: v for k, v in values.items() if k != "api_key"}
    assert "# api-key is given; it is not printed\n" in text and "# ---" in text


@pytest.mark.parametrize("value", ["31415926", '["31415926"]', "{ key = 31415926 }"])
def test_a_secret_is_in_no_error(tmp_path: Path, value: str) -> None:
    with pytest.raises(OptionError, match="api-key is not shown; it must be a text") as error:
        config_file.read(_file(tmp_path, f"api-key = {value}\n"), OF_FILE)
    assert "31415926" not in str(error.value)


def test_an_option_that_is_not_given_is_a_comment(tmp_path: Path) -> None:
    done = _run("--print-config")
    assert done.exit_code == 0 and tomllib.loads(done.stdout) == {}
    for row in OF_FILE:
        assert f"\n# {row.key} = " in done.stdout and f"# {row.help}\n" in done.stdout
    assert "# port = 8000\n" in done.stdout and '# policy = "balanced"\n' in done.stdout


def test_a_run_of_the_command_prints_what_holds(tmp_path: Path) -> None:
    given = _file(tmp_path, 'engine = "e"\nserve = true\nport = 81\nhost = "::"\nstop = ["x"]\n')
    done = _run("--config", given, "--print-config", "--port", 82, SPARK_API_KEY="secret")
    want = {"engine": "e", "serve": True, "port": 82, "host": "::", "stop": ["x"]}
    assert tomllib.loads(done.stdout) == want, done.output
    assert "secret" not in done.stdout and "api-key is given" in done.stdout
    assert tomllib.loads(_run("--print-config", "named", "--stop", "a").stdout) == {
        "engine": "named",
        "stop": ["a"],
    }
    several = _file(tmp_path, 'engine = ["e", "x=f"]\n')
    printed = _run("--config", several, "--print-config").stdout
    assert tomllib.loads(printed) == {"engine": ["e", "x=f"]}
    assert tomllib.loads(_run("--print-config", "e", "x=f").stdout) == {"engine": ["e", "x=f"]}


WRONG = [
    ("serve = true\nprot = 1\n", "spark.toml, line 2: there is no option 'prot'; did you mean"),
    ("max_tokens = 3", "did you mean max-tokens?"),
    ("config = 'x'", "line 1: there is no option 'config'"),
    ("# a\n\nport = '80'\n", "line 3: port is '80'; it must be an integer"),
    ("port = true", "port is True; it must be an integer"),
    ("port = 70000", "line 1: port: 70000 is not in the range"),
    ("serve = 1", "serve is 1; it must be true or false"),
    ("temperature = 'hot'", "temperature is 'hot'; it must be a number"),
    ("host = 1", "host is 1; it must be a text in quotes"),
    ("policy = 'fast'", "line 1: policy: 'fast' is not one of"),
    ("stop = 'x'", 'stop is \'x\'; give a list, stop = ["one", "two"]'),
    ("seed = 1\nstop = ['x', 3]", "line 2: stop is 3; it must be a text"),
    ("seed = 1\n[server]\nport = 3", "line 2: [server] is a table; write options at the top level"),
    ("port = \nseed = 1", "at line 1, column"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_mistake_in_a_file_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(OptionError) as error:
        config_file.read(_file(tmp_path, text), OF_FILE)
    assert words in str(error.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_bytes(b"\xff")
    for name, words in (("none", "No such file"), ("b.toml", "not UTF-8"), ("", "is a directory")):
        done = _run("--config", tmp_path / name, "--serve")
        assert done.exit_code == 2 and "Traceback" not in done.stderr
        assert words in done.stderr.splitlines()[-1] and str(tmp_path) in done.stderr


@pytest.mark.parametrize(
    "text", ["port = " + "1" * 5_000_000, "port = " + "[" * 100_000, "port = 1_", "x = {" * 10_000]
)
def test_what_no_parser_takes_is_the_users_mistake(text: str, tmp_path: Path) -> None:
    done = _run("--config", _file(tmp_path, text), "--print-config")
    assert done.exit_code == 2 and "This is our bug" not in done.stderr
    assert len(done.stderr) < 1000 and str(tmp_path) in done.stderr


def test_numbers_and_a_byte_order_mark_are_taken(tmp_path: Path) -> None:
    read = config_file.read(_file(tmp_path, "\ufefftemperature = 1\nitl-ms = 2.5\n"), OF_FILE)
    assert read == {"temperature": 1.0, "itl_ms": 2.5} and type(read["temperature"]) is float


def test_an_option_may_be_kept_out_of_files(tmp_path: Path) -> None:
    rows = [Option("--here", FOLDER.group, "X.", of_file=False), FOLDER]
    with pytest.raises(OptionError, match="no option 'here'"):
        config_file.read(_file(tmp_path, "here = 'x'"), rows)
    assert "here" not in config_file.write(rows, {"here": "x", "engine": None}, lambda name: True)


def test_a_file_may_hold_what_is_for_other_modes_but_nothing_idle(tmp_path: Path) -> None:
    given = _file(tmp_path, 'engine = "none"\nserve = true\nmax-tokens = 3\nport = 1\nlogprobs = 2')
    for words in ((), ("--prompt", "a", "--json")):
        done = _run("--config", given, *words)  # the mode of the command line has precedence
        assert done.exit_code == 2 and "there is no engine folder none" in done.stderr
    done = _run("--config", given, "--prompt", "a")
    assert "--logprobs does nothing without --json" in done.stderr
    done = _run("--config", given, "--seed", "3")
    assert "--seed does nothing with --serve" in done.stderr
    two = _file(tmp_path, 'serve = true\nchat = "hi"')
    assert "only one" in _run("--config", two).stderr


def test_every_option_is_a_key() -> None:
    assert {row.key for row in OF_FILE} == {row.key for row in OPTIONS} | {"engine"}
