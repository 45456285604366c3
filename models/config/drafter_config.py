"""The configuration of a block drafter (DFlash2), read from its config.json.

Knows its keys, and what the network that it drafts for must be like; knows no tensor and no graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import CheckpointError
from spark_engine.models.config.json_values import Json, Reader, malformed_json
from spark_engine.models.config.model_config import ModelConfig

WHERE, ARCHITECTURE = "the drafter's config.json", "DFlash2DraftModel"
NESTED = "dflash_config"  # an object with keys that precede those next to it
# Keys that give the name of the target, in the order in which they are read.
NAMES = ("target_model_name_or_path", "target_model", "base_model_name_or_path")
_NEEDED: Mapping[str, tuple[object, ...]] = {
    "is_causal": (False,),
    "causal": (None, False),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "conv_kernel_size": (2,),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "attention_value_scale": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
}


@dataclass(frozen=True)
class DrafterConfig:
    """A block drafter. Heads and dims are counts."""

    taps: tuple[int, ...]  # the target's layers of which it reads the residual stream, zero-based
    target_layers: int | None
    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    theta: float
    eps: float
    window: int  # a query sees keys at distances below it
    block: int  # tokens of a block that it was trained for
    mask: int  # the id of all tokens of a block but the first
    group: int  # columns of a group of the convolutions
    rank: int  # of the selector
    top: int  # its candidates of a draft
    target: str = ""  # the name of the model that it was trained for; "" if the file has none

    @property
    def kv_token_width(self) -> int:
        """Values of K and V that it stores for a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def inv_freq(self) -> NDArray[np.float64]:
        """[head_dim / 2]: the whole head turns."""
        return self.theta ** (-np.arange(self.head_dim // 2) / (self.head_dim // 2))


def read_drafter(config: Json) -> DrafterConfig:
    """Raises CheckpointError naming the key when a value is missing, malformed or unsupported."""
    if ARCHITECTURE not in (found := config.get("architectures") or []):
        raise CheckpointError(
            f"{WHERE}: architectures is {found!r}; a drafter is {ARCHITECTURE}: the first version "
            "(DFlashDraftModel) has no selector of candidates and is not compiled"
        )
    with malformed_json(WHERE):
        row: dict[str, Any] = {**config, **(config.get(NESTED) or {})}
        rope = {
            "rope_type": "default",
            **(row.get("rope_parameters") or row.get("rope_scaling") or {}),
        }
        kinds, layers = {*map(str, row["layer_types"])}, len(row["layer_types"])
        taps = tuple(int(i) for i in row["target_layer_ids"])
    for key, legal in _NEEDED.items():
        if row.get(key) not in legal:
            words = " or ".join(repr(v) for v in legal if v is not None) or "no value"
            raise CheckpointError(f"{WHERE}: {key} is {row.get(key)!r}; supported: {words}")
    if rope["rope_type"] != "default":
        raise CheckpointError(f"{WHERE}: rope_type is {rope['rope_type']!r}; supported: 'default'")
    if kinds != {"sliding_attention"}:
        words = ", ".join(sorted(kinds))
        raise CheckpointError(f"{WHERE}: layer_types are {words}; all must be sliding_attention")
    reader = Reader(row, WHERE)
    made = DrafterConfig(
        taps=taps,
        target_layers=reader.optional("num_target_layers"),
        hidden=reader.count("hidden_size"),
        vocab=reader.count("vocab_size"),
        layers=layers,
        heads=reader.count("num_attention_heads"),
        kv_heads=reader.count("num_key_value_heads"),
        head_dim=reader.count("head_dim"),
        intermediate=reader.count("intermediate_size"),
        theta=Reader({**row, **rope}, WHERE).number("rope_theta"),
        eps=reader.number("rms_norm_eps", 1e-6),
        window=reader.count("sliding_window"),
        block=reader.count("block_size", least=2),
        mask=reader.count("mask_token_id", least=0),
        group=reader.count("conv_group_size"),
        rank=reader.count("selector_rank"),
        top=reader.count("selector_top_k", most=64),
        target=next((str(row[key]) for key in NAMES if row.get(key)), ""),
    )
    if made.heads % made.kv_heads or made.hidden % made.group or made.head_dim % 2:
        raise CheckpointError(
            f"{WHERE}: {made.heads} heads of {made.head_dim} with {made.kv_heads} key heads, "
            f"{made.hidden} columns in groups of {made.group} do not divide: take the file from "
            "the drafter's source"
        )
    return made


def check_target(drafter: DrafterConfig, target: ModelConfig, name: str) -> None:
    """Raises CheckpointError where the drafter was trained for another network. `name`: the
    target's, "" if its files do not say."""
    layers, taps = len(target.layers), drafter.taps
    pairs = {
        "hidden_size": (drafter.hidden, target.hidden),
        "vocab_size": (drafter.vocab, target.vocab),
        "num_target_layers": (drafter.target_layers or layers, layers),
    }
    faults = [f"its {k} is {a}, the model has {b}" for k, (a, b) in pairs.items() if a != b]
    if list(taps) != sorted({*taps}) or not taps or taps[0] < 0 or taps[-1] >= layers - 1:
        faults.append(
            f"its target_layer_ids are {list(taps)}; they must ascend from 0, below {layers - 1}"
        )
    if drafter.mask >= drafter.vocab:
        faults.append(f"its mask_token_id is {drafter.mask}, which is no id")
    own, other = _plain(drafter.target), _plain(name)
    if own and other and not (own.startswith(other) or other.startswith(own)):
        faults.append(f"it was trained for {drafter.target}, the model is {name}")
    if faults:
        raise CheckpointError(
            f"the drafter is of another model: {'; '.join(faults)}; give one that was trained for "
            "this model"
        )


def _plain(name: str) -> str:
    """The last word of a model's name, in small letters."""
    return name.rstrip("/").rpartition("/")[2].lower()
