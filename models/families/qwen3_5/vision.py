"""The vision tower of model types qwen3_5 and qwen3_5_moe: the names of its tensors.

They are those of transformers' `Qwen3_5VisionModel`. `PREFIXES` are those of names of the tower and
of the draft head, which graphs without images and drafts leave out.
"""

from math import isqrt

from spark_engine.models.checkpoint.layout import DRAFT, DRAFT_PREFIXES, VISUAL, VISUAL_PREFIXES
from spark_engine.models.checkpoint.tensor_list import Shape, Tensor, ValueKind
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config, VisionConfig
from spark_engine.models.graph.vision_tower import Affine, TowerBlock, VisionTower
from spark_engine.vision import COLOURS, MERGE, PATCH, ROW_PATCHES

PREFIXES = {
    "vision": tuple(prefix + VISUAL for prefix in VISUAL_PREFIXES),
    "mtp": tuple(prefix + DRAFT for prefix in DRAFT_PREFIXES),
}


def tower(c: Qwen3_5Config) -> VisionTower | str:
    """The tower, or the reason why there is none or it is unsupported."""
    v = c.vision
    if v is None:
        return "config.json has no vision_config"
    if fault := _unsupported(c, v):
        return f"config.json: vision_config: {fault}"
    wide = v.hidden * ROW_PATCHES
    return VisionTower(
        v.heads,
        patch=_affine("patch_embed.proj", (v.hidden, COLOURS, v.temporal_patch, PATCH, PATCH)),
        positions=_tensor("pos_embed.weight", (v.positions, v.hidden)),
        blocks=tuple(_block(f"blocks.{i}", v) for i in range(v.depth)),
        norm=_norm("merger.norm", v.hidden),
        fc1=_affine("merger.linear_fc1", (wide, wide)),
        fc2=_affine("merger.linear_fc2", (v.out_hidden, wide)),
    )


def _unsupported(c: Qwen3_5Config, v: VisionConfig) -> str:
    """The first value that the tower does not support; "" if there is none."""
    wanted = {
        "in_channels": (v.channels, COLOURS),
        "patch_size": (v.patch, PATCH),
        "spatial_merge_size": (v.merge, MERGE),
        "deepstack_visual_indexes": (v.deepstack, 0),
        "hidden_act": (v.act, "gelu_pytorch_tanh"),
        "out_hidden_size": (v.out_hidden, c.hidden),
        "num_position_embeddings": (v.positions, isqrt(v.positions) ** 2),
    }
    for key, (value, legal) in wanted.items():
        if value != legal:
            return f"{key} is {value!r}; a tower is compiled with {legal!r}, no other"
    if v.hidden % (4 * v.heads):
        return f"hidden_size is {v.hidden}, which {v.heads} heads do not divide into quarters"
    return ""


def _block(name: str, v: VisionConfig) -> TowerBlock:
    return TowerBlock(
        norm1=_norm(f"{name}.norm1", v.hidden),
        qkv=_affine(f"{name}.attn.qkv", (3 * v.hidden, v.hidden)),
        proj=_affine(f"{name}.attn.proj", (v.hidden, v.hidden)),
        norm2=_norm(f"{name}.norm2", v.hidden),
        fc1=_affine(f"{name}.mlp.linear_fc1", (v.intermediate, v.hidden)),
        fc2=_affine(f"{name}.mlp.linear_fc2", (v.hidden, v.intermediate)),
    )


def _affine(module: str, shape: Shape) -> Affine:
    return Affine(_tensor(f"{module}.weight", shape), _tensor(f"{module}.bias", shape[:1]))


def _norm(module: str, size: int) -> Affine:
    weight = _tensor(f"{module}.weight", (size,), ValueKind.NORM)
    return Affine(weight, _tensor(f"{module}.bias", (size,)))


def _tensor(name: str, shape: Shape, kind: ValueKind = ValueKind.MATRIX) -> Tensor:
    return Tensor(VISUAL + name, shape, kind, part="vision")
