"""Every documented field of every body does what it says: a value of each, and its effect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from spark_engine.runtime.engine.request import FinishReason, Request
from spark_engine.runtime.server.http.openapi import document
from spark_engine.runtime.server.http.routes import ROUTES
from spark_engine.runtime.text.thinking import FIELDS, SWITCHES
from tests.runtime.server.api.api_client import CALL, SCHEMA, THOUGHT, USER, ApiClient, tokenizer

DOCUMENT = document(ROUTES)
TOOL = {"name": "weather", "parameters": SCHEMA}
TOOLS, OPEN_TOOLS = [{"type": "function", "function": TOOL}], [{"type": "function", **TOOL}]
ANTHROPIC_TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
STREAM = {"stream": True}
SAID = [*USER, {"role": "assistant", "content": "bear"}]
MARK = "<|im_start|>"
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@dataclass(frozen=True)
class Asked:
    """What a field's value led to. `answer` is the whole one; `prompt` the last request's text."""

    status: int
    answer: Any
    requests: list[Request]
    prompt: str
    text: str

    @property
    def request(self) -> Request:
        return self.requests[0]

    @property
    def params(self) -> Any:
        return self.request.params

    @property
    def bound(self) -> Any:
        return self.request.constraint

    @property
    def choice(self) -> Any:
        return self.answer["choices"][0]

    @property
    def message(self) -> Any:
        return self.choice["message"]

    @property
    def logprobs(self) -> Any:
        return self.choice["logprobs"]["content"]


Effect = Callable[[Asked], object]
# (value, what must hold); a third: other fields that belong to it
Row = tuple[Any, Effect] | tuple[Any, Effect, dict[str, Any]]


def _param(value: Any, name: str, wanted: Any = None, **more: Any) -> Row:
    wanted = value if wanted is None else wanted
    return value, lambda a: getattr(a.params, name) == wanted, more


def _bound(value: Any, **more: Any) -> Row:
    return value, lambda a: a.bound is not None and a.bound.grammar != "", more


def _has(word: str) -> Effect:
    return lambda a: word in a.prompt


def _lacks(word: str) -> Effect:
    return lambda a: word not in a.prompt


def _only(*kinds: str) -> Effect:
    """The answer has just these items or blocks."""

    def effect(asked: Asked) -> bool:
        rows = asked.answer.get("output") or asked.answer["content"]
        return tuple(row["type"] for row in rows) == kinds

    return effect


def _first_is_an_id(asked: Asked) -> bool:
    """The first token of the answer's log-probabilities."""
    rows = asked.choice["logprobs"]
    first = rows["content"][0]["token"] if "content" in rows else rows["tokens"][0]
    return str(first).startswith("token_id:")


def _thought_of(asked: Asked) -> bool:
    return asked.prompt.endswith("<think>\n")


def _budget(asked: Asked) -> bool:
    return asked.bound is not None and asked.bound.budget == 7


def _called_as_a_function(asked: Asked) -> bool:
    called = asked.message["function_call"]["name"] == "weather"
    return called and asked.choice["finish_reason"] == "function_call"


def _refused(value: Any, words: str) -> Row:
    return value, lambda a: a.status == 400 and words in a.text


def _taken(value: Any) -> Row:
    """It asks for nothing that this server has."""
    return value, lambda a: a.status == 200


