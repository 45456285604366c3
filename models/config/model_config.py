"""`ModelConfig`: a published configuration as a frozen dataclass, the same for every family.

Knows the sizes of a hybrid text network, which the graph's blocks and the options' defaults depend
on. A family converts its config.json into it (`models/families/`) and may add fields. Knows no key
of a file, no tensor, no quantisation and no graph.
"""

from dataclasses import KW_ONLY, dataclass

from spark_engine.models.config.rope import Rope
from spark_engine.tensors import DType

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class MoeConfig:
    """The mixture of experts of every layer: `experts` routed experts and one shared expert."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int


@dataclass(frozen=True)
class ModelConfig:
    """A text network. Heads and dims are counts; `layers` names the mixer of each layer."""

    model_type: str  # the model family's name, for every variant of it
    nested: bool  # the text config is inside a multimodal one (prefix `model.language_model.`)
    layers: tuple[str, ...]
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    eps: float
    intermediate: int | None
    moe: MoeConfig | None
    tied: bool
    max_position: int
    dtype: DType  # the dtype of plain tensors according to the file (a hint: the tensors decide)
    state_dtype: DType  # the recurrent state's dtype that the checkpoint asks for
    # Of generation_config and config together, in that order, no repeats.
    eos_token_ids: tuple[int, ...]
    _: KW_ONLY
    # Of the draft head; None if the file does not say (the tensors decide).
    mtp_layers: int | None = None

    @property
    def conv_channels(self) -> int:
        """Columns of q, k and v together, which the convolution runs over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def value_width(self) -> int:
        """Columns of the linear mixer's output: value heads times their size."""
        return self.value_heads * self.value_dim

    @property
    def delta_heads(self) -> dict[str, int]:
        """The sizes of the linear mixer's heads, as its ops have them."""
        sizes = {"key_heads": self.key_heads, "value_heads": self.value_heads}
        return {**sizes, "key_dim": self.key_dim, "value_dim": self.value_dim}
