"""The pages: links, anchors, paths, commands, options and figures exist; sizes stay in bounds.

Pages are README, CONTRIBUTING, SECURITY, CHANGELOG, docs/ and the embedded model's. A command is a
line of a code block, or a span in backquotes, that starts with one of the package's commands,
`python -m`, `make`, `pytest` or `scripts/`.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from spark_engine.bench import cli as bench
from spark_engine.builder import cli as builder
from spark_engine.builder import inspect
from spark_engine.check import cli as check
from spark_engine.hints import FOREIGN
from spark_engine.runtime.cli import spark_replicas, spark_run
from spark_engine.runtime.cli.doctor import doctor
from tests.repository import PACKAGES, ROOT, files

WORDS, LINES, FILES = 900, 200, 20  # of README, of performance.md, of a folder of docs/
PAGES = [path for path in files("*.md") if path.parts[0] != "benchmarks"]
SHOWN = [path for path in PAGES if path.name != "CHANGELOG.md"]
FIGURES = [
    path for path in PAGES if path.match("docs/performance.md") or path.match("results/*.md")
]
COMMANDS: dict[str, click.Command] = {
    "spark-bench": bench.main,
    "spark-build": builder.main,
    "spark-check": check.main,
    "spark-inspect": inspect.main,
    "spark-replicas": spark_replicas.main,
    "spark-run": spark_run.main,
}
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_ANCHOR = re.compile(r"[^\w\- ]")
_PATH = re.compile(
    r"(?<![\w/.~-])((?:docs|benchmarks|tests|scripts|training|"
    + "|".join(PACKAGES)
    + r")/[\w./-]+)"
)
_NAMELESS = re.compile(r"(?<![a-zA-Z])[A-Z]{2,}(?![a-zA-Z])|[-_/]$")  # a placeholder, NAME or ID
_SPEED = re.compile(r"([\d,.]*\d)(?: to ([\d,.]*\d))? (?:tokens/s|ms\b|times as fast)")


def _text(path: Path) -> str:
    return (ROOT / path).read_text()


def _prose(text: str) -> str:
    """A page without its code."""
    return _SPAN.sub("``", _BLOCK.sub("", text))


def _anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    heads = re.findall(r"^#+ (.+)$", _BLOCK.sub("", _text(path)), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).replace("`", "") for head in heads)
    return {_ANCHOR.sub("", head.strip().lower()).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in _LINK.findall(_prose(_text(page))):
        name, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (ROOT / page.parent / name).resolve() if name else ROOT / page
        if not target.exists():
            dead.append(link)
        elif anchor and anchor not in _anchors(target):
            dead.append(link)
    assert not dead, f"{page}: {dead}"


@pytest.mark.parametrize("page", SHOWN, ids=str)
def test_every_path_is_there(page: Path) -> None:
    text = _text(page)
    found = {path.rstrip(".") for path in _PATH.findall(text)}
    missing = [path for path in found if not (ROOT / path).exists() and not _NAMELESS.search(path)]
    assert not missing, f"{page}: {missing}"


def test_every_path_that_the_packages_name_is_there() -> None:
    sources = files(*(f"{package}/*{kind}" for package in PACKAGES for kind in (".py", ".cu*")))
    made = {"spark_engine/commit.txt"}  # by a build of the wheel
    for path in sources:
        found = {name.rstrip("./-") for name in _PATH.findall(_text(path))} - made
        there = [name for name in found if (ROOT / name).exists() or _NAMELESS.search(name)]
        assert not found.difference(there), f"{path}: {found.difference(there)}"


def test_every_page_that_the_sources_name_is_there() -> None:
    named = re.compile(r"\bdocs/[\w/.-]+\.(?:md|png|svg|json)\b")
    for path in files("*.py", "*.toml", "*.cu", "*.cuh", "*.sh", "*.yaml", "*.service", "Makefile"):
        found = [name for name in named.findall(_text(path)) if not _NAMELESS.search(name)]
        assert not [name for name in found if not (ROOT / name).is_file()], path


def test_the_index_lists_every_page() -> None:
    index = _text(Path("docs/README.md"))
    links = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in _LINK.findall(index)}
    pages = {ROOT / page for page in PAGES if page.parts[0] == "docs"} - {ROOT / "docs/README.md"}
    assert not pages - links


def test_readme_fits() -> None:
    assert len(_text(Path("README.md")).split()) <= WORDS


def test_the_page_of_figures_fits() -> None:
    assert len(_text(Path("docs/performance.md")).splitlines()) <= LINES


@pytest.mark.parametrize("top", ["docs", "training"])
def test_a_folder_has_few_files(top: str) -> None:
    folders: dict[Path, int] = {}
    for path in files(f"{top}/*"):
        folders[path.parent] = folders.get(path.parent, 0) + 1
    assert folders and max(folders.values()) <= FILES, folders


def _lines(text: str) -> Iterator[str]:
    """Lines of code blocks, without the remark in a column after them, and spans."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            yield re.split(r" {3,}| #", line.strip())[0]
    yield from _SPAN.findall(_BLOCK.sub("", text))


