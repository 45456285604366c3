"""Stored responses of a greedy key, and looks at long ones."""

import json
import time

from tests.soak.attacks.attack import RESPONSES, Answer, Attack, Attacker

GREEDY, BOB, ALICE, HONEST = (f"abuse-{name}-0123456789abcdef" for name in "gbah")
KEYS = f"""
[[key]]
name = "greedy"
key = "{GREEDY}"
[[key]]
name = "bob"
key = "{BOB}"
max_requests = 4
[[key]]
name = "alice"
key = "{ALICE}"
[[key]]
name = "honest"
key = "{HONEST}"
"""
MIB = 1 << 20


def background(at: Attacker) -> None:
    """40 of 24 MiB in the background, then a look at each that was taken."""
    junk = {"junk": "j" * (24 * MIB)}
    first = {"role": "user", "content": "a bear", **junk}
    body = json.dumps({"input": [first], "background": True, "max_output_tokens": 64}).encode()
    taken = []
    for _ in range(40):
        found = at.send(RESPONSES, body)
        if found.status == 200:
            taken.append(found.json()["id"])
    at.only(200, 400, 413, 503)
    for ident in taken:
        look = at.get(f"{RESPONSES}/{ident}")
        at.expect(look.status == 200, f"one that was taken is not to be read: {look.status}")
        at.send(f"{RESPONSES}/{ident}/cancel", b"")
        at.send(f"{RESPONSES}/{ident}", method="DELETE")


def greedy(at: Attacker) -> None:
    """One key stores all that it can; another's responses stay."""
    kept = at.post(RESPONSES, {"input": "a", "max_output_tokens": 1}, key=ALICE)
    running = at.post(
        RESPONSES, {"input": "b", "max_output_tokens": 900, "background": True}, key=ALICE
    )
    rows: list[Answer] = []
    for size in (31, 31, 2, 31, 31):
        text = {"type": "input_text", "text": "a" * 1000}
        items = [{"role": "user", "content": [text]} for _ in range(size * 1000 * 9 // 10)]
        body = {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 1}
        rows += [
            at.post(RESPONSES, {**body, "metadata": {"a": "b"}}, key=BOB),
            at.post(RESPONSES, {**body, "input": items, "background": True}, key=BOB),
        ]
        long = {"instructions": "a" * (size * MIB), "background": True}
        rows.append(at.post(RESPONSES, {**body, **long}, key=BOB))
    for found in (kept, running):
        at.expect(found.status == 200, f"alice was answered {found.status} {found.body[:100]!r}")
        if found.status == 200:
            look = at.get(f"{RESPONSES}/{found.json()['id']}", key=ALICE)
            at.expect(look.status == 200, f"alice's response is gone: {look.status}")
    if running.status == 200:
        at.send(f"{RESPONSES}/{running.json()['id']}/cancel", b"", key=ALICE)
    for row in rows:  # what is stored counts as kept memory
        if row.status == 200:
            at.send(f"{RESPONSES}/{row.json()['id']}", method="DELETE", key=BOB)


def looks(at: Attacker) -> None:
    """A long conversation is stored; its items are read again and again, by four."""
    parts = [{"type": "input_text", "text": "a"} for _ in range(100)]
    items = [{"role": "user", "content": parts} for _ in range(1500)]
    body = {"input": items, "max_output_tokens": 1, "truncation": "auto", "background": True}
    found = at.post(RESPONSES, body)
    if found.status != 200:
        at.expect(found.status in (400, 413), f"storing: {found.status}")
        found = at.post(RESPONSES, {"input": "a" * 3000, "max_output_tokens": 1})
    ident = found.json()["id"]
    end = time.monotonic() + 5

    def read(number: int) -> None:
        after = ""
        while time.monotonic() < end:
            path = f"{RESPONSES}/{ident}/input_items?limit=100{after}"
            answer = at.get(path)
            at.expect(answer.status in (200, 429), f"input_items: {answer.status}")
            if answer.status == 200:
                page = answer.json()
                after = f"&after={page['last_id']}" if page["has_more"] and number else ""
            at.get(f"{RESPONSES}/{ident}")

    at.all(read, range(4), 4)
    at.send(f"{RESPONSES}/{ident}", method="DELETE")


ATTACKS = (
    Attack(
        "40 background responses, 24 MiB", background, "bounded; those taken are there", key=GREEDY
    ),
    Attack("a greedy key", greedy, "others' responses stay", key=BOB),
    Attack("loops of GET input_items", looks, "200 or 429", key=GREEDY),
)
