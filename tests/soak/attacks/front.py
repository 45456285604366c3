"""Bodies without a key for the front of a replica that has keys."""

from tests.soak.attacks.attack import CHAT, RESPONSES, TEXT, Attack, Attacker
from tests.soak.attacks.connections import smuggling, tiny_chunks


def small_objects(at: Attacker) -> None:
    """4 MB of small objects, again and again."""
    rows = [
        *((CHAT, "messages", part) for part in ("{}", "[]", "0", '{"role":"user"}')),
        *((TEXT, "prompt", part) for part in ("[]", "[0]", '""')),
        *((RESPONSES, "input", part) for part in ("{}", "[]")),
        (CHAT, "a", "{}"),
    ]

    def send(row: tuple[str, str, str]) -> None:
        path, name, part = row
        parts = (4_170_000 // (len(part) + 1)) * f"{part},"
        at.send(path, f'{{"{name}":[{parts}{part}]}}'.encode())

    at.all(send, rows * 2, 2)
    at.only(401, 413)


ATTACKS = (
    Attack("front: 4 MB of small objects, no key", small_objects, "401"),
    Attack("front: one-byte chunks, no key", tiny_chunks, "4xx"),
    Attack("front: two lengths, bad heads", smuggling, "one answer, 400"),
)
