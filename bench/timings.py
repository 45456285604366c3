"""What client processes are given and return: the server, and the timestamps of every request.

Times are seconds of `time.perf_counter`, which on Linux is one clock for all processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Server:
    """Whom to ask."""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0  # without a byte


@dataclass
class RequestTiming:
    """One request: when it was sent, what each event brought and when, and how it ended.

    `due` is when it should have been sent. Without `error` the answer is whole.
    """

    script: int
    turn: int
    due: float
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each event
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not say
    error: str = ""


@dataclass
class ClientShare:
    """What one process did: its requests, and whether it could keep up."""

    took: list[RequestTiming]
    busy_s: float  # of processor time
    late_s: list[float]  # by how much its looks at the clock came late