SHARED: Mapping[str, Row] = {
    "model": ("other", lambda a: a.status == 404),
    "n": (2, lambda a: len(a.requests) == 2 and len(a.answer["choices"]) == 2),
    "best_of": _refused(2, "only the value of n"),
    "stop": ("l", lambda a: a.choice["stop_reason"] == "l"),
    "stop_token_ids": _param([5], "stop_token_ids", (5,)),
    "max_tokens": _param(3, "max_tokens"),
    "min_tokens": _param(3, "min_tokens"),
    "ignore_eos": _param(True, "ignore_eos"),
    "temperature": _param(0.5, "temperature"),
    "top_p": _param(0.5, "top_p"),
    "top_k": _param(5, "top_k"),
    "min_p": _param(0.5, "min_p"),
    "presence_penalty": _param(0.5, "presence"),
    "frequency_penalty": _param(0.5, "frequency"),
    "repetition_penalty": _param(1.5, "repetition"),
    "logit_bias": _param({"5": 2.0}, "logit_bias", {5: 2.0}),
    "allowed_token_ids": ([5, 9, 7, 8], lambda a: a.bound.grammar.endswith("\nid: <[5,7-9]>")),
    "bad_words": (["ab c"], lambda a: len(a.bound.barred) == 2),
    "seed": _param(77, "seed"),
    "stream": (True, lambda a: a.text.startswith("data: {")),
    "stream_options": ({"include_usage": True}, lambda a: '"completion_tok' in a.text, STREAM),
    "return_token_ids": (True, lambda a: len(a.choice["token_ids"]) > 2),
    "return_tokens_as_token_ids": (True, lambda a: '"token_id:' in a.text),
    "skip_special_tokens": (False, lambda a: MARK in _text(a)),
    "include_stop_str_in_output": (True, lambda a: _text(a).endswith("l"), {"stop": "l"}),
    "detokenize": (False, lambda a: _text(a) == ""),
    "truncate_prompt_tokens": (2, lambda a: len(a.request.prompt) == 2),
    "priority": _refused(3, "--allow-priority"),
    "drafts": _param(0, "drafts"),  # which is not none
    "return_draft_counts": _param(True, "draft_counts"),
    "cache_salt": ("mine", lambda a: len(a.request.salt) == 16),
    "prompt_logprobs": (1, lambda a: a.bound is not None and a.params.logprobs == 1),
    "response_format": _bound(FORM),
    "guided_json": _bound(SCHEMA),
    "guided_regex": _bound("a+"),
    "guided_choice": _bound(["a", "b"]),
    "guided_grammar": _bound('start: "a"'),
    "structured_outputs": _bound({"regex": "a+"}),
    "guided_json_object": _bound(True),
    "guided_whitespace_pattern": _bound(" ", guided_json=SCHEMA),
}
TEXT: Mapping[str, Row] = {
    **SHARED,
    "prompt": ("bear", lambda a: a.prompt == "bear"),
    "logprobs": (2, lambda a: len(a.choice["logprobs"]["top_logprobs"][0]) == 2),
    "echo": (True, lambda a: a.choice["text"].startswith("a bear")),
    "suffix": _refused("x", "suffix is not supported"),
    "return_tokens_as_token_ids": (True, _first_is_an_id, {"logprobs": 0}),
}
CHAT: Mapping[str, Row] = {
    **SHARED,
    "messages": ([{"role": "user", "content": "bear"}], _has("bear")),
    "max_completion_tokens": _param(3, "max_tokens", max_tokens=9),
    "logprobs": (True, lambda a: a.logprobs[0]["logprob"] == -0.5),
    "top_logprobs": (2, lambda a: len(a.logprobs[0]["top_logprobs"]) == 2, {"logprobs": True}),
    "return_tokens_as_token_ids": (True, _first_is_an_id, {"logprobs": True}),
    "tools": (TOOLS, _has("weather")),
    "tool_choice": ("none", _lacks("weather"), {"tools": TOOLS}),
    "functions": ([TOOL], _called_as_a_function),
    "echo": _refused(True, "use /v1/completions"),
    "function_call": ("none", _lacks("weather"), {"functions": [TOOL]}),
    "parallel_tool_calls": (False, lambda a: len(a.message["tool_calls"]) == 1, {"tools": TOOLS}),
    "chat_template_kwargs": ({"enable_thinking": False}, lambda a: not _thought_of(a)),
    "enable_thinking": (False, lambda a: not _thought_of(a)),
    "thinking": ({"type": "disabled"}, lambda a: not _thought_of(a)),
    "reasoning": ({"enabled": False}, lambda a: not _thought_of(a)),
    "reasoning_effort": ("none", lambda a: not _thought_of(a)),
    "thinking_budget": (7, _budget),
    "thinking_token_budget": (7, _budget),
    "budget_tokens": (7, _budget),
    "max_reasoning_tokens": (7, _budget),
    "reasoning_budget": (7, _budget),
    "thinking_budget_tokens": (7, _budget),
    "enableThinking": (False, lambda a: not _thought_of(a)),
    "think": (False, lambda a: not _thought_of(a)),
    "include_reasoning": (False, lambda a: "reasoning" not in a.message),
    "add_generation_prompt": (False, _lacks("assistant")),
    "continue_final_message": (True, lambda a: a.prompt.endswith("bear"), {"messages": SAID}),
}
THINKING = {name: CHAT[name] for name in FIELDS}
RESPONSES: Mapping[str, Row] = {
    **THINKING,
    "input": ("bear", _has("bear")),
    "model": SHARED["model"],
    "instructions": ("bear", _has("system\nbear")),
    "previous_response_id": ("resp_1", lambda a: a.status == 404),
    "store": (False, lambda a: a.answer["store"] is False),
    "stream": (True, lambda a: a.text.startswith("event: response.created")),
    "background": (True, lambda a: a.answer["background"] is True),
    "max_output_tokens": _param(3, "max_tokens"),
    **{name: SHARED[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    "priority": SHARED["priority"],
    "drafts": _param(2, "drafts"),
    "return_draft_counts": _param(True, "draft_counts"),
    "cache_salt": SHARED["cache_salt"],
    "stop": ("l", lambda a: a.answer["status"] == "completed"),
    "top_logprobs": _param(2, "logprobs"),
    "include": (["message.output_text.logprobs"], lambda a: a.params.logprobs == 0),
    "tools": (OPEN_TOOLS, _has("weather")),
    "tool_choice": ("none", _lacks("weather"), {"tools": OPEN_TOOLS}),
    "parallel_tool_calls": (False, _only("reasoning", "function_call"), {"tools": OPEN_TOOLS}),
    "include_reasoning": (False, _only("message")),
    "text": _bound({"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    "truncation": _refused("some", "truncation is 'some'"),
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "conversation": _refused("c", "previous_response_id"),
    "prompt": _refused({"id": "p"}, "instructions"),
    "context_management": _taken([{"type": "compaction", "compact_threshold": 9}]),
    "moderation": _refused({}, "judges nothing"),
    **{
        name: ({"a": "b"} if name == "metadata" else "v", lambda a, n=name: _repeated(a, n))
        for name in ("metadata", "user", "prompt_cache_key", "safety_identifier")
    },
    "service_tier": ("auto", lambda a: a.answer["service_tier"] == "default"),
}
COUNTED: Mapping[str, Row] = {
    **{name: row for name, row in THINKING.items() if row[0] == 7},
    **dict.fromkeys(SWITCHES, (True, _thought_of)),
    "reasoning": ({"enabled": True}, _thought_of),
    "reasoning_effort": ("high", _thought_of),
    "include_reasoning": (False, _only("text"), {"think": True}),
    "messages": CHAT["messages"],
    "system": ("bear", _has("system\nbear")),
    "tools": (ANTHROPIC_TOOLS, _has("weather")),
    "tool_choice": ({"type": "none"}, _lacks("weather"), {"tools": ANTHROPIC_TOOLS}),
    "thinking": ({"type": "adaptive"}, _thought_of),
    "chat_template_kwargs": ({"enable_thinking": True}, _thought_of),
    "output_config": _bound({"format": {"type": "json_schema", "schema": SCHEMA}}),
    "output_format": _bound({"type": "json_schema", "schema": SCHEMA}),
    "context_management": (
        {"edits": [{"type": "clear_tool_uses_1"}]},
        lambda a: a.answer["context_management"] == {"applied_edits": []},
    ),
    "mcp_servers": _taken([{}]),
    "container": _taken("c"),
}
MESSAGES: Mapping[str, Row] = {
    **COUNTED,
    "model": SHARED["model"],
    "max_tokens": SHARED["max_tokens"],
    "stop_sequences": (["l"], lambda a: a.answer["stop_sequence"] == "l"),
    "stream": (True, lambda a: a.text.startswith("event: message_start")),
    **{name: SHARED[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")},
    "priority": SHARED["priority"],
    "drafts": _param(2, "drafts"),
    "return_draft_counts": _param(True, "draft_counts"),
    "cache_salt": SHARED["cache_salt"],
}
APIS: Mapping[str, tuple[str, Mapping[str, Row], dict[str, Any]]] = {
    "CompletionBody": ("/v1/completions", TEXT, {"prompt": "a bear", "max_tokens": 90}),
    "ChatBody": ("/v1/chat/completions", CHAT, {"messages": USER}),
    "ResponsesBody": ("/v1/responses", RESPONSES, {"input": "hi"}),
    "MessagesBody": ("/v1/messages", MESSAGES, {"messages": USER}),
}
NEEDED = {("CompletionBody", "prompt"), ("ResponsesBody", "input")}
NEEDED |= {("ChatBody", "messages"), ("MessagesBody", "messages")}
CASES = [(api, name) for api, (_, rows, _) in APIS.items() for name in rows]
# accepted and without a counterpart in the answer: they concern other servers' bookkeeping
NO_EFFECT = {
    "user": "u", "metadata": {"a": "b"}, "service_tier": "flex", "store": True,
    "safety_identifier": "s", "prompt_cache_key": "k", "prediction": {"type": "content"},
    "add_special_tokens": True, "modalities": ["text"], "verbosity": "low",
}  # fmt: skip


def _repeated(asked: Asked, name: str) -> bool:
    return bool(asked.answer[name])


def _text(asked: Asked) -> str:
    choice = asked.choice
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _ask(path: str, body: dict[str, Any], text: str) -> Asked:
    server = ApiClient(text, FinishReason.STOP)
    response = server.post(path, body)
    kind = response.headers["content-type"]
    answer = response.json() if kind == "application/json" else None
    requests = server.client.submitted
    prompt = server.prompt if requests else ""
    return Asked(response.status_code, answer, requests, prompt, response.text)


def test_every_documented_field_has_a_row() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for api, (_, rows, _) in APIS.items():
        assert set(schemas[api]["properties"]) == set(rows), api
    assert set(schemas["CountBody"]["properties"]) == {*COUNTED, "model"}


@pytest.mark.parametrize(("api", "name"), CASES, ids=[f"{a}-{n}" for a, n in CASES])
def test_a_field_does_what_it_says(api: str, name: str) -> None:
    path, rows, base = APIS[api]
    value, effect, *more = rows[name]
    fields = {**base, **(more[0] if more else {}), name: value}
    called = name in ("parallel_tool_calls", "functions")
    thought = api in ("ChatBody", "ResponsesBody") and name != "detokenize"
    thought = thought or name == "include_reasoning"
    words = MARK if name == "skip_special_tokens" else "Hello"
    text = (THOUGHT if thought else "") + (CALL + CALL if called else words)
    asked = _ask(path, fields, text)
    assert effect(asked), (asked.status, asked.text, asked.prompt)


@pytest.mark.parametrize("api", APIS)
def test_null_is_as_good_as_absent(api: str) -> None:
    path, rows, base = APIS[api]
    needed = {name for which, name in NEEDED if which == api}
    nothing = {name: None for name in rows if name not in needed}
    plain, null = (_ask(path, {**fields, **base}, "Hello") for fields in ({}, nothing))
    assert null.status == 200
    for one in (plain, null):
        assert len(one.requests) == 1 and one.request.constraint is None
    for name in needed:
        assert _ask(path, {**base, name: None}, "Hello").status == 400


@pytest.mark.parametrize("api", ["CompletionBody", "ChatBody"])
def test_what_concerns_no_answer_is_taken(api: str) -> None:
    path, _, base = APIS[api]
    plain, more = (_ask(path, {**base, "seed": 1, **f}, "Hello") for f in ({}, NO_EFFECT))
    assert more.status == 200
    assert more.requests == plain.requests and more.answer["choices"] == plain.answer["choices"]


def test_the_document_describes_what_is_routed() -> None:
    paths = {(r.method.lower(), r.path.replace(":path", "")) for r in ROUTES}
    described = {(m, p) for p, rows in DOCUMENT["paths"].items() for m in rows}
    assert described == paths
    operations = [row for rows in DOCUMENT["paths"].values() for row in rows.values()]
    assert len({row["operationId"] for row in operations}) == len(operations)
    got = ApiClient("x").get("/openapi.json")
    assert got.json() == DOCUMENT and got.status_code == 200
    fields = DOCUMENT["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["top_p"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 1}
    assert "mirostat" not in fields


def test_tokenize_and_detokenize() -> None:
    server = ApiClient("x")
    ids = tokenizer().encode("a bear")
    answer = server.post("/tokenize", {"prompt": "a bear", "model": "fake"}).json()
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    with_tools = server.post("/tokenize", {"messages": USER, "tools": TOOLS}).json()["tokens"]
    plain = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    off = {"messages": USER, "chat_template_kwargs": {"enable_thinking": False}}
    assert len(with_tools) > len(plain) < len(server.post("/tokenize", off).json()["tokens"])
    back = server.post("/detokenize", {"tokens": ids, "model": "fake"}).json()
    assert back == {"prompt": "a bear"}
