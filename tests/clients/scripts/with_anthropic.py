"""The anthropic package, and the forms in which Claude Code sends its bodies."""

import json
from pathlib import Path

import anthropic
import httpx2 as httpx
from asked import ANSWER, KEY, MODEL, PNG, SUM, URL, WEATHER
from verdicts import Trial, holds, is_weather, refused, same

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
trial = Trial()
ASK = [{"role": "user", "content": SUM}]
TOOL = {"name": "weather", "description": "The weather.", "input_schema": WEATHER}
PLAIN = {"model": MODEL, "max_tokens": 200, "messages": ASK}
GREEDY = {"extra_body": {"temperature": 0}}  # the package has no such argument any more
THINK = {"type": "enabled", "budget_tokens": 1024}
# Claude Code asks so: a system prompt in blocks with marks for a cache, thoughts, several tools, a
# reminder inside the user's turn, its own beta features as a query and a header. `title`: a side
# request for the title of the session, as JSON.
BODIES = Path(__file__).with_suffix(".json").read_text().replace("$question", SUM)
AGENT, TITLE = json.loads(BODIES.replace("$model", MODEL)).values()


@trial("chat")
def _() -> None:
    answer = client.messages.create(**PLAIN, **GREEDY)
    same([block.type for block in answer.content], ["text"])
    same(answer.content[0].text, ANSWER)
    same(answer.stop_reason, "end_turn")
    holds(answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0, answer.usage)


@trial("models")
def _() -> None:
    same([row.id for row in client.models.list()], [MODEL])
    same(client.models.retrieve(MODEL).id, MODEL)


@trial("thinking")
def _() -> None:
    answer = client.messages.create(**{**PLAIN, "max_tokens": 2000}, thinking=THINK)
    same([block.type for block in answer.content], ["thinking", "text"])
    holds("So 7." in answer.content[0].thinking, answer.content)
    said = [{"role": "assistant", "content": answer.content}]
    more = [*ASK, *said, {"role": "user", "content": "What is 5 plus 4?"}]
    again = client.messages.create(
        model=MODEL, max_tokens=2000, messages=more, thinking={"type": "disabled"}
    )
    same([block.type for block in again.content], ["text"])


@trial("streaming")
def _() -> None:
    with client.messages.stream(**PLAIN) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    holds(text and final.content[0].text == text, text)
    holds(final.usage.output_tokens > 3, final.usage)
    same(final.stop_reason, "end_turn")


@trial("thinking, streaming")
def _() -> None:
    with client.messages.stream(**{**PLAIN, "max_tokens": 2000}, thinking=THINK) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    holds({"thinking", "signature", "text", "message_stop"} <= kinds, kinds)
    same([block.type for block in final.content], ["thinking", "text"])


@trial("conversation")
def _() -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    messages = [
        *ASK,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": [{"type": "text", "text": "What is 5 plus 4?"}]},
    ]
    answer = client.messages.create(
        model=MODEL, max_tokens=50, system=system, messages=messages, **GREEDY
    )
    holds(answer.content[0].text, answer)
    prefilled = [*ASK, {"role": "assistant", "content": "3 + 4 ="}]
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=prefilled, **GREEDY)
    holds(answer.content[0].text.strip().startswith("7"), answer.content)


@trial("choices and stops")
def _() -> None:
    answer = client.messages.create(stop_sequences=["="], **PLAIN, **GREEDY)
    same((answer.stop_reason, answer.stop_sequence), ("stop_sequence", "="))
    same(answer.content[0].text, "3 + 4 ")
    answer = client.messages.create(**{**PLAIN, "max_tokens": 2})
    same(answer.stop_reason, "max_tokens")


@trial("structured")
def _() -> None:
    form = {"type": "json_schema", "schema": WEATHER}
    answer = client.messages.create(**PLAIN, output_config={"format": form})
    is_weather(answer.content[0].text)


@trial("tools, required")
def _() -> None:
    answer = client.messages.create(tools=[TOOL], tool_choice={"type": "any"}, **PLAIN)
    same(answer.stop_reason, "tool_use")
    for block in answer.content:
        same((block.type, block.name), ("tool_use", "weather"))
        is_weather(block.input)


@trial("tools, by name")
def _() -> None:
    other = {"name": "other", "input_schema": {"type": "object"}}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    answer = client.messages.create(tools=[other, TOOL], tool_choice=choice, **PLAIN)
    [block] = answer.content
    same(block.name, "weather")
    is_weather(block.input)


@trial("tools, streaming")
def _() -> None:
    with client.messages.stream(tools=[TOOL], tool_choice={"type": "any"}, **PLAIN) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    holds("input_json" in kinds, kinds)
    same(final.stop_reason, "tool_use")
    is_weather(final.content[0].input)


@trial("tool results")
def _() -> None:
    first = client.messages.create(tools=[TOOL], tool_choice={"type": "any"}, **PLAIN)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "mild"}
        for block in first.content
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    answer = client.messages.create(model=MODEL, max_tokens=50, messages=messages, tools=[TOOL])
    holds(answer.content, answer)


@trial("counting tokens")
def _() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, tools=[TOOL], system="Hi.")
    answer = client.messages.create(**PLAIN, tools=[TOOL], system="Hi.")
    usage = answer.usage
    holds(counted.input_tokens > 50, counted)
    same(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))


@trial("errors")
def _() -> None:
    bad, create = {"temperature": -1}, client.messages.create
    error = refused(anthropic.BadRequestError, create, **PLAIN, extra_body=bad)
    holds("temperature" in str(error), error)
    same((error.body["type"], error.body["error"]["type"]), ("error", "invalid_request_error"))
    error = refused(anthropic.NotFoundError, create, **{**PLAIN, "model": "other"})
    same(error.body["error"]["type"], "not_found_error")


@trial("the bodies of Claude Code")
def _() -> None:
    heads = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "authorization": f"Bearer {KEY}",
        "user-agent": "claude-cli/2.1.0 (external, cli)",
        "x-app": "cli",
    }

    def stream(body: object) -> list[dict]:
        url = f"{URL}/v1/messages?beta=true"
        said = httpx.post(url, json=body, headers=heads, timeout=120)
        same(said.status_code, 200)
        lines = said.text.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    rows = stream(AGENT)
    same((rows[0]["type"], rows[-1]["type"]), ("message_start", "message_stop"))
    holds({"content_block_start", "message_delta"} <= {row["type"] for row in rows}, rows[-3:])
    counting = {key: AGENT[key] for key in ("model", "messages", "system", "tools", "thinking")}
    path = f"{URL}/v1/messages/count_tokens?beta=true"
    holds(httpx.post(path, json=counting, headers=heads).json()["input_tokens"] > 100)
    text = "".join(row["delta"].get("text", "") for row in stream(TITLE) if "delta" in row)
    holds(json.loads(text)["topic"] in ("sums", "stories"), text)


def _prompt(with_image: bool) -> int:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    content = [{"type": "text", "text": SUM}, {"type": "image", "source": source}]
    messages = [{"role": "user", "content": content}] if with_image else ASK
    usage = client.messages.create(**{**PLAIN, "max_tokens": 5, "messages": messages}).usage
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    same(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))
    return counted.input_tokens


trial.sees(_prompt)
trial.run()
