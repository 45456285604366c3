"""The numbers that the page's live view reads once a second: fewer than /metrics has.

Knows which counters the view draws; `files/metrics.js` makes rates and quantiles of them.
"""

import math

from msgspec import to_builtins

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.engine_client.ipc import Stats
from spark_engine.runtime.server.operation.metrics import Metrics

COUNTERS = {  # of the HTTP process, by the view's names
    "prompt": "prompt_tokens",
    "generated": "generation_tokens",
    "ended": "request_success",
    "refused": "admission_rejections",
}
HISTOGRAMS = {"first": "time_to_first_token_seconds", "between": "inter_token_latency_seconds"}


def live(metrics: Metrics, stats: Stats, drafts: int) -> Json:
    """Counters since the start and the engine's state now, by name; those of drafts only where the
    engine makes any (`drafts` a round at most).

    A histogram is [bound in seconds, count up to it] by bucket; the last bound, which is infinite,
    is null.
    """
    counted = metrics.counted()
    found: Json = {name: int(sum(counted[source].values())) for name, source in COUNTERS.items()}
    for name, source in HISTOGRAMS.items():
        rows = sorted((float(bound), int(count)) for bound, count in counted[source].items())
        found[name] = [[None if math.isinf(b) else b, count] for b, count in rows]
    found |= {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv": stats.kv_usage,
        "preempted": stats.preemptions,
        "queries": stats.prefix_queries,
        "hits": stats.prefix_hits,
        "cacheBytes": stats.cache_bytes,
        "cacheBudget": stats.cache_budget,
    }
    if drafts:
        found |= {
            "drafts": sum(stats.drafts_by_position),
            "kept": sum(stats.accepted_by_position),
            "bySource": to_builtins(stats.by_source),
            "perRound": stats.tokens_per_round,
        }
    return found