def _commands(text: str) -> Iterator[list[str]]:
    for line in _lines(text):
        for part in re.split(r"&&|\||;|>", line):
            try:
                words = shlex.split(part)
            except ValueError:
                continue  # a quotation that a cut ended
            while words and (re.fullmatch(r"[A-Z_]+=\S*", words[0]) or words[0] == "sudo"):
                words = words[1:]
            if words:
                yield [words[0].removeprefix(".venv/bin/").rpartition("bin/")[2], *words[1:]]


def _options(command: click.Command) -> set[str]:
    return {name for row in command.params for name in (*row.opts, *row.secondary_opts)}


def _unknown(words: list[str]) -> list[str]:
    """Of a command of the package, the options that it does not have."""
    command, rest = COMMANDS[words[0]], words[1:]
    if words[0] == "spark-run" and rest[:1] == ["doctor"]:
        command, rest = doctor, rest[1:]
    elif isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[:1]
        command, rest = command.commands[rest[0]], rest[1:]
    mine, _, passed = " ".join(rest).partition(" -- ")
    known = _options(command) | {"--help", "--version"}
    wrong = [w for w in mine.split() if w.startswith("--") and w.partition("=")[0] not in known]
    further = _options(spark_run.main)
    return wrong + [w for w in passed.split() if w.startswith("--") and w not in further]


@pytest.mark.parametrize("page", SHOWN, ids=str)
def test_every_command_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", _text(Path("Makefile")), re.M))
    wrong = []
    for words in _commands(_text(page)):
        if words[0] in COMMANDS:
            wrong += [f"{words[0]} {option}" for option in _unknown(words)]
        elif words[:2] == ["python", "-m"] and len(words) > 2:
            top = words[2].partition(".")[0]
            module = ROOT / words[2].replace(".", "/")
            if top in ("benchmarks", "tests", "training"):
                there = module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
                wrong += [] if there else [words[2]]
        elif words[0] == "make" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            wrong += [] if words[1] in targets else [f"make {words[1]}"]
        elif re.match(r"scripts/\w", words[0]):
            wrong += [] if (ROOT / words[0]).is_file() else words[:1]
    assert not wrong, f"{page}: {wrong}"


SUBCOMMANDS = [doctor, *bench.main.commands.values(), *spark_replicas.main.commands.values()]
ALL = [*COMMANDS.values(), *SUBCOMMANDS]


@pytest.mark.parametrize("command", ALL, ids=lambda command: str(command.name))
def test_every_option_has_a_help(command: click.Command) -> None:
    rows = [row for row in command.params if isinstance(row, click.Option) and not row.hidden]
    assert not [row.opts for row in rows if not row.help]


def _known() -> set[str]:
    """The options of all commands."""
    return {"--help", "--version", *(name for one in ALL for name in _options(one))}


def _unknown_in(text: str) -> set[str]:
    """Options in a module's string literals that no command has."""
    nodes = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    named = (re.findall(r"(?<![\w-])--[a-z][\w-]+", s) for s in nodes if isinstance(s, str))
    return {option for found in named for option in found} - _known()


# Of nvidia-smi, the hub's client and pip; and a key of the configuration file.
ELSEWHERE = {"--query-gpu", "--query-compute-apps", "--format", "--revision", "--local-dir"}
ELSEWHERE |= {"--python", "--engine"}


def test_every_option_in_a_message_exists() -> None:
    """Error messages and help texts name options of our commands, or of a program that is used."""
    sources = files(*(f"{package}/*.py" for package in PACKAGES))
    wrong = [(str(path), option) for path in sources for option in _unknown_in(_text(path))]
    assert {option for _, option in wrong} == ELSEWHERE, wrong
    assert _unknown_in('raise E("give more, or --no-such")') == {"--no-such"}


@pytest.mark.parametrize("page", SHOWN, ids=str)
def test_every_option_in_the_text_exists(page: Path) -> None:
    """Spans such as `--max-context`: of one of the commands, or of a server that is explained."""
    known = {*_known(), *FOREIGN}
    known |= {"--gpus", "--only", "--sample", "--write-fixtures", "--url"}  # docker, tests
    spans = [span.split()[0].partition("=")[0] for span in _SPAN.findall(_text(page))]
    measuring = set(re.findall(r'"(--[\w-]+)"', "".join(map(_text, files("benchmarks/*.py")))))
    wrong = {span for span in spans if span.startswith("--")} - known - measuring
    assert not wrong, f"{page}: {sorted(wrong)}"


@pytest.mark.parametrize("page", [page for page in SHOWN if page not in FIGURES], ids=str)
def test_a_speed_is_one_of_the_measured_or_predicted_ones(page: Path) -> None:
    sources = "".join(map(_text, FIGURES + files("benchmarks/log/*.md")))
    figures = {number for found in _SPEED.findall(_text(page)) for number in found if number}
    whole = re.compile(r"(?<![\d.,])[\d.,]*\d")
    measured = set(whole.findall(sources))
    assert not figures - measured, f"{page}: {sorted(figures - measured)}"
