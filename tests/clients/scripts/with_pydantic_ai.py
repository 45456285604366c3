"""pydantic-ai's agents, over OpenAI's two APIs and Anthropic's."""

import asyncio
from typing import Any

from asked import ANSWER, KEY, MODEL, NEXT, SUM, URL, V1
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, RunContext, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import City, Report
from verdicts import Trial, holds, is_weather, refused, same

trial = Trial()
ours = OpenAIProvider(base_url=V1, api_key=KEY)
chat = OpenAIChatModel(MODEL, provider=ours)
responses = OpenAIResponsesModel(MODEL, provider=ours)
messages = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
SHORT = {"temperature": 0.0, "max_tokens": 300}
LITTLE = {**SHORT, "extra_body": {"enable_thinking": False}}
NATIVE, TOOL = NativeOutput(Report, strict=True), ToolOutput(Report, strict=True)


def _typed(model: Any, output: Any, settings: dict[str, Any]) -> Report:
    return Agent(model, output_type=output, model_settings=settings).run_sync(SUM).output


async def _stream(output: Any) -> None:
    agent = Agent(chat, output_type=output, model_settings=LITTLE)
    async with agent.run_stream(SUM) as stream:
        is_weather(await stream.get_output())


@trial("chat")
def _() -> None:
    for model in (chat, responses):
        answer = Agent(model, model_settings=SHORT).run_sync(SUM)
        same(answer.output, ANSWER)
        holds(answer.usage.output_tokens > 3, answer.usage)
    holds("7" in Agent(messages, model_settings={"max_tokens": 300}).run_sync(SUM).output)


@trial("streaming")
async def _() -> None:
    for model in (chat, responses):
        async with Agent(model, model_settings=SHORT).run_stream(SUM) as stream:
            parts = [part async for part in stream.stream_text(delta=True)]
        same("".join(parts), ANSWER)


@trial("conversation")
def _() -> None:
    agent = Agent(chat, instructions="Be brief.", model_settings=LITTLE)
    first = agent.run_sync(SUM)
    again = agent.run_sync(NEXT, message_history=first.all_messages())
    holds(again.output and len(again.all_messages()) == 4, again)


trial.calls("structured", lambda: _typed(chat, NATIVE, LITTLE))
trial("structured, streaming")(lambda: asyncio.run(_stream(NATIVE)))
trial.calls(
    "tools, required",
    lambda: _typed(chat, TOOL, LITTLE),
    lambda: _typed(messages, ToolOutput(Report), {"max_tokens": 300}),
)
trial("tools, streaming")(lambda: asyncio.run(_stream(ToolOutput(Report))))


@trial("tool results")
def _() -> None:
    seen = []

    def settings(context: RunContext) -> dict:
        return {**LITTLE, "tool_choice": "auto" if context.run_step > 1 else ["weather"]}

    agent = Agent(chat, output_type=str, model_settings=settings)

    @agent.tool_plain
    def weather(city: City, days: int) -> str:
        """The weather of a city."""
        seen.append((city, days))
        return "mild"

    holds(agent.run_sync(SUM).output)
    holds(seen, "the tool was not called")


trial.calls("responses, structured", lambda: _typed(responses, NATIVE, SHORT))
trial.calls("responses, tools", lambda: _typed(responses, ToolOutput(Report), SHORT))


@trial("errors")
def _() -> None:
    error = refused(ModelHTTPError, Agent(chat, model_settings={"top_p": 2}).run_sync, SUM)
    same((error.status_code, error.body["param"]), (400, "top_p"))


trial.run()
