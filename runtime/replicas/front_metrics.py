"""Metrics of the front: routed requests, retries and broken answers."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class FrontMetrics:
    """The counters of one front."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._routed = Counter("spark_front_requests", "Requests sent to a replica", registry=own)
        text = "Bytes of prompts that were routed"
        self._bytes = Counter("spark_front_prompt_bytes", text, registry=own)
        text = "Of those, bytes that went to the same replica before"
        self._shared = Counter("spark_front_shared_prompt_bytes", text, registry=own)
        text = "Requests sent to another replica, by reason"
        self._again = Counter("spark_front_retries", text, ["why"], registry=own)
        for why in ("refused", "lost"):
            self._again.labels(why)
        text = "Answers that a replica broke after they had started"
        self._broken = Counter("spark_front_broken_answers", text, registry=own)
        text = "Requests for which there was no replica"
        self._failed = Counter("spark_front_unanswered", text, registry=own)
        text, label = "Requests at a replica now", ["replica"]
        self._open = Gauge("spark_front_replica_requests", text, label, registry=own)
        self._up = Gauge(
            "spark_front_replica_up", "Whether the replica accepts requests", label, registry=own
        )

    def routed(self, length: int, shared: int) -> None:
        """Counts a routed request, its prompt bytes, and those that the replica had before."""
        self._routed.inc()
        self._bytes.inc(length)
        self._shared.inc(shared)

    def again(self, why: str) -> None:
        """Counts a retry; `why`: `refused` or `lost`."""
        self._again.labels(why).inc()

    def broken(self) -> None:
        """Counts a broken answer."""
        self._broken.inc()

    def failed(self) -> None:
        """Counts a request without a replica."""
        self._failed.inc()

    def render(self, replicas: dict[str, tuple[bool, int]]) -> str:
        """Prometheus' text; `replicas`: (up, running requests) by name."""
        self._open.clear()
        self._up.clear()
        for name, (up, count) in replicas.items():
            self._up.labels(name).set(up)
            self._open.labels(name).set(count)
        return generate_latest(self.registry).decode()
