"""litellm, by its three routes to us: an OpenAI-compatible server, vLLM, and Anthropic's form."""

from typing import Literal

import litellm
from pydantic import BaseModel, Field
from verdicts import KEY, MODEL, PICTURE, SUM, URL, V1, WEATHER, Trial, holds, is_weather, same

trial = Trial()
litellm.suppress_debug_info = True
ASK = [{"role": "user", "content": SUM}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
OPENAI = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY, "num_retries": 0}
OPENAI["temperature"] = 0
HOSTED = {**OPENAI, "model": f"hosted_vllm/{MODEL}"}
ANTHROPIC = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}


class Report(BaseModel):
    """What a typed answer holds."""

    city: Literal["Paris", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


@trial("chat")
def _() -> None:
    for route in (OPENAI, HOSTED):
        answer = litellm.completion(messages=ASK, **route)
        same(answer.choices[0].message.content, "3 + 4 = 7.")
        same(answer.choices[0].finish_reason, "stop")
        holds(answer.usage.completion_tokens > 5, answer.usage)
    answer = litellm.completion(messages=ASK, max_tokens=50, **ANTHROPIC)
    same(answer.choices[0].message.content, "3 + 4 = 7.")


@trial("thinking")
def _() -> None:
    answer = litellm.completion(messages=ASK, **HOSTED)
    holds("So 7." in answer.choices[0].message.reasoning_content, answer)
    answer = litellm.completion(messages=ASK, reasoning_effort="none", **HOSTED)
    holds(not getattr(answer.choices[0].message, "reasoning_content", None), answer)


@trial("streaming")
def _() -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    for route in (OPENAI, HOSTED, {**ANTHROPIC, "max_tokens": 50}):
        events = list(litellm.completion(messages=ASK, **more, **route))
        text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
        same(text, "3 + 4 = 7.")
        holds(events[-1].usage.prompt_tokens > 5, events[-1])
        whole = litellm.stream_chunk_builder(events, messages=ASK)
        same(whole.choices[0].message.content, "3 + 4 = 7.")


@trial("structured")
def _() -> None:
    for route in (OPENAI, HOSTED):
        answer = litellm.completion(messages=ASK, response_format=Report, **route)
        is_weather(answer.choices[0].message.content)
        answer = litellm.completion(
            messages=ASK, response_format={"type": "json_object"}, max_tokens=300, **route
        )
        holds(answer.choices[0].message.content.lstrip().startswith("{"), answer)


@trial("tools, required")
def _() -> None:
    for route in (OPENAI, HOSTED, {**ANTHROPIC, "max_tokens": 400}):
        answer = litellm.completion(messages=ASK, tools=[TOOL], tool_choice="required", **route)
        choice = answer.choices[0]
        same(choice.finish_reason, "tool_calls")
        is_weather(choice.message.tool_calls[0].function.arguments)


@trial("tools, by name")
def _() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for route in (OPENAI, HOSTED, {**ANTHROPIC, "max_tokens": 400}):
        answer = litellm.completion(messages=ASK, tools=[TOOL], tool_choice=named, **route)
        is_weather(answer.choices[0].message.tool_calls[0].function.arguments)


@trial("tools, streaming")
def _() -> None:
    for route in (OPENAI, HOSTED, {**ANTHROPIC, "max_tokens": 400}):
        events = litellm.completion(
            messages=ASK, tools=[TOOL], tool_choice="required", stream=True, **route
        )
        whole = litellm.stream_chunk_builder(list(events), messages=ASK)
        is_weather(whole.choices[0].message.tool_calls[0].function.arguments)


@trial("tool results")
def _() -> None:
    for route in (OPENAI, {**ANTHROPIC, "max_tokens": 400}):
        first = litellm.completion(messages=ASK, tools=[TOOL], tool_choice="required", **route)
        message = first.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "mild"}
            for call in message.tool_calls
        ]
        answer = litellm.completion(messages=[*ASK, message, *results], tools=[TOOL], **route)
        holds(answer.choices[0].message.content, answer)


@trial("log-probabilities")
def _() -> None:
    answer = litellm.completion(messages=ASK, logprobs=True, top_logprobs=2, **OPENAI)
    rows = answer.choices[0].logprobs.content
    holds(rows and len(rows[0].top_logprobs) == 2, rows)


@trial("completions")
def _() -> None:
    route = {**OPENAI, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(prompt="Once upon a time", max_tokens=8, **route)
    holds(answer.choices[0].text, answer)


@trial("responses")
def _() -> None:
    answer = litellm.responses(input=SUM, **OPENAI)
    texts = [item.content[0].text for item in answer.output if item.type == "message"]
    same(texts, ["3 + 4 = 7."])
    events = list(litellm.responses(input=SUM, stream=True, **OPENAI))
    same(str(events[-1].type.value), "response.completed")


@trial("errors")
def _() -> None:
    for route in (OPENAI, HOSTED, {**ANTHROPIC, "max_tokens": 50}):
        try:
            litellm.completion(messages=ASK, **{**route, "temperature": -1})
            raise AssertionError("a temperature of -1 was taken")
        except litellm.BadRequestError as error:
            holds("temperature" in str(error), error)
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 9000}], **HOSTED)
        raise AssertionError("a prompt beyond the context was taken")
    except litellm.ContextWindowExceededError:
        pass


@trial("asynchronous, eight at once")
async def _() -> None:
    import asyncio

    asks = [
        litellm.acompletion(
            messages=[{"role": "user", "content": f"What is {i} plus 4?"}], **HOSTED
        )
        for i in range(8)
    ]
    for i, answer in enumerate(await asyncio.gather(*asks)):
        same(answer.choices[0].message.content, f"{i} + 4 = {i + 4}.")


@trial("images")
def _() -> None:
    parts = [{"type": "text", "text": SUM}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    for route in (OPENAI, HOSTED, ANTHROPIC):
        plain = litellm.completion(messages=ASK, max_tokens=5, **route)
        answer = litellm.completion(
            messages=[{"role": "user", "content": parts}], max_tokens=5, **route
        )
        more = answer.usage.prompt_tokens - plain.usage.prompt_tokens
        holds(3 <= more <= 4, (route["model"], answer.usage))


trial.run()
