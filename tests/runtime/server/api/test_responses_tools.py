"""Tools of /v1/responses that are no functions: what is offered, and the items of their calls."""

import json
import random
from typing import Any

import pytest
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.responses_items import to_messages
from spark_engine.runtime.server.api.responses_tools import ToolNames
from spark_engine.runtime.server.replies.custom_input import CustomInput
from tests.runtime.server.api.api_client import THOUGHT, ApiClient, events

PATH = "/v1/responses"
TEXT = {"type": "object", "properties": {"x": {"type": "string"}}}
RUN = {"type": "function", "name": "run", "parameters": TEXT, "strict": False}
GO = {"type": "function", "name": "go", "parameters": TEXT}
SPACE = {"type": "namespace", "name": "agents", "description": "d", "tools": [GO]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Changes files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    *({"type": f"web_search_preview{date}"} for date in ("", "_2025_03_11")),
    *({"type": kind} for kind in ("image_generation", "tool_search", "local_shell", "shell")),
    *({"type": kind} for kind in ("apply_patch", "computer", "computer_use_preview")),
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "m", "server_url": "http://m"},
    {"type": "of_next_year", "name": "n"},
    {"vendor": "without a type and a name"},
]
PATCHED = '*** Begin Patch\n+"é" \\ 🙂\n*** End Patch'


def _call(name: str, key: str, value: str) -> str:
    inner = f"<parameter={key}>\n{value}\n</parameter>\n"
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _offered(server: ApiClient) -> dict[str, Any]:
    lines = server.prompt.partition("</tools>")[0].splitlines()[3:]
    return {row["function"]["name"]: row["function"] for row in map(json.loads, lines)}


def test_a_function_without_a_type_is_one() -> None:
    server = ApiClient(THOUGHT + "Hello")
    space = {**SPACE, "tools": [{"name": "go"}]}
    body = {"input": "hi", "tools": [{"name": "a"}, {"function": {"name": "b"}}, space]}
    assert server.post(PATH, body).status_code == 200
    assert list(_offered(server)) == ["a", "b", "agents__go"]


def test_tools_that_openai_runs_are_left_out() -> None:
    server = ApiClient(THOUGHT + "Hello")
    body = {"input": "hi", "tools": [RUN, *HOSTED, SPACE, PATCH]}
    assert server.post(PATH, body).status_code == 200
    assert list(_offered(server)) == ["run", "agents__go", "apply_patch"]
    alone = server.post(PATH, {"input": "hi", "tools": HOSTED})
    assert alone.status_code == 200 and "# Tools" not in server.prompt
    assert alone.json()["tools"] == HOSTED


@pytest.mark.parametrize(
    "choice", [{"type": t["type"]} for t in HOSTED if "type" in t] + [{"type": "mcp", "name": "x"}]
)
def test_a_choice_of_one_is_refused(choice: dict[str, Any]) -> None:
    answer = ApiClient("x").post(
        PATH, {"input": "hi", "tools": [RUN, *HOSTED], "tool_choice": choice}
    )
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "tool_choice"
    assert "that this server cannot run" in error["message"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "go"}, ["run", "agents__go", "apply_patch"]),
        ({"type": "function", "name": "go", "namespace": "agents"}, None),
        ({"type": "custom", "name": "apply_patch"}, None),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [HOSTED[0], {"name": "go"}]},
            ["agents__go"],
        ),
        ({"type": "allowed_tools", "tools": [{"type": "namespace", "name": "agents"}]}, None),
    ],
)
def test_every_form_of_a_choice(choice: Any, names: list[str] | None) -> None:
    server = ApiClient(THOUGHT + "Hello")
    body = {"input": "hi", "tools": [RUN, *HOSTED, SPACE, PATCH], "tool_choice": choice}
    answer = server.post(PATH, body)
    assert answer.status_code == 200, answer.text
    assert names is None or list(_offered(server)) == names


def test_names_that_would_be_the_same_are_distinguished() -> None:
    other = {"type": "function", "name": "agents__go", "parameters": TEXT}
    server = ApiClient(THOUGHT + _call("agents__go", "x", "1") + _call("agents__go_2", "x", "2"))
    answer = server.post(PATH, {"input": "hi", "tools": [other, SPACE]}).json()
    assert list(_offered(server)) == ["agents__go", "agents__go_2"]
    first, second = answer["output"][1:]
    assert first["name"] == "agents__go" and "namespace" not in first
    assert (second["name"], second["namespace"]) == ("go", "agents")


