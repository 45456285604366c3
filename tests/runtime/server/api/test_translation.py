"""Any body of the four APIs is accepted, or refused with a message."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.errors import RequestError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.server.api import messages, responses
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.common import Defaults, check, sampling
from spark_engine.runtime.server.api.completions import CompletionBody, prompts
from spark_engine.runtime.server.api.fields import decode, renamed
from spark_engine.runtime.server.api.messages import MessagesBody
from spark_engine.runtime.server.api.messages import to_chat_request as message_job
from spark_engine.runtime.server.api.responses import ResponsesBody, items_of
from spark_engine.runtime.server.api.responses import to_chat_request as response_job
from spark_engine.runtime.text.messages import normalise

WORDS = [
    *("type", "role", "content", "text", "name", "id", "input", "tool_use_id", "thinking"),
    *("call_id", "arguments", "output", "summary", "encrypted_content", "format", "schema"),
    *("effort", "mode", "tools", "parameters", "input_schema", "verbosity", "edits", "strict"),
    *("user", "assistant", "system", "tool_use", "tool_result", "message", "function"),
    *("function_call", "function_call_output", "reasoning", "item_reference", "allowed_tools"),
    *("custom_tool_call", "mcp_call", "namespace", "web_search_call", "action", "image"),
    *("json_schema", "auto", "any", "tool", "enabled", "custom", "document", "source", "data"),
]
LEAF = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 9), st.integers(-(2**66), 2**66), st.just(0.5)),
    *(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["", "x", "5", *WORDS])),
)
JSON = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)
BODIES = {MessagesBody: "messages", ResponsesBody: "input"}
BODIES |= {ChatRequest: "messages", CompletionBody: "prompt"}
LIMITS = Limits(max_seqs=4, max_context=256, pages=16, vocab=512)


@pytest.mark.parametrize("kind", BODIES)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_whatever_comes_is_taken_or_refused(kind: Any, data: Any) -> None:
    needed, names = BODIES[kind], st.sampled_from(kind.__struct_fields__)
    body = data.draw(st.dictionaries(names, JSON, max_size=3))
    items = st.lists(st.dictionaries(st.sampled_from(WORDS), JSON, max_size=4), max_size=3)
    valid = st.just([{"role": "user", "content": "x"}] if needed != "prompt" else "a")
    body[needed] = data.draw(st.one_of(valid, items, JSON))
    try:
        given = decode(json.dumps(body).encode(), kind)
        made = {MessagesBody: message_job, ResponsesBody: _response}.get(kind, lambda g: g)(given)
        check(made)
        if isinstance(made, CompletionBody):
            prompts(made.prompt)
        else:
            normalise(made.messages)
        Request((3,), sampling(made, Defaults.of({}), 100)).check(LIMITS, (1, 2))
    except RequestError as error:
        assert str(error)


def _response(body: ResponsesBody) -> Any:
    items = items_of(body, [{"type": "message", "role": "user", "content": "x"}])
    return response_job(body, items)[0]


FORM = "response_format.json_schema.schema.a is x"


@pytest.mark.parametrize(
    ("module", "said", "param", "want"),
    [
        (messages, "tools[2].function.parameters.a is x", "tools", "tools[2].input_schema.a"),
        (responses, "tools[2].function.parameters.a is x", "tools", "tools[2].parameters.a"),
        (messages, FORM, None, "output_config.format.schema.a"),
        (responses, FORM, None, "text.format.schema.a is x"),
        (responses, "response_format.type is 'x'", None, "text.format.type is 'x'"),
        (messages, "stop is 3", "stop", "stop_sequences is 3"),
        (messages, "the value of stop is 3", "stop", "the value of stop_sequences is 3"),
    ],
)
def test_errors_name_the_places_of_the_body(
    module: Any, said: str, param: str | None, want: str
) -> None:
    with pytest.raises(RequestError) as caught, renamed(module.NAMES, module.PLACES):
        raise RequestError(said, param or "response_format")
    assert str(caught.value).startswith(want)
    assert caught.value.param in want.replace("[", ".").replace(" ", ".").split(".")
