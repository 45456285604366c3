"""Every switch of thinking that clients use: its meaning, alone and with another."""

from typing import Any

import pytest

from spark_engine.errors import OptionError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.reply_formats import AUTO, REASONING, TOOLS, Formats
from spark_engine.runtime.text.thinking import BUDGETS, EFFORTS, FIELDS, Thinking
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.repository import ROOT

THOUGHTS = Formats().thoughts


KWARGS = "chat_template_kwargs"


def _of(fields: dict[str, Any]) -> Thinking:
    own = {name: value for name, value in fields.items() if name != KWARGS}
    return Thinking.of(own, fields.get(KWARGS))


@pytest.mark.parametrize(
    ("fields", "enabled", "budget"),
    [
        ({}, None, None),
        (dict.fromkeys(FIELDS), None, None),
        ({"other": 3, KWARGS: {"other": 3}}, None, None),
        ({"enable_thinking": False}, False, None),
        ({"enable_thinking": True}, True, None),
        ({KWARGS: {"enable_thinking": False}}, False, None),
        ({KWARGS: {"thinking": False}}, False, None),
        ({KWARGS: {"thinking_budget": 30}}, None, 30),
        ({"thinking": True}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, 1024),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, False, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, None, 512),
        ({"reasoning_effort": "low"}, None, 2048),
        ({"reasoning_effort": "high"}, None, None),
        ({"reasoning_effort": "low", "thinking_budget": 9}, None, 9),
        ({"reasoning_effort": "low", "thinking_budget": -1}, None, None),
        ({"reasoning_effort": "low", "enable_thinking": False}, False, None),
        ({"reasoning": False}, False, None),
        ({"enableThinking": False}, False, None),
        ({"enableThinking": True, "think": True}, True, None),
        ({"think": False}, False, None),
        ({"think": "low"}, None, 2048),
        ({"think": "none"}, False, None),
        ({"reasoning_budget": 0}, False, None),
        ({"thinking_budget_tokens": 0}, False, None),
        ({"thinking_budget": 2**31 - 1}, None, 2**31 - 1),
        ({"thinking_budget": 2**31}, None, None),
        ({"thinking_budget": 2**64}, None, None),
        ({"budget_tokens": 1e308, "thinking_budget": 10**400}, None, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**400}}, True, None),
        ({"reasoning": {"max_tokens": 1e300}}, None, None),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, None, 2048),
        ({"reasoning": {"enabled": True, "max_tokens": 77}}, True, 77),
        ({"thinking_budget": 0}, False, None),
        ({"thinking_budget": 8.0, "budget_tokens": 8}, None, 8),
        ({"enableThinking": True, KWARGS: {"thinking": True}}, True, None),
    ],
)
def test_what_a_request_says(
    fields: dict[str, Any], enabled: bool | None, budget: int | None
) -> None:
    found = _of(fields)
    assert found.options.get("enable_thinking") == found.enabled == enabled
    assert found.budget == budget


@pytest.mark.parametrize("name", BUDGETS)
def test_every_name_of_a_budget(name: str) -> None:
    assert [_of({name: budget}).budget for budget in (5, -1)] == [5, None]
    for bad in (-2, 1.5, "5", True, float("nan"), float("inf")):
        with pytest.raises(RequestError, match=f"{name} is .* tokens of thought at most") as caught:
            Thinking.of({name: bad})
        assert caught.value.param == name


def test_the_servers_budget_holds_where_a_request_says_nothing() -> None:
    assert Thinking.of({}, None, 100).budget == 100
    assert Thinking.of({"thinking_budget": 500}, None, 100).budget == 500
    assert Thinking.of({"thinking_budget": -1}, None, 100).budget is None
    assert Thinking.of({"reasoning_effort": "high"}, None, 100).budget == 100
    assert Thinking.of({"enable_thinking": False}, None, 100).budget is None


