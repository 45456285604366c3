"""From stored tensors to op operands: the recipes of one projection, and of stacked experts.

Knows each scheme's tensors in each dialect and the operand conventions of docs/graph.md: global
scales multiply, and are repeated to one per row. Knows no graph.

modelopt globals multiply, compressed-tensors globals divide (their reciprocals are stored).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.expected_tensors import STACK_SCALE
from spark_engine.models.checkpoint.quant_schemes import SUFFIXES, Dialect, Scheme
from spark_engine.models.checkpoint.tensor_list import PLAIN, Experts, Linear, Tensor
from spark_engine.models.weights import recipes
from spark_engine.models.weights.borrowed_scales import borrowed
from spark_engine.models.weights.int4_tensors import projection_parts
from spark_engine.models.weights.quantise import quantised_parts
from spark_engine.models.weights.recipes import Recipe
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.formats.nvfp4 import A8_COLUMNS
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.tensors import DType, TensorSpec


@dataclass(frozen=True)
class Projection:
    """One linear module: [N, K] weights and their scales.

    Attributes:
        scales: the weight's scales by suffix, in operand order.
        input_scale: f32 [], the input's static scale; None without static quantisation of the
            input.
        fp8_input: the input of NVFP4 weights is quantised to FP8 by token.
    """

    scheme: Scheme
    weight: Recipe
    scales: Mapping[str, Recipe] = field(default_factory=dict)
    input_scale: Recipe | None = None
    fp8_input: bool = False

    @property
    def weights(self) -> str:
        """The weight format (plugins/formats) of the projection's op."""
        return "nvfp4_a8" if self.fp8_input else self.scheme.weights


def projection(model: Model, module: str, scheme: Scheme) -> Projection:
    """The recipes of a module, named without prefix; quantised here if its scheme asks for it.

    fp8, fp8_channel: weight_scale f32 [N]. fp8_block: weight_scale f32 [⌈N/128⌉, ⌈K/128⌉]. nvfp4:
    weight_scale f8 [N, K/16], w_scale2 f32 [N]; nvfp4_a4: alpha f32 [N] in place of w_scale2. int4:
    weight_scale f32 [N, K/16], w_scale2 f32 [N].
    """
    weight = f"{module}.weight"
    if scheme is not Scheme.PLAIN and model.has(weight) and model.whole(weight).dtype in PLAIN:
        return _share(model, module, quantised(model.whole(weight), scheme))
    return _int4(model, module, scheme) if scheme.group else _READERS[scheme](model, module)


def unquantised(model: Model, tensor: Tensor) -> Recipe:
    """[N, K] of a matrix that ops have unquantised; f32 if the files quantise it."""
    scheme = model.table[tensor.module]
    if scheme is Scheme.PLAIN:
        return model.source(tensor.name)
    p = projection(model, tensor.module, Scheme.NVFP4 if scheme is Scheme.NVFP4_A4 else scheme)
    to = TensorSpec("", DType.F32, tensor.shape)
    return recipes.transform(p.weight, to, FORMATS[p.weights].matrix, *p.scales.values())


def takes_fp8(model: Model, module: str) -> bool:
    """Whether the input may be FP8: of a dense NVFP4 MLP, not the head's, and of a fit size."""
    c = model.config
    columns = (c.intermediate or 0) // model.shards.ranks if "down_proj" in module else c.hidden
    dense = ".mlp." in module and c.moe is None and columns % A8_COLUMNS == 0
    return dense and model.table.modules.get(module) is Scheme.NVFP4


def quantised(weight: Recipe, scheme: Scheme) -> Projection:
    """A plain matrix [..., N, K] in another scheme: FP8 in blocks, or NVFP4 with plain inputs."""
    parts = quantised_parts(weight, scheme)
    return Projection(scheme, parts.pop("weight"), parts)


