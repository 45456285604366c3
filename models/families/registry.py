"""The table of networks: one row per model type. Knows nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from spark_engine.models.families import qwen3_5, qwen3_5_moe
from spark_engine.models.graph.writer import Writer

NETWORKS: Mapping[str, Callable[[Writer, bool], None]] = MappingProxyType(
    {
        "qwen3_5": qwen3_5.write,
        "qwen3_5_moe": qwen3_5_moe.write,
    }
)
