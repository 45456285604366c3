"""Bodies without a key for the front of a replica that has keys."""

from tests.soak.attacks import bodies
from tests.soak.attacks.attack import Attack, Attacker
from tests.soak.attacks.connections import smuggling, tiny_chunks


def small_objects(at: Attacker) -> None:
    """The replica asks for the key."""
    bodies.small_objects(at, 401, 413)


ATTACKS = (
    Attack("front: 4 MB of small objects, no key", small_objects, "401"),
    Attack("front: one-byte chunks, no key", tiny_chunks, "4xx"),
    Attack("front: two lengths, bad heads", smuggling, "one answer, 400"),
)
