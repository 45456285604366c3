"""How late this process comes to what is due: what a bound on a measured time has to allow."""

from __future__ import annotations

import threading
import time

TICK_S = 0.005


class Lateness:
    """`seconds` of the block in which a thread of ours could have run and did not."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        over = False
        while not over:
            start = time.monotonic()
            over = self._over.wait(TICK_S)
            self.seconds += max(0.0, time.monotonic() - start - TICK_S)
