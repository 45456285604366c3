"""Timer of a build: wall time by stage, and peak memory."""

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from spark_engine.progress import Advance, ignore


class StageClock:
    """Calls `progress` at the start of each stage and sums the seconds by stage name.

    The stages call `advance` with their progress.
    """

    def __init__(self, progress: Callable[[str], None], advance: Advance = ignore) -> None:
        self._progress = progress
        self.advance = advance
        self._starts: list[tuple[str, float]] = []
        self.peak_anonymous = self.peak_of_process = 0  # bytes; a process that makes the weights

    def look(self) -> None:
        """Updates `peak_anonymous`, the most bytes seen that no file backs."""
        self.peak_anonymous = max(self.peak_anonymous, anonymous_bytes())

    def start(self, stage: str, what: str) -> None:
        """Ends the current stage and starts another: "lower", "the network"."""
        self._starts.append((stage, time.perf_counter()))
        self._progress(f"{stage} {what}")

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, summed over its runs; the last one runs until now."""
        ends = [at for _, at in self._starts[1:]] + [time.perf_counter()]
        found: dict[str, float] = {}
        for (stage, at), end in zip(self._starts, ends, strict=True):
            found[stage] = found.get(stage, 0.0) + end - at
        return found

    def peak_rss(self) -> int:
        """Peak resident bytes of one process of the build, mapped files included."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return max(peak if sys.platform == "darwin" else peak * 1024, self.peak_of_process)


def anonymous_bytes() -> int:
    """Resident bytes of this process that no file backs; 0 if the system does not report them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("RssAnon:")), "RssAnon: 0 kB")
    return int(found.split()[1]) * 1024
