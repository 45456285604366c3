"""Prose and identifiers are plain technical English: words that a reader may misread are banned.

Prose is: docstrings, comments and string literals with a space of *.py; comments of CUDA, JS, CSS,
HTML and TOML files, and the `why` of a mutant; Makefile and *.sh; *.md without code and quotations.
Code in backquotes is not read. Identifiers are those of Python, CUDA and JS, split at underscores
and capitals; those of the packages may not have the words of BANNED_NAMES either.
`python -m tests.repository_checks.test_language FOLDER...` prints every place in prose.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.repository import PACKAGES, ROOT, files

# (what is banned, what to write); a space matches any white space.
BANNED = (
    (r"mend(?:s|ed|ing)?", "fix, correct"),
    (r"rooms?", "space, memory, capacity; folder"),
    (r"house", "project, repository"),
    (r"beside", "next to, with, in addition to"),
    (r"told", "is given, receives, learns; told apart: distinguished"),
    (r"begun", "started"),
    (r"heirs?", "successor"),
    (r"walkers?", "warp, thread block, or what walks"),
    (r"made-up", "generated, emulated, fake"),
    (r"who(?:so)?ever", "a user who, any caller that"),
    (r"young(?:er|est)?", "recent, newer, new"),
    (r"ways?", "method, form, direction, path; delete 'in this way'"),
    (r"half-way", "the middle, the midpoint"),
    (r"(?:lies?|lain)", "is, is stored, is between"),
    (r"(?:stands?|stood)(?!-)", "is, is written, means"),
    (r"(?:goes|go|going|went) on", "continues"),
    (r"(?:gives?|gave|given|giving) back", "returns, releases, frees"),
    (r"(?:holds?|held) up", "delays, blocks"),
    (r"of (?:its|their) own", "its own X, a separate X"),
    (r"somebody(?:'s)?", "a client, another request"),
    (r"nobody(?:'s)?", "no client, no request, nothing"),
    (r"no one(?:'s)?", "no client, no request, nothing"),
    (r"reckon(?:s|ed|ing)?", "calculate, compute, estimate"),
    (r"nought", "zero"),
    (r"anew", "again"),
    (r"lest", "so that … not"),
)
# In names of the packages only: in prose they are plain words.
BANNED_NAMES = (
    (r"(?:un)?said|saying", "text, tokens, message, words"),
    (r"hears?|heard", "receive, on_message, last_beat"),
    (r"tells|telling", "answer, report, heartbeat"),
    (r"talk", "conversation"),
    (r"news", "changes, new_X"),
    (r"homes|owe[sd]?|spoilt|strangers?|wild|scene", "owner, must_X, damaged, unknown, inputs"),
    (r"strays|hopeless|frugal|forgiven|fallen|born|lefts|mores", "outliers, permanent, remaining"),
)
# Of people only.
_WHO = re.compile(r"\b(?:who|whose|whom)\b", re.I)
_PERSON = re.compile(
    r"\b(?:user|client|owner|operator|engineer|reader|author|attacker|person|developer|maintainer"
    r"|newcomer|vendor|speaker|tester|compan(?:y|ie))s?\b|\bpeople\b|\byour?s?\b",
    re.I,
)
_EACH = (rf"{words}(?!\w)".replace(" ", r"\s+") for words, _ in BANNED)
_WORDS = re.compile(rf"\b(?:{'|'.join(_EACH)})", re.I)
_NAMES_ONLY = re.compile(rf"\b(?:{'|'.join(words for words, _ in BANNED_NAMES)})\b", re.I)

_NAME = re.compile(r"\b[A-Za-z_]\w*")
_NAME_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_SPAN = re.compile(r"`+[^`]+`+")
_SENTENCE = re.compile(r"\S.*?(?:[.!?](?=\s)|\Z)", re.S)
_MARKERS = re.compile(r"\n[ /#*]+")
_SLASHES = re.compile(r"(?<![:\"'])//(.*)")
_STARS = re.compile(r"/\*(.*?)\*/|<!--(.*?)-->", re.S)
_HASH = re.compile(r"^(?:[^\n#]*\s)?#(.*)$|^why = \"(.*)\"$", re.M)
_QUOTED = re.compile(r"^(```|~~~).*?^\1|^>.*?$|\]\([^)]*\)|<!--.*?-->", re.M | re.S)

Block = tuple[int, str]  # its first line, its text


def _joined(lines: Iterable[Block]) -> Iterator[Block]:
    """Comments of consecutive lines as one text."""
    first, texts = 0, list[str]()
    for at, text in lines:
        if texts and at != first + len(texts):
            yield first, "\n".join(texts)
            texts = []
        first = first if texts else at
        texts.append(text)
    if texts:
        yield first, "\n".join(texts)


def _matched(pattern: re.Pattern[str], text: str) -> Iterator[Block]:
    for match in pattern.finditer(text):
        found = "".join(group for group in match.groups() if group is not None)
        yield text.count("\n", 0, match.start()) + 1, found


def _strings(node: ast.AST) -> Iterator[Block]:
    """String literals with a space; {} is what an f-string puts in."""
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
        yield node.lineno, node.value
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
        yield node.lineno, "".join(map(str, parts))
        inner = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    for child in inner:
        yield from _strings(child)


def _python(text: str) -> Iterator[Block]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    yield from _joined((token.start[0], token.string.lstrip("#: ")) for token in comments)
    yield from _strings(ast.parse(text))


def _whole(text: str) -> Iterator[Block]:
    yield 1, text


def _page(text: str) -> Iterator[Block]:
    yield 1, _QUOTED.sub(lambda match: "\n" * match[0].count("\n"), text)


def _slashes(text: str) -> Iterator[Block]:
    yield from _joined(_matched(_SLASHES, text))
    yield from _matched(_STARS, text)


READERS: dict[str, Callable[[str], Iterator[Block]]] = {
    ".py": _python,
    ".cu": _slashes,
    ".cuh": _slashes,
    ".js": _slashes,
    ".css": lambda text: _matched(_STARS, text),
    ".html": lambda text: _matched(_STARS, text),
    ".toml": lambda text: _joined(_matched(_HASH, text)),
    ".sh": _whole,
    ".json": _whole,
    ".md": _page,
    "": _whole,  # Makefile
}
# Tables of messages are the only JSON with prose of ours.
PROSE = ("Makefile", *(f"*/{name}.json" for name in ("*_options", "*_fields", "*_paths")))
SOURCES = [
    path
    for path in files(*(f"*{suffix}" for suffix in READERS if suffix not in ("", ".json")), *PROSE)
    if path != Path("tests/repository_checks/test_language.py")
]


def _banned(text: str) -> Iterator[tuple[int, str]]:
    """(line, words) of each place; lines are counted from 0."""
    text = _SPAN.sub(lambda match: "`" + "\n" * match[0].count("\n"), text)
    found = [(match.start(), match[0]) for match in _WORDS.finditer(text)]
    for sentence in _SENTENCE.finditer(text):
        if not _PERSON.search(sentence[0]):
            start = sentence.start()
            found += [(start + match.start(), match[0]) for match in _WHO.finditer(sentence[0])]
    for at, words in sorted(found):
        yield text.count("\n", 0, at), words


def _places(path: Path) -> list[tuple[int, str]]:
    """(line, words) of each banned place of a file."""
    text = (ROOT / path).read_text()
    if not _WORDS.search(_MARKERS.sub("\n", text)) and not _WHO.search(text):
        return []  # most files; reading Python takes long
    blocks = READERS[path.suffix](text)
    return sorted((first + line, words) for first, text in blocks for line, words in _banned(text))


def _names(text: str, suffix: str, product: bool = True) -> Iterator[Block]:
    """(line, identifier) of each banned identifier of a source, once a line."""
    if suffix == ".py":
        if not any(_is_banned(name, product) for name in {*_NAME.findall(text)}):
            return  # most files; reading Python takes long
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [(t.start[0], t.string) for t in tokens if t.type == tokenize.NAME]
    else:
        code = _STARS.sub(lambda match: "\n" * match[0].count("\n"), text)
        lines = enumerate(_SLASHES.sub("", code).split("\n"), 1)
        found = [(at, name) for at, line in lines for name in _NAME.findall(line)]
    yield from (one for one in sorted(set(found)) if _is_banned(one[1], product))


@cache
def _is_banned(name: str, product: bool) -> bool:
    words = " ".join(_NAME_WORDS.findall(name))
    banned = _WORDS.search(words) or _WHO.search(words)
    return bool(banned or (product and _NAMES_ONLY.search(words)))


def _folder(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "."


@pytest.mark.parametrize("folder", sorted({_folder(path) for path in SOURCES}))
def test_no_word_is_banned(folder: str) -> None:
    paths = [path for path in SOURCES if _folder(path) == folder]
    found = [f"{path}:{line}: {words!r}" for path in paths for line, words in _places(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("suffix", [".py", ".cu", ".cuh", ".js"])
def test_no_identifier_has_a_banned_word(suffix: str) -> None:
    paths = [path for path in SOURCES if path.suffix == suffix]
    found = [
        f"{path}:{at}: {name}"
        for path in paths
        if not path.name.endswith(".min.js")
        for at, name in _names((ROOT / path).read_text(), suffix, path.parts[0] in PACKAGES)
    ]
    assert not found, "\n".join(found)


def test_identifiers_are_split_at_underscores_and_capitals() -> None:
    code = "whoRuns = 1\nROOMS, x.goes_on, roomy = HTTPHouse, f'told', 'told'  # told\n"
    found = [(1, "whoRuns"), (2, "HTTPHouse"), (2, "ROOMS"), (2, "goes_on")]
    assert list(_names(code, ".py")) == found
    assert list(_names("x = tellable(heard_last, HOMES, unsaid)", ".py")) == [
        (1, "HOMES"),
        (1, "heard_last"),
        (1, "unsaid"),
    ]
    assert list(_names("heard = HOMES", ".py", product=False)) == []
    code = "int way_of; // told\n/* told\n*/ float lies;"
    assert list(_names(code, ".cu")) == [(1, "way_of"), (3, "lies")]


def test_the_reader_sees_prose_only(tmp_path: Path) -> None:
    source = """
# A page whose
# reader is told
told = "told", f"is told {told:told} more", f"{x('a b whose')}"  # `told` beside
def f(who):
    '''A user
    whose key.'''
"""
    assert [words for _, text in _python(source) for _, words in _banned(text)] == [
        "told",
        "beside",
        "told",
        "whose",
    ]
    page = "told\n```\nwho\n```\n> who\n[x](beside/house)\nIt goes\non."
    assert [place for _, text in _page(page) for place in _banned(text)] == [
        (0, "told"),
        (6, "goes\non"),
    ]
    code = "int told;  // who\n/* its\nhouse */ x = 'http://beside';"
    assert [(first, text) for first, text in _slashes(code)] == [(1, " who"), (2, " its\nhouse ")]


if __name__ == "__main__":
    for path in SOURCES:
        if not sys.argv[1:] or any(path.is_relative_to(folder) for folder in sys.argv[1:]):
            for line, words in _places(path):
                print(f"{path}:{line}: {words!r}")
