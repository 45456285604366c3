"""Conversations: searched, saved as Markdown, cut, continued, counted; presets; accessibility."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import LAST, ask, delta, press, script, set_field, texts, until


def test_the_search_reads_titles_and_messages(page: Any) -> None:
    script(page, delta(content="An answer about cherries."), delta("stop"))
    assert page.is_hidden("#search")
    for words in ("the apple", "the pear"):
        page.click("#new")
        ask(page, words)
    page.fill("#search", "pear")
    assert texts(page, "#conversations li") == ["the pear"]
    page.fill("#search", "CHERRIES apple")
    assert texts(page, "#conversations li") == ["the apple"]
    page.fill("#search", "plum")
    assert "No conversation has these words" in page.inner_text("#conversations")
    page.fill("#search", "")
    assert len(texts(page, "#conversations li")) == 2


def test_a_conversation_is_saved_as_markdown(page: Any, tmp_path: Path) -> None:
    script(page, delta(reasoning_content="a\nb"), delta(content="**So.**"), delta("stop"))
    ask(page, "Why: this?")
    page.hover("#conversations li")
    with page.expect_download() as download:
        page.click("[aria-label='Save Why: this? as Markdown']")
    assert download.value.suggested_filename == "Why-this-.md"
    download.value.save_as(tmp_path / "x.md")
    assert (tmp_path / "x.md").read_text() == (
        "# Why: this?\n\n## You\n\nWhy: this?\n\n## Answer\n\n> a\n> b\n\n**So.**\n"
    )


def test_a_message_is_deleted_with_what_follows(page: Any) -> None:
    sent = script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    ask(page, "two")
    press(page, ".message.user >> nth=1", "Delete from here")
    assert texts(page, ".bubble") == ["one"] and page.locator(".message.assistant").count() == 1
    page.click("#toast button")
    assert texts(page, ".bubble") == ["one", "two"]
    press(page, ".message.user >> nth=1", "Delete from here")
    ask(page, "three")
    assert [m["content"] for m in sent[-1]["messages"]] == ["one", "So.", "three"]
    page.reload()
    page.wait_for_selector(".bubble")
    assert texts(page, ".bubble") == ["one", "three"]


def test_deleting_a_version_shows_the_other(page: Any) -> None:
    script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    press(page, LAST, "Regenerate")
    page.wait_for_selector(f"{LAST} :text('2 of 2')")
    press(page, LAST, "Delete from here")
    assert page.locator(".message.assistant").count() == 1
    assert page.locator(f"{LAST} .turns").count() == 0


def test_an_answer_at_its_limit_is_continued_in_its_place(page: Any) -> None:
    script(page, delta(content="One two"), delta("length"))
    ask(page, "Count")
    page.unroute("**/v1/chat/completions")
    sent = script(page, delta(content=" three."), delta("stop"))
    press(page, LAST, "Continue")
    page.wait_for_selector(f"{LAST} .content :text('One two three.')")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    assert page.locator(".message.assistant").count() == 1
    assert sent[0]["messages"][-1] == {"role": "assistant", "content": "One two"}
    assert sent[0]["continue_final_message"] and sent[0]["add_generation_prompt"] is False
    assert page.locator(f"{LAST} [aria-label='Continue']").count() == 0


def test_the_server_continues_what_the_page_sends(page: Any) -> None:
    """The scripted engine's words are those of a prompt with an open last message."""
    set_field(page, max_tokens="30")
    ask(page, "What is 40 plus 2?")
    first = page.inner_text(f"{LAST} .content")
    press(page, LAST, "Continue")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    until(page, lambda: len(page.inner_text(f"{LAST} .content")) > len(first))
    assert page.inner_text(f"{LAST} .content").startswith(first)
    assert page.locator(".problem:not([hidden])").count() == 0


def test_tokens_are_counted_before_sending(page: Any) -> None:
    page.fill("#composer-text", "What is 40 plus 2?")
    page.wait_for_selector("#used:text-matches('^\\\\d+ of [\\\\d,]+ tokens$')")
    few = int(page.inner_text("#used").split()[0])
    page.fill("#composer-text", "What is 40 plus 2? " * 20)
    until(page, lambda: page.inner_text("#used").strip())
    assert int(page.inner_text("#used").split()[0]) > 5 * few
    page.fill("#composer-text", "")
    until(page, lambda: page.inner_text("#used") == "")


def test_presets_are_saved_chosen_and_deleted(page: Any) -> None:
    set_field(page, temperature="0.3", system="Be brief.")
    page.click("#open-settings")
    page.fill("#preset-name", "brief")
    page.click("#settings button:text-is('Save')")
    page.click("#settings >> text=Reset all to defaults")
    assert page.input_value("#setting-temperature") == ""
    page.select_option("#preset", "brief")
    assert page.input_value("#setting-temperature") == "0.3"
    assert page.input_value("#setting-system") == "Be brief."
    page.reload()
    page.click("#open-settings")
    page.fill("#preset-name", "brief")
    page.click("#settings button:text-is('Delete')")
    assert page.locator("#preset option").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(new_page: Callable[..., Any], url: str, scheme: str) -> None:
    """The chat with an answer, a thought, code, a formula and files; settings; the other views."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="extra `page`").Axe()
    page = new_page(url, color_scheme=scheme)
    page.wait_for_selector("#health .model:text('scripted')")
    words = "# A\n\n```py\nif x:\n    y()\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n$$x^2$$"
    script(page, delta(reasoning_content="So."), delta(content=words), delta("length"))
    files = [{"name": "a.txt", "mimeType": "text/plain", "buffer": b"one"}]
    page.set_input_files("#attach-file", files)
    page.wait_for_selector("#attached li")
    ask(page, "one")
    page.set_input_files("#attach-file", files)
    page.wait_for_selector("#attached li")

    def serious() -> list[str]:
        found = axe.run(page).response["violations"]
        bad = [row for row in found if row["impact"] in ("serious", "critical")]
        return [f"{row['id']}: {node['html']}" for row in bad for node in row["nodes"]]

    assert serious() == []
    page.click("#open-settings")
    assert serious() == []
    page.keyboard.press("Escape")
    for view in ("live", "engine"):
        page.click(f"[data-view={view}]")
        page.wait_for_selector(f"#{view}:not([hidden]) > *")
        assert serious() == []
