"""A server's defaults for chats, and efforts that a template refuses."""

from typing import Any

import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.cli.options.answer_options import CHAT
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.conversation import ChatReader
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.thinking import EFFORTS, nearest
from tests.runtime import small_tokenizer
from tests.runtime.server.api.api_client import USER, ApiClient, tokenizer

# In the manner of Qwen3.8's: three efforts alone, each a sentence at the very beginning but one.
THREE = """\
{%- set effort = reasoning_effort | default("xhigh") %}
{%- if effort not in ("xhigh", "medium", "low") %}
    {{- raise_exception("Unknown effort " ~ effort) }}
{%- endif %}
{{- "<|im_start|>system\\n" ~ {"xhigh": "Think long.", "low": "Think little."}.get(effort, "") }}
{%- if preserve_thinking | default(false) %}{{- " Keep thoughts." }}{%- endif %}
{{- "<|im_end|>\\n" }}
"""


def _served(**chat: Any) -> ApiClient:
    template = ChatTemplate(THREE + small_tokenizer.TEMPLATE)
    return ApiClient(template=template, service={"chat": ChatOptions(**chat)})


def _prompt(served: ApiClient, **fields: Any) -> str:
    answer = served.post("/v1/chat/completions", {"messages": USER, **fields})
    assert answer.status_code == 200, answer.text
    return served.prompt


@pytest.mark.parametrize(
    ("effort", "words"),
    [
        ("minimal", "Think little."),
        ("low", "Think little."),
        ("medium", "system\n<"),
        ("high", "Think long."),
        ("xhigh", "Think long."),
        ("max", "Think long."),
        ("default", "Think long."),
        (None, "Think long."),
        ("none", "<think>\n\n</think>"),
    ],
)
@pytest.mark.parametrize("place", ["field", "kwargs", "server", "reasoning"])
def test_every_effort_is_one_that_the_template_takes(
    effort: str | None, words: str, place: str
) -> None:
    fields: dict[str, Any] = {
        "field": {"reasoning_effort": effort},
        "kwargs": {"chat_template_kwargs": {"reasoning_effort": effort}},
        "server": {},
        "reasoning": {"reasoning": {"effort": effort}},
    }[place]
    served = _served(reasoning_effort=effort) if place == "server" else _served()
    assert words in _prompt(served, **fields)


def test_the_nearest_effort() -> None:
    assert nearest("high", {"low", "high"}) == "high"
    assert nearest("medium", {"low", "high"}) == "high"
    assert nearest("max", {"minimal", "low"}) == "low"
    assert nearest("none", {"low"}) is None is nearest("high", set())
    assert nearest("default", {"low"}) is None


def test_a_template_without_efforts_is_given_any() -> None:
    for source in (small_tokenizer.TEMPLATE, "{{ raise_exception('never') }}"):
        found = ChatTemplate(source).accepted("reasoning_effort", EFFORTS)
        assert found == set(EFFORTS)
    shows = "{{- reasoning_effort | default('') }}"
    template = ChatTemplate(shows + small_tokenizer.TEMPLATE)
    reader = ChatReader(template, tokenizer(), ChatOptions())
    assert reader.thinking({"reasoning_effort": "max"}).options == {"reasoning_effort": "max"}


def _kwargs(**kwargs: Any) -> dict[str, Any]:
    return {"template_kwargs": kwargs}


LEFT = {"chat_template_kwargs": {"preserve_thinking": False}}


@pytest.mark.parametrize(
    ("chat", "fields", "has", "lacks"),
    [
        (_kwargs(preserve_thinking=True), {}, "Keep thoughts.", "x"),
        (_kwargs(preserve_thinking=True), LEFT, "hi", "Keep thoughts."),
        (_kwargs(enable_thinking=False), {}, "\n</think>", "x"),
        (_kwargs(enable_thinking=False), {"enable_thinking": True}, "hi", "</think>"),
        (_kwargs(enable_thinking=False), {"think": True}, "hi", "</think>"),
        (_kwargs(thinking=False), {"think": True}, "hi", "</think>"),
        ({"reasoning_effort": "none"}, {}, "\n</think>", "x"),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, "Think little.", "</think>"),
        ({"reasoning_effort": "none"}, {"enable_thinking": True}, "Think long.", "</think>"),
        ({"reasoning_effort": "low"}, {"enable_thinking": True}, "Think little.", "</think>"),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "max"}, "Think long.", "little"),
        (_kwargs(reasoning_effort="low"), {}, "Think little.", "x"),
    ],
)
def test_a_request_goes_before_the_server(
    chat: dict[str, Any], fields: dict[str, Any], has: str, lacks: str
) -> None:
    prompt = _prompt(_served(**chat), **fields)
    assert has in prompt and lacks not in prompt


def test_budgets_follow_the_effort_that_holds() -> None:
    def budget(chat: dict[str, Any], **fields: Any) -> int | None:
        served = _served(**chat)
        _prompt(served, **fields)
        bound = served.client.submitted[-1].constraint
        return None if bound is None else bound.budget

    low: dict[str, Any] = {"reasoning_effort": "low"}
    assert budget(low) == 2048
    assert budget(low, reasoning_effort="high") is None
    assert budget(low, thinking_budget=7) == 7
    assert budget({**low, "think_budget": 9}) == 9
    assert budget({"template_kwargs": {"thinking_budget": 5}}) == 5
    assert budget({"template_kwargs": {"thinking_budget": 0}}, enable_thinking=True) is None


def test_a_prompt_is_counted_as_it_is_answered() -> None:
    served = _served(reasoning_effort="low", template_kwargs={"preserve_thinking": True})
    counted = served.post("/tokenize", {"messages": USER}).json()
    _prompt(served)
    assert counted["tokens"] == list(served.client.submitted[-1].prompt)


def test_what_cannot_be_a_default_is_named() -> None:
    def reader(**chat: Any) -> ChatReader:
        return ChatReader(ChatTemplate(THREE), tokenizer(), ChatOptions(**chat))

    with pytest.raises(OptionError, match="contradict each other: give the effort once"):
        reader(reasoning_effort="low", template_kwargs={"reasoning_effort": "high"})
    reader(reasoning_effort="low", template_kwargs={"reasoning_effort": "low"})
    with pytest.raises(OptionError, match="kwargs.enable_thinking is 3; it must be true or false"):
        reader(template_kwargs={"enable_thinking": 3})
    [row] = [row for row in CHAT if row.flag == "--chat-template-kwargs"]
    assert row.turn is not None and row.turn(None) is None
    assert row.turn('{"a": 1}') == {"a": 1}
    for text, words in (("{", "is not JSON"), ("[1]", "a JSON object"), ('{"tools": 1}', "tools")):
        with pytest.raises(OptionError, match=words):
            row.turn(text)
