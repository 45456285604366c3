"""Makes new weights from existing ones, as recipes of `models/weights/recipes.py`.

Knows names, recipes and graph inputs; reads only scalars from the checkpoint, to compare them. A
joined weight is named after its parts: `a.q.weight`, `a.k.weight` -> `a.q+k.weight`.
"""

from collections.abc import Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.edit import variable
from spark_engine.builder.graph.rewrite import RewriteContext
from spark_engine.errors import GraphError
from spark_engine.models.weights import recipes
from spark_engine.models.weights.recipes import Recipe

SMALL = 64  # the most elements of a weight that is evaluated for a comparison


def concat(context: RewriteContext, tensors: Sequence[gs.Tensor]) -> gs.Tensor:
    parts = [recipe_of(context, t) for t in tensors]
    return add_weight(context, joined_name([t.name for t in tensors]), recipes.concat0(parts))


def stack_scalars(context: RewriteContext, name: str, tensors: Sequence[gs.Tensor]) -> gs.Tensor:
    """f32 [] weights as one f32 [n]."""
    return add_weight(context, name, recipes.stack([recipe_of(context, t) for t in tensors]))


def append_expert(context: RewriteContext, stack: gs.Tensor, recipe: Recipe) -> gs.Tensor:
    """[E, ...] weights and one more [...] as [E+1, ...]."""
    joined = recipes.append_expert(recipe_of(context, stack), recipe)
    return add_weight(context, f"{stack.name}+shared", joined)


def without_input_scale(alpha: Recipe) -> Recipe:
    """The weight's global scale of alpha = input_scale · w_scale2, per row.

    Raises GraphError when the recipe is not such a product.
    """
    if alpha.op == "multiply":
        return alpha.args[1]
    if alpha.op not in ("concat0", "repeat", "reshape"):
        raise GraphError(f"recipe {alpha.op} is no product of input and weight scale")
    return replace(alpha, args=tuple(without_input_scale(a) for a in alpha.args))


def recipe_of(context: RewriteContext, tensor: gs.Tensor) -> Recipe:
    """The recipe of a weight. Raises GraphError when the tensor is none."""
    if tensor.name not in context.weights:
        raise GraphError(f"{tensor.name} is not a weight")
    return context.weights[tensor.name].recipe


def add_weight(context: RewriteContext, name: str, recipe: Recipe) -> gs.Tensor:
    """A new graph input for the recipe, or the existing one of that name."""
    if name in context.weights:
        if context.weights[name].recipe != recipe:
            raise GraphError(f"two different weights are named {name}")
        found = [t for t in context.graph.inputs if t.name == name]
        if found:
            return found[0]
    context.weights[name] = recipes.weight(name, recipe)
    tensor = variable(context.weights[name].spec)
    context.graph.inputs.append(tensor)
    return tensor


def joined_name(names: Sequence[str]) -> str:
    """`a.q.weight`, `a.k.weight` -> `a.q+k.weight`: joins the parts that differ by a plus."""
    parts = [name.split(".") for name in names]
    if len({len(p) for p in parts}) != 1:
        return "+".join(names)
    columns = (dict.fromkeys(column) for column in zip(*parts, strict=True))
    return ".".join("+".join(column) for column in columns)


def same_value(context: RewriteContext, a: gs.Tensor, b: gs.Tensor) -> bool:
    """Whether they are one tensor, or two small weights of equal value."""
    if a is b:
        return True
    if a.name not in context.weights or b.name not in context.weights:
        return False
    one, two = context.weights[a.name], context.weights[b.name]
    if one.recipe == two.recipe:
        return True
    if (one.spec.dtype, one.spec.shape) != (two.spec.dtype, two.spec.shape):
        return False
    small = one.spec.nbytes <= SMALL * one.spec.dtype.itemsize
    values = [w.evaluate(context.checkpoint).tobytes() for w in (one, two) if small]
    return small and values[0] == values[1]
