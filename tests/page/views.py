"""Beyond the chat: live plots, the engine's report, keys, narrow screens, themes, names."""

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
import pytest

from spark_engine.interface import Limits
from tests.page.conftest import LAST, ask, delta, script, set_field, until

SIZES = [(1280, 800), (768, 900), (360, 640)]


def _title(page: Any, title: str) -> Any:
    return page.locator(".plot", has=page.locator(f".title:text-is('{title}')"))


def test_live_plots_follow_the_server(page: Any, url: str) -> None:
    page.click("[data-view=live]")
    words = {"model": "scripted", "prompt": "SLOW ROUND", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", url + "v1/completions", json=words, timeout=30) as answer:
        batch = _title(page, "Requests").locator("svg")
        until(page, lambda: "running 1" in str(batch.get_attribute("aria-label")))
        generated = _title(page, "Generated tokens")
        until(page, lambda: re.match(r"[1-9]", generated.locator("b").inner_text()) is not None)
        between = _title(page, "Time between tokens (ITL)")
        until(page, lambda: between.locator("path.line").count() == 2)
        assert re.match(r"\d+ ms", between.locator("b").first.inner_text())
        kept = _title(page, "Drafts accepted")
        until(page, lambda: kept.locator("b").inner_text() == "67 %")
        answer.close()
    until(page, lambda: "running 0" in str(batch.get_attribute("aria-label")))
    generated.locator("svg").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert generated.locator(".cross").count() == between.locator(".cross").count() == 1
    page.keyboard.press("Tab")
    assert generated.locator(".cross").count() == 0
    page.check("label:has-text('15 min') input")
    assert "15 min ago" in generated.locator("svg").text_content()
    assert re.search(r"Generated tokens\s+[1-9]", page.inner_text(".totals"))


def test_plots_of_what_an_engine_has_not_are_left_out(page: Any) -> None:
    page.route("**/page/live", lambda route: route.fulfill(json={"running": 3}))
    page.click("[data-view=live]")
    until(page, lambda: _title(page, "Requests").locator("b").first.inner_text() == "3")
    assert not _title(page, "Drafts accepted").is_visible()
    assert _title(page, "Generated tokens").locator("b").inner_text() == "–"


def test_numbers_are_read_only_while_the_page_is_visible(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url) if r.url.endswith("/page/live") else None)
    page.wait_for_timeout(3500)
    assert asked == []
    page.click("[data-view=live]")
    until(page, lambda: len(asked) >= 2)
    page.click("[data-view=chat]")
    page.wait_for_timeout(500)
    before = len(asked)
    page.wait_for_timeout(3500)
    assert len(asked) - before <= 1


def test_a_server_that_fails_is_said_in_the_live_view_and_at_the_top(page: Any) -> None:
    page.route("**/page/live", lambda route: route.abort())
    page.route(
        "**/health", lambda route: route.fulfill(status=503, json={"reason": "the engine died"})
    )
    page.click("[data-view=live]")
    page.wait_for_selector("#live :text('does not answer')")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_selector("#health.bad:has-text('the engine died')")


REPORT = {
    "name": "made",
    "version": "0.1.0",
    "target": "sm_90a",
    "card": "h200",
    "executor": "native",
    "invariant": True,
    "model": {"model_type": "qwen3_5", "layers": 64, "hidden": 5120, "vocab": 9, "parameters": 27},
    "dtypes": {"activation": "bf16", "kv": "f8e4m3", "state": "f32"},
    "limits": asdict(Limits(max_seqs=4, max_context=64, pages=4, vocab=512, drafts=3)),
    "cache": {"budget_bytes": 1 << 30, "snapshots": 7},
    "generation": {"temperature": 0.6},
    "memory": {"weights": 3 << 30, "kv": 1 << 30, "states": 0, "total": 4 << 30},
    "buckets": [
        {"file": "decode_b1.engine", "family": "decode", "rows": 1, "tokens": 1}
        | {"cost_us": 1234.5, "arena_bytes": 2048, "file_bytes": 100}
    ],
    "quantisation": [{"module": "layers.mlp.up", "format": "nvfp4", "modules": 64, "tensors": 128}],
    "fusions": {"decode": {"norm_quant": 16}, "prefill": {"norm_quant": 8}},
    "refusals": [{"rule": "moe_norm", "node": "layers.0", "reason": "there is no expert"}],
    "tactics": [
        {"op": "linear", "bucket": "decode_b1.engine", "node": "q", "nodes": 7, "chosen": "wide"}
        | {"timed": True, "microseconds": 3.5}
    ],
    "producer": {"numpy": "2.0"},
    "fingerprint": {"all": "abcdef0123456789ff"},
    "ignored": {},
}


def test_the_engines_report(page: Any) -> None:
    page.route("**/report", lambda route: route.fulfill(json=REPORT))
    page.click("[data-view=engine]")
    page.wait_for_selector("#engine h1:text('made')")
    words = re.sub(r"\s+", " ", page.inner_text("#engine"))
    for part in (
        *("sm_90a (native), h200", "Weights 3.00 GiB 75.0 %", "Total 4.00 GiB", "up to 3 a round"),
        *("decode_b1 1 1 1.23 ms 2.00 KiB 100 B", "layers.mlp.up nvfp4 64 128", "norm_quant 16 8"),
        *("1.00 GiB, 7 states", "temperature 0.6", "abcdef0123456789", "Fusions refused (1)"),
    ):
        assert part in words, part
    page.click("summary:text('Tactics (1)')")
    assert "wide" in page.inner_text("#engine details[open]")
    shares = page.eval_on_selector_all(".bar i", "e => e.map((i) => i.offsetWidth)")
    assert shares[0] == pytest.approx(3 * shares[1], rel=0.02)