def test_options_reach_the_template_with_the_clients_own() -> None:
    found = Thinking.of({"reasoning_effort": "none"}, {"preserve_thinking": True})
    off = {"enable_thinking": False, "reasoning_effort": "none"}
    assert found.options == {"preserve_thinking": True, **off}
    assert "enable_thinking" not in Thinking.of({"reasoning_effort": "low"}).options


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, True),
        ({"include_reasoning": True}, True),
        ({"include_reasoning": False}, False),
        ({"reasoning": {"exclude": True}}, False),
        ({"reasoning": {"exclude": False}, "include_reasoning": False}, False),
        ({"thinking": {"type": "enabled", "display": "omitted"}}, False),
        ({"thinking": {"type": "enabled", "display": "summarized"}}, True),
    ],
)
def test_whether_thoughts_are_shown(fields: dict[str, Any], shown: bool) -> None:
    assert Thinking.of(fields).shown is shown


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "thinking", "contradict"),
        ({"reasoning_effort": "none", KWARGS: {"enable_thinking": True}}, KWARGS, "contradict"),
        ({"enable_thinking": True, "thinking_budget": 0}, "thinking_budget", "contradict"),
        ({"thinking_budget": 5, "budget_tokens": 6}, "budget_tokens", "contradict"),
        ({"reasoning_effort": "low", "think": "high"}, "reasoning_effort", "contradict"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "max"}}, "reasoning_effort", "contra"),
        ({"reasoning_effort": "low", KWARGS: {"reasoning_effort": "high"}}, KWARGS, "contradict"),
        ({"enable_thinking": "no"}, "enable_thinking", "'no'; it must be true or false"),
        ({"thinking": "on"}, "thinking", "must be true or false"),
        ({"think": "on"}, "think", "must be true or false"),
        ({"enableThinking": 1}, "enableThinking", "must be true or false"),
        ({"think": False, "enable_thinking": True}, "think", "contradict"),
        ({"thinking_budget": -(10**400)}, "thinking_budget", "tokens of thought at most"),
        ({"thinking": {"type": "sometimes"}}, "thinking", "'enabled', 'disabled' or 'adaptive'"),
        ({"thinking": {"type": ["a"]}}, "thinking", "must be 'enabled'"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "none, minimal, low"),
        ({"reasoning": {"effort": 3}}, "reasoning", "reasoning.effort is 3"),
        ({"reasoning": {"max_tokens": -5}}, "reasoning", "reasoning.max_tokens is -5"),
        ({"reasoning": {"exclude": 1}}, "reasoning", "reasoning.exclude is 1"),
        ({KWARGS: {"enable_thinking": 1}}, KWARGS, "kwargs.enable_thinking is 1"),
        ({"include_reasoning": 0}, "include_reasoning", "include_reasoning is 0"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        _of(fields)
    assert caught.value.param == param


def test_every_effort_is_known_by_openais_name() -> None:
    assert set(EFFORTS) >= {"none", "minimal", "low", "medium", "high", "xhigh"}


def test_a_budget_binds_an_answer_with_an_open_thought(tokenizer: Tokenizer) -> None:
    end = tokenizer.id_of("</think>")
    spec = Thinking(budget=9).bind(None, tokenizer, THOUGHTS)
    assert spec is not None and (spec.budget, spec.end_of_thought) == (9, end)
    assert end in spec.close and tokenizer.decode(spec.close).endswith("\n</think>\n\n")
    spec.check(len(tokenizer))
    assert Thinking(budget=9).bind(None, tokenizer, None) is None
    assert Thinking().bind(None, tokenizer, THOUGHTS) is None


def test_a_thought_that_was_switched_off_ends_at_once(tokenizer: Tokenizer) -> None:
    """A template without the switch opens it although thinking is off."""
    spec = Thinking(enabled=False).bind(None, tokenizer, THOUGHTS)
    assert spec is not None and spec.budget == 0
    assert tokenizer.decode(spec.close) == "\n</think>\n\n"


def test_a_grammar_starts_behind_the_thought(tokenizer: Tokenizer) -> None:
    given = ConstraintSpec(grammar="g", forced=(3,))
    spec = Thinking().bind(given, tokenizer, THOUGHTS)
    want = ConstraintSpec(grammar="g", forced=(3,), end_of_thought=tokenizer.id_of("</think>") or 0)
    assert spec == want
    assert Thinking().bind(given, tokenizer, None) is given


def test_a_thought_without_a_token_for_its_end_is_refused(tokenizer: Tokenizer) -> None:
    class Plain(Tokenizer):
        def id_of(self, token: str) -> int | None:
            return None

    plain = Plain(tokenizer._backend, tokenizer.special)
    with pytest.raises(RequestError, match="no token '</think>'"):
        Thinking(budget=9).bind(None, plain, THOUGHTS)


def test_the_form_of_calls_is_that_of_the_template() -> None:
    tiny = (ROOT / "models/tiny/checkpoint/chat_template.jinja").read_text()
    assert Formats.of(tiny) == Formats("qwen3", "qwen3_coder")
    hermes = 'Write <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}'
    assert Formats.of(hermes).tools == "hermes"
    assert Formats.of("no tools") == Formats.of(None) == Formats()
    assert Formats.of(hermes, tools="qwen3_coder", reasoning="none").reasoning == "none"
    assert Formats.of(hermes, tools="qwen3_coder").calls is TOOLS["qwen3_coder"]
    assert Formats.of(None, reasoning="none").thoughts is None
    for option, wrong in (("--reasoning", {"reasoning": "x"}), ("--tools", {"tools": "x"})):
        with pytest.raises(OptionError, match=f"{option} is 'x'; it must be one of {AUTO}"):
            Formats.of(None, **wrong)


# After the templates of Qwen3-Next and Qwen3-Coder-Next: the form of calls, and how a turn begins.
JSON_CALLS = r"""{%- if tools %}{{- "For each function call, return a json object with function name
and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>,
\"arguments\": <args-json-object>}\n</tool_call>" }}{%- endif %}"""
XML_CALLS = r"""{%- if tools %}{{- "If you choose to call a function ONLY reply in the following
format:\n<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n
</parameter>\n</function>\n</tool_call>" }}{%- endif %}"""
TURNS = r"""{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"""
NEXT = {
    "Instruct": (JSON_CALLS + TURNS + "{%- endif %}", "hermes", False),
    "Thinking": (JSON_CALLS + TURNS + r"{{- '<think>\n' }}{%- endif %}", "hermes", True),
    "Coder-Next": (XML_CALLS + TURNS + "{%- endif %}", "qwen3_coder", False),
}


@pytest.mark.parametrize("name", NEXT)
def test_the_forms_of_qwen3_next(name: str) -> None:
    """A model that never thinks begins its answer at once, whatever a request says."""
    source, calls, thinks = NEXT[name]
    formats, template = Formats.of(source), ChatTemplate(source)
    assert formats == Formats("qwen3", calls)
    user = [{"role": "user", "content": "hi"}]
    for fields in ({}, {"enable_thinking": True}, {"reasoning_effort": "high"}):
        thinking = Thinking.of(fields)
        made = template.prompt(user, None, thinking.options, thoughts=formats.thoughts)
        assert made.thinking is thinks


def test_every_form_closes_what_it_opens() -> None:
    for form in REASONING.values():
        assert form is None or form.end in form.close
