"""litellm, by its three routes to us: an OpenAI-compatible server, vLLM, and Anthropic's form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import litellm
from asked import ANSWER, KEY, MODEL, PICTURE, SUM, URL, V1, WEATHER
from report import Report
from verdicts import Trial, holds, is_weather, refused, same

trial = Trial()
litellm.suppress_debug_info = True
ASK = [{"role": "user", "content": SUM}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
OPENAI = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY, "num_retries": 0}
OPENAI["temperature"] = 0
HOSTED = {**OPENAI, "model": f"hosted_vllm/{MODEL}"}
ANTHROPIC = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}


SHORT = {**ANTHROPIC, "max_tokens": 50}
CALLING = {**ANTHROPIC, "max_tokens": 400}
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(route: dict[str, Any], messages: list[Any] = ASK, **more: Any) -> Any:
    return litellm.completion(messages=messages, **{**route, **more})


def _call(route: dict[str, Any], **more: Any) -> Any:
    """The arguments of a forced call."""
    found = ask(route, tools=[TOOL], **more)
    if more.get("stream"):
        found = litellm.stream_chunk_builder(list(found), messages=ASK)
    choice = found.choices[0]
    holds(choice.finish_reason == "tool_calls" or more["tool_choice"] == NAMED, choice)
    return choice.message.tool_calls[0].function.arguments


def _calls(**more: Any) -> list[Callable[[], Any]]:
    return [partial(_call, route, **more) for route in (OPENAI, HOSTED, CALLING)]


async def _sum(text: str) -> str:
    answer = await litellm.acompletion(messages=[{"role": "user", "content": text}], **HOSTED)
    return answer.choices[0].message.content


def _prompt(route: dict[str, Any], with_image: bool) -> int:
    parts = [{"type": "text", "text": SUM}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    messages = [{"role": "user", "content": parts}] if with_image else ASK
    return ask(route, messages, max_tokens=5).usage.prompt_tokens


@trial("chat")
def _() -> None:
    for route in (OPENAI, HOSTED, SHORT):
        answer = ask(route)
        same(answer.choices[0].message.content, ANSWER)
        same(answer.choices[0].finish_reason, "stop")
        holds(answer.usage.completion_tokens > 5, answer.usage)


@trial("thinking")
def _() -> None:
    holds("So 7." in ask(HOSTED).choices[0].message.reasoning_content)
    message = ask(HOSTED, reasoning_effort="none").choices[0].message
    holds(not getattr(message, "reasoning_content", None), message)


@trial("streaming")
def _() -> None:
    for route in (OPENAI, HOSTED, SHORT):
        events = list(ask(route, stream=True, stream_options={"include_usage": True}))
        text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
        same(text, ANSWER)
        holds(events[-1].usage.prompt_tokens > 5, events[-1])
        whole = litellm.stream_chunk_builder(events, messages=ASK)
        same(whole.choices[0].message.content, ANSWER)


@trial("structured")
def _() -> None:
    for route in (OPENAI, HOSTED):
        is_weather(ask(route, response_format=Report).choices[0].message.content)
        answer = ask(route, response_format={"type": "json_object"}, max_tokens=300)
        holds(answer.choices[0].message.content.lstrip().startswith("{"), answer)


trial.calls("tools, required", *_calls(tool_choice="required"))
trial.calls("tools, by name", *_calls(tool_choice=NAMED))
trial.calls("tools, streaming", *_calls(tool_choice="required", stream=True))


@trial("tool results")
def _() -> None:
    for route in (OPENAI, CALLING):
        message = ask(route, tools=[TOOL], tool_choice="required").choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "mild"}
            for call in message.tool_calls
        ]
        answer = ask(route, [*ASK, message, *results], tools=[TOOL])
        holds(answer.choices[0].message.content, answer)


@trial("log-probabilities")
def _() -> None:
    rows = ask(OPENAI, logprobs=True, top_logprobs=2).choices[0].logprobs.content
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
    same(texts, [ANSWER])
    events = list(litellm.responses(input=SUM, stream=True, **OPENAI))
    same(str(events[-1].type.value), "response.completed")


@trial("errors")
def _() -> None:
    for route in (OPENAI, HOSTED, SHORT):
        error = refused(litellm.BadRequestError, ask, route, temperature=-1)
        holds("temperature" in str(error), error)
    long = [{"role": "user", "content": "word " * 9000}]
    refused(litellm.ContextWindowExceededError, ask, HOSTED, long)


trial.eight(_sum)
trial.sees(*(partial(_prompt, route) for route in (OPENAI, HOSTED, ANTHROPIC)))
trial.run()
