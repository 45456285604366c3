"""Bodies as Open WebUI and a browser's page send them, in their forms."""

import json

import httpx2 as httpx
from asked import KEY, MODEL, PICTURE, SUM, V1
from verdicts import Trial, holds, same

trial = Trial()
HEADS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def _stream(body: dict) -> list[dict]:
    said = httpx.post(f"{V1}/chat/completions", json=body, headers=HEADS, timeout=120)
    same((said.status_code, said.text[:200] if said.status_code != 200 else ""), (200, ""))
    rows = [line[6:] for line in said.text.splitlines() if line.startswith("data: ")]
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
    ]  # fmt: skip
    rows = _stream({
        "stream": True,
        "model": MODEL,
        "messages": messages,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        "frequency_penalty": 0,
        "stop": [],
        "max_tokens": 200,
    })  # fmt: skip
    text = "".join(r["choices"][0]["delta"].get("content") or "" for r in rows if r["choices"])
    holds("7" in text, text)
    holds(rows[-1]["usage"]["completion_tokens"] > 3, rows[-1])


@trial("chat")
def _() -> None:
    body = {  # the title of a chat
        "model": MODEL,
        "messages": [{"role": "user", "content": f"### Task:\nName the chat.\n{SUM}"}],
        "stream": False,
        "max_completion_tokens": 60,
    }
    said = httpx.post(f"{V1}/chat/completions", json=body, headers=HEADS, timeout=120)
    same(said.status_code, 200)
    same(said.json()["choices"][0]["message"]["role"], "assistant")


@trial("tools, streaming")
def _() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_current_time",
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    rows = _stream({
        "model": MODEL,
        "stream": True,
        "messages": [{"role": "user", "content": SUM}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},  # its thoughts of tools do not end
    })  # fmt: skip
    calls = [c for r in rows for c in r["choices"][0]["delta"].get("tool_calls") or []]
    same(calls[0]["function"]["name"], "get_current_time")
    same("".join(call["function"].get("arguments") or "" for call in calls), "{}")


@trial("images")
def _() -> None:
    def tokens(*parts: dict) -> int:
        content = [{"type": "text", "text": SUM}, *parts]
        rows = _stream({  # as Open WebUI sends a file that was attached
            "stream": True,
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
        })  # fmt: skip
        return rows[-1]["usage"]["prompt_tokens"]

    url = {"type": "image_url", "image_url": {"url": PICTURE}}
    holds(3 <= tokens(url) - tokens() <= 4, (tokens(url), tokens()))
    holds(6 <= tokens(url, url) - tokens() <= 8, (tokens(url, url), tokens()))


trial.run()
