"""Bodies that are large, or that ask for much: each is refused soon, or answered."""

import gzip
import json
from typing import Any

import zstandard

from tests.soak.attacks.attack import (
    CHAT,
    GOOD,
    MESSAGES,
    RESPONSES,
    TEXT,
    TOKENIZE,
    Attack,
    Attacker,
)

MIB = 1 << 20
ODD = [2**31, 2**63, 2**64, -(2**63), 1e308, -1, 0, 1e-300, 10**400, 0.5, True, "9" * 5000]
NUMBERS = {
    TEXT: "max_tokens min_tokens n best_of seed logprobs prompt_logprobs top_k top_p min_p "
    "temperature presence_penalty frequency_penalty repetition_penalty priority echo "
    "truncate_prompt_tokens stop_token_ids logit_bias thinking_budget num_draft_tokens".split(),
    CHAT: "max_tokens max_completion_tokens n seed top_logprobs thinking_budget budget_tokens "
    "thinking_token_budget max_reasoning_tokens reasoning_budget thinking_budget_tokens top_k "
    "temperature min_tokens priority truncate_prompt_tokens".split(),
    MESSAGES: "max_tokens top_k top_p temperature thinking".split(),
    RESPONSES: "max_output_tokens top_logprobs temperature max_tool_calls".split(),
    TOKENIZE: ["truncate_prompt_tokens", "add_special_tokens"],
}
_TURN = [{"role": "user", "content": "a"}]
_SOON = [" ", "a", "e", "o"]  # stop strings: a limit beyond the context means as many as fit
BASES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 1, "stop": _SOON},
    CHAT: {"messages": _TURN, "max_tokens": 1, "stop": _SOON},
    MESSAGES: {"messages": _TURN, "max_tokens": 1, "stop_sequences": _SOON},
    RESPONSES: {"input": "a", "max_output_tokens": 1, "stop": _SOON, "store": False},
    TOKENIZE: {"prompt": "a"},
}
NO_THOUGHT = {CHAT: {"enable_thinking": False}, RESPONSES: {"reasoning": {"effort": "none"}}}


def _refused(at: Attacker, path: str, body: bytes, *statuses: int, **headers: str) -> None:
    found = at.send(path, body, headers)
    words = f"{path}: {found.status} after {found.seconds:.1f} s, {found.body[:120]!r}"
    expected = (*(statuses or (400, 413)), *at.busy)
    good = found.status in expected and found.seconds < at.soon_s
    at.expect(good, words)


def priorities(at: Attacker) -> None:
    body = {**GOOD, "priority": 10**20 - 1}
    at.all(lambda _: at.post(TEXT, body), range(320), 8)
    at.only(400)


def many_prompts(at: Attacker) -> None:
    _refused(at, TEXT, json.dumps({"prompt": ["a"] * 200_000, "n": 512}).encode())


