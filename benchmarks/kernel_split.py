"""Where a bucket's time goes: every launch by itself, grouped by what it belongs to.

The launches of the bucket's file run one after the other outside its graph, over the inputs of
its last step, with an event between them. They are queued behind a long fill, so that the host's
time is not in it. The gap between two launches is longer than in a graph: the sum is more than a
step takes. States move on by one garbage step each time: for use at the end of a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from spark_engine.device.gpu import Gpu
    from spark_engine.runtime.executors.bucket_graphs import QueuedLaunch
    from spark_engine.runtime.executors.native import NativeExecutor

FILL_BYTES, FILLS = 1 << 30, 64  # about 20 ms of the device's time
PARTS = {  # by the beginning of the kernel's name, the first that fits
    "embed": "embed",
    "norm_quant": "norm",
    "reduce_norm": "norm",  # with a sum over ranks
    "all_reduce": "ranks",
    "gather_logits": "ranks",
    "add": "norm",
    "last_rows": "norm",
    "fp8_linear": "linear-fp8",
    "nvfp4_linear": "linear-nvfp4",
    "linear": "linear-bf16",
    "gdn": "gdn",
    "gated": "gdn",
    "causal_conv": "gdn",
    "paged": "attention",
    "attention": "attention",
    "act_quant": "activation",
    "moe_router": "router",
    "moe": "moe",
    "each": "moe",
    "wide": "moe",
    "quantise": "moe",
    "fp8_block_linear": "linear-fp8",
    "shared_gate": "moe",
    "sample": "sample",
    "mark": "sample",
    "clear": "sample",
    "round_rows": "sample",
    "accept": "sample",
    "shift": "sample",
    "draft_token": "token",
    "mtp_input": "embed",
    "append_kv": "attention",
}
FILL, DRAFT = "mtp.", "draft."  # nodes of the draft head over all tokens, and of one draft


@dataclass(frozen=True)
class Timed:
    """One launch: the node and kernel it belongs to, and its median microseconds."""

    node: str
    symbol: str
    microseconds: float


def part_of(symbol: str, node: str = "") -> str:
    """The part that a kernel belongs to; that of the draft head where its node does."""
    if node.startswith(FILL):
        return "fill"
    part = next((part for start, part in PARTS.items() if symbol.startswith(start)), symbol)
    return f"draft-{part.partition('-')[0]}" if node.startswith(DRAFT) else part


def time_launches(executor: NativeExecutor, payload: bytes, passes: int = 5) -> list[Timed]:
    """Every launch of an open executor, whose payload it is."""
    queue = executor.launches(payload)
    medians = time_queue(executor.gpu, queue, passes)
    return [Timed(x.node, x.symbol, us) for x, us in zip(queue, medians, strict=True)]


def time_queue(gpu: Gpu, queue: Sequence[QueuedLaunch], passes: int = 5) -> list[float]:
    """Median microseconds of each launch, one after the other."""
    filler = gpu.allocate(FILL_BYTES)
    events = [gpu.event(timed=True) for _ in range(len(queue) + 1)]
    times = []
    for _ in range(passes + 1):
        for _ in range(FILLS):
            gpu.fill(filler, 0, FILL_BYTES)
        gpu.record(events[0])
        for launch, event in zip(queue, events[1:], strict=True):
            launch.queue()
            gpu.record(event)
        gpu.wait()
        pairs = zip(events, events[1:], strict=False)
        times.append([gpu.milliseconds(a, b) * 1e3 for a, b in pairs])
    gpu.free(filler)
    medians: list[float] = np.median(np.array(times[1:]), axis=0).tolist()
    return medians


def by_part(timed: list[Timed], gap: float = 0.0) -> Mapping[str, float]:
    """Milliseconds by part, largest first; `gap` microseconds of each launch are not counted."""
    found: Counter[str] = Counter()
    for row in timed:
        found[part_of(row.symbol, row.node)] += (row.microseconds - gap) / 1e3
    return {part: round(ms, 4) for part, ms in found.most_common()}


def counts(timed: list[Timed]) -> Mapping[str, int]:
    """Launches by part, most first."""
    return dict(Counter(part_of(row.symbol, row.node) for row in timed).most_common())
