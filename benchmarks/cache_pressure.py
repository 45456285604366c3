"""What agents find in a prefix cache that holds a share of their conversations.

    python -m benchmarks.cache_pressure

Prints the share of prompt tokens found by the agents of `test_prefix_pressure`, which ask in turns
or in random order: the real engine over the fake executor, with a clock that moves by the request.
No GPU. benchmarks/log/runtime.md has what it printed and what eviction was before.
"""

import logging

from tests.runtime.engine.policy.test_prefix_pressure import AGENTS, Pressed

SHARES = (4.0, 1.0, 0.5, 0.3, 0.2, 0.1)


def main() -> None:
    """A column for each share of what the conversations come to."""
    logging.disable(logging.WARNING)
    print(f"{f'{AGENTS} agents':<16}" + "".join(f"{share:>7g}" for share in SHARES))
    for name, shuffled in (("in turns", False), ("in random order", True)):
        row = [Pressed(share).found(shuffled) for share in SHARES]
        print(f"{name:<16}" + "".join(f"{found:7.3f}" for found in row))


if __name__ == "__main__":
    main()
