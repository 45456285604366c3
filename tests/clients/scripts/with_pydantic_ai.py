"""pydantic-ai's agents, over OpenAI's two APIs and Anthropic's."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from verdicts import KEY, MODEL, SUM, URL, V1, Trial, holds, is_weather, same

trial = Trial()
ours = OpenAIProvider(base_url=V1, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=ours)
responses = OpenAIResponsesModel(MODEL, provider=ours)
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
LITTLE = {"temperature": 0.0, "max_tokens": 300, "extra_body": {"enable_thinking": False}}
SHORT = {"temperature": 0.0, "max_tokens": 300}


class Report(BaseModel):
    """The weather."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


@trial("chat")
def _() -> None:
    for model in (chat, responses):
        answer = Agent(model, model_settings=SHORT).run_sync(SUM)
        same(answer.output, "3 + 4 = 7.")
        holds(answer.usage.output_tokens > 3, answer.usage)
    holds("7" in Agent(messages, model_settings={"max_tokens": 300}).run_sync(SUM).output)


@trial("streaming")
async def _() -> None:
    for model in (chat, responses):
        async with Agent(model, model_settings=SHORT).run_stream(SUM) as stream:
            parts = [part async for part in stream.stream_text(delta=True)]
        same("".join(parts), "3 + 4 = 7.")


@trial("conversation")
def _() -> None:
    agent = Agent(chat, instructions="Be brief.", model_settings=LITTLE)
    first = agent.run_sync(SUM)
    again = agent.run_sync("What is 5 plus 4?", message_history=first.all_messages())
    holds(again.output and len(again.all_messages()) == 4, again)


@trial("structured")
def _() -> None:
    agent = Agent(chat, output_type=NativeOutput(Report, strict=True), model_settings=LITTLE)
    is_weather(agent.run_sync(SUM).output.model_dump())


@trial("structured, streaming")
async def _() -> None:
    agent = Agent(chat, output_type=NativeOutput(Report, strict=True), model_settings=LITTLE)
    async with agent.run_stream(SUM) as stream:
        is_weather((await stream.get_output()).model_dump())


@trial("tools, required")
def _() -> None:
    agent = Agent(chat, output_type=ToolOutput(Report, strict=True), model_settings=LITTLE)
    is_weather(agent.run_sync(SUM).output.model_dump())
    agent = Agent(messages, output_type=ToolOutput(Report), model_settings={"max_tokens": 300})
    is_weather(agent.run_sync(SUM).output.model_dump())


@trial("tools, streaming")
async def _() -> None:
    agent = Agent(chat, output_type=ToolOutput(Report), model_settings=LITTLE)
    async with agent.run_stream(SUM) as stream:
        is_weather((await stream.get_output()).model_dump())


@trial("tool results")
def _() -> None:
    seen = []

    def settings(context: RunContext) -> dict:
        return {**LITTLE, "tool_choice": "auto" if context.run_step > 1 else ["weather"]}

    agent = Agent(chat, output_type=str, model_settings=settings)

    @agent.tool_plain
    def weather(city: Literal["Paris", "Oslo", "Rome"], days: int) -> str:
        """The weather of a city."""
        seen.append((city, days))
        return "mild"

    holds(agent.run_sync(SUM).output)
    holds(seen, "the tool was not called")


@trial("responses, structured")
def _() -> None:
    agent = Agent(responses, output_type=NativeOutput(Report, strict=True), model_settings=SHORT)
    is_weather(agent.run_sync(SUM).output.model_dump())


@trial("responses, tools")
def _() -> None:
    agent = Agent(responses, output_type=ToolOutput(Report), model_settings=SHORT)
    is_weather(agent.run_sync(SUM).output.model_dump())


@trial("errors")
def _() -> None:
    try:
        Agent(chat, model_settings={"top_p": 2}).run_sync(SUM)
        raise AssertionError("a top_p of 2 was taken")
    except ModelHTTPError as error:
        same((error.status_code, error.body["param"]), (400, "top_p"))


trial.run()
