"""The openai package: chat, completions, parse, tools, responses."""

import math
from typing import Any

import openai
from asked import ANSWER, MODEL, OPENAI, PICTURE, SUM, WEATHER
from report import Report
from verdicts import Trial, holds, is_weather, refused, same

client, many = openai.OpenAI(**OPENAI), openai.AsyncOpenAI(**OPENAI)
trial = Trial()
ASK = [{"role": "user", "content": SUM}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
FLAT = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
TEXT = "Once upon a time"
LITTLE = {"temperature": 0.0, "extra_body": {"enable_thinking": False}}


def ask(**more: object) -> Any:
    """A chat completion of the sum, greedy unless it says otherwise."""
    given = {"messages": ASK, "temperature": 0.0, **more}
    return client.chat.completions.create(model=MODEL, **given)


def parse(**more: object) -> Any:
    """The message of a typed completion."""
    answer = client.chat.completions.parse(model=MODEL, messages=ASK, **more)
    return answer.choices[0].message


def last(**more: object) -> Any:
    """The choice that a stream of a completion ends with."""
    with client.chat.completions.stream(model=MODEL, messages=ASK, **LITTLE, **more) as stream:
        return stream.get_final_completion().choices[0]


@trial("models")
def _() -> None:
    same([row.id for row in client.models.list()], [MODEL])
    same(client.models.retrieve(MODEL).id, MODEL)


@trial("chat")
def _() -> None:
    answer = ask()
    same(answer.choices[0].message.content, ANSWER)
    same(answer.choices[0].finish_reason, "stop")
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


@trial("thinking")
def _() -> None:
    holds("So 7." in ask().choices[0].message.reasoning_content)
    message = ask(reasoning_effort="none").choices[0].message
    holds(not getattr(message, "reasoning_content", None))


@trial("streaming")
def _() -> None:
    events = list(ask(stream=True, stream_options={"include_usage": True}))
    deltas = [event.choices[0].delta for event in events if event.choices]
    same("".join(delta.content or "" for delta in deltas), ANSWER)
    same(deltas[0].role, "assistant")
    holds(len(deltas) > 5, deltas)
    holds(events[-1].usage.completion_tokens > 5 and not events[-1].choices)


@trial("stream helper")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    same(final.choices[0].message.content, ANSWER)
    holds({"content.delta", "content.done"} <= set(kinds), kinds)


@trial("conversation")
def _() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "What is 5 plus 4?"}]},
    ]
    holds(ask(messages=messages, **LITTLE).choices[0].message.content)


trial.calls(
    "structured",
    lambda: parse(response_format=Report, **LITTLE).parsed,
    lambda: parse(response_format=Report).parsed,
)
trial.calls("structured, streaming", lambda: last(response_format=Report).message.parsed)


@trial("tools, required")
def _() -> None:
    choice = ask(tools=[TOOL], tool_choice="required", **LITTLE).choices[0]
    same(choice.finish_reason, "tool_calls")
    for call in choice.message.tool_calls:
        same(call.function.name, "weather")
        is_weather(call.function.arguments)


@trial("tools, by name")
def _() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    answer = ask(tools=[other, TOOL], tool_choice=named, **LITTLE)
    [call] = answer.choices[0].message.tool_calls
    same(call.function.name, "weather")
    is_weather(call.function.arguments)


@trial("tools, parsed")
def _() -> None:
    tool = openai.pydantic_function_tool(Report, name="weather")
    [call, *_] = parse(tools=[tool], tool_choice="required", **LITTLE).tool_calls
    is_weather(call.function.parsed_arguments)


@trial("tools, streaming")
def _() -> None:
    choice = last(tools=[TOOL], tool_choice="required")
    same(choice.finish_reason, "tool_calls")
    is_weather(choice.message.tool_calls[0].function.arguments)


@trial("tool results")
def _() -> None:
    message = ask(tools=[TOOL], tool_choice="required", **LITTLE).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "mild"} for call in message.tool_calls
    ]
    answer = ask(messages=[*ASK, message, *results], tools=[TOOL], **LITTLE)
    holds(answer.choices[0].message.content, answer)


@trial("log-probabilities")
def _() -> None:
    rows = ask(logprobs=True, top_logprobs=3, **LITTLE).choices[0].logprobs.content
    same("".join(row.token for row in rows[:-1]), ANSWER)
    for row in rows:
        same(len(row.top_logprobs), 3)
        holds(math.isclose(row.logprob, row.top_logprobs[0].logprob), row)
        same(bytes(row.bytes).decode(), row.token)