def long_prompt(at: Attacker) -> None:
    """A prompt of 24 MB, of words, of one letter, of one that is two bytes."""
    for text in ("once upon a time ", "a", "é"):
        prompt = text * (24_000_000 // len(text.encode()))
        _refused(at, TEXT, json.dumps({"prompt": prompt}, ensure_ascii=False).encode())


def small_objects(at: Attacker, *statuses: int) -> None:
    """Bodies of 4 MB of small things, for each API."""
    rows = [
        *((path, "messages", "{}") for path in (CHAT, MESSAGES)),
        *((CHAT, "messages", part) for part in ("[]", "0", '""', '{"role":"user"}')),
        *((CHAT, "tools", part) for part in ("{}", '{"type":"function"}')),
        *((TEXT, "prompt", part) for part in ("[]", "{}", "[0]", '""')),
        *((RESPONSES, "input", part) for part in ("{}", "[]", '{"role":"user","content":[]}')),
        (CHAT, "a", "{}"),
        (TOKENIZE, "messages", "{}"),
    ]

    def send(row: tuple[str, str, str]) -> None:
        path, name, part = row
        parts = (4_170_000 // (len(part) + 1)) * f"{part},"
        _refused(at, path, f'{{"{name}":[{parts}{part}]}}'.encode(), *statuses)

    at.all(send, rows, 2)


def stop_ids(at: Attacker) -> None:
    """`stop_token_ids` of 1.5 and 8 million entries, times n; also their siblings."""
    for count, one, n in ((1_500_000, "1", 60), (8_000_000, "999", 8)):
        ids = ",".join([one] * count)
        for name in ("stop_token_ids", "allowed_token_ids", "bad_words_token_ids"):
            if name != "stop_token_ids" and n == 8:
                continue
            body = f'{{"prompt":"a","max_tokens":1,"n":{n},"{name}":[{ids}]}}'.encode()
            found = at.send(TEXT, body)
            words = f"{name}: {found.status} after {found.seconds:.1f} s"
            at.expect(found.status in (200, 400, 413, *at.busy), words)


def truncated(at: Attacker) -> None:
    """`truncate_prompt_tokens` with prompts of 24 MB in all, two at a time."""
    text = "once upon a time there was "
    whole, part = text * (24 * MIB // len(text)), text * (3 * MIB // len(text))
    bodies = [
        *({"prompt": whole, "truncate_prompt_tokens": n, "max_tokens": 1} for n in (1, 64)),
        {"prompt": [part + str(i) for i in range(8)], "truncate_prompt_tokens": 8, "max_tokens": 1},
        {"prompt": "é" * (12 * MIB), "truncate_prompt_tokens": 8, "max_tokens": 1},
    ]
    at.all(lambda body: at.post(TEXT, body), bodies, 2)
    chat = {"messages": [{"role": "user", "content": whole}], "max_tokens": 1}
    at.post(CHAT, {**chat, "truncate_prompt_tokens": 64})
    at.only(200, 400, 413)


def odd_numbers(at: Attacker) -> None:
    """2^64, 1e308 and their like in each number of each body."""

    def send(row: tuple[str, str, Any]) -> None:
        path, name, value = row
        shown: Any = value
        if name in ("stop_token_ids",):
            shown = [value]
        elif name == "logit_bias":
            shown = {str(value): value}
        elif name == "thinking":
            shown = {"type": "enabled", "budget_tokens": value}
        limit = name.startswith("max_") and name.endswith("_tokens")
        plain = NO_THOUGHT.get(path, {}) if limit else {}  # in which no stop string counts
        found = at.post(path, {**BASES[path], **plain, name: shown})
        words = f"{path} {name} {str(value)[:30]}: {found.status} {found.body[:80]!r}"
        at.expect(0 < found.status < 500, words)

    at.all(send, [(p, n, v) for p, names in NUMBERS.items() for n in names for v in ODD], 8)


def bombs(at: Attacker) -> None:
    """Small bodies that become 400 MB, and bodies packed twice."""
    zeros = bytes(4 * MIB)
    packer = zstandard.ZstdCompressor().compressobj()
    zstd = b"".join(packer.compress(zeros) for _ in range(100)) + packer.flush()
    packed = gzip.compress(zeros * 10)
    gzips = packed * 10  # members of one file
    below = gzip.compress(b'{"a":"' + b"a" * (31 * MIB) + b'"}')
    for path in (TEXT, CHAT, RESPONSES):
        _refused(at, path, gzips, 413, **{"content-encoding": "gzip"})
        _refused(at, path, zstd, 413, **{"content-encoding": "zstd"})
        _refused(at, path, gzip.compress(packed), 400, **{"content-encoding": "gzip"})
        _refused(at, path, packed, 415, 400, **{"content-encoding": "gzip, gzip"})
        _refused(at, path, packed[:-9], 400, 413, **{"content-encoding": "gzip"})
        _refused(at, path, below, 400, **{"content-encoding": "gzip"})


def small_requests(at: Attacker) -> None:
    """10,000 small requests of many kinds, on connections that stay open."""
    good = json.dumps({**GOOD, "max_tokens": 1}).encode()
    rows: list[tuple[str, str, bytes | None, int]] = [
        ("POST", TEXT, good, 200),
        ("POST", TOKENIZE, b'{"prompt":"a bear"}', 200),
        ("POST", TEXT, b"{", 400),
        ("POST", CHAT, b'{"messages":[]}', 400),
        ("GET", "/v1/models", None, 200),
        ("GET", "/health", None, 200),
        ("GET", "/nothing", None, 404),
        ("GET", "/v1/responses/resp_0", None, 404),
        ("POST", "/detokenize", b'{"tokens":[1,2]}', 200),
        ("POST", RESPONSES, b'{"input":1}', 400),
    ]

    def send(part: int) -> None:
        connection = at.connect()
        headers = {"content-type": "application/json"}
        for i in range(1000):
            method, path, body, want = rows[(part + i) % len(rows)]
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            at.count(answer.status)
            at.expect(answer.status == want, f"{path}: {answer.status} {data[:80]!r}")
        connection.close()

    at.all(send, range(10), 10)


ATTACKS = (
    Attack("priority 10^20 - 1, 320 times", priorities, "400", mixed=True),
    Attack("200,000 prompts, n = 512", many_prompts, "400 soon", mixed=True),
    Attack("24 MB prompt, 3 times", long_prompt, "400 soon", mixed=True),
    Attack("4 MB of small objects", small_objects, "4xx soon", mixed=True),
    Attack("stop_token_ids x n, 32 MB", stop_ids, "400 or an answer", mixed=True),
    Attack("truncate_prompt_tokens, 24 MB", truncated, "an answer or 4xx", mixed=True),
    Attack("2^64, 1e308, … in each number", odd_numbers, "no 5xx"),
    Attack("gzip and zstd bombs", bombs, "413, 415, 400", mixed=True),
    Attack("10,000 small requests", small_requests, "each as if alone"),
)
