"""How far a check has come: a bar on a terminal, else a line every few seconds. Knows no level."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Say = Callable[[str], None]
Step = Callable[[], None]
Track = Callable[[str, int], AbstractContextManager[Step]]  # (what, how many) -> call once for each

SECONDS = 4.0  # between lines, however long one step takes


def lines(say: Say, seconds: float = SECONDS) -> Track:
    """Tells `say` at the beginning, every so many seconds, and at the end."""

    @contextmanager
    def track(what: str, total: int) -> Iterator[Step]:
        done, start, ended = 0, time.monotonic(), threading.Event()

        def step() -> None:
            nonlocal done
            done += 1

        def tell() -> None:
            while not ended.wait(seconds):
                say(f"{what}: {done} of {total}, {time.monotonic() - start:.0f} s")

        say(f"{what}: {total}")
        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            yield step
        finally:
            ended.set()
            teller.join()
        say(f"{what}: {done} of {total} in {time.monotonic() - start:.1f} s")

    return track


def bars(console: Console) -> Track:
    """A bar for what is under way, which goes when it has ended."""

    @contextmanager
    def track(what: str, total: int) -> Iterator[Step]:
        columns = (TextColumn("{task.description}"), BarColumn())
        ends = (MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, *ends, console=console, transient=True) as shown:
            task = shown.add_task(what, total=total)
            yield lambda: shown.advance(task)

    return track