def _share(model: Model, name: str, whole: Projection) -> Projection:
    """A rank's share of a matrix quantised as a whole, so that scales are the same."""
    scales = {suffix: model.shards.cut(name, scale) for suffix, scale in whole.scales.items()}
    return replace(whole, weight=model.shards.cut(name, whole.weight), scales=scales)


def _plain(model: Model, module: str) -> Projection:
    return Projection(Scheme.PLAIN, model.source(f"{module}.weight"))


def _fp8(model: Model, module: str) -> Projection:
    read = scalar(model, f"{module}.input_scale") if model.has(f"{module}.input_scale") else None
    return replace(_fp8_channel(model, module), scheme=Scheme.FP8, input_scale=read)


def _fp8_channel(model: Model, module: str) -> Projection:
    weight = recipes.verified(model.source(f"{module}.weight"), "codes")
    scale = _per_row(model.source(f"{module}.weight_scale"), weight.shape[0])
    return Projection(Scheme.FP8_CHANNEL, weight, {"weight_scale": scale})


def _fp8_block(model: Model, module: str) -> Projection:
    suffix = SUFFIXES[model.table.dialect_of(module)].block_scale
    scale = recipes.cast(recipes.verified(model.source(f"{module}.{suffix}"), "part_scale"))
    weight = recipes.verified(model.source(f"{module}.weight"), "codes")
    return Projection(Scheme.FP8_BLOCK, weight, {"weight_scale": scale})


def _nvfp4(model: Model, module: str) -> Projection:
    suffixes = SUFFIXES[model.table.dialect_of(module)]
    weight = model.source(f"{module}.{suffixes.fp4_weight}")
    block = recipes.verified(model.source(f"{module}.weight_scale"), "part_scale")
    scale2 = recipes.repeat(_multiplier(model, module, suffixes.fp4_global), weight.shape[0])
    return Projection(Scheme.NVFP4, weight, {"weight_scale": block, "w_scale2": scale2})


def _nvfp4_a4(model: Model, module: str) -> Projection:
    p = _nvfp4(model, module)
    read = _multiplier(model, module, SUFFIXES[model.table.dialect_of(module)].fp4_input)
    alpha = recipes.multiply(recipes.repeat(read, p.weight.shape[0]), p.scales["w_scale2"])
    scales = {"weight_scale": p.scales["weight_scale"], "alpha": alpha}
    return Projection(Scheme.NVFP4_A4, p.weight, scales, read)


def _multiplier(model: Model, module: str, suffix: str) -> Recipe:
    """f32 []: a global scale, which multiplies."""
    stored = scalar(model, f"{module}.{suffix}")
    divides = model.table.dialect_of(module) is Dialect.COMPRESSED
    return recipes.reciprocal(stored) if divides else stored


def _int4(model: Model, module: str, scheme: Scheme) -> Projection:
    parts = projection_parts(model, module, scheme)
    return _share(model, module, Projection(scheme, parts.pop("weight"), parts))


def scalar(model: Model, name: str) -> Recipe:
    """f32 []: a stored scale of a whole tensor."""
    return recipes.reshape(recipes.cast(recipes.verified(model.whole(name), "whole_scale")), ())


def _per_row(scale: Recipe, rows: int) -> Recipe:
    """f32 [rows] from one scale for all, or from one for each row."""
    if math.prod(scale.shape) == 1 and rows != 1:
        return recipes.repeat(recipes.cast(recipes.verified(scale, "whole_scale")), rows)
    return recipes.reshape(recipes.cast(recipes.verified(scale, "part_scale")), (rows,))


_READERS: Mapping[Scheme, Callable[[Model, str], Projection]] = {
    Scheme.PLAIN: _plain,
    Scheme.FP8: _fp8,
    Scheme.FP8_CHANNEL: _fp8_channel,
    Scheme.FP8_BLOCK: _fp8_block,
    Scheme.NVFP4: _nvfp4,
    Scheme.NVFP4_A4: _nvfp4_a4,
}


