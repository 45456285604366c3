"""langchain-openai's ChatOpenAI."""

from typing import Literal

import openai
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from verdicts import KEY, MODEL, PNG, SUM, V1, Trial, holds, is_weather, same

trial = Trial()
REACH = {"model": MODEL, "base_url": V1, "api_key": KEY, "max_retries": 0}
OFF = {"extra_body": {"enable_thinking": False}}
chat = ChatOpenAI(temperature=0, **REACH, **OFF)
CITY = Literal["Paris", "Oslo", "Rome"]


class Report(BaseModel):
    """The weather."""

    city: CITY
    days: int = Field(ge=1, le=7)


@tool(args_schema=Report)
def weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"mild for {days} days in {city}"


@trial("chat")
def _() -> None:
    answer = chat.invoke(SUM)
    same(answer.content, "3 + 4 = 7.")
    holds(answer.usage_metadata["output_tokens"] > 3, answer)
    same(answer.response_metadata["finish_reason"], "stop")


@trial("streaming")
def _() -> None:
    parts = list(chat.stream(SUM, stream_usage=True))
    same("".join(part.content for part in parts), "3 + 4 = 7.")
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    holds(whole.usage_metadata["output_tokens"] > 3, whole)


@trial("conversation")
def _() -> None:
    first = [SystemMessage("Be brief."), HumanMessage(SUM)]
    said = chat.invoke(first)
    more = [*first, said, SystemMessage("Be kind."), HumanMessage("What is 5 plus 4?")]
    holds(chat.invoke(more).content)


@trial("structured")
def _() -> None:
    typed = chat.with_structured_output(Report, method="json_schema", strict=True)
    is_weather(typed.invoke(SUM).model_dump())
    loose = chat.bind(max_tokens=200).with_structured_output(
        {**Report.model_json_schema(), "additionalProperties": False}, method="json_schema"
    )
    is_weather(loose.invoke(SUM))
    raw = chat.with_structured_output(Report, strict=True, include_raw=True).invoke(SUM)
    same(raw["parsing_error"], None)
    thinking = ChatOpenAI(temperature=0, **REACH)
    is_weather(thinking.with_structured_output(Report, strict=True).invoke(SUM).model_dump())


@trial("structured, streaming")
def _() -> None:
    typed = chat.with_structured_output(Report, method="json_schema", strict=True)
    is_weather(list(typed.stream(SUM))[-1].model_dump())


@trial("tools, by name")
def _() -> None:
    typed = chat.with_structured_output(Report, method="function_calling")
    is_weather(typed.invoke(SUM).model_dump())
    named = chat.bind_tools([weather], tool_choice="weather").invoke(SUM)
    is_weather(named.tool_calls[0]["args"])


@trial("tools, required")
def _() -> None:
    answer = chat.bind_tools([weather], tool_choice="any").invoke(SUM)
    same(answer.tool_calls[0]["name"], "weather")
    is_weather(answer.tool_calls[0]["args"])


@trial("tools, streaming")
def _() -> None:
    whole = None
    for part in chat.bind_tools([weather], tool_choice="any").stream(SUM):
        whole = part if whole is None else whole + part
    is_weather(whole.tool_calls[0]["args"])


@trial("tool results")
def _() -> None:
    first = chat.bind_tools([weather], tool_choice="any").invoke(SUM)
    results = [weather.invoke(call) for call in first.tool_calls]
    holds(all(isinstance(result, ToolMessage) for result in results), results)
    holds(chat.bind_tools([weather]).invoke([HumanMessage(SUM), first, *results]).content)


@trial("log-probabilities")
def _() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(SUM)
    rows = answer.response_metadata["logprobs"]["content"]
    holds(rows and len(rows[0]["top_logprobs"]) == 2, rows)


@trial("completions")
def _() -> None:
    text = OpenAI(temperature=0, max_tokens=8, **REACH)
    whole = text.invoke("Once upon a time")
    same("".join(text.stream("Once upon a time")), whole)
    same(len(text.batch(["Once", "Twice"])), 2)


@trial("responses")
def _() -> None:
    model = ChatOpenAI(temperature=0, use_responses_api=True, **REACH)
    answer = model.invoke(SUM)
    same(answer.text, "3 + 4 = 7.")
    same("".join(part.text for part in model.stream(SUM)), "3 + 4 = 7.")
    again = model.invoke([HumanMessage(SUM), answer, HumanMessage("What is 5 plus 4?")])
    holds(again.text, again)


@trial("responses, structured")
def _() -> None:
    model = ChatOpenAI(temperature=0, use_responses_api=True, **REACH)
    typed = model.with_structured_output(Report, method="json_schema", strict=True)
    is_weather(typed.invoke(SUM).model_dump())


@trial("responses, tools")
def _() -> None:
    model = ChatOpenAI(temperature=0, use_responses_api=True, **REACH)
    first = model.bind_tools([weather], tool_choice="any").invoke(SUM)
    is_weather(first.tool_calls[0]["args"])
    results = [weather.invoke(call) for call in first.tool_calls]
    holds(model.bind_tools([weather]).invoke([HumanMessage(SUM), first, *results]).text)


@trial("errors")
def _() -> None:
    try:
        chat.bind(top_p=2).invoke(SUM)
        raise AssertionError("a top_p of 2 was taken")
    except openai.BadRequestError as error:
        same(error.param, "top_p")
    try:
        chat.invoke("word " * 9000)
        raise AssertionError("a prompt beyond the context was taken")
    except ContextOverflowError:
        pass


@trial("asynchronous, eight at once")
async def _() -> None:
    answers = await chat.abatch([f"What is {i} plus 4?" for i in range(8)])
    same([answer.content for answer in answers], [f"{i} + 4 = {i + 4}." for i in range(8)])


@trial("images")
def _() -> None:
    seen = {"type": "image", "base64": PNG, "mime_type": "image/png"}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    plain = chat.invoke(SUM).usage_metadata["input_tokens"]
    for part in (seen, url):
        message = HumanMessage(content=[{"type": "text", "text": SUM}, part])
        more = chat.invoke([message]).usage_metadata["input_tokens"] - plain
        holds(3 <= more <= 4, (part["type"], more))


trial.run()