def test_calls_are_items_of_their_tools_whole_streamed_stored_and_replayed() -> None:
    text = THOUGHT + _call("agents__go", "x", "1") + _call("apply_patch", "input", PATCHED)
    server = ApiClient(text)
    body = {"input": "hi", "tools": [RUN, SPACE, HOSTED[0], PATCH]}
    whole = server.post(PATH, body).json()
    _, go, patch = whole["output"]
    assert whole["tools"] == body["tools"]
    ResponseFunctionToolCall.model_validate(go)
    ResponseCustomToolCall.model_validate(patch)
    assert (go["type"], go["name"], go["namespace"]) == ("function_call", "go", "agents")
    assert json.loads(go["arguments"]) == {"x": "1"}
    assert (patch["type"], patch["name"]) == ("custom_tool_call", "apply_patch")
    assert patch["input"] == PATCHED
    assert patch["id"].startswith("ctc_") and patch["call_id"].startswith("call_")
    found = list(events(server.post(PATH, {**body, "stream": True})))
    last = found[-1][1]["response"]
    keys = ("type", "name", "namespace", "arguments", "input")
    same = [[{k: r.get(k) for k in keys} for r in one["output"]] for one in (whole, last)]
    assert same[0] == same[1]
    deltas = [d for name, d in found if name == "response.custom_tool_call_input.delta"]
    assert "".join(d["delta"] for d in deltas) == PATCHED and len(deltas) > 5
    (done,) = [d for name, d in found if name == "response.custom_tool_call_input.done"]
    assert done["input"] == PATCHED and done["item_id"] == last["output"][2]["id"]
    added = [d["item"] for name, d in found if name == "response.output_item.added"]
    assert (added[1]["namespace"], added[2]["input"]) == ("agents", "")
    assert server.get(f"{PATH}/{last['id']}").json() == last
    results = [
        {"type": "function_call_output", "call_id": go["call_id"], "output": "went"},
        {"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"},
    ]
    again = {**body, "input": [{"role": "user", "content": "hi"}, *whole["output"], *results]}
    assert server.post(PATH, again).status_code == 200
    sent = server.prompt
    stored = {**body, "input": results, "previous_response_id": whole["id"]}
    assert server.post(PATH, stored).status_code == 200
    assert server.prompt == sent and f"input={PATCHED}" in sent and "went" in sent


def test_the_call_of_a_name_that_is_offered_no_more_keeps_it() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "go", "namespace": "agents"}
    (message,) = to_messages([item], ToolNames())
    assert message["tool_calls"][0]["function"]["name"] == "agents__go"


def test_a_custom_tools_form_is_said_and_a_regex_binds() -> None:
    server = ApiClient(THOUGHT + "Hello")
    regex = {"type": "custom", "name": "r", "format": {"type": "grammar", "syntax": "regex"}}
    regex["format"] = {**regex["format"], "definition": "[a-c]+"}  # type: ignore[dict-item]
    server.post(PATH, {"input": "hi", "tools": [PATCH, regex]})
    found = _offered(server)
    assert found["apply_patch"]["description"].startswith("Changes files.\n\nThe input must")
    assert "start: /a+/" in found["apply_patch"]["description"]
    assert found["r"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-c]+)$"


def test_a_call_that_was_cut_off_keeps_what_came() -> None:
    cut = THOUGHT + _call("apply_patch", "input", "abcdef").partition("def")[0]
    body = {"input": "hi", "tools": [PATCH]}
    answer = ApiClient(cut, FinishReason.LENGTH).post(PATH, body).json()
    assert (answer["status"], answer["output"][-1]["input"]) == ("incomplete", "abc")


@pytest.mark.parametrize("value", ["", "a", PATCHED, "\x01\n\t\\u0041\\", '"', "🙂🙂"])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_input_is_the_same_however_its_json_is_cut(value: str, ascii_only: bool) -> None:
    for given in ({"input": value}, {"input": value, "z": 1}, {"patch": value}):
        text = json.dumps(given, ensure_ascii=ascii_only)
        for seed in range(40):
            cut, found, said, at = random.Random(seed), CustomInput(), "", 0
            while at < len(text):
                size = cut.randint(1, 1 + seed // 4)
                said, at = said + found.push(text[at : at + size]), at + size
            said += found.end()
            assert said == found.text == value


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ("{}", ""),
        ("", ""),
        ('{"a": 1, "b": "x"}', '{"a": 1, "b": "x"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("no JSON", "no JSON"),
        ('{"input": "cut o', "cut o"),
        ('{"patch": "' + "x" * 200, "x" * 200),
    ],
)
def test_arguments_without_an_input_are_passed_on(arguments: str, want: str) -> None:
    found = CustomInput()
    assert found.push(arguments) + found.end() == want == found.text
