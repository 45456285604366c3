"""The differences of qwen3_5_moe from qwen3_5: every MLP has routed experts and a gated shared
one."""

from spark_engine.models.checkpoint.tensor_list import Experts, Split, Tensor, ValueKind
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.families.qwen3_5 import network as dense
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config
from spark_engine.models.graph.decoder import Decoder
from spark_engine.models.graph.draft_head import DraftHead
from spark_engine.models.graph.mlp import Mixture


def decoder(c: ModelConfig) -> Decoder:
    """The whole text network."""
    return dense.decoder(c, mixture)


def draft_head(c: Qwen3_5Config) -> DraftHead | str:
    """The draft head, with a layer of this network."""
    return dense.draft_head(c, mixture)


def mixture(c: ModelConfig, name: str) -> Mixture:
    """The MLP of a layer; files hold its experts one by one, or stacked."""
    assert c.moe is not None
    count, inner, experts = c.moe.experts, c.moe.intermediate, f"{name}.experts"
    each = [dense.swiglu(f"{experts}.{e}", c.hidden, inner, group=experts) for e in range(count)]
    part = (inner, 1)
    stacked = {
        "gate_up_proj": ((2 * inner, c.hidden), Split(1, (part, part))),
        "down_proj": ((c.hidden, inner), Split(2, (part,))),
    }
    gate_up, down = (
        Tensor(f"{experts}.{leaf}", (count, *shape), ValueKind.STACKED_EXPERTS, split=split)
        for leaf, (shape, split) in stacked.items()
    )
    return Mixture(
        name,
        router=Tensor(f"{name}.gate.weight", (count, c.hidden), ValueKind.ROUTER),
        shared_gate=Tensor(f"{name}.shared_expert_gate.weight", (1, c.hidden), ValueKind.GATE),
        shared=dense.swiglu(f"{name}.shared_expert", c.hidden, c.moe.shared_intermediate),
        experts=Experts(experts, tuple((e.gate, e.up, e.down) for e in each), gate_up, down),
    )
