"""instructor: typed answers in each of its modes that an OpenAI-compatible server can have."""

import asyncio

import instructor
import openai
from asked import MODEL, OPENAI, SUM
from instructor import Mode
from report import Report
from verdicts import Trial, holds, is_weather

trial = Trial()
plain = openai.OpenAI(**OPENAI)
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": SUM}],
    "max_tokens": 300,
    "max_retries": 0,
    "temperature": 0,
}


def _ask(mode: Mode, response_model: type[Report] | None = Report) -> object:
    client = instructor.from_openai(plain, mode=mode)
    return client.chat.completions.create(response_model=response_model, **ASK)


def _last(mode: Mode) -> Report:
    client = instructor.from_openai(plain, mode=mode)
    parts = list(client.chat.completions.create_partial(response_model=Report, **ASK))
    holds(len(parts) > 1, parts)
    return parts[-1]


def _respond() -> Report:
    client = instructor.from_openai(plain, mode=Mode.RESPONSES_TOOLS)
    ask = {"model": MODEL, "input": SUM, "max_retries": 0, "max_output_tokens": 300}
    return client.responses.create(response_model=Report, **ask)


trial.calls("tools, by name", lambda: _ask(Mode.TOOLS))
trial.calls("tools, strict", lambda: _ask(Mode.TOOLS_STRICT))
trial.calls("structured", lambda: _ask(Mode.JSON_SCHEMA))
trial.calls("structured, streaming", lambda: _last(Mode.JSON_SCHEMA))
trial.calls("tools, streaming", lambda: _last(Mode.TOOLS))


@trial("asynchronous, eight at once")
async def _() -> None:
    async with openai.AsyncOpenAI(**OPENAI) as many:
        client = instructor.from_openai(many, mode=Mode.JSON_SCHEMA)
        asks = [client.chat.completions.create(response_model=Report, **ASK) for _ in range(8)]
        for report in await asyncio.gather(*asks):
            is_weather(report)


trial.calls("responses, tools", _respond)
trial.says("chat", lambda: _ask(Mode.TOOLS, None).choices[0].message.content)
trial.run()
