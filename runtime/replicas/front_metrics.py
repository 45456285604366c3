"""Metrics of the front, and those of all servers in one text.

Knows Prometheus' text format.
"""

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

_ABOUT = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)")
LABEL = "replica"


class FrontMetrics:
    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._routed = Counter("spark_front_requests", "Requests sent to a replica", registry=own)
        text = "Bytes of prompts that were routed"
        self._bytes = Counter("spark_front_prompt_bytes", text, registry=own)
        text = "Of those, bytes that went to the same replica before"
        self._shared = Counter("spark_front_shared_prompt_bytes", text, registry=own)
        text = "Requests sent to another replica, by reason"
        self.again = Counter("spark_front_retries", text, ["why"], registry=own)
        for why in ("refused", "lost"):
            self.again.labels(why)
        text = "Answers that a replica broke after they had started"
        self.broken = Counter("spark_front_broken_answers", text, registry=own)
        text = "Requests for which there was no replica"
        self.failed = Counter("spark_front_unanswered", text, registry=own)
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

    def render(self, replicas: dict[str, tuple[bool, int]]) -> str:
        """Prometheus' text; `replicas`: (up, running requests) by name."""
        self._open.clear()
        self._up.clear()
        for name, (up, count) in replicas.items():
            self._up.labels(name).set(up)
            self._open.labels(name).set(count)
        return generate_latest(self.registry).decode()


def merge(texts: Mapping[str, str]) -> str:
    """The servers' metrics: each sample gets the label `replica`. The format requires that a
    family's samples are consecutive."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        quoted = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        family = ""
        for line in text.splitlines():
            if found := _ABOUT.match(line):
                family = found[1]
                known = about.setdefault(family, [])
                samples.setdefault(family, [])
                if line.split(" ", 3)[1] not in {row.split(" ", 3)[1] for row in known}:
                    known.append(line)
            elif found := _SAMPLE.match(line):
                labels = f",{found[2].rstrip(',')}" if found[2] else ""
                row = f'{found[1]}{{{LABEL}="{quoted}"{labels}}} {found[3]}'
                samples.setdefault(family, []).append(row)
    lines = [line for family, rows in samples.items() for line in (*about.get(family, ()), *rows)]
    return "\n".join((*lines, ""))
