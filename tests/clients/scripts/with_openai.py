"""The openai package: chat, completions, parse, tools, responses."""

import math
from typing import Literal

import openai
from pydantic import BaseModel, Field
from verdicts import KEY, MODEL, PICTURE, SUM, V1, WEATHER, Trial, holds, is_weather, same

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
trial = Trial()
ASK = [{"role": "user", "content": SUM}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}
FLAT = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
LITTLE = {"temperature": 0.0, "extra_body": {"enable_thinking": False}}


class Report(BaseModel):
    """What a typed answer holds."""

    city: Literal["Paris", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


@trial("models")
def _() -> None:
    same([row.id for row in client.models.list()], [MODEL])
    same(client.models.retrieve(MODEL).id, MODEL)


@trial("chat")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    choice = answer.choices[0]
    same(choice.message.content, "3 + 4 = 7.")
    same(choice.finish_reason, "stop")
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)


@trial("thinking")
def _() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    holds("So 7." in answer.choices[0].message.reasoning_content)
    effort = {"reasoning_effort": "none"}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, **effort)
    holds(not getattr(answer.choices[0].message, "reasoning_content", None))


@trial("streaming")
def _() -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, **more)
    events = list(stream)
    deltas = [event.choices[0].delta for event in events if event.choices]
    same("".join(delta.content or "" for delta in deltas), "3 + 4 = 7.")
    same(deltas[0].role, "assistant")
    holds(len(deltas) > 5, deltas)
    holds(events[-1].usage.completion_tokens > 5 and not events[-1].choices)


@trial("stream helper")
def _() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    same(final.choices[0].message.content, "3 + 4 = 7.")
    holds({"content.delta", "content.done"} <= set(kinds), kinds)


@trial("conversation")
def _() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": [{"type": "text", "text": "3 + 4 = 7."}]},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "What is 5 plus 4?"}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, **LITTLE)
    holds(answer.choices[0].message.content, answer)


@trial("structured")
def _() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Report, **LITTLE
    )
    is_weather(answer.choices[0].message.parsed.model_dump())
    thought = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Report)
    is_weather(thought.choices[0].message.parsed.model_dump())


@trial("structured, streaming")
def _() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Report, **LITTLE
    ) as stream:
        final = stream.get_final_completion()
    is_weather(final.choices[0].message.parsed.model_dump())


@trial("tools, required")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", **LITTLE
    )
    choice = answer.choices[0]
    same(choice.finish_reason, "tool_calls")
    for call in choice.message.tool_calls:
        same(call.function.name, "weather")
        is_weather(call.function.arguments)


@trial("tools, by name")
def _() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[other, TOOL], tool_choice=named, **LITTLE
    )
    [call] = answer.choices[0].message.tool_calls
    same(call.function.name, "weather")
    is_weather(call.function.arguments)


@trial("tools, parsed")
def _() -> None:
    tool = openai.pydantic_function_tool(Report, name="weather")
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, tools=[tool], tool_choice="required", **LITTLE
    )
    is_weather(answer.choices[0].message.tool_calls[0].function.parsed_arguments.model_dump())


@trial("tools, streaming")
def _() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", **LITTLE
    ) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    same(choice.finish_reason, "tool_calls")
    is_weather(choice.message.tool_calls[0].function.arguments)


@trial("tool results")
def _() -> None:
    options = {"model": MODEL, "tools": [TOOL], **LITTLE}
    first = client.chat.completions.create(messages=ASK, tool_choice="required", **options)
    message = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "mild"} for call in message.tool_calls
    ]
    answer = client.chat.completions.create(messages=[*ASK, message, *results], **options)
    holds(answer.choices[0].message.content, answer)


@trial("log-probabilities")
def _() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, logprobs=True, top_logprobs=3, **LITTLE
    )
    rows = answer.choices[0].logprobs.content
    same("".join(row.token for row in rows[:-1]), "3 + 4 = 7.")
    for row in rows:
        same(len(row.top_logprobs), 3)
        holds(math.isclose(row.logprob, row.top_logprobs[0].logprob), row)
        same(bytes(row.bytes).decode(), row.token)


