"""What a field cannot be: api x field x words of the refusal, over HTTP without sockets."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.runtime.server.api.api_client import (
    CHAT,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    TEXT,
    USER,
    ApiClient,
)

TOKENS, IDS = "/tokenize", "/detokenize"
NESTED = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
UNKNOWN = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "unknown"}]}
WEB = [{"type": "web_search"}, {"type": "code_interpreter", "container": {}}]
ANTHROPICS = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
FORMAT = {"format": {"type": "x"}}
ONE = {"type": "tool", "name": "web_search"}
BASES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a"}, CHAT: {"messages": USER}, RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": USER, "max_tokens": 200}, TOKENS: {}, IDS: {},
}  # fmt: skip
LONG = "context length is 512 tokens"
# by path: the fields, and words of what is said; of other statuses than 400, the status
Row = tuple[dict[str, Any], str] | tuple[dict[str, Any], str, int]
ROWS: dict[str, Sequence[Row]] = {
    TEXT: [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": None}, "prompt is None"),
        ({"prompt": 7}, "prompt is 7"),
        ({"prompt": ["a", 1]}, "prompt is ['a', 1]"),
        ({"prompt": [{}]}, "prompt[0] is not right"),
        ({"n": "y" * 5000}, 'n is "yyy'),
        ({"prompt": [[1], []]}, "none empty"),
        ({"prompt": [99999]}, "99999"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [True]}, "True"),
        ({"prompt": "a b " * 600}, LONG),
        ({"prompt": "\ud800"}, "half of a character"),
        ({"bad_words": ["x", " "]}, "more than blanks"),
        ({"mirostat": 2}, "use temperature"),
        ({"stop": "x", "detokenize": False}, "stop needs text"),
        ({"truncate_prompt_tokens": 512}, "truncate_prompt_tokens is 512"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": "x"}, "max_tokens is 'x'"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens is 6"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ({"priority": 10**20 - 1}, "priority"),
        ({"drafts": 8}, "drafts is 8; it must be from 0 to 7"),
        ({"drafts": -1}, "drafts is -1"),
        ({"temperature": -0.1}, "-0.1"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": "hot"}, "'hot'"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 1.1}, "1.1"),
        ({"top_k": -2}, "-2"),
        ({"min_p": 2}, "min_p is 2"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"n": 0}, "n is 0"),
        ({"stop": ["x", ""]}, "empty string"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "17"),
        ({"stop_token_ids": [99999]}, "99999"),
        ({"logit_bias": {"x": 1}}, "'x'"),
        ({"logit_bias": {"5": 101}}, "101"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"logprobs": 21}, "21"),
        ({"seed": 1.5}, "1.5"),
        ({"stream_options": {}}, "stream: true"),
        ({"guided_json": {"type": 3}}, "guided_json"),
        ({"prompt_logprobs": 1, "stream": True}, "leave stream out"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be from 0 to 20"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
    ],
    CHAT: [
        ({"messages": None}, "messages"),
        ({"messages": []}, "empty"),
        ({"messages": "hi"}, "'hi'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is None; it must be a string"),
        ({"messages": [*USER, {"role": "user", "content": 3}]}, "messages[1].content is 3; it mu"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role is 3"),
        ({"modalities": ["text", "audio"]}, "say ['text']"),
        ({"functions": [{"name": "f"}], "tools": []}, "functions and tools"),
        ({"drafts": 1.5}, "drafts"),
        ({"continue_final_message": True}, "needs an assistant's"),
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs is 30"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": WEB, "tool_choice": {"type": "web_search"}}, "this server can"),
        ({"tools": WEB, "tool_choice": "required"}, "this server can"),
        ({"tools": WEB, "tool_choice": "any"}, "this server can"),
        ({"tools": [NESTED], "tool_choice": UNKNOWN}, "names 'unknown'"),
        *(
            ({"tools": [NESTED, *WEB], "tool_choice": choice}, "tool_choice")
            for choice in (
                {"type": ["a"]},
                {"type": "allowed_tools", "tools": ["weather"]},
                {"type": "allowed_tools", "tools": [None]},
                {"type": "allowed_tools", "tools": [{"type": ["a"], "name": ["weather"]}]},
            )
        ),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {"x": 1}}, "structured_outputs.x is not supported"),
        ({"guided_json": {"type": "x"}}, "guided_json.type cannot be enforced"),
        ({"guided_json": {}, "guided_whitespace_pattern": "("}, "cannot be enforced"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "contradict"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "are both true"),
        ({"stop": ["x" * 100_000]}, "stop"),
        ({"bad_words": ["x"] * 2000}, "bad_words"),
        ({"logit_bias": {str(i): 1 for i in range(600)}}, "logit_bias"),
        ({"allowed_token_ids": [5, 10**400]}, "allowed_token_ids"),
        ({"stop_token_ids": [*range(513)]}, "at most 512"),
        ({"model": "m" * 100_000}, "model 'mmm", 404),
    ],
    RESPONSES: [
        ({"input": None}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"tools": [{"type": "function"}]}, "tools[0].name is None"),
        ({"input": [{"type": "message"}]}, "input[0].role is None"),
        ({"tool_choice": {"type": 3}}, "tool_choice.type is 3"),
        ({"tools": WEB, "tool_choice": "required"}, "can run none of the tools"),
        ({"text": {"verbosity": "x"}}, "text.verbosity is 'x'"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort is 'x'"),
        ({"truncation": "x"}, "truncation is 'x'"),
        ({"conversation": "c"}, "say previous_response_id"),
        ({"prompt": {"id": "p"}}, "send the prompt's text"),
        ({"background": True, "store": False}, "background needs store"),
        ({"temperature": 3}, "temperature is 3"),
    ],
    MESSAGES: [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role is None"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3"),
        ({"tools": [{}]}, "tools[0].name is None"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type is 'x'"),
        ({"thinking": {"type": "x"}}, "thinking.type is 'x'"),
        ({"stop_sequences": [""]}, "stop_sequences holds an empty string"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 3}, "temperature is 3"),
        ({"output_config": FORMAT}, "output_config.format"),
        ({"tools": ANTHROPICS, "tool_choice": ONE}, "cannot run"),
        ({"tools": ANTHROPICS, "tool_choice": {"type": "any"}}, "can run none of the tools"),
        ({"model": "claude"}, "claude", 404),
    ],
    TOKENS: [({"prompt": None}, "prompt or messages"), ({"messages": 3}, "messages")],
    IDS: [({"tokens": [-4]}, "-4"), ({"tokens": 3}, "tokens")],
}  # fmt: skip
CASES = [(path, row) for path, rows in ROWS.items() for row in rows]
SERVER = ApiClient("x", context=512)


@pytest.mark.parametrize(("path", "row"), CASES, ids=lambda value: str(value)[:60])
def test_what_a_field_cannot_be_is_refused_in_its_own_words(path: str, row: Row) -> None:
    fields, words, *status = row
    answer = SERVER.post(path, {**BASES[path], **fields})
    assert answer.status_code == (status[0] if status else 400), answer.text
    body = answer.json()
    error = body["error"]
    if path == MESSAGES:
        kind = "not_found_error" if status else "invalid_request_error"
        assert (body["type"], error["type"]) == ("error", kind)
    else:
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] in (None, *fields), error
    assert words in error["message"] and len(answer.content) < 1000
    assert body["request_id"] == answer.headers["x-request-id"]
    assert not SERVER.client.submitted


DEEP = b"[" * 100_000
BROKEN = (b"{", b"\xff\xfe", b"", b'{"prompt": "a", "x": ' + DEEP)
NO_OBJECTS = dict.fromkeys(BROKEN, "not valid JSON") | {b"[]": "JSON object"}
NO_OBJECTS[b'{"prompt": ' + DEEP] = "prompt[0][0] is not right"


@pytest.mark.parametrize("data", NO_OBJECTS, ids=lambda data: data[:20])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    answer = SERVER.post(TEXT, data)
    words = answer.json()["error"]["message"]
    assert answer.status_code == 400 and NO_OBJECTS[data] in words and len(words) < 300


@pytest.mark.parametrize(
    "schema", [[None], {"properties": 3}, {"properties": {"a": {"type": [{}], "anyOf": 1}}}]
)
def test_a_tools_schema_may_be_anything(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = ApiClient("x").post(CHAT, {"messages": USER, "max_tokens": 2, "tools": [tool]})
    assert answer.status_code == 200
