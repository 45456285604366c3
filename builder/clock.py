"""Timer of a build: wall time by stage, and peak memory. Knows no stage by name."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spark_engine.progress import Advance, ignore


class Clock:
    """Tells `progress` when a stage starts, and how long each took, under one name.

    `advance` is for the stages, which tell it how far they are.
    """

    def __init__(self, progress: Callable[[str], None], advance: Advance = ignore) -> None:
        self._progress = progress
        self.advance = advance
        self._starts: list[tuple[str, float]] = []
        self.peak_anonymous = 0

    def look(self) -> None:
        """Remembers in `peak_anonymous` the most bytes found that belong to no file."""
        self.peak_anonymous = max(self.peak_anonymous, anonymous_bytes())

    def start(self, stage: str, what: str) -> None:
        """Ends the stage before and starts this one: "lower", "the network"."""
        self._starts.append((stage, time.perf_counter()))
        self._progress(f"{stage} {what}")

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, all turns of it together; the last one runs until now."""
        ends = [at for _, at in self._starts[1:]] + [time.perf_counter()]
        found: dict[str, float] = {}
        for (stage, at), end in zip(self._starts, ends, strict=True):
            found[stage] = found.get(stage, 0.0) + end - at
        return found

    @staticmethod
    def peak_rss() -> int:
        """Bytes of the largest resident size of this process so far, mapped files included."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def anonymous_bytes() -> int:
    """Bytes of this process in memory that no file backs; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("RssAnon:")), "RssAnon: 0 kB")
    return int(found.split()[1]) * 1024
