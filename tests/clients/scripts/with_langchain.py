"""langchain-openai's ChatOpenAI."""

from functools import reduce
from operator import add
from typing import Any

import openai
from asked import ANSWER, MODEL, NEXT, OPENAI, PICTURE, PNG, STORY, SUM
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from report import Report
from report import weather as said
from verdicts import Trial, holds, refused, same

trial = Trial()
REACH = {"model": MODEL, **OPENAI}
OFF = {"extra_body": {"enable_thinking": False}}
chat = ChatOpenAI(temperature=0, **REACH, **OFF)
thinking = ChatOpenAI(temperature=0, **REACH)
responses = ChatOpenAI(temperature=0, use_responses_api=True, **REACH)
weather = tool(args_schema=Report)(said)
URL = {"type": "image_url", "image_url": {"url": PICTURE}}
IMAGE = {"type": "image", "base64": PNG, "mime_type": "image/png"}


def _typed(model: Any = chat, method: str = "json_schema", **how: Any) -> Any:
    return model.with_structured_output(Report, method=method, **how)


def _call(choice: str, model: Any = chat) -> Any:
    [call, *_] = model.bind_tools([weather], tool_choice=choice).invoke(SUM).tool_calls
    same(call["name"], "weather")
    return call["args"]


def _results(model: Any) -> Any:
    first = model.bind_tools([weather], tool_choice="any").invoke(SUM)
    results = [weather.invoke(call) for call in first.tool_calls]
    holds(all(isinstance(result, ToolMessage) for result in results), results)
    return model.bind_tools([weather]).invoke([HumanMessage(SUM), first, *results]).text


def _prompt(*parts: dict) -> int:
    message = HumanMessage(content=[{"type": "text", "text": SUM}, *parts])
    return chat.invoke([message] if parts else SUM).usage_metadata["input_tokens"]


async def _sum(text: str) -> str:
    return (await chat.ainvoke(text)).content


@trial("chat")
def _() -> None:
    answer = chat.invoke(SUM)
    same(answer.content, ANSWER)
    holds(answer.usage_metadata["output_tokens"] > 3, answer)
    same(answer.response_metadata["finish_reason"], "stop")


@trial("streaming")
def _() -> None:
    whole = reduce(add, chat.stream(SUM, stream_usage=True))
    same(whole.content, ANSWER)
    holds(whole.usage_metadata["output_tokens"] > 3, whole)


@trial("conversation")
def _() -> None:
    first = [SystemMessage("Be brief."), HumanMessage(SUM)]
    more = [*first, chat.invoke(first), SystemMessage("Be kind."), HumanMessage(NEXT)]
    holds(chat.invoke(more).content)


trial.calls(
    "structured",
    lambda: _typed(strict=True).invoke(SUM),
    lambda: (
        chat.bind(max_tokens=200)
        .with_structured_output(Report.model_json_schema(), method="json_schema")
        .invoke(SUM)
    ),
    lambda: _typed(strict=True, include_raw=True).invoke(SUM)["parsed"],
    lambda: _typed(thinking, strict=True).invoke(SUM),
)
trial.calls("structured, streaming", lambda: list(_typed(strict=True).stream(SUM))[-1])
trial.calls(
    "tools, by name",
    lambda: _typed(method="function_calling").invoke(SUM),
    lambda: _call("weather"),
)
trial.calls("tools, required", lambda: _call("any"))
trial.calls(
    "tools, streaming",
    lambda: reduce(add, chat.bind_tools([weather], tool_choice="any").stream(SUM)).tool_calls[0][
        "args"
    ],
)
trial.gives("tool results", lambda: _results(chat))


@trial("log-probabilities")
def _() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(SUM)
    rows = answer.response_metadata["logprobs"]["content"]
    holds(rows and len(rows[0]["top_logprobs"]) == 2, rows)


@trial("completions")
def _() -> None:
    text = OpenAI(temperature=0, max_tokens=8, **REACH)
    same("".join(text.stream(STORY)), text.invoke(STORY))
    same(len(text.batch(["Once", "Twice"])), 2)


@trial("responses")
def _() -> None:
    answer = responses.invoke(SUM)
    same(answer.text, ANSWER)
    same("".join(part.text for part in responses.stream(SUM)), ANSWER)
    again = responses.invoke([HumanMessage(SUM), answer, HumanMessage(NEXT)])
    holds(again.text, again)


trial.calls("responses, structured", lambda: _typed(responses, strict=True).invoke(SUM))


@trial("responses, tools")
def _() -> None:
    holds(1 <= _call("any", responses)["days"] <= 7)
    holds(_results(responses))


@trial("errors")
def _() -> None:
    same(refused(openai.BadRequestError, chat.bind(top_p=2).invoke, SUM).param, "top_p")
    refused(ContextOverflowError, chat.invoke, "word " * 9000)


trial.eight(_sum)
trial.sees(
    lambda with_image: _prompt(*([IMAGE] * with_image)),
    lambda with_image: _prompt(*([URL] * with_image)),
)
trial.run()