def test_the_report_of_this_server(page: Any) -> None:
    page.click("[data-view=engine]")
    page.wait_for_selector("#engine h1:text('fake')")
    assert "8 of up to 512 tokens" in page.inner_text("#engine")


def test_shortcuts(page: Any) -> None:
    script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "composer-text"
    page.keyboard.type("?/")
    assert page.input_value("#composer-text") == "?/" and not page.is_visible("#help")
    page.keyboard.press("Alt+n")
    assert page.locator(".bubble").count() == 0
    page.keyboard.press("Alt+ArrowDown")
    page.wait_for_selector(".bubble")
    page.keyboard.press("Alt+s")
    assert page.is_visible("#settings")
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+2")
    page.wait_for_selector("#live:not([hidden])")
    page.go_back()
    page.wait_for_selector("#chat:not([hidden])")
    assert page.inner_text(".bubble") == "one"


def test_escape_stops(page: Any) -> None:
    ask(page, "SLOW", wait=False)
    page.wait_for_selector(f"{LAST} .content p")
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    assert "stopped" in page.inner_text(f"{LAST} .figures")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: str(size[0]))
def test_nothing_is_wider_than_the_screen(
    new_page: Callable[..., Any], url: str, size: tuple[int, int]
) -> None:
    page = new_page(url, viewport={"width": size[0], "height": size[1]})
    code, row = "```\n" + "x" * 300 + "\n```", "| " + "y" * 200 + " | z |"
    wide = "\n\n".join(("a" * 300, code, f"| a | b |\n|--|--|\n{row}"))
    script(page, delta(content=wide), delta("stop"))
    ask(page, "v" * 300)
    for view in ("chat", "live", "engine"):
        page.click(f"[data-view={view}]")
        page.wait_for_timeout(300)
        inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert inner[0] <= inner[1], view
        outside = page.evaluate(
            """() => {
              const kinds = "button, a, textarea, .bubble, figure, .message";
              const apart = "#side, .skip, .off-screen, .table";
              return [...document.querySelectorAll(kinds)].filter((e) => {
                const { left, right, width } = e.getBoundingClientRect();
                return width && !e.closest(apart) && (left < -1 || right > innerWidth + 1);
              }).map((e) => e.outerHTML.slice(0, 80));
            }"""
        )
        assert outside == [], view


def test_conversations_on_a_narrow_screen(new_page: Callable[..., Any], url: str) -> None:
    page = new_page(url, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    page.tap("#open-side")
    page.wait_for_selector("#scrim", state="visible")
    assert page.get_attribute("#open-side", "aria-expanded") == "true"
    page.tap("#new")
    page.wait_for_selector("#scrim", state="hidden")
    assert page.locator(".bubble").count() == 0
    page.tap("#open-side")
    page.tap("#conversations a")
    page.wait_for_selector(".bubble")
    page.wait_for_selector("#scrim", state="hidden")


def test_the_theme_is_the_systems_or_the_readers(new_page: Callable[..., Any], url: str) -> None:
    def light(page: Any) -> bool:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(re.findall(r"\d+", colour)[0]) > 128

    page = new_page(url, color_scheme="dark")
    assert not light(page)
    page.click("#theme")
    assert page.get_attribute("#theme", "aria-label") == "Light theme" and light(page)
    page.reload()
    page.wait_for_selector("#composer-text")
    assert light(page)
    page.click("#theme")
    assert not light(page)
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert light(page)


def test_everything_that_can_be_used_has_a_name(page: Any) -> None:
    tool = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    script(page, delta(content="```\nx\n```"), delta("tool_calls", tool_calls=[tool]))
    set_field(page, temperature="0.5")
    ask(page, "one")
    nameless = """() => {
      const kinds = "button, a, input, select, textarea, summary, dialog[open], svg[tabindex]";
      const named = (e) => e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
        || e.textContent.trim() || e.labels?.length;
      const seen = [...document.querySelectorAll(kinds)].filter((e) => e.checkVisibility());
      return seen.filter((e) => !named(e)).map((e) => e.outerHTML);
    }"""
    for opens in ("#open-settings", "#open-key", "#open-help"):
        page.click(opens)
        assert page.evaluate(nameless) == [], opens
        page.keyboard.press("Escape")
    page.click("[data-view=live]")
    page.wait_for_timeout(300)
    assert page.evaluate(nameless) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_the_keyboard_alone_is_enough(page: Any) -> None:
    script(page, delta(content="So."), delta("stop"))
    page.focus("#composer-text")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        here = "document.activeElement"
        seen.add(page.evaluate(f"{here}.getAttribute('aria-label') ?? {here}.id"))
        assert page.evaluate(f"{here}.checkVisibility()")
    assert {"Copy", "Regenerate", "Edit", "composer-text", "open-settings", "new"} <= seen
    assert "the answer is complete" in page.inner_text("#spoken").lower()
