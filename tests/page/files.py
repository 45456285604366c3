"""Files of a message: chosen, pasted, dropped, sent as parts, kept, exported and imported."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.page.conftest import ask, delta, script, until

LAST = ".message.user >> nth=-1"


def _png(colour: str = "red", size: tuple[int, int] = (40, 24)) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size, colour).save(held, "PNG")
    return held.getvalue()


def _chosen(page: Any, *files: tuple[str, str, bytes]) -> None:
    """Chooses files in the dialog of the button."""
    given = [{"name": n, "mimeType": kind, "buffer": data} for n, kind, data in files]
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    chooser.value.set_files(given)


def _transfer(page: Any, event: str, where: str, name: str, kind: str, data: bytes) -> None:
    """Pastes or drops a file, as the browser reports it."""
    page.evaluate(
        """([event, where, name, kind, data]) => {
          const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], name, { type: kind }));
          const key = event === "paste" ? "clipboardData" : "dataTransfer";
          const given = { [key]: transfer };
          const Kind = event === "paste" ? ClipboardEvent : DragEvent;
          const made = new Kind(event, { ...given, bubbles: true, cancelable: true });
          document.querySelector(where).dispatchEvent(made);
        }""",
        [event, where, name, kind, base64.b64encode(data).decode()],
    )


@pytest.fixture
def seeing(new_page: Callable[..., Any], url: str) -> Any:
    """The page of a server with a model that reads images."""
    page = new_page("about:blank", ready=False)

    def with_vision(route: Any) -> None:
        found = route.fetch()
        route.fulfill(response=found, json={**found.json(), "vision": {"patch": 16}})

    page.route("**/report", with_vision)
    page.goto(url)
    page.wait_for_selector("#health .model:text('scripted')")
    return page


def test_a_text_file_is_sent_in_a_fence_longer_than_its_own(page: Any) -> None:
    sent = script(page, delta(content="So."), delta("stop"))
    _chosen(page, ("notes.md", "text/markdown", b"a\n````\nb"), ("x.py", "", b"print(1)\n"))
    page.wait_for_selector("#attached li >> nth=1")
    ask(page, "What is this?")
    assert sent[0]["messages"] == [
        {
            "role": "user",
            "content": "notes.md\n`````md\na\n````\nb\n`````\n\n"
            "x.py\n```py\nprint(1)\n```\n\nWhat is this?",
        }
    ]
    assert page.is_hidden("#attached")
    page.click(f"{LAST} >> details >> nth=1 >> summary")
    assert page.inner_text(f"{LAST} >> details >> nth=1 >> pre").strip() == "print(1)"
    assert "x.py · 9 B" in page.inner_text(f"{LAST} >> details >> nth=1 >> summary")


def test_files_can_be_removed_and_are_enough_for_a_message(page: Any) -> None:
    sent = script(page, delta(content="So."), delta("stop"))
    assert page.is_disabled("#send")
    _chosen(page, ("a.txt", "text/plain", b"one"), ("b.txt", "text/plain", b"two"))
    page.click("[aria-label='Remove a.txt']")
    assert page.is_enabled("#send")
    page.click("#send")
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    assert sent[0]["messages"][0]["content"] == "b.txt\n```txt\ntwo\n```"
    assert page.inner_text("#conversations li a") == "b.txt"


@pytest.mark.parametrize(
    ("name", "kind", "data", "words"),
    [
        (
            "a.bin",
            "application/octet-stream",
            b"\xff\xfe\x00",
            "neither an image nor text in UTF-8",
        ),
        ("nul.txt", "text/plain", b"a\0b", "neither an image nor text in UTF-8"),
        ("a.heic", "image/heic", b"....", "send PNG, JPEG, WebP, GIF or BMP"),
        ("a.png", "image/png", b"....", "this model reads no images"),
        ("long.txt", "text/plain", b"a" * (513 << 10), "at most 512 KiB; this one has 513 KiB"),
    ],
    ids=["binary", "NUL", "HEIC", "no vision", "long"],
)
def test_what_cannot_be_sent_is_said(
    page: Any, name: str, kind: str, data: bytes, words: str
) -> None:
    _chosen(page, (name, kind, data))
    page.wait_for_selector("#toast .toast")
    assert name in page.inner_text("#toast") and words in page.inner_text("#toast")
    assert page.is_hidden("#attached") and page.is_disabled("#send")


def test_a_message_has_a_limit_of_files(page: Any) -> None:
    _chosen(page, *((f"{i}.txt", "text/plain", b"x") for i in range(17)))
    page.wait_for_selector("#toast :text('at most 16 files')")
    assert page.locator("#attached li").count() == 16


def test_images_are_pasted_and_dropped_and_sent_unchanged(seeing: Any) -> None:
    page, red, blue = seeing, _png("red"), _png("blue", (8, 8))
    sent = script(page, delta(content="So."), delta("stop"))
    _transfer(page, "paste", "#composer-text", "red.png", "image/png", red)
    page.wait_for_selector("#attached img[alt='red.png'][src^='blob:']")
    _transfer(page, "dragover", "#thread", "blue.png", "image/png", blue)
    page.wait_for_selector("#chat.dropping")
    _transfer(page, "drop", "#thread", "blue.png", "image/png", blue)
    page.wait_for_selector("#attached img[alt='blue.png']")
    assert page.locator("#chat.dropping").count() == 0
    ask(page, "Which colours?")
    urls = [f"data:image/png;base64,{base64.b64encode(data).decode()}" for data in (red, blue)]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    (message,) = sent[0]["messages"]
    assert message["content"] == [*parts, {"type": "text", "text": "Which colours?"}]


def test_images_stay_with_the_conversation(seeing: Any, tmp_path: Path) -> None:
    """After a reload, in a changed question, enlarged, and in an exported file."""
    page = seeing
    sent = script(page, delta(content="So."), delta("stop"))
    _chosen(page, ("red.png", "image/png", _png()), ("a.txt", "text/plain", b"one"))
    ask(page, "Which colour?")
    page.reload()
    image = page.wait_for_selector(".message.user img[src^='blob:']")
    until(page, lambda: image.evaluate("e => e.naturalWidth") == 40)
    page.click("[aria-label='Show red.png']")
    assert page.is_visible("#picture img")
    page.keyboard.press("Escape")
    page.hover(".message.user")
    page.click(".message.user >> [aria-label='Edit']")
    page.keyboard.press("Control+A")
    page.keyboard.type("And now?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.user :text('2 of 2')")
    page.wait_for_selector(".message.assistant[aria-busy=false]")
    kinds = [part["type"] for part in sent[-1]["messages"][0]["content"]]
    assert kinds == ["image_url", "text"]
    assert sent[-1]["messages"][0]["content"][1]["text"] == "a.txt\n```txt\none\n```\n\nAnd now?"
    with page.expect_download() as download:
        page.click("#export")
    file = tmp_path / "all.json"
    download.value.save_as(file)
    (data,) = json.loads(file.read_text())["images"].values()
    assert base64.b64decode(data.removeprefix("data:image/png;base64,")) == _png()
    page.evaluate("() => { localStorage.clear(); indexedDB.deleteDatabase('spark'); }")
    page.reload()
    page.set_input_files("#import-file", file)
    page.click("#conversations li a")
    image = page.wait_for_selector(".message.user img[src^='blob:']")
    until(page, lambda: image.evaluate("e => e.naturalWidth") == 40)


def test_an_image_that_the_browser_lost_is_named(seeing: Any) -> None:
    page = seeing
    sent = script(page, delta(content="So."), delta("stop"))
    _chosen(page, ("red.png", "image/png", _png()))
    ask(page, "Which colour?")
    page.evaluate("() => { indexedDB.deleteDatabase('spark'); }")
    page.reload()
    page.wait_for_selector(".message.user :text('red.png (not in this browser)')")
    ask(page, "And now?")
    first = sent[-1]["messages"][0]["content"]
    assert first == "[the image red.png is no longer in this browser]\n\nWhich colour?"
