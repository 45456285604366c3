"""instructor: typed answers in each of its modes that an OpenAI-compatible server can have."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field
from verdicts import KEY, MODEL, SUM, V1, Trial, holds, is_weather, same

trial = Trial()
plain = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": SUM}],
    "max_tokens": 300,
    "max_retries": 0,
    "temperature": 0,
}


class Report(BaseModel):
    """The weather."""

    # else an answer may hold more, and this model does not end it
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Oslo", "Rome"]
    days: int = Field(ge=1, le=7)


def _ask(mode: instructor.Mode, **more: object) -> None:
    client = instructor.from_openai(plain, mode=mode)
    is_weather(client.chat.completions.create(response_model=Report, **ASK, **more).model_dump())


@trial("tools, by name")
def _() -> None:
    _ask(instructor.Mode.TOOLS)


@trial("tools, strict")
def _() -> None:
    _ask(instructor.Mode.TOOLS_STRICT)


@trial("structured")
def _() -> None:
    _ask(instructor.Mode.JSON_SCHEMA)


@trial("structured, streaming")
def _() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(client.chat.completions.create_partial(response_model=Report, **ASK))
    holds(len(parts) > 1, parts)
    is_weather(parts[-1].model_dump())


@trial("tools, streaming")
def _() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(response_model=Report, **ASK))
    holds(len(parts) > 1, parts)
    is_weather(parts[-1].model_dump())


@trial("asynchronous, eight at once")
async def _() -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0) as many:
        client = instructor.from_openai(many, mode=instructor.Mode.JSON_SCHEMA)
        asks = [client.chat.completions.create(response_model=Report, **ASK) for _ in range(8)]
        for report in await asyncio.gather(*asks):
            is_weather(report.model_dump())


@trial("responses, tools")
def _() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    ask = {"model": MODEL, "input": SUM, "max_retries": 0, "max_output_tokens": 300}
    is_weather(client.responses.create(response_model=Report, **ask).model_dump())


@trial("chat")
def _() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
    answer = client.chat.completions.create(response_model=None, **ASK)
    same(answer.choices[0].message.content, "3 + 4 = 7.")


trial.run()
