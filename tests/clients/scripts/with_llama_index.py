"""llama-index's OpenAILike, for servers of OpenAI's form."""

from typing import Literal

from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field
from verdicts import KEY, MODEL, SUM, V1, Trial, holds, is_weather, same

trial = Trial()
REACH = {"model": MODEL, "api_base": V1, "api_key": KEY, "max_retries": 0, "context_window": 4096}
OFF = {"additional_kwargs": {"extra_body": {"enable_thinking": False}}}
CHAT = {**REACH, **OFF, "is_chat_model": True, "temperature": 0.0, "max_tokens": 200}
model = OpenAILike(is_function_calling_model=True, **CHAT)
ASK = [ChatMessage(role=MessageRole.USER, content=SUM)]


class Report(BaseModel):
    """The weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


def weather(city: Literal["Paris", "Oslo", "Rome"], days: int) -> str:
    """The weather of a city."""
    return f"mild for {days} days in {city}"


TOOL = FunctionTool.from_defaults(weather, fn_schema=Report)


@trial("chat")
def _() -> None:
    same(model.chat(ASK).message.content, "3 + 4 = 7.")


@trial("streaming")
def _() -> None:
    same("".join(part.delta or "" for part in model.stream_chat(ASK)), "3 + 4 = 7.")


@trial("completions")
def _() -> None:
    text = OpenAILike(is_chat_model=False, temperature=0.0, max_tokens=8, **REACH)
    whole = text.complete("Once upon a time").text
    holds(whole)
    same("".join(part.delta for part in text.stream_complete("Once upon a time")), whole)


@trial("conversation")
def _() -> None:
    said = model.chat(ASK).message
    more = [
        ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
        *ASK,
        said,
        ChatMessage(role=MessageRole.DEVELOPER, content="Be kind."),
        ChatMessage(role=MessageRole.USER, content="What is 5 plus 4?"),
    ]
    holds(model.chat(more).message.content)


@trial("tools, required")
def _() -> None:
    answer = model.chat_with_tools([TOOL], user_msg=SUM, tool_required=True)
    [call, *_] = model.get_tool_calls_from_response(answer)
    same(call.tool_name, "weather")
    is_weather(call.tool_kwargs)


@trial("tools, by name")
def _() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = model.chat_with_tools([TOOL], user_msg=SUM, tool_choice=named)
    is_weather(model.get_tool_calls_from_response(answer)[0].tool_kwargs)


@trial("tools, streaming")
def _() -> None:
    *_, last = model.stream_chat_with_tools([TOOL], user_msg=SUM, tool_required=True)
    is_weather(model.get_tool_calls_from_response(last)[0].tool_kwargs)


@trial("tool results")
def _() -> None:
    first = model.chat_with_tools([TOOL], user_msg=SUM, tool_required=True)
    results = [
        ChatMessage(role="tool", content="mild", additional_kwargs={"tool_call_id": call.tool_id})
        for call in model.get_tool_calls_from_response(first)
    ]
    answer = model.chat_with_tools([TOOL], chat_history=[*ASK, first.message, *results])
    holds(answer.message.content, answer)


@trial("structured")
def _() -> None:
    prompt = PromptTemplate(SUM)
    typed = OpenAILike(should_use_structured_outputs=True, **CHAT)
    is_weather(typed.structured_predict(Report, prompt).model_dump())
    called = model.structured_predict(Report, prompt, llm_kwargs={"tool_choice": "required"})
    is_weather(called.model_dump())


@trial("errors")
def _() -> None:
    try:
        model.chat(ASK, top_p=2)
        raise AssertionError("a top_p of 2 was taken")
    except Exception as error:
        same(getattr(error, "param", error), "top_p")


@trial("asynchronous, eight at once")
async def _() -> None:
    import asyncio

    asks = [
        model.achat([ChatMessage(role="user", content=f"What is {i} plus 4?")]) for i in range(8)
    ]
    for i, answer in enumerate(await asyncio.gather(*asks)):
        same(answer.message.content, f"{i} + 4 = {i + 4}.")


trial.run()
