"""Images that are damaged, hostile or many, on a server with an engine that reads them."""

import base64
import json
from collections import Counter
from typing import Any

from tests.runtime.images.damaged_files import bombs, fuzzed
from tests.soak.attacks.attack import CHAT, MESSAGES, RESPONSES, Attack, Attacker

PATHS = (CHAT, RESPONSES, MESSAGES)
PLACES = {
    CHAT: "messages[0].content[0].image_url",
    RESPONSES: "input[0].content[0].image_url",
    MESSAGES: "messages[0].content[0].source.data",
}


def _body(path: str, data: bytes) -> bytes:
    text = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{text}"
    parts: dict[str, dict[str, Any]] = {
        CHAT: {"type": "image_url", "image_url": url},
        RESPONSES: {"type": "input_image", "image_url": url},
        MESSAGES: {"type": "image", "source": {"type": "base64", "data": text}},
    }
    field, most = (
        ("input", "max_output_tokens") if path == RESPONSES else ("messages", "max_tokens")
    )
    message = {"role": "user", "content": [parts[path]]}
    return json.dumps({field: [message], most: 1, "store": False}).encode()


def _send(at: Attacker, path: str, name: str, data: bytes) -> int:
    found = at.send(path, _body(path, data))
    words = f"{path}, {name}: {found.status} after {found.seconds:.1f} s, {found.body[:200]!r}"
    named = found.status != 400 or PLACES[path].encode() in found.body
    at.expect(found.status in (200, 400, *at.busy) and named, words)
    return found.status


def mutated(at: Attacker) -> None:
    found: Counter[int] = Counter()

    def send(pair: tuple[int, tuple[str, bytes]]) -> None:
        found[_send(at, PATHS[pair[0] % len(PATHS)], *pair[1])] += 1

    at.all(send, enumerate(fuzzed()), 8)
    at.expect(found[200] > 50 < found[400], f"some are read and some not: {found}")


def hostile(at: Attacker) -> None:
    """Small files that would take much memory or time."""
    for path in PATHS:
        for name, data in bombs():
            _send(at, path, name, data)


ATTACKS = (
    Attack("500 mutated image files", mutated, "200, or 400 with the field", mixed=True),
    Attack("image bombs", hostile, "200, or 400 with the field", mixed=True),
)
