"""Spans of a process for a trace in the Chrome format, and their shares of time.

Knows spans, tracks and files; knows neither a step's parts nor an engine. Times are seconds of
`time.perf_counter`, which on Linux is one clock for all processes. `NoTrace` has the same methods,
which do nothing.
"""

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from spark_engine.command import check_writable
from spark_engine.runtime.executors.memory import BucketKey

MOST_SPANS = 400_000  # kept; those that follow are counted only, and are in the shares still
STEPS, DEVICE, REQUESTS = "steps", "device", "requests"  # tracks
IDLE, BETWEEN = "idle", "between steps"
ENGINE, HTTP = "engine", "http"  # processes


class NoTrace:
    """Records nothing."""

    on = False

    def begin(self) -> None:
        """A step starts; the time since the last one was between steps or idle."""

    def done(self, part: str, of: BucketKey | None = None, count: int = 0) -> None:
        """The part of a step that ends now, and started where the one before it ended.

        `of`: its bucket; `count`: rows with a sequence.
        """

    def end(self, idle: bool) -> None:
        """The step has ended; `idle`: there is nothing to do until the next one."""

    def now(self) -> float:
        """The time, for `span`; 0 where nothing is recorded."""
        return 0.0

    def span(self, track: str, name: str, start: float, of: object = None, count: int = 0) -> None:
        """Anything else, from `start` to now."""

    def ran(self, of: BucketKey, start: float, end: float) -> None:
        """A launch, from its first kernel to its last."""

    def save(self) -> None:
        """Writes the record. May be called twice, and from another thread."""


class Trace(NoTrace):
    """Records one process, `name`, for the file `part`."""

    on = True

    def __init__(self, name: str, part: Path) -> None:
        self._name, self._part = name, part
        self._spans: list[tuple[str, str, float, float, object, int]] = []
        self._left_out = 0
        self._seconds: dict[str, float] = defaultdict(float)  # by part
        self._steps = 0
        self._device = 0.0  # seconds in which launches ran
        self._last = self._first = 0.0  # end of the last part; begin of the first step
        self._gap = IDLE
        self._saving = threading.Lock()

    def begin(self) -> None:
        if not self._steps:
            self._first = self._last = time.perf_counter()
        self.done(self._gap)
        self._steps += 1

    def done(self, part: str, of: BucketKey | None = None, count: int = 0) -> None:
        start, self._last = self._last, time.perf_counter()
        self._seconds[part] += self._last - start
        self._keep(STEPS, part, start, self._last, of, count)

    def end(self, idle: bool) -> None:
        self._gap = IDLE if idle else BETWEEN

    def now(self) -> float:
        return time.perf_counter()

    def span(self, track: str, name: str, start: float, of: object = None, count: int = 0) -> None:
        now = time.perf_counter()
        if track != REQUESTS:  # which overlap
            self._seconds[name] += now - start
        self._keep(track, name, start, now, of, count)

    def ran(self, of: BucketKey, start: float, end: float) -> None:
        self._device += end - start
        self._keep(DEVICE, of[0], start, end, of, 0)

    def shares(self) -> dict[str, Any]:
        """Seconds by part, and how the time from the first step to the last was shared.

        `busy`: launches ran; `idle`: there was nothing to do; `host`: there was, and none ran.
        """
        wall, idle = self._last - self._first, self._seconds.get(IDLE, 0.0)
        seconds = {"busy": self._device, "host": max(0.0, wall - idle - self._device), "idle": idle}
        return {
            "steps": self._steps,
            "wall_s": wall,
            **_shared(seconds),
            "parts_s": dict(self._seconds),
            "spans_left_out": self._left_out,
        }

    def save(self) -> None:
        with self._saving:
            if self._spans and not self._part.exists():
                spans = self._spans.copy()  # the loop may continue while its process ends
                row = {"spans": spans, **self.shares()}
                self._part.write_bytes(msgspec.json.encode(row))

    def _keep(
        self, track: str, name: str, start: float, end: float, of: object, count: int
    ) -> None:
        if len(self._spans) < MOST_SPANS:
            self._spans.append((track, name, start, end, of, count))
        else:
            self._left_out += 1


def trace_of(file: str | None, name: str, first: bool = True) -> NoTrace:
    """The recorder of the process `name` for the trace `file`; `NoTrace` without a file.

    The `first` process of a trace removes the parts that a killed one left. A later one, such as a
    restarted engine, writes a further part. Raises OptionError where the trace cannot be written.
    """
    if file is None:
        return NoTrace()
    check_writable("--profile", Path(file))
    if first:
        for left in (part for one in (ENGINE, HTTP) for part in _parts(file, one)):
            left.unlink(missing_ok=True)
    part = _part(file, name, len(_parts(file, name)))
    check_writable("--profile", part)
    return Trace(name, part)


def merge(file: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Merges the parts of the processes `names` into `file`, deletes them; returns the shares."""
    events: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    parts = {name: _parts(file, name) for name in names}
    for pid, (name, lives) in enumerate(parts.items(), 1):
        rows = [msgspec.json.decode(part.read_bytes()) for part in lives]
        if rows:
            events += _events(pid, name, [span for row in rows for span in row.pop("spans")])
            found[name] = _together(rows)
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": found}
    Path(file).write_bytes(msgspec.json.encode(whole))
    for part in itertools.chain(*parts.values()):
        part.unlink(missing_ok=True)
    return found


def _together(lives: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The shares of all lives of a process, without the time between them."""
    seconds, parts = Counter[str](), Counter[str]()
    for row in lives:
        seconds.update(row["seconds"])
        parts.update(row["parts_s"])
    return {
        "lives": len(lives),
        "steps": sum(row["steps"] for row in lives),
        "wall_s": sum(row["wall_s"] for row in lives),
        **_shared(dict(seconds)),
        "parts_s": dict(parts),
        "spans_left_out": sum(row["spans_left_out"] for row in lives),
    }


def _shared(seconds: dict[str, float]) -> dict[str, Any]:
    whole = sum(seconds.values())
    shares = {name: s / whole if whole else 0.0 for name, s in seconds.items()}
    return {"seconds": seconds, "shares": shares}


def _part(file: str, name: str, life: int) -> Path:
    return Path(f"{file}.{name}.{life}.part")


def _parts(file: str, name: str) -> list[Path]:
    all_lives = (_part(file, name, life) for life in itertools.count())
    return list(itertools.takewhile(Path.exists, all_lives))


def _events(pid: int, name: str, spans: list[Any]) -> list[dict[str, Any]]:
    tracks = {track: tid for tid, track in enumerate(dict.fromkeys(s[0] for s in spans), 1)}
    events: list[dict[str, Any]] = [_label("process_name", name, pid, 0)]
    events += [_label("thread_name", track, pid, tid) for track, tid in tracks.items()]
    for track, what, start, end, of, count in spans:
        row = {"name": what, "pid": pid, "tid": tracks[track], "ts": start * 1e6}
        if of is not None:
            row["args"] = {"of": "_".join(map(str, of)) if isinstance(of, list) else of}
            row["args"]["count"] = count
        if track == REQUESTS:  # they overlap: each is a pair of events
            row |= {"cat": "request", "id": of}
            events += [{**row, "ph": "b"}, {**row, "ph": "e", "ts": end * 1e6}]
        else:
            events.append({**row, "ph": "X", "dur": (end - start) * 1e6})
    return events


def _label(kind: str, name: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
