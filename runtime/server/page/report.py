"""The engine's report: what was built and its memory, as JSON for the page.

Knows the manifest and the open engine's description. A summary: modules are grouped, and only the
time of the chosen tactic is included.
"""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from spark_engine.manifest import Manifest
from spark_engine.runtime.server.engine_client.ipc import EngineInfo
from spark_engine.runtime.server.prompts.chat_options import ChatOptions

Json = dict[str, Any]


def make_report(
    info: EngineInfo, manifest: Manifest | None, chat: ChatOptions | None = None
) -> Json:
    """`GET /report`. Without a manifest (an engine without a folder) only the limits.
    `chat`: the defaults of chat requests.

    Sizes are bytes, times microseconds.
    """
    chat = chat or ChatOptions()
    report: Json = {
        "object": "report",
        "name": info.name,
        "version": version("spark-engine"),
        "limits": info.limits.to_json(),
        "generation": dict(info.generation),
        "chat": {**asdict(chat), "media_domains": list(chat.media_domains)},
        "cache": {
            "budget_bytes": info.cache_bytes,
            "snapshots": info.snapshots,
            "disk_bytes": info.disk_bytes,
        },
    }
    return report if manifest is None else {**report, **_built(manifest)}


def _built(m: Manifest) -> Json:
    plain = m.to_json()
    kept = (
        *("producer", "target", "card", "executor", "invariant", "model", "dtypes", "memory"),
        *("ignored", "fingerprint", "fusions", "refusals"),
    )
    return {
        **{name: plain[name] for name in kept},
        "vision": plain.get("vision"),
        "buckets": _buckets(m),
        "quantisation": _quantisation(m),
        "tactics": [_tactic(row) for row in m.tactics],
    }


def _buckets(m: Manifest) -> list[Json]:
    kept = ("file", "family", "rows", "tokens", "cost_us", "arena_bytes")
    return [
        {**{name: getattr(b, name) for name in kept}, "file_bytes": m.files[b.file].bytes}
        for b in m.buckets
    ]


def _quantisation(m: Manifest) -> list[Json]:
    """Modules grouped by their name within a layer, and by format."""
    names = ("module", "format", "modules", "tensors")
    rows = m.quantised_kinds.items()
    return [dict(zip(names, (*kind, *counts), strict=True)) for kind, counts in rows]


def _tactic(row: Json) -> Json:
    """One group of nodes: the tactic it runs, whether it was timed, and its microseconds."""
    kept = {name: row[name] for name in ("op", "bucket", "node", "nodes", "chosen", "timed")}
    return {**kept, "microseconds": row["microseconds"].get(row["chosen"])}
