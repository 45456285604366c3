"""The page as HTTP gives it, and what its files may hold."""

import hashlib
import json
import re
from os.path import normpath
from pathlib import Path
from typing import Any

import httpx
import pytest

from spark_engine.runtime.engine.draft_counts import DraftCounts
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.engine_client.ipc import Stats
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.page import bundle as module
from spark_engine.runtime.server.page.bundle import KINDS, read_bundle
from spark_engine.runtime.server.page.live import live
from tests.runtime.fake_client import FakeClient, service
from tests.runtime.server.api.api_client import ApiClient

FOLDER = Path(module.__file__).parent / "files"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())
MOST = 165_000  # bytes of our files together
# Temml 0.13.5: its file of npm, between a line with the license and an export.
LIBRARY = FOLDER / "markdown/temml.min.js"
LIBRARY_SHA256 = "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95"
# What would make markup or code of text, or reach beyond the server.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment"
    r"|srcdoc|\beval\b|new Function|setTimeout\(['\"`]|javascript:|importScripts|WebSocket"
)
# Addresses that name something and are never asked for.
NAMES = ("http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML")


def _ask(*paths: str, key: str | None = None, **headers: str) -> list[httpx.Response]:
    server = ApiClient(keys=Keyring(None, key))
    return [server.get(path, **headers) for path in paths]


