"""`OnDemandClient`: an engine with a process that runs only while it is wanted.

Knows one engine; which engines are loaded is decided in `residency.py`.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence

from spark_engine.runtime.engine.request import Request
from spark_engine.runtime.server.engine_client import ipc
from spark_engine.runtime.server.engine_client.client import Busy, EngineClient, Mailbox, _Open
from spark_engine.runtime.server.engine_client.engine_process import Death
from spark_engine.runtime.server.engine_client.supervisor import (
    CLOSED,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Backoff,
    Supervision,
)

log = logging.getLogger(__name__)


class NotLoaded(Busy):
    """The model's engine is not loaded, and the request could not wait for it."""

    code = "model_not_loaded"


class OnDemandClient(EngineClient):
    """Requests to the engine `info` of the model `name`. They wait, as during a restart, until
    `load` has started its process; `unload` ends it. A process that does not start, or ends too
    often, ends the requests that wait for it; others may try again after a pause.

    Attributes:
        changed: is called where a request begins to wait, and where one has ended.
        used: when a request last began or ended, on the loop's clock.
        since: when the engine was loaded. `wanted`: when a request began to wait for it.
        leaving: it is being unloaded.
        owed: others end their requests for it: it is loaded even if those that waited have left,
            and then has a turn in which a request may come.
    """

    def __init__(
        self, name: str, info: ipc.EngineInfo, command: Sequence[str], most: int, how: Supervision
    ) -> None:
        super().__init__(command, most, how)
        self.name, self.info, self._build = name, info, info.build
        self.changed: Callable[[], None] = lambda: None
        self.used = self.since = self.wanted = 0.0
        self.must_load = self.leaving = self._paused = self._loading = False
        self._retry_s = self._retry_at = 0.0

    @property
    def accepting(self) -> bool:
        return self.running and not self._paused

    @property
    def resident(self) -> bool:
        """Whether its memory is taken, or will be."""
        process = self._process is not None and not self._process.gone
        return self._loading or process or (self._task is not None and not self._task.done())

    @property
    def waits(self) -> bool:
        """Whether it is to be loaded, and that has not started."""
        return (self._held > 0 or self.must_load) and not self.resident

    @property
    def may_leave(self) -> bool:
        """Whether it may be unloaded once its requests allow it."""
        return self.resident and not self._loading and not self.leaving

    @property
    def state(self) -> str:
        if self.running:
            return "loaded"
        if self.resident:
            return "unloading" if self.leaving else "loading"
        return "failed" if _now() < self._retry_at else "unloaded"

    @property
    def words(self) -> str:
        if self.reason == CLOSED:
            return CLOSED
        words = f"the engine of model {self.name} does not start, or ended too often"
        return f"{words}; the server's log says why; retry"

    def unhealthy_reason(self) -> str | None:
        """Why a request would not be answered; None also while the engine is not loaded."""
        if self.died.is_set() or self.state == "failed":
            return self.words
        return super().unhealthy_reason() if self.running else None

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        """Also raises NotLoaded shortly after a process did not start."""
        now = _now()
        if now < self._retry_at and not self.resident:
            raise NotLoaded(self.words)
        if not (self._held or self.must_load):
            self.wanted = now
        ids = super().submit(requests, box, slots)
        self.used, self.must_load = now, self.must_load and not self.running
        if not self.accepting:
            self.changed()
        return ids

    def pause(self, paused: bool) -> None:
        """While it is paused, new requests wait, so that those that run come to an end."""
        if paused == self._paused:
            return
        self._paused = paused
        if self.accepting:
            super().on_engine_ready()

    def load(self) -> Coroutine[None, None, None]:
        """From now on its memory is taken. The result waits until the engine runs, and raises what
        `start` raises."""
        self._loading = True
        return self._load()

    async def _load(self) -> None:
        log.info("model %s: loading its engine", self.name)
        began = _now()
        self._backoff = Backoff(self._how.restarts, self._how.window_s)
        self.death = None
        try:
            await self.start()
        finally:
            self._loading = False
        log.info("model %s: loaded in %.1f s", self.name, _now() - began)

    def unload(self) -> Coroutine[None, None, None]:
        """From now on requests wait for the next process; none may run. The result ends this one
        and frees its memory."""
        assert not self.sent
        self.running, self.leaving, self.must_load = False, True, False
        return self._unload()

    async def _unload(self) -> None:
        try:
            await self._stop()
        finally:
            self.leaving = self._paused = False
            self._stats = ipc.Stats()
        log.info("model %s: unloaded its engine", self.name)

    def on_engine_ready(self) -> None:
        self.loads, self._retry_s = self.loads + self._loading, 0.0
        self.since = self.used = _now()
        self.must_load &= not self._held
        if not self._paused:
            super().on_engine_ready()

    def _on_long_wait(self, number: int) -> None:
        words = f"the engine of this model was not loaded within {self._how.wait_s:g} s; retry"
        self._deliver(number, NotLoaded(words), last=True)

    def on_engine_lost(self, words: str, for_good: bool) -> None:
        if for_good and self.reason != CLOSED:
            for number, one in list(self._open.items()):
                if not one.received and not one.cancelled:
                    self._deliver(number, NotLoaded(words), last=True)
        super().on_engine_lost(words, for_good)

    def _give_up(self, death: Death) -> None:
        if death.reason == CLOSED:
            super()._give_up(death)
            return
        self._retry_s = min(max(2 * self._retry_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._retry_at, self.must_load = _now() + self._retry_s, False
        log.error("model %s: its engine does not run: %s", self.name, death.reason)
        self._end(death)

    def _forget(self, number: int, one: _Open) -> None:
        super()._forget(number, one)
        self.used = _now()
        self.changed()


def _now() -> float:
    return asyncio.get_running_loop().time()