@trial("choices and stops")
def _() -> None:
    more = {"n": 3, "seed": 5, "stop": ["="], "extra_body": {"enable_thinking": False}}
    answer = client.chat.completions.create(model=MODEL, messages=ASK, **more)
    same([choice.index for choice in answer.choices], [0, 1, 2])
    for choice in answer.choices:
        holds("=" not in choice.message.content, choice)
    again = client.chat.completions.create(model=MODEL, messages=ASK, **more)
    same(
        [choice.message.content for choice in again.choices],
        [choice.message.content for choice in answer.choices],
    )


@trial("completions")
def _() -> None:
    text = "Once upon a time"
    answer = client.completions.create(
        model=MODEL, prompt=text, max_tokens=8, temperature=0, echo=True, logprobs=2
    )
    holds(answer.choices[0].text.startswith(text), answer)
    rows = answer.choices[0].logprobs
    same("".join(rows.tokens), answer.choices[0].text)
    same([rows.token_logprobs[0] is None, rows.token_logprobs[1] is None], [True, False])
    stream = client.completions.create(
        model=MODEL, prompt=text, max_tokens=8, temperature=0, stream=True
    )
    parts = [event.choices[0].text for event in stream]
    same(text + "".join(parts), answer.choices[0].text)


@trial("responses")
def _() -> None:
    first = client.responses.create(model=MODEL, input=SUM, temperature=0)
    same(first.output_text, "3 + 4 = 7.")
    same([item.type for item in first.output], ["reasoning", "message"])
    second = client.responses.create(
        model=MODEL, input="What is 5 plus 4?", previous_response_id=first.id, temperature=0
    )
    holds(second.output_text and second.usage.input_tokens > first.usage.input_tokens)
    same(client.responses.retrieve(first.id).output_text, first.output_text)
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError:
        return
    raise AssertionError("a response that was deleted is still there")


@trial("responses, streaming")
def _() -> None:
    with client.responses.stream(model=MODEL, input=SUM, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    same(final.output_text, "3 + 4 = 7.")
    same(kinds[0], "response.created")
    same(kinds[-1], "response.completed")


@trial("responses, structured")
def _() -> None:
    answer = client.responses.parse(model=MODEL, input=SUM, text_format=Report, temperature=0)
    is_weather(answer.output_parsed.model_dump())


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
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
        raise AssertionError("a temperature of -1 was taken")
    except openai.BadRequestError as error:
        same(error.param, "temperature")
        holds(error.request_id, error)
    try:
        client.embeddings.create(model=MODEL, input="text")
        raise AssertionError("there are embeddings")
    except openai.NotFoundError as error:
        holds("embed" in error.message, error.message)
    try:
        client.chat.completions.create(model="other", messages=ASK)
        raise AssertionError("a model that is not served was taken")
    except openai.NotFoundError as error:
        same(error.code, "model_not_found")


@trial("asynchronous, eight at once")
async def _() -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as many:
        asks = [
            many.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"What is {i} plus 4?"}],
                **LITTLE,
            )
            for i in range(8)
        ]
        answers = await asyncio.gather(*asks)
    for i, answer in enumerate(answers):
        same(answer.choices[0].message.content, f"{i} + 4 = {i + 4}.")


@trial("images")
def _() -> None:
    text, url = {"type": "text", "text": SUM}, {"type": "image_url", "image_url": {"url": PICTURE}}
    messages = [{"role": "user", "content": [text, url]}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
    plain = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=5)
    # the image's token, those around it, and a line's end at most
    holds(3 <= answer.usage.prompt_tokens - plain.usage.prompt_tokens <= 4, answer.usage)
    parts = [{"type": "input_text", "text": SUM}, {"type": "input_image", "image_url": PICTURE}]
    found = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": parts}], max_output_tokens=5
    )
    same(found.usage.input_tokens, answer.usage.prompt_tokens)
    try:
        broken = {"type": "image_url", "image_url": {"url": PICTURE[:-40]}}
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [text, broken]}]
        )
    except openai.BadRequestError as error:
        same(error.param, "messages[0].content[1].image_url.url")
    else:
        raise AssertionError("half an image was read")


trial.run()