def expert_operands(model: Model, experts: Experts) -> dict[str, Recipe]:
    """`grouped_moe`'s operands by name, in order; made once for a model.

    Raises CheckpointError when FP8 blocks of gate and up would not tile their concatenation.
    """
    if experts.name not in model.of_experts:
        model.of_experts[experts.name] = _expert_operands(model, experts)
    return model.of_experts[experts.name]


def _expert_operands(model: Model, experts: Experts) -> dict[str, Recipe]:
    scheme, inner = model.table[experts.name], experts.down.columns
    if model.layout.fused(experts.name):
        stacks = {"w13": experts.gate_up, "w2": experts.down}
        return _stacked(model, stacks, scheme)
    if scheme is Scheme.FP8_BLOCK and inner % 128:
        raise CheckpointError(
            f"{experts.name}: moe_intermediate_size is {inner}; with FP8 blocks it must be a "
            "multiple of 128"
        )
    rows = [_expert(model, each, scheme) for each in experts.each]
    out = {name: recipes.stack([row[name] for row in rows]) for name in rows[0]}
    if FORMATS[scheme.weights].static:
        gates, ups, downs = (
            [_input_scale(model, linear.module, scheme) for linear in of]
            for of in zip(*experts.each, strict=True)
        )
        # The input is quantised once for both; calibration gives both the same scale.
        out["x_scale"] = borrowed(f"{experts.name}.*.gate_proj", [gates, ups])
        out["h_scale"] = borrowed(f"{experts.name}.*.down_proj", [downs])
    return out


def _input_scale(model: Model, module: str, scheme: Scheme) -> Recipe:
    """f32 []: the scale of an expert's input, 0 if the file has none."""
    dialect = model.table.dialect_of(module)
    fp4 = scheme is Scheme.NVFP4_A4
    name = f"{module}.{SUFFIXES[dialect].fp4_input if fp4 else 'input_scale'}"
    if not model.has(name):
        return recipes.constant(0.0)
    found = recipes.verified(model.source(name), "input_scale")
    stored = recipes.reshape(recipes.cast(found), ())
    return recipes.reciprocal(stored) if fp4 and dialect is Dialect.COMPRESSED else stored


def _stacked(model: Model, stacks: Mapping[str, Tensor], scheme: Scheme) -> dict[str, Recipe]:
    """Operands of experts that the file stacks, plain or quantised here."""
    out: dict[str, Recipe] = {}
    for name, stacked in stacks.items():
        whole = model.whole(stacked.name)
        if scheme is Scheme.PLAIN:
            p = Projection(scheme, recipes.verified(whole, "finite"))
        elif whole.dtype in PLAIN:
            p = quantised(whole, scheme)
        else:
            scale = recipes.verified(model.whole(f"{stacked.name}{STACK_SCALE}"), "part_scale")
            scales = {"weight_scale": recipes.cast(scale)}
            p = Projection(scheme, recipes.verified(whole, "codes"), scales)
        p = _share(model, stacked.name, p)
        out |= _named(name, p)
    return out


def _named(weight: str, p: Projection) -> dict[str, Recipe]:
    """The weight and its scales as `grouped_moe` calls them."""
    names = FORMATS[p.scheme.weights].names_of(weight)
    return dict(zip(names, (p.weight, *p.scales.values()), strict=True))


def _expert(
    model: Model, linears: tuple[Linear, Linear, Linear], scheme: Scheme
) -> dict[str, Recipe]:
    """One expert's operands: gate and up rows joined as w13, down as w2."""
    # The op needs the weight's global scale apart from the input's, so W4A4 is read as W4A16.
    stored = Scheme.NVFP4 if scheme is Scheme.NVFP4_A4 else scheme
    gate, up, down = (projection(model, linear.module, stored) for linear in linears)
    parts = zip(_named("w13", gate).items(), _named("w13", up).values(), strict=True)
    out = {name: recipes.concat0([first, second]) for (name, first), second in parts}
    return out | _named("w2", down)
