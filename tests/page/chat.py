"""The chat: answers as they come, stopped, made again, changed; conversations; tools; settings."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.page.conftest import LAST, ask, delta, press, script, serving, set_field, texts, until

SHORT = {"max_tokens": "30"}


def test_an_answer_comes_piece_by_piece_with_its_thought_folded(page: Any) -> None:
    ask(page, "What is 40 plus 2? SLOW", wait=False)
    page.wait_for_selector(f"{LAST} .content p")
    first = page.inner_text(f"{LAST} .content")
    until(page, lambda: len(page.inner_text(f"{LAST} .content")) > len(first) + 20)
    assert page.get_attribute(LAST, "aria-busy") == "true"
    assert page.get_attribute("#send", "aria-label") == "Stop (Esc)"
    assert page.inner_text(f"{LAST} summary").startswith("Thought for ")
    assert not page.is_visible(f"{LAST} .thought-text")
    page.click(f"{LAST} summary")
    until(page, lambda: page.inner_text(f"{LAST} .thought-text").strip() == "I add é 🙂.")
    assert page.inner_text(f"{LAST} .content").startswith("The answer is 42, 猫!")
    page.keyboard.press("Escape")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")


def test_what_was_typed_is_sent_by_enter_and_broken_by_shift(page: Any) -> None:
    sent = script(page, delta(content="Yes."), delta("stop"))
    page.click("#composer-text")
    assert page.is_disabled("#send")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    assert sent[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert sent[0]["stream"] is True
    assert page.input_value("#composer-text") == ""
    assert page.inner_text(".message.user .bubble") == "one\ntwo"


def test_figures_of_an_answer(page: Any) -> None:
    set_field(page, **SHORT)
    ask(page, "ROUND WARM")
    words = page.inner_text(f"{LAST} .figures")
    assert "30 tokens" in words and "tokens/s" in words and "TTFT" in words
    assert re.search(r"\d+ of \d+ prompt tokens cached", words)
    assert "67 % of drafts kept" in words and "stopped at max tokens" in words


def test_stopping_ends_the_request_at_the_server(page: Any, url: str) -> None:
    ask(page, "SLOW please", wait=False)
    page.wait_for_selector(f"{LAST} .content p")
    assert _running(url) == 1
    page.click("#send")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    assert page.inner_text(f"{LAST} .figures").startswith("stopped")
    assert page.inner_text(f"{LAST} .content") != ""
    until(page, lambda: _running(url) == 0)


def _running(url: str) -> float:
    text = httpx.get(url + "metrics").text
    return float(re.findall(r"^spark:num_requests_running\{.*\} (\S+)", text, re.MULTILINE)[0])


def test_an_answer_made_again_is_shown_next_to_the_first(page: Any) -> None:
    script(page, delta(content="The first."), delta("stop"))
    ask(page, "Say")
    page.unroute("**/v1/chat/completions")
    script(page, delta(content="The second."), delta("stop"))
    press(page, LAST, "Regenerate")
    page.wait_for_selector(f"{LAST} :text('2 of 2')")
    assert page.inner_text(f"{LAST} .content") == "The second."
    page.click(f"{LAST} [aria-label='Previous version']")
    assert page.inner_text(f"{LAST} .content") == "The first."
    page.reload()
    page.wait_for_selector(f"{LAST} :text('1 of 2')")
    assert page.inner_text(f"{LAST} .content") == "The first."


def test_a_changed_question_begins_another_branch(page: Any) -> None:
    sent = script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    ask(page, "two")
    press(page, ".message.user >> nth=0", "Edit")
    page.keyboard.press("End")
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    page.wait_for_selector(".message.user :text('2 of 2')")
    assert [m["content"] for m in sent[-1]["messages"]] == ["one more"]
    assert texts(page, ".bubble") == ["one more"]
    page.click("[aria-label='Previous version']")
    assert texts(page, ".bubble") == ["one", "two"]


def test_editing_is_left_by_escape(page: Any) -> None:
    script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    page.focus("#composer-text")
    page.keyboard.press("ArrowUp")
    page.keyboard.type(" more")
    page.keyboard.press("Escape")
    assert texts(page, ".bubble") == ["one"]


def test_conversations_are_kept_named_deleted_and_brought_back(page: Any) -> None:
    script(page, delta(content="So."), delta("stop"))
    for words in ("the apple", "the pear"):
        page.click("#new")
        ask(page, words)
    rows = "#conversations li"
    assert texts(page, rows) == ["the pear", "the apple"]
    page.click(f"{rows} >> nth=1 >> a")
    until(page, lambda: texts(page, ".bubble") == ["the apple"])
    page.reload()
    page.wait_for_selector(".bubble")
    assert texts(page, ".bubble") == ["the apple"]
    press(page, f"{rows} >> nth=0", "Rename the pear")
    page.keyboard.type("fruit")
    page.keyboard.press("Enter")
    assert texts(page, rows) == ["fruit", "the apple"]
    press(page, f"{rows} >> nth=1", "Delete the apple")
    assert texts(page, rows) == ["fruit"] and texts(page, ".bubble") == []
    page.click("#toast button")
    page.wait_for_selector(".bubble")
    assert texts(page, ".bubble") == ["the apple"] and len(texts(page, rows)) == 2


def test_an_answer_continues_while_another_conversation_is_shown(page: Any) -> None:
    set_field(page, max_tokens="60")
    ask(page, "SLOW one", wait=False)
    page.wait_for_selector(f"{LAST} .content p")
    page.click("#new")
    assert page.get_attribute("#send", "aria-label") == "Send"
    assert page.locator("#conversations .busy").count() == 1
    page.wait_for_selector("#conversations .busy", state="detached")
    page.click("#conversations a")
    assert page.get_attribute(LAST, "aria-busy") == "false"
    assert "60 tokens" in page.inner_text(f"{LAST} .figures")


def test_an_answer_that_the_page_left_says_so(page: Any) -> None:
    ask(page, "SLOW one", wait=False)
    page.wait_for_selector(f"{LAST} .content p")
    page.reload()
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    assert "incomplete" in page.inner_text(f"{LAST} .figures")
    assert page.inner_text(f"{LAST} .content") != ""


def test_a_call_is_shown_and_its_result_continues_the_chat(page: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    set_field(page, tools=json.dumps([tool]), max_tokens="300")
    sent: list[Any] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "POST" else None)
    ask(page, "TOOL")
    assert page.inner_text(f"{LAST} .call-head strong") == "weather"
    assert json.loads(page.inner_text(f"{LAST} .call pre")) == {"city": "Paris"}
    page.fill(f"{LAST} .call textarea", "sunny")
    page.click(f"{LAST} :text('Send result')")
    page.wait_for_selector(".message.tool")
    page.wait_for_selector(f"{LAST}[aria-busy=false]")
    assert sent[0]["tools"] == [tool]
    *_, called, result = sent[1]["messages"]
    (call,) = called["tool_calls"]
    assert call["function"]["name"] == "weather" and called["reasoning_content"]
    assert result == {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    assert page.locator(".call textarea").count() == 1, "that of the new call"


def test_calls_that_come_in_pieces(page: Any) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        own = {"id": f"c{index}"} if "name" in function else {}
        return delta(tool_calls=[{"index": index, **own, "function": function}])

    parts = [call(0, name="a", arguments=""), call(0, arguments='{"x"'), call(0, arguments=": 1}")]
    script(page, *parts, call(1, name="b", arguments="{}"), delta("tool_calls"))
    ask(page, "both")
    assert texts(page, f"{LAST} .call pre") == ['{\n  "x": 1\n}', "{}"]
    page.click(f"{LAST} :text('Send results')")
    page.wait_for_selector(".message.tool")


def test_settings_become_fields_of_the_request(page: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    set_field(
        page,
        model="other",
        system="Be short.",
        thinking="off",
        temperature="0.5",
        top_k="7",
        seed="3",
        stop="END\nSTOP",
        schema=json.dumps(schema),
        **SHORT,
    )
    assert "JSON schema" in page.inner_text("#chips")
    sent = script(page, delta(content='{"n":'), delta("stop", content="1}"))
    ask(page, "x")
    body = sent[0]
    assert body["messages"][0] == {"role": "system", "content": "Be short."}
    assert (body["model"], body["temperature"], body["top_k"], body["seed"]) == ("other", 0.5, 7, 3)
    assert body["stop"] == ["END", "STOP"] and body["max_tokens"] == 30
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    form = body["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"] == schema and form["json_schema"]["strict"] is True
    assert page.inner_text(f"{LAST} .code pre") == '{\n  "n": 1\n}'
    assert "top_p" not in body and "tools" not in body
    page.click("#new")
    assert "JSON schema" in page.inner_text("#chips"), "a new conversation begins with them"
    page.click("#open-settings")
    assert page.get_attribute("#setting-top_k", "placeholder") == "20", "the engine's own default"
    page.click(":text('Reset all to defaults')")
    page.keyboard.press("Escape")
    assert page.inner_text("#chips") == ""


def test_a_setting_that_is_wrong_is_named_and_nothing_is_sent(page: Any) -> None:
    sent = script(page, delta("stop"))
    set_field(page, schema="{oops", temperature="9")
    page.fill("#composer-text", "x")
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings[open]")
    assert "At most 2" in page.inner_text("#setting-temperature-fault")
    assert "not JSON" in page.inner_text("#setting-schema-fault")
    assert page.get_attribute("#setting-schema", "aria-invalid") == "true"
    assert "Temperature" in page.inner_text("#toast")
    assert sent == [] and page.input_value("#composer-text") == "x"


def test_a_failure_is_shown_and_can_be_tried_again(page: Any) -> None:
    ask(page, "NAN")
    assert "not finite" in page.inner_text(f"{LAST} .problem")
    script(page, delta(content="Well."), delta("stop"))
    page.click(":text('Try again')")
    page.wait_for_selector(f"{LAST} .content p")
    assert page.inner_text(f"{LAST} .content") == "Well."
    assert page.locator(".turns").count() == 0, "what failed without a word is not kept"


def test_a_conversation_that_is_too_long_offers_a_new_one(page: Any) -> None:
    """To try again could only fail again."""
    words = "This conversation is too long"
    error = {"error": {"message": words, "code": "context_length_exceeded"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=error))
    ask(page, "more")
    assert words in page.text_content(".problem") and not page.is_visible(":text('Try again')")
    page.click(".problem :text('New conversation')")
    assert page.is_visible(".welcome")


def test_headings_and_landmarks_are_there_in_every_view(page: Any) -> None:
    """As screen readers go by them; the brand has a name on a phone, too."""
    assert page.locator("main").count() == 1 and page.locator("section main").count() == 0
    assert page.locator("h1:visible").count() == 1
    ask(page, "hello")
    assert page.locator("#chat h1:not([hidden])").count() == 1
    assert page.text_content("#chat h1") == "hello"
    for view in ("live", "engine"):
        page.click(f"[data-view={view}]")
        page.wait_for_selector(f"#{view} h1")
        assert page.is_visible("main")
        assert page.locator(f"#{view} th:empty").count() == 0
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.get_attribute(".brand", "aria-label") == "Spark"
    assert page.is_visible("#health .model")


def test_an_error_within_a_stream_keeps_what_came(page: Any) -> None:
    script(page, delta(content="Half"), {"error": {"message": "the engine died"}})
    ask(page, "x")
    assert page.inner_text(f"{LAST} .content") == "Half"
    assert "the engine died" in page.inner_text(f"{LAST} .problem")


def test_a_server_that_is_gone_is_said(page: Any) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "x")
    assert "does not answer" in page.inner_text(f"{LAST} .problem")


def test_the_key_is_asked_for_kept_with_the_tab_and_sent(
    new_page: Callable[..., Any], tokenizer_folder: Path
) -> None:
    with serving(tokenizer_folder, api_key="secret-1") as url:
        page = new_page(url)
        page.wait_for_selector("#key[open]")
        assert "asks for an API key" in page.inner_text("#key")
        page.fill("#key-input", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector(":text('does not take this key')")
        page.fill("#key-input", "secret-1")
        page.keyboard.press("Enter")
        page.wait_for_selector("#health:has-text('scripted')")
        set_field(page, **SHORT)
        ask(page, "Hello")
        assert "30 tokens" in page.inner_text(f"{LAST} .figures")
        assert "secret" not in page.evaluate("JSON.stringify({...localStorage})")
        assert page.evaluate("sessionStorage['spark.key']") == "secret-1"
        page.click("#open-key")
        page.check("#key input[type=checkbox]")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key", state="hidden")
        assert page.evaluate("localStorage['spark.key']") == "secret-1"


def test_a_full_storage_is_reported_and_the_chat_continues(page: Any) -> None:
    page.evaluate(
        """() => {
          for (let n = 1 << 20; n >= 1; n >>= 1)
            try { for (let i = 0; i < 9; i++) localStorage[`x${n}-${i}`] = "x".repeat(n); } catch {}
        }"""
    )
    script(page, delta(content="So."), delta("stop"))
    ask(page, "x")
    assert page.inner_text(f"{LAST} .content") == "So."
    assert "storage is full" in page.inner_text("#toast")


def test_what_another_tab_wrote_is_shown(page: Any, url: str) -> None:
    script(page, delta(content="So."), delta("stop"))
    ask(page, "one")
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".bubble")
    ask(page, "two")
    other.wait_for_selector(".bubble:text('two')")
    script(other, delta(content="Well."), delta("stop"))
    ask(other, "three")
    page.wait_for_selector(".bubble:text('three')")
    assert texts(page, ".message.assistant .content") == ["So.", "So.", "Well."]


def test_without_a_storage_it_works_until_it_is_closed(page: Any, url: str) -> None:
    forbid = "Object.defineProperty(window, '{}', {{ get() {{ throw new Error('no') }} }});"
    page.context.add_init_script("".join(map(forbid.format, ("localStorage", "sessionStorage"))))
    page.goto(url)
    page.wait_for_selector("#health .model:text('scripted')")
    script(page, delta(content="So."), delta("stop"))
    ask(page, "the apple")
    page.click("#new")
    page.click("#conversations a")
    until(page, lambda: texts(page, ".bubble") == ["the apple"])


def test_conversations_are_carried_to_another_browser(
    page: Any, new_page: Callable[..., Any], url: str, tmp_path: Path
) -> None:
    script(page, delta(reasoning_content="hm", content="So."), delta("stop"))
    ask(page, "the apple")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "file.json")
    other = new_page(url)
    for _ in range(2):  # what is there already is not taken twice
        other.set_input_files("#import-file", tmp_path / "file.json")
        other.wait_for_selector("#conversations a")
    other.click("#conversations a")
    until(other, lambda: texts(other, ".bubble") == ["the apple"])
    assert other.inner_text(f"{LAST} .content") == "So."
    (tmp_path / "bad.json").write_text('{"conversations": [{"id": "x", "nodes": {"a": 1}}]}')
    other.set_input_files("#import-file", tmp_path / "bad.json")
    other.wait_for_selector("#toast :text('malformed')")
    assert len(texts(other, "#conversations li")) == 1
