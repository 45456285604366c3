"""The bytes that one decode step must move, by part, and the time they take.

Weights are read once (of routed experts those expected to be hit under uniform routing), a
sequence's recurrent and convolution states are read and written (with a replay ring of L records:
read, one part in L written, and what a step takes from the ring), its keys and values read, its
logits written and read. Activations are taken to stay in the L2 cache. Knows shapes and stored
types only; knows no kernel and no measurement.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from spark_engine.models.config.model_config import FULL
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import DType, TensorSpec

H200_BANDWIDTH = 4.3e12  # bytes a second; reads, as measured on the card
LOGIT_BYTES = 8  # f32, written and read
DRAFT_HEAD = "mtp."  # how the names of its tensors begin
CONV_PASSES = 2  # read and written
_STORED = {DType.F8E4M3: "linear-fp8", DType.U8: "linear-nvfp4", DType.I32: "linear-int4"}


def ring_bytes(length: int, keys: int, values: int, key_dim: int, value_dim: int) -> float:
    """Bytes that a step moves of one slot's ring once it is full: the other records' keys, of
    their deltas those that some group has not folded in (half of them), and a new record."""
    others = length - 1
    floats = (others + 1) * (keys * key_dim + values) + (others / 2 + 1) * values * value_dim
    return 4 * floats


@dataclass(frozen=True)
class Work:
    """One step's work: sequences, tokens each has, bytes of a state and of a KV element, records
    of a replay ring."""

    npl: int
    ctx: int
    state_bytes: int = 4
    kv_bytes: int = 1
    ring: int = 0


@dataclass(frozen=True)
class Floor:
    model: Model

    def parts(self, work: Work) -> Mapping[str, float]:
        """Bytes of one decode step by part."""
        c = self.model.config
        found: Counter[str] = Counter()
        found.update(self._weights)
        if c.moe is not None:
            missed = (1 - c.moe.top_k / c.moe.experts) ** work.npl
            found["moe"] -= round(self._routed * missed)
        attention = c.layers.count(FULL)
        delta = len(c.layers) - attention
        state = c.value_heads * c.value_dim * c.key_dim * work.state_bytes
        conv = (c.conv_kernel - 1) * c.conv_channels * 2
        moved = state * (1 + 1 / max(work.ring, 1)) + CONV_PASSES * conv
        if work.ring:
            sizes = (c.key_heads, c.value_heads, c.key_dim, c.value_dim)
            moved += ring_bytes(work.ring, *sizes)
        found["gdn"] += round(work.npl * delta * moved)
        token = 2 * c.kv_heads * c.head_dim * work.kv_bytes
        found["attention"] += work.npl * attention * (work.ctx + 1) * token
        found["sample"] += work.npl * c.vocab * LOGIT_BYTES
        found["embed"] += work.npl * c.hidden * 2
        return found

    def round_parts(self, work: Work, k: int, draft_bytes: int) -> Mapping[str, float]:
        """Bytes of one round of `k` drafts: of experts those that all its tokens hit, and k times
        the draft head's weights and logits."""
        found = dict(self.parts(work))
        wide = self.parts(replace(work, npl=work.npl * (1 + k)))
        found |= {part: wide[part] for part in ("moe", "sample") if part in wide}
        found["draft"] = k * (draft_bytes + work.npl * self.model.config.vocab * LOGIT_BYTES)
        return found

    def seconds(self, work: Work, bandwidth: float) -> float:
        """Seconds of one step at `bandwidth` bytes a second."""
        return sum(self.parts(work).values()) / bandwidth

    @cached_property
    def _weights(self) -> Mapping[str, int]:
        """Bytes of the weights by part, the embedding's table and the draft head left out."""
        found: Counter[str] = Counter()
        for name, spec in self._network.items():
            found[self._part(name)] += spec.nbytes
        del found["table"]
        return found

    @cached_property
    def _routed(self) -> int:
        """Bytes of all routed experts."""
        return sum(s.nbytes for n, s in self._network.items() if ".mlp.experts." in n)

    @cached_property
    def _network(self) -> Mapping[str, TensorSpec]:
        """What a step without drafts reads."""
        tensors = self.model.tensors
        return {name: spec for name, spec in tensors.items() if not name.startswith(DRAFT_HEAD)}

    def _part(self, name: str) -> str:
        """The part that reads a tensor; scales belong to their weight's."""
        module, _, leaf = name.rpartition(".")
        if name.endswith("embed_tokens.weight"):
            return "table"
        if ".experts." in name or ".shared_expert." in name:
            return "moe"
        if module.endswith((".mlp.gate", ".shared_expert_gate")):
            return "router"
        if "norm" in module.rpartition(".")[2]:
            return "norm"
        if module.endswith(".conv1d") or leaf in ("A_log", "dt_bias"):
            return "gdn"
        tensors = self.model.tensors
        named = (tensors.get(f"{module}.{x}") for x in ("weight", "qweight", "weight_packed"))
        weight = next(t for t in named if t is not None)
        return _STORED.get(weight.dtype, "linear-bf16")


def floor_of(row: Mapping[str, Any]) -> float:
    """Milliseconds of the bytes that this engine's step must move, what its ring saves left out."""
    return float(row.get("ring_floor_ms", row["floor_ms"]))