def test_every_file_comes_with_its_kind_and_what_a_browser_may_do() -> None:
    answers = _ask("/", *(f"/page/{path.relative_to(FOLDER)}" for path in FILES))
    for answer, path in zip(answers, [FOLDER / "index.html", *FILES], strict=True):
        assert answer.status_code == 200 and answer.content == path.read_bytes()
        assert answer.headers["content-type"] == KINDS[path.suffix]
        policy = dict(
            (part.split()[0], part.split()[1:])
            for part in answer.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == ["'none'"]
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == ["'self'"]
        assert policy["frame-ancestors"] == ["'none'"] and policy["form-action"] == ["'none'"]
        assert policy["trusted-types"] == ["'none'"]
        assert policy["require-trusted-types-for"] == ["'script'"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"


def test_what_a_browser_has_is_not_sent_again() -> None:
    (whole,) = _ask("/page/main.js")
    tag = whole.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        (again,) = _ask("/page/main.js", **{"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["content-security-policy"]
    (changed,) = _ask("/page/main.js", **{"If-None-Match": tag[:-2] + '0"'})
    assert changed.status_code == 200
    for name, file in read_bundle().items():
        whole_digest = hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        assert len(file.tag) >= 18 and whole_digest.startswith(file.tag.strip('"'))


@pytest.mark.parametrize("name", ["x.js", "..%2fbundle.py", "%2e%2e/bundle.py", "", "main.js/"])
def test_nothing_else_is_a_file_of_the_page(name: str) -> None:
    (answer,) = _ask(f"/page/{name}")
    assert answer.status_code in (404, 307)
    assert b"import" not in answer.content


def test_the_page_needs_no_key_and_the_report_does() -> None:
    answers = _ask("/", "/page/main.js", "/report", "/v1/models", key="a key of the test")
    assert [a.status_code for a in answers] == [200, 200, 401, 401]
    (report,) = _ask("/report", key="a key of the test", Authorization="Bearer a key of the test")
    assert report.status_code == 200


def test_without_a_page_there_is_none() -> None:
    server = ApiClient(page=False)
    index, script, report = map(server.get, ("/", "/page/main.js", "/report"))
    assert (index.status_code, script.status_code, report.status_code) == (404, 404, 200)
    assert b"<html" not in index.content


def test_the_whole_is_small() -> None:
    assert sum(path.stat().st_size for path in FILES if path != LIBRARY) <= MOST


def test_the_library_is_as_it_was_published() -> None:
    head, body, end = LIBRARY.read_bytes().split(b"\n")[:3]
    assert b"MIT License" in head and b"Temml 0.13.5" in head
    assert hashlib.sha256(body).hexdigest() == LIBRARY_SHA256
    assert end == b"export default temml;"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_makes_no_markup_of_text_and_asks_no_other_host(path: Path) -> None:
    text = path.read_text()
    assert path.suffix in KINDS
    assert FORBIDDEN.findall(text) == []
    for name in NAMES:
        text = text.replace(name, "")
    assert re.findall(r"""["'(=]\s*(?:https?:)?//[\w.]""", text) == []
    lines = text.splitlines()
    assert len(lines) <= 400, "it is two files"


def test_the_index_has_no_inline_script_style_or_handler() -> None:
    text = (FOLDER / "index.html").read_text()
    assert re.findall(r"\son\w+=|\sstyle=|<style", text) == []
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)
    assert scripts and all("src=" in head and not inner for head, inner in scripts)


def test_every_file_is_reached_from_the_index_and_none_is_missing() -> None:
    names = {str(path.relative_to(FOLDER)) for path in FILES}
    reached, todo = set(), ["index.html"]
    while todo:
        name = todo.pop()
        reached.add(name)
        text = (FOLDER / name).read_text()
        found = re.findall(r'(?:href|src): "page/([\w.]+)"|(?:href|src)="page/([\w.]+)"', text)
        wanted = [a or b for a, b in found]
        for path in re.findall(r'(?:from |import\()"(\.[\w./]+)"', text):
            wanted.append(normpath(Path(name).parent / path))
        todo += [other for other in wanted if other not in reached]
    assert reached == names


def test_the_ids_that_scripts_ask_for_are_in_the_index() -> None:
    known = set(re.findall(r'\sid="([\w-]+)"', (FOLDER / "index.html").read_text()))
    for path in FILES:
        asked = set(re.findall(r'(?:find|getElementById)\("([\w-]+)"\)', path.read_text()))
        assert asked <= known, path.name


def _luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_contrast_with_what_is_behind_them(theme: int) -> None:
    """WCAG's contrast of 4.5 for text, and of 3 for the lines of plots."""
    style = (FOLDER / "page.css").read_text()
    rows = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);", style)
    colours = {name: _luminance(pair[theme]) for name, *pair in rows}
    words = ("text", "soft", "accent", "bad", "t-k", "t-s", "t-n", "t-c")
    pairs = [(word, behind, 4.5) for word in words[:2] for behind in ("ground", "raised", "tint")]
    pairs += [(word, "surface", 4.5) for word in words]
    pairs += [("accent", "tint", 4.5), ("on-accent", "accent", 4.5), ("bad", "bad-tint", 4.5)]
    pairs += [(line, "surface", 3) for line in ("s0", "s1")]
    for word, behind, wanted in pairs:
        low, high = sorted((colours[word], colours[behind]))
        assert (high + 0.05) / (low + 0.05) >= wanted, (word, behind)


def test_the_plots_read_what_the_server_says() -> None:
    metrics = service(FakeClient(), None, drafts=2).metrics
    counts: Any = {"drafts_by_position": [4, 3], "accepted_by_position": [3, 1]}
    stats = Stats(**counts, by_source={"mtp": DraftCounts([4, 3], [3, 1])})
    said = live(metrics, stats, drafts=2)
    assert said["bySource"] == {"mtp": {"verified": [4, 3], "kept": [3, 1]}}
    text = (FOLDER / "live.js").read_text()
    read = set(re.findall(r'seen\.\w+\(((?:"\w+"(?:, )?)+)', text))
    names = {name for row in read for name in re.findall(r'"(\w+)"', row)}
    names |= set(re.findall(r"values\.(\w+)", text)) | set(re.findall(r'only: "(\w+)"', text))
    assert len(names) > 12 and names <= said.keys()
    histograms = re.search(r"HISTOGRAMS = (\[.*\]);", (FOLDER / "metrics.js").read_text())
    assert histograms is not None
    assert set(json.loads(histograms[1])) == {n for n in said if isinstance(said[n], list)}


def test_the_settings_are_fields_that_the_server_knows() -> None:
    text = (FOLDER / "settings.js").read_text()
    numbers = re.findall(r'name: "(\w+)", label: "[^"]+", kind: "number"', text)
    assert len(numbers) > 8
    others = ("model", "stop", "tools", "response_format", "chat_template_kwargs", "stream_options")
    assert {*numbers, *others} <= set(ChatRequest.__struct_fields__)
