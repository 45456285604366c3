"""Writes nodes, weights and states into a graphsurgeon graph, typed by the ops' own inference.

Knows the graph's conventions (docs/graph.md); knows no block and no weight format.
Use one writer per graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import onnx_graphsurgeon as gs

from spark_engine.errors import GraphError
from spark_engine.interface import STATE_OUT, Limits, Precision, tile_of
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.weights import recipes
from spark_engine.models.weights.operands import Projection, projection, takes_fp8, unquantised
from spark_engine.models.weights.recipes import Recipe, Weight
from spark_engine.models.weights.shards import by_rank
from spark_engine.models.weights.stored_model import Model
from spark_engine.op import DOMAIN
from spark_engine.plugins import registry
from spark_engine.plugins.formats.format import Inputs
from spark_engine.plugins.formats.registry import FORMATS
from spark_engine.tensors import DType, TensorSpec
from spark_engine.vision import IMAGE_ROWS

OPSET = 23


class Writer:
    """The graph of one family while it is written.

    Attributes:
        weights: every weight by its graph input's name, in order of first use.
        states: (spec, unit) of every state, unit "slot", "page" or "sequence".
        tile, rows: tokens of a row, and the variables of its slots, starts and counts.
    """

    def __init__(
        self,
        model: Model,
        family: str,
        limits: Limits,
        precision: Precision,
        fp8_mlps: bool = False,
    ) -> None:
        self.model, self.config = model, model.config
        self.family, self.tile = family, tile_of(family)
        self.limits, self.precision = limits, precision
        self.graph = gs.Graph(name=family, opset=OPSET)
        self.weights: dict[str, Weight] = {}
        self.states: list[tuple[TensorSpec, str]] = []
        self._tensors: dict[str, gs.Variable] = {}
        self._rows: Sequence[gs.Variable] = ()
        self._scope = ""
        self._fp8_mlps = fp8_mlps
        self._quantised: dict[object, dict[str, gs.Variable]] = {}

    @property
    def activation(self) -> str:
        """The `dtype` attribute of ops that write activations."""
        return self.precision.activation.value

    @property
    def rows(self) -> list[gs.Variable]:
        """slots, starts, counts, which sequence ops take in this order."""
        return [*self._rows] or [self[name] for name in ("slots", "starts", "counts")]

    @property
    def images(self) -> list[gs.Variable]:
        """The rows of images, in graphs that read them."""
        return [self[IMAGE_ROWS]] if self.has(IMAGE_ROWS) else []

    @contextmanager
    def over(
        self, rows: Sequence[gs.Variable], tile: int | None = None, scope: str = ""
    ) -> Iterator[None]:
        """A writer for other rows than the launch's; `scope` prefixes the nodes' names."""
        kept = self._rows, self.tile, self._scope
        self._rows, self.tile = rows, self.tile if tile is None else tile
        self._scope = scope
        try:
            yield
        finally:
            self._rows, self.tile, self._scope = kept

    def __getitem__(self, name: str) -> gs.Variable:
        """The tensor of that name. Raises GraphError when nothing has written it yet."""
        if name not in self._tensors:
            raise GraphError(f"the {self.family} graph has no tensor {name} yet")
        return self._tensors[name]

    def has(self, name: str) -> bool:
        """True if something has written the tensor."""
        return name in self._tensors

    def input(self, spec: TensorSpec) -> gs.Variable:
        """A new graph input."""
        tensor = self._new(spec)
        self.graph.inputs.append(tensor)
        return tensor

    def state(self, spec: TensorSpec, unit: str) -> gs.Variable:
        """A new state: a graph input. If an op updates it, the last update is named `.out`."""
        self.states.append((spec, unit))
        return self.input(spec)

    def output(self, tensor: gs.Variable) -> None:
        """Marks a graph output."""
        self.graph.outputs.append(tensor)

    def weight(self, name: str, recipe: Recipe) -> gs.Variable:
        """The graph input of a weight; the same name must mean the same recipe."""
        known = self.weights.get(name)
        if known is None:
            self.weights[name] = recipes.weight(name, recipe)
            return self.input(self.weights[name].spec)
        if known.recipe != recipe:
            raise GraphError(f"weight {name} has two recipes")
        return self[name]

    def matrix(self, name: str, recipe: Recipe) -> gs.Variable:
        """An unquantised weight, which is multiplied with activations or gives embeddings.

        With bf16 activations the matrix is bf16 too: kernels multiply equal dtypes.
        """
        narrow = self.precision.activation is DType.BF16
        return self.weight(name, recipes.to_bf16(recipe) if narrow else recipe)

    def stored_matrix(self, tensor: Tensor) -> gs.Variable:
        """A matrix that ops have unquantised, under its own name."""
        return self.matrix(tensor.name, unquantised(self.model, tensor))

    def op(
        self, op: str, inputs: Sequence[gs.Variable], outputs: Sequence[str], **attrs: Any
    ) -> list[gs.Variable]:
        """One `spark` node. Raises GraphError when the op refuses its operands.

        The scope prefixes the outputs' names, except that of a state's last update.
        """
        specs = [TensorSpec(t.name, DType.of(t.dtype), tuple(t.shape)) for t in inputs]
        found = registry.get(op)
        defaults = {k: v for k, v in found.attrs.items() if v is not None}
        typed = found.infer({**defaults, **attrs}, tuple(specs))
        if len(typed) != len(outputs):
            raise GraphError(f"{op} gives {len(typed)} outputs, not {len(outputs)}")
        made = [
            self._new(TensorSpec(self._scoped(name), spec.dtype, spec.shape))
            for name, spec in zip(outputs, typed, strict=True)
        ]
        self._node(op, inputs, made, attrs, DOMAIN)
        return made

    def one(self, op: str, inputs: Sequence[gs.Variable], output: str, **attrs: Any) -> gs.Variable:
        """`op` with a single output."""
        return self.op(op, inputs, [output], **attrs)[0]

    def add(self, a: gs.Variable, b: gs.Variable, output: str) -> gs.Variable:
        """The residual addition, a standard Add."""
        out = self._new(TensorSpec(self._scoped(output), DType.of(a.dtype), tuple(a.shape)))
        self._node("Add", [a, b], [out], {}, None)
        return out

    def summed(self, x: gs.Variable) -> gs.Variable:
        """The sum over all ranks; each has a part x [tokens, H]."""
        return self._collective("all_reduce", x, f"{x.name.removeprefix(self._scope)}.sum")

    def gathered(self, x: gs.Variable, output: str) -> gs.Variable:
        """The columns of x [rows, V/ranks] of all ranks, concatenated under this name."""
        return self._collective("gather_logits", x, output)

    def first_id(self) -> list[gs.Variable]:
        """i32 [1], the first id of this rank's logits; nothing if each rank has all."""
        ranks = self.model.shards.samplers
        if ranks == 1:
            return []
        firsts = [rank * self.config.vocab // ranks for rank in range(ranks)]
        return [self.weight("sampling.first_id", by_rank(firsts))]

    def _collective(self, op: str, x: gs.Variable, output: str) -> gs.Variable:
        shards = self.model.shards
        attrs = {"ranks": shards.ranks, **({"across": 1} if shards.across else {})}
        return x if shards.ranks == 1 else self.one(op, [x], output, **attrs)

    def concat(self, parts: Sequence[gs.Variable], output: str) -> gs.Variable:
        """Columns of unmerged projections side by side, a standard Concat."""
        width = sum(p.shape[1] for p in parts)
        name = self._scoped(output)
        out = self._new(TensorSpec(name, DType.of(parts[0].dtype), (parts[0].shape[0], width)))
        self._node("Concat", parts, [out], {"axis": 1}, None)
        return out

    def project(
        self, x: gs.Variable, linear: Linear, dtype: str | None = None, output: str = ""
    ) -> gs.Variable:
        """y = x · Wᵀ by the projection's scheme, with x quantised first if the scheme requires it.

        y is named after the module unless `output` names it.
        """
        p = projection(self.model, linear.module, self.model.table[linear.table_key])
        p = replace(p, fp8_input=self._fp8_mlps and takes_fp8(self.model, linear.module))
        return self.multiply(x, linear.module, p, dtype, output)

    def multiply(
        self, x: gs.Variable, module: str, p: Projection, dtype: str | None = None, output: str = ""
    ) -> gs.Variable:
        """`project` with given recipes instead of those of a module of the checkpoint."""
        output, weight = output or f"{module}.y", f"{module}.weight"
        if p.scheme is Scheme.PLAIN:
            return self.matmul(x, self.matrix(weight, p.weight), output, dtype)
        form = FORMATS[p.weights]
        scales = [self.weight(f"{module}.{name}", r) for name, r in p.scales.items()]
        given = self._quantise(x, module, p)
        stored = (self.weight(weight, p.weight), *scales)
        given |= zip((o.name for o in form.stored), stored, strict=True)
        operands = [given[operand.name] for operand in form.operands]
        attrs = {"dtype": dtype or self.activation, **form.attrs}
        return self.one(form.op, operands, output, **attrs)

    def matmul(
        self, x: gs.Variable, matrix: gs.Variable, output: str, dtype: str | None = None
    ) -> gs.Variable:
        """`linear` over an unquantised matrix."""
        return self.one("linear", [x, matrix], output, dtype=dtype or self.activation)

    def _quantise(self, x: gs.Variable, module: str, p: Projection) -> dict[str, gs.Variable]:
        """The operands that x becomes in the scheme's form; quantised once per scale value."""
        inputs = FORMATS[p.weights].inputs
        if inputs is None:
            return {"x": x}
        value = None if p.input_scale is None else self.model.key_of(p.input_scale)
        key = (x.name, p.weights, value)
        if key not in self._quantised:
            self._quantised[key] = self._quantiser(x, module, p, inputs)
        return dict(self._quantised[key])

    def _quantiser(
        self, x: gs.Variable, module: str, p: Projection, inputs: Inputs
    ) -> dict[str, gs.Variable]:
        base = f"{x.name.removeprefix(self._scope)}.{module.rsplit('.', 1)[-1]}"
        results = [f"{base}.{part}" for part, _ in zip("qs", inputs.makes, strict=False)]
        if p.input_scale is None:
            made = self.op(inputs.op, [x], results, **inputs.attrs)
            return dict(zip(inputs.makes, made, strict=True))
        scale = self.weight(f"{module}.input_scale", p.input_scale)
        made = self.op(inputs.op, [x, scale], results)
        return {inputs.scale: scale, **dict(zip(inputs.makes, made, strict=True))}

    def _scoped(self, name: str) -> str:
        """A node's output name with the scope; a state's last update keeps its own name."""
        last = any(name == state_out(spec.name) for spec, _ in self.states)
        return name if last else self._scope + name

    def _new(self, spec: TensorSpec) -> gs.Variable:
        if spec.name in self._tensors:
            raise GraphError(f"two tensors are named {spec.name}")
        self._tensors[spec.name] = gs.Variable(spec.name, spec.dtype.numpy, list(spec.shape))
        return self._tensors[spec.name]

    def _node(
        self,
        op: str,
        inputs: Sequence[gs.Variable],
        outputs: Sequence[gs.Variable],
        attrs: dict[str, Any],
        domain: str | None,
    ) -> None:
        node = gs.Node(op, outputs[0].name, dict(attrs), list(inputs), list(outputs), domain=domain)
        self.graph.nodes.append(node)


def state_out(name: str) -> str:
    """The name of a state's updated value."""
    return name + STATE_OUT
