"""Attacks among the clients of the soak: one at a time, each some seconds behind the last.

Knows the attacks that need no separate server (`mixed`); knows no process.
"""

import asyncio
import random
import time

from tests.soak.attacks import bodies, connections, grammars
from tests.soak.attacks.attack import Attack, Attacker
from tests.soak.clients import PATIENCE_S, Clients

MIXED = tuple(
    attack for attack in (*bodies.ATTACKS, *grammars.ATTACKS, *connections.ATTACKS) if attack.mixed
)
EVERY_S = 20.0  # from the end of one to the next
NUMBER = -1  # among the clients


class Attackers:
    """Makes one attack after the other. What is wrong with one counts as a client's."""

    def __init__(self, clients: Clients, port: int) -> None:
        self._clients, self._address = clients, ("127.0.0.1", port)

    async def live(self) -> None:
        """In an order of chance, each as often as the others."""
        rng, left = random.Random(3), list[Attack]()
        while True:
            await asyncio.sleep(EVERY_S)
            await self._clients.opened()
            left = left or rng.sample(MIXED, len(MIXED))
            attack = left.pop()
            with self._clients.here(NUMBER, attack.name):
                await self._make(attack)

    async def _make(self, attack: Attack) -> None:
        begin, at = time.monotonic(), Attacker(self._address)
        at.alone, at.soon_s, at.patience_s, at.busy = False, PATIENCE_S, PATIENCE_S, (503,)
        at.read_s = 10.0
        try:
            await asyncio.to_thread(attack.run, at)
        except Exception as error:  # its own connections fail where the server falls
            at.expect(False, repr(error))
        name = f"attack, {attack.name}"
        self._clients.counts[name] += 1
        self._clients.counts["requests of attacks"] += at.statuses.total()
        for words in at.wrong[:3]:
            self._clients.judge(name, words, begin)
