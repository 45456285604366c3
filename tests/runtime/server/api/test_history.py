"""Nothing that a client has stored makes its next request fail, in any of the three chat APIs."""

from typing import Any

import pytest

from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.messages import MessagesBody
from spark_engine.runtime.server.api.messages import to_chat_request as of_messages
from spark_engine.runtime.server.api.responses import ResponsesBody
from spark_engine.runtime.server.api.responses import to_chat_request as of_responses
from spark_engine.runtime.text.chat import ChatTemplate
from tests.repository import ROOT
from tests.runtime.server.api.api_client import CHAT, MESSAGES, RESPONSES, ApiClient, tool_result

STRICT = ROOT / "models/tiny/checkpoint/chat_template.jinja"  # it raises where Qwen's raises

USER = {"role": "user", "content": "look"}
IMAGE, FILE = "[an image that this model cannot see]", "[a file that this model cannot read"
PNG = {"type": "base64", "media_type": "image/png", "data": "AA=="}
INNER, FAILED = [{"text": "inner"}], {"type": "e", "error_code": "too_many"}
URL = "data:image/png;base64,AA=="
# name: (what a content holds, what the model reads), by API
PARTS: dict[str, list[tuple[Any, str]]] = {
    CHAT: [
        ({"type": "image_url", "image_url": {"url": URL}}, IMAGE),
        ({"type": "image_url", "image_url": URL}, IMAGE),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "[a sound"),
        ({"type": "video_url", "video_url": {"url": "u"}}, "[a video"),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": "AA"}}, f"{FILE}: a.pdf]"),
        ({"type": "of_next_year", "data": 1}, "[content of type of_next_year"),
        ({"type": "text", "text": None}, ""),
        ({"type": "text", "text": 3}, "[content of type text"),
        ({"type": ["text"]}, "[content"),
        (None, ""),
        (7, "7"),
        ("plain", "plain"),
    ],
    MESSAGES: [
        ({"type": "image", "source": PNG}, IMAGE),
        ({"type": "document", "title": "T", "source": PNG}, f"{FILE}: T]"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, FILE),
        ({"type": "document", "source": {"type": "text", "data": "words"}}, "words"),
        ({"type": "document", "source": {"type": "content", "content": INNER}}, "inner"),
        ({"type": "search_result", "title": "S", "source": "s", "content": INNER}, "S s\ninner"),
        ({"type": "tool_reference", "tool_name": "Grep"}, "[the tool Grep]"),
        ({"type": "container_upload", "file_id": "f1"}, f"{FILE}: f1]"),
        ({"type": "web_search_tool_result", "content": FAILED}, "cannot read: too_many]"),
        ({"type": "of_next_year"}, "[content of type of_next_year"),
        ({"type": "text"}, ""),
    ],
    RESPONSES: [
        ({"type": "input_image", "image_url": URL}, IMAGE),
        ({"type": "input_file", "filename": "b.pdf", "file_data": "AA"}, f"{FILE}: b.pdf]"),
        ({"type": "input_audio", "input_audio": {}}, "[a sound"),
        ({"type": "computer_screenshot", "image_url": URL}, IMAGE),
        ({"type": "of_next_year"}, "[content of type of_next_year"),
        ({"type": "input_text"}, ""),
    ],
}


def _asked(path: str, messages: list[Any], **more: Any) -> str:
    """The prompt that the history becomes; every answer is a 200."""
    server = ApiClient("Hello")
    name = "input" if path == RESPONSES else "messages"
    answer = server.post(path, {name: messages, "max_output_tokens": 9, **more})
    assert answer.status_code == 200, answer.text
    return server.prompt


CASES = [(path, part, words) for path, rows in PARTS.items() for part, words in rows]


@pytest.mark.parametrize(("path", "part", "words"), CASES)
def test_what_is_no_text_becomes_a_note(path: str, part: Any, words: str) -> None:
    """In a result, in a question that was answered, and in the newest question alike: a client that
    was refused once would send the same again."""
    inside = _asked(path, tool_result(path, [part]))
    before = _asked(path, [{"role": "user", "content": [part]}, _said("yes"), USER])
    newest = _asked(path, [{"role": "user", "content": [part]}])
    answered = _asked(path, [USER, {"role": "assistant", "content": [part]}, USER])
    for prompt in (inside, before, newest, answered):
        assert words in prompt and "AA==" not in prompt


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("content", [None, "", [], {"a": 1}, 3, True, [[]], [{"a": 1}]])
def test_results_of_any_json(path: str, content: Any) -> None:
    prompt = _asked(path, tool_result(path, content))
    assert '{"a": 1}' in prompt or content != {"a": 1}


