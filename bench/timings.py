"""The data of client processes: the server, and the timestamps of every request.

Times are seconds of `time.perf_counter`, which on Linux is one clock for all processes.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Server:
    """The server to send requests to: its model, the most tokens of a request, its version."""

    url: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0  # seconds without a byte
    most: int | None = None
    version: str | None = None


@dataclass
class RequestTiming:
    """One request: when it was sent, the tokens and times of its events, and how it ended.

    `due` is when it should have been sent. Without `error` the answer is complete.
    """

    script: int
    turn: int
    due: float
    start: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each event
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: not reported by the server
    error: str = ""


@dataclass
class ClientShare:
    """One process's record: its requests, and its load."""

    took: list[RequestTiming]
    busy_s: float  # seconds of processor time
    late_s: list[float]  # seconds that its periodic checks came late
