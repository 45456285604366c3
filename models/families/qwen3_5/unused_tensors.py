"""Names and shapes of tensors that are recognised and not compiled: the vision tower.

Knows the tensors of transformers' `Qwen3_5VisionModel`, and the prefixes of the draft head's names,
which graphs without drafts leave out.
"""

from collections.abc import Iterator

from spark_engine.models.checkpoint.layout import DRAFT, DRAFT_PREFIXES
from spark_engine.models.checkpoint.tensor_list import Shape, Tensor
from spark_engine.models.families.qwen3_5.config import Qwen3_5Config, VisionConfig

Shapes = Iterator[tuple[str, Shape]]
PREFIXES = {
    "vision": ("model.visual.", "visual."),
    "mtp": tuple(prefix + DRAFT for prefix in DRAFT_PREFIXES),
}


def tensors(c: Qwen3_5Config) -> Iterator[Tensor]:
    """Every tensor of the vision tower, if there is one."""
    if c.vision is not None:
        for name, shape in _vision(c.vision):
            yield Tensor(name, shape, part="vision")


def _vision(v: VisionConfig) -> Shapes:
    p = "model.visual."
    yield f"{p}patch_embed.proj.weight", (v.hidden, v.channels, v.temporal_patch, v.patch, v.patch)
    yield f"{p}patch_embed.proj.bias", (v.hidden,)
    yield f"{p}pos_embed.weight", (v.positions, v.hidden)
    for i in range(v.depth):
        yield from _vision_block(f"{p}blocks.{i}.", v)
    wide = v.hidden * v.merge**2
    deep = ((f"deepstack_merger_list.{i}.", wide) for i in range(v.deepstack))
    for merger, norm in (("merger.", v.hidden), *deep):
        yield from _affine(f"{p}{merger}norm", (norm,))
        yield from _affine(f"{p}{merger}linear_fc1", (wide, wide))
        yield from _affine(f"{p}{merger}linear_fc2", (v.out_hidden, wide))


def _vision_block(p: str, v: VisionConfig) -> Shapes:
    yield from _affine(f"{p}norm1", (v.hidden,))
    yield from _affine(f"{p}norm2", (v.hidden,))
    yield from _affine(f"{p}attn.qkv", (3 * v.hidden, v.hidden))
    yield from _affine(f"{p}attn.proj", (v.hidden, v.hidden))
    yield from _affine(f"{p}mlp.linear_fc1", (v.intermediate, v.hidden))
    yield from _affine(f"{p}mlp.linear_fc2", (v.hidden, v.intermediate))


def _affine(module: str, shape: Shape) -> Shapes:
    yield f"{module}.weight", shape
    yield f"{module}.bias", shape[:1]
