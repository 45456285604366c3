"""A browser without a window, a server with a scripted engine, and pages that must not complain."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.repository import PATH
from tests.runtime import fake_engine, small_tokenizer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next(filter(None, map(shutil.which, NAMES)), None)
ROOT = Path(__file__).parents[2]
WAIT_MS = 10_000
LAST = ".message.assistant:last-child"


@contextmanager
def serving(folder: Path, **options: object) -> Iterator[str]:
    """The address of a server with a scripted engine (tests/runtime/fake_engine.py)."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = json.dumps({"port": port, "names": ["scripted", "other"], **options})
    command = [sys.executable, fake_engine.__file__, "server", str(folder), words]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": PATH})
    url = f"http://127.0.0.1:{port}/"
    try:
        end = time.monotonic() + 60
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < end, "the server does not start"
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer.write(tmp_path_factory.mktemp("engine") / "tokenizer")


@pytest.fixture(scope="session")
def url(tokenizer_folder: Path) -> Iterator[str]:
    with serving(tokenizer_folder) as found:
        yield found


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if FOUND is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[page]'")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND)
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Makes a page in a new profile; at the end no page may have reported an error."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def heard(message: Any) -> None:
        # a status that is no success is a line of the browser's own, whatever the page makes of it
        if message.type == "error" and "Failed to load resource" not in message.text:
            complaints.append(message.text)

    def make(path: str, ready: bool = True, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 780}, **options})
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.on("console", heard)
        page.on("pageerror", lambda problem: complaints.append(str(problem)))
        page.goto(path)
        if ready:
            page.wait_for_selector("#composer-text, .plots", state="attached")
        return page

    make.complaints = complaints  # type: ignore[attr-defined]
    yield make
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def page(new_page: Callable[..., Any], url: str) -> Any:
    """The page, when it knows its server."""
    made = new_page(url)
    made.wait_for_selector("#health .model:text('scripted')")
    return made


def until(page: Any, true: Callable[[], bool], seconds: float = WAIT_MS / 1000) -> None:
    """Waits; playwright's own waiting for a script's value is stopped by the page's policy."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not in time"
        page.wait_for_timeout(30)


def ask(page: Any, text: str, wait: bool = True) -> None:
    """Sends a message; waits for the end of its answer."""
    page.fill("#composer-text", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(LAST)
    if wait:
        page.wait_for_selector(f"{LAST}[aria-busy=false]")


def press(page: Any, where: str, label: str) -> None:
    """Presses a button that is shown where the mouse is."""
    page.hover(where)
    page.click(f"{where} >> [aria-label='{label}']")


def texts(page: Any, where: str) -> list[str]:
    return [text.strip() for text in page.locator(where).all_inner_texts()]


def set_field(page: Any, **values: str) -> None:
    """Fills fields of the settings and closes them."""
    page.click("#open-settings")
    for name, value in values.items():
        box = page.locator(f"#setting-{name}")
        if box.evaluate("e => e.tagName") == "SELECT":
            box.select_option(value)
        else:
            box.fill(value)
    page.keyboard.press("Escape")


def script(page: Any, *chunks: dict[str, Any] | str, status: int = 200) -> list[dict[str, Any]]:
    """Answers the page's requests with these chunks; returns the bodies that were sent, as they
    come."""
    sent: list[dict[str, Any]] = []

    def fulfil(route: Any) -> None:
        sent.append(route.request.post_data_json)
        lines = [c if isinstance(c, str) else "data: " + json.dumps(c) for c in chunks]
        body = "\n\n".join([*lines, "data: [DONE]", ""])
        route.fulfill(status=status, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", fulfil)
    return sent


def delta(finish: str | None = None, **parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": finish}]}
