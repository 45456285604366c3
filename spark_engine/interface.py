"""The names every engine shares: step inputs, tables, common states, outputs (docs/graph.md).

Knows no model: per-layer states are added by `models`, and the runtime reads them from the
manifest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from spark_engine.tensors import DType, TensorSpec
from spark_engine.typed import typed

TILE = {"decode": 1, "prefill": 64}
STATE_OUT = ".out"
SAMPLING_F = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "", "")
SAMPLING_I = ("top_k", "seed_low", "seed_high", "")


@dataclass(frozen=True)
class Limits:
    """Sizes fixed at build time. All counts; `page_size` and `max_context` in tokens.

    `gdn_ring`: records of the replay ring behind every recurrent state; 0, there is none.
    """

    max_seqs: int
    max_context: int
    pages: int
    vocab: int
    page_size: int = 64
    bias_slots: int = 512
    top_logprobs: int = 20
    gdn_ring: int = 0

    @property
    def pages_per_seq(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_context // self.page_size)

    def to_json(self) -> dict[str, int]:
        """The manifest's `limits`."""
        return {**asdict(self), "pages_per_seq": self.pages_per_seq, "tile": TILE["prefill"]}

    @classmethod
    def from_json(cls, row: dict[str, int]) -> Limits:
        """The inverse of `to_json`. Raises KeyError when a limit is missing, TypeError or
        ValueError when it is no count; an engine that does not speak of a ring has none."""
        known = {"gdn_ring": 0, **row}
        return cls(**{k: typed(int, known[k], k) for k in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Precision:
    """Element types of what is not a weight. `kv` may be F8E4M3 (pages then hold U8 codes)."""

    activation: DType
    kv: DType
    state: DType

    @property
    def kv_storage(self) -> DType:
        """The dtype of the page tensors."""
        return DType.U8 if self.kv is DType.F8E4M3 else self.kv


def steps() -> tuple[TensorSpec, ...]:
    """Inputs written for every step."""
    per_row = ("slots", "starts", "counts", "emit")
    return (
        TensorSpec("token_ids", DType.I32, ("tokens",)),
        *(TensorSpec(name, DType.I32, ("rows",)) for name in per_row),
    )


def tables(limits: Limits) -> tuple[TensorSpec, ...]:
    """Slot-indexed inputs that change on admission, eviction or a new page only."""
    slots = limits.max_seqs + 1
    return (
        TensorSpec("page_table", DType.I32, (slots, limits.pages_per_seq)),
        TensorSpec("prompt_lens", DType.I32, (slots,)),
        TensorSpec("sampling_f", DType.F32, (slots, len(SAMPLING_F))),
        TensorSpec("sampling_i", DType.I32, (slots, len(SAMPLING_I))),
        TensorSpec("bias_ids", DType.I32, (slots, limits.bias_slots)),
        TensorSpec("bias_values", DType.F32, (slots, limits.bias_slots)),
    )


def common_states(limits: Limits) -> tuple[TensorSpec, ...]:
    """Slot-indexed states of every model."""
    slots = limits.max_seqs + 1
    return (
        TensorSpec("last_tokens", DType.I32, (slots,)),
        TensorSpec("token_counts", DType.I32, (slots, limits.vocab)),
    )


def outputs(limits: Limits) -> tuple[TensorSpec, ...]:
    """What every engine writes besides its states."""
    top = limits.top_logprobs
    return (
        TensorSpec("next_tokens", DType.I32, ("rows",)),
        TensorSpec("logprobs", DType.F32, ("rows",)),
        TensorSpec("top_ids", DType.I32, ("rows", top)),
        TensorSpec("top_logprobs", DType.F32, ("rows", top)),
        TensorSpec("ok", DType.I32, ("rows",)),
        TensorSpec("logits", DType.F32, ("rows", limits.vocab)),
    )