@trial("choices and stops")
def _() -> None:
    more = {"n": 3, "seed": 5, "stop": ["="], "temperature": openai.omit}
    more["extra_body"] = {"enable_thinking": False}
    choices = ask(**more).choices
    same([choice.index for choice in choices], [0, 1, 2])
    said = [choice.message.content for choice in choices]
    holds(not any("=" in text for text in said), said)
    same([choice.message.content for choice in ask(**more).choices], said)


@trial("completions")
def _() -> None:
    asked = {"model": MODEL, "prompt": TEXT, "max_tokens": 8, "temperature": 0}
    [choice] = client.completions.create(echo=True, logprobs=2, **asked).choices
    holds(choice.text.startswith(TEXT), choice)
    rows = choice.logprobs
    same("".join(rows.tokens), choice.text)
    same([rows.token_logprobs[0] is None, rows.token_logprobs[1] is None], [True, False])
    parts = [event.choices[0].text for event in client.completions.create(stream=True, **asked)]
    same(TEXT + "".join(parts), choice.text)


@trial("responses")
def _() -> None:
    first = client.responses.create(model=MODEL, input=SUM, temperature=0)
    same(first.output_text, ANSWER)
    same([item.type for item in first.output], ["reasoning", "message"])
    second = client.responses.create(
        model=MODEL, input="What is 5 plus 4?", previous_response_id=first.id, temperature=0
    )
    holds(second.output_text and second.usage.input_tokens > first.usage.input_tokens)
    same(client.responses.retrieve(first.id).output_text, first.output_text)
    client.responses.delete(first.id)
    refused(openai.NotFoundError, client.responses.retrieve, first.id)


@trial("responses, streaming")
def _() -> None:
    with client.responses.stream(model=MODEL, input=SUM, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    same(final.output_text, ANSWER)
    same(kinds[0], "response.created")
    same(kinds[-1], "response.completed")


trial.calls(
    "responses, structured",
    lambda: (
        client.responses.parse(
            model=MODEL, input=SUM, text_format=Report, temperature=0
        ).output_parsed
    ),
)


@trial("responses, tools")
def _() -> None:
    options = {"model": MODEL, "tools": [FLAT], "temperature": 0}
    first = client.responses.create(input=SUM, tool_choice="required", **options)
    calls = [item for item in first.output if item.type == "function_call"]
    holds(calls, first.output)
    is_weather(calls[0].arguments)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
        for call in calls
    ]
    answer = client.responses.create(input=results, previous_response_id=first.id, **options)
    same(answer.status, "completed")
    with client.responses.stream(input=SUM, tool_choice="required", **options) as stream:
        final = stream.get_final_response()
    is_weather(next(i for i in final.output if i.type == "function_call").arguments)


@trial("errors")
def _() -> None:
    error = refused(openai.BadRequestError, ask, temperature=-1)
    same(error.param, "temperature")
    holds(error.request_id, error)
    error = refused(openai.NotFoundError, client.embeddings.create, model=MODEL, input="text")
    holds("embed" in error.message, error.message)
    create = client.chat.completions.create
    same(refused(openai.NotFoundError, create, model="other", messages=ASK).code, "model_not_found")
    half = {"type": "image_url", "image_url": {"url": PICTURE[:-40]}}
    messages = [{"role": "user", "content": [{"type": "text", "text": SUM}, half]}]
    error = refused(openai.BadRequestError, ask, messages=messages)
    same(error.param, "messages[0].content[1].image_url.url")


async def _sum(text: str) -> str:
    asked = [{"role": "user", "content": text}]
    answer = await many.chat.completions.create(model=MODEL, messages=asked, **LITTLE)
    return answer.choices[0].message.content


def _prompt(with_image: bool) -> int:
    parts = [{"type": "text", "text": SUM}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    messages = [{"role": "user", "content": parts}] if with_image else ASK
    return ask(messages=messages, max_tokens=5).usage.prompt_tokens


def _input(with_image: bool) -> int:
    parts = [{"type": "input_text", "text": SUM}, {"type": "input_image", "image_url": PICTURE}]
    asked = [{"role": "user", "content": parts}] if with_image else SUM
    found = client.responses.create(model=MODEL, input=asked, max_output_tokens=5)
    return found.usage.input_tokens


trial.eight(_sum)
trial.sees(_prompt, _input)


trial.run()
