"""Bodies as Open WebUI and a browser's page send them, in their forms."""

import json

import httpx2 as httpx
from asked import KEY, MODEL, PICTURE, SUM, V1
from verdicts import Trial, holds, same

trial = Trial()
HEADS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
TIME = {"name": "get_current_time", "description": "", "parameters": {"type": "object"}}
TIME["parameters"] |= {"properties": {}, "required": []}


def _post(**body: object) -> httpx.Response:
    body = {"model": MODEL, **body}
    said = httpx.post(f"{V1}/chat/completions", json=body, headers=HEADS, timeout=120)
    same((said.status_code, said.text[:200] if said.status_code != 200 else ""), (200, ""))
    return said


def _stream(**body: object) -> list[dict]:
    lines = _post(stream=True, **body).text.splitlines()
    rows = [line[6:] for line in lines if line.startswith("data: ")]
    same(rows[-1], "[DONE]")
    return [json.loads(row) for row in rows[:-1]]


@trial("models")
def _() -> None:
    found = httpx.get(f"{V1}/models", headers=HEADS).json()
    same([row["id"] for row in found["data"]], [MODEL])


@trial("streaming")
def _() -> None:
    messages = [
        {"role": "system", "content": "User Context:\n\n"},
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": '<details type="reasoning">\n</details>\n7'},
        {"role": "user", "content": [{"type": "text", "text": SUM}]},
    ]
    usage = {"stream_options": {"include_usage": True}, "max_tokens": 200}
    rows = _stream(messages=messages, temperature=0, frequency_penalty=0, stop=[], **usage)
    text = "".join(r["choices"][0]["delta"].get("content") or "" for r in rows if r["choices"])
    holds("7" in text, text)
    holds(rows[-1]["usage"]["completion_tokens"] > 3, rows[-1])


@trial("chat")
def _() -> None:
    title = [{"role": "user", "content": f"### Task:\nName the chat.\n{SUM}"}]
    said = _post(messages=title, stream=False, max_completion_tokens=60)
    same(said.json()["choices"][0]["message"]["role"], "assistant")


@trial("tools, streaming")
def _() -> None:
    rows = _stream(
        messages=[{"role": "user", "content": SUM}],
        tools=[{"type": "function", "function": TIME}],
        tool_choice="required",
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},  # its thoughts of tools do not end
    )
    calls = [c for r in rows for c in r["choices"][0]["delta"].get("tool_calls") or []]
    same(calls[0]["function"]["name"], "get_current_time")
    same("".join(call["function"].get("arguments") or "" for call in calls), "{}")


def _prompt(*images: dict) -> int:
    """Tokens, where files are attached as Open WebUI sends them."""
    messages = [{"role": "user", "content": [{"type": "text", "text": SUM}, *images]}]
    usage = {"stream_options": {"include_usage": True}, "max_tokens": 5}
    return _stream(messages=messages, **usage)[-1]["usage"]["prompt_tokens"]


@trial("images")
def _() -> None:
    url = {"type": "image_url", "image_url": {"url": PICTURE}}
    plain, one, two = _prompt(), _prompt(url), _prompt(url, url)
    holds(3 <= one - plain <= 4 and 6 <= two - plain <= 8, (plain, one, two))


trial.run()
