"""Pictures of the page for docs/pictures/, taken while a real server of the embedded model works.

    python -m tests.page.pictures [URL]        docs/pictures/page_*.png

Without a URL it starts `spark-run --serve`. Needs what `make page` needs. All that is seen was
measured by that server on this machine.
"""

import sys
import threading
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from tests.page.conftest import FOUND, ask
from tests.ports import served

DOCS = Path(__file__).parents[2] / "docs" / "pictures"
LOAD_S = 62  # of what the plots show
CLIENTS = 6
LARGEST = 150_000  # bytes of a picture
QUESTIONS = ("Tell me a story about a small boat.", "What is 3 plus 4?", "What is a promise?")


def main() -> int:
    if len(sys.argv) > 1:
        return take(sys.argv[1].rstrip("/") + "/")
    with served() as url:
        return take(url + "/")


def take(url: str) -> int:
    done = threading.Event()
    clients = [threading.Thread(target=client, args=(url, i, done)) for i in range(CLIENTS)]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND)
        page = new_page(browser, url, width=1180, height=760)
        chat(page)
        shoot(page, "chat")
        page.click("[data-view=live]")
        for thread in clients:
            thread.start()
            page.wait_for_timeout(1000 * LOAD_S / 3 / CLIENTS)
        page.wait_for_timeout(1000 * LOAD_S * 2 / 3)
        shoot(page, "live", height=880)
        done.set()
        page.click("[data-view=engine]")
        page.wait_for_selector(".bar")
        shoot(page, "engine")
        narrow = {"color_scheme": "dark", "device_scale_factor": 2, "has_touch": True}
        page = new_page(browser, url, width=390, height=700, **narrow)
        ask(page, QUESTIONS[1])
        page.click(".message.assistant summary")
        shoot(page, "narrow")
        browser.close()
    for thread in clients:
        thread.join()
    return 0


def new_page(browser: Any, url: str, width: int, height: int, **options: Any) -> Any:
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    page.set_default_timeout(60_000)
    page.goto(url)
    page.wait_for_selector("#health .model:text('tiny')", state="attached")
    return page


def chat(page: Any) -> None:
    """Three conversations; the last one has two questions and an unfolded thought."""
    for question in QUESTIONS:
        page.click("#new")
        ask(page, question)
    page.click("#conversations a:has-text('plus')")
    ask(page, "And 12 plus 30?")
    page.click(".message.assistant summary >> nth=0")
    page.locator("#messages").evaluate("box => (box.scrollTop = 0)")
    page.mouse.move(0, 0)


def client(url: str, number: int, done: threading.Event) -> None:
    """Asks again and again, its conversation growing: its beginning is then in the cache."""
    messages: list[dict[str, str]] = []
    with httpx.Client(timeout=120) as session:
        for turn in range(10_000):
            if done.is_set():
                return
            if turn % 4 == 0:
                messages = []
            question = (
                f"Tell me a story about {'a boat,a bear,a kite,a fox'.split(',')[number % 4]}."
            )
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": 160}
            answer = session.post(url + "v1/chat/completions", json=body).json()
            content = answer["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": content})


def shoot(page: Any, name: str, height: int | None = None) -> None:
    """docs/pictures/page_NAME.png; smaller than LARGEST, or it is said."""
    if height is not None:
        page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.wait_for_timeout(400)
    path = DOCS / f"page_{name}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    assert size <= LARGEST, f"{path} has {size} bytes"
    print(f"{path.name}: {size} bytes")


if __name__ == "__main__":
    sys.exit(main())
