"""The differences of qwen3_next from qwen3_5_moe: a delta net stores two matrices in place of four.

Their rows take turns by key head, with the value heads that it serves: q, k, v, z; and b, a.
"""

from dataclasses import replace
from itertools import accumulate

from spark_engine.models.checkpoint.tensor_list import Linear, Slice
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.families.qwen3_5_moe import network as mixture
from spark_engine.models.graph.decoder import Decoder, Layer
from spark_engine.models.graph.gated_delta_net import GatedDeltaNet

draft_head = mixture.draft_head  # of full attention alone


def decoder(c: ModelConfig) -> Decoder:
    """The whole text network."""
    whole = mixture.decoder(c)
    return replace(whole, layers=tuple(_layer(c, layer) for layer in whole.layers))


def _layer(c: ModelConfig, layer: Layer) -> Layer:
    net = layer.mixer
    if not isinstance(net, GatedDeltaNet):
        return layer
    each = c.value_heads // c.key_heads
    (q, k, v, z), wide = _turns(c, c.key_dim, c.key_dim, each * c.value_dim, each * c.value_dim)
    (b, a), narrow = _turns(c, each, each)
    qkvz, ba = f"{net.name}.in_proj_qkvz", f"{net.name}.in_proj_ba"

    def rows(linear: Linear, module: str, total: int, *ranges: tuple[int, int]) -> Linear:
        return replace(linear, slice=Slice(module, total, ranges))

    fused = replace(
        net,
        qkv=rows(net.qkv, qkvz, wide, *q, *k, *v),
        z=rows(net.z, qkvz, wide, *z),
        b=rows(net.b, ba, narrow, *b),
        a=rows(net.a, ba, narrow, *a),
    )
    return replace(layer, mixer=fused)


def _turns(c: ModelConfig, *sizes: int) -> tuple[list[list[tuple[int, int]]], int]:
    """(the ranges of each part over all key heads, all rows) of parts with `sizes` rows a head."""
    *starts, step = accumulate(sizes, initial=0)
    heads = [head * step for head in range(c.key_heads)]
    parts = zip(starts, sizes, strict=True)
    return [[(h + at, h + at + size) for h in heads] for at, size in parts], c.key_heads * step