@pytest.mark.parametrize("path", PARTS)
def test_calls_without_results_and_results_without_calls(path: str) -> None:
    whole = tool_result(path, "r")
    for kept in ([0, 1], [0, 2], [1, 2], [2], [1], [2, 0], [1, 0], [2, 2, 0], [0, 1, 1, 0]):
        _asked(path, [whole[i] for i in kept])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHAT, {"role": "assistant", "tool_calls": [{"index": 0, "id": "c"}]}),
        (CHAT, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]}),
        (CHAT, {"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a": tru'}}]}),
        (CHAT, {"role": "assistant", "tool_calls": {"a": 1}, "reasoning": {"b": 2}}),
        (CHAT, {"role": "assistant", "function_call": {"name": None}}),
        (CHAT, {"role": "assistant", "audio": {"id": "a"}}),
        (CHAT, {"role": "tool", "content": "r"}),
        (CHAT, {"role": "critic", "content": "hm"}),
        (MESSAGES, {"role": "assistant", "content": [{"type": "tool_use"}]}),
        (MESSAGES, {"role": "assistant", "content": [{"type": "thinking"}]}),
        (MESSAGES, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}),
        (MESSAGES, {"role": "user", "content": [{"type": "tool_result"}]}),
        (MESSAGES, {"role": "critic", "content": [{"type": "text", "text": "hm"}]}),
        (MESSAGES, {"role": "user", "content": None}),
        (MESSAGES, {"role": "system", "content": [{"type": "image"}]}),
        (RESPONSES, {"type": "function_call", "call_id": None, "name": None, "arguments": [1]}),
        (RESPONSES, {"type": "function_call_output", "call_id": 3, "output": None}),
        (RESPONSES, {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": None}),
        (RESPONSES, {"type": "custom_tool_call_output", "call_id": "c", "output": "o"}),
        (RESPONSES, {"type": "reasoning", "summary": None, "encrypted_content": "gAAA"}),
        (RESPONSES, {"type": "item_reference", "id": "msg_of_another_server"}),
        (RESPONSES, {"type": "web_search_call", "action": {"query": "q"}}),
        (RESPONSES, {"type": "file_search_call", "queries": ["q"], "results": None}),
        (RESPONSES, {"type": "code_interpreter_call", "code": "1", "outputs": []}),
        (RESPONSES, {"type": "image_generation_call", "result": "AA=="}),
        (RESPONSES, {"type": "computer_call", "call_id": "c", "action": {"type": "click"}}),
        (RESPONSES, {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}}),
        (RESPONSES, {"type": "local_shell_call_output", "id": "c", "output": "{}"}),
        (RESPONSES, {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "s"}]}),
        (RESPONSES, {"type": "apply_patch_call", "call_id": "c", "operation": {"path": "a"}}),
        (RESPONSES, {"type": "mcp_call", "name": "m", "arguments": "{", "output": None}),
        (RESPONSES, {"type": "mcp_list_tools", "tools": [{"name": "m"}]}),
        (RESPONSES, {"type": "tool_search_call", "call_id": "c", "arguments": {}}),
        (RESPONSES, {"type": "tool_search_output", "call_id": "c", "tools": [{"name": "t"}]}),
        (RESPONSES, {"type": "compaction", "encrypted_content": "x"}),
        (RESPONSES, {"type": "of_next_year", "data": {"a": [1]}}),
        (RESPONSES, {"type": {"a": 1}}),
        (RESPONSES, {"data": 1}),
    ],
)
def test_what_is_half_or_unknown_ends_no_chat(path: str, message: dict[str, Any]) -> None:
    for history in ([USER, message], [USER, message, USER], [message], [message, message, USER]):
        assert "AA==" not in _asked(path, history)


def _step(path: str, step: int, reminder: str) -> list[Any]:
    """A thought, a call, its result, and a reminder in one of the forms that agents use."""
    thought, name = f"Thought {step}.", f"c{step}"
    later = [{"role": "system" if step % 2 else "developer", "content": reminder}]
    if path == CHAT:
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        said = {"role": "assistant", "reasoning_content": thought, "tool_calls": [call]}
        return [said, {"role": "tool", "tool_call_id": name, "content": "r"}, *later]
    if path == MESSAGES:
        blocks = [
            {"type": "thinking", "thinking": thought, "signature": "s"},
            {"type": "tool_use", "id": name, "name": "f", "input": {}},
        ]
        result = {"type": "tool_result", "tool_use_id": name, "content": "r"}
        text = [{"type": "text", "text": reminder}] if step % 2 else []
        user = {"role": "user", "content": [result, *text]}
        return [{"role": "assistant", "content": blocks}, user, *([] if text else later)]
    return [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]},
        {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": "r"},
        *later,
    ]


def _rendered(path: str, messages: list[Any]) -> str:
    """The prompt by a template that drops thoughts before the last turn of the user's."""
    if path == CHAT:
        chat = ChatRequest(messages=messages)
    elif path == MESSAGES:
        chat = of_messages(MessagesBody(messages=messages))
    else:
        chat, _ = of_responses(ResponsesBody(input=messages), messages)
    return ChatTemplate(STRICT.read_text()).prompt(chat.messages).text


@pytest.mark.parametrize("path", PARTS)
def test_reminders_keep_a_loops_thoughts_and_its_cached_prefix(path: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    before = ""
    for step in range(6):
        messages += _step(path, step, f"<system-reminder>{step}</system-reminder>")
        prompt = _rendered(path, messages)
        assert prompt.startswith(before) and prompt.count("Thought") == step + 1
        assert prompt.count("<system-reminder>") == step + 1
        before = prompt.removesuffix("<|im_start|>assistant\n<think>\n")
    messages += [{"role": "assistant", "content": "Found."}, {"role": "user", "content": "Thanks."}]
    prompt = _rendered(path, messages)
    assert "Thought" not in prompt and "<|im_start|>user\nThanks.<|im_end|>" in prompt
