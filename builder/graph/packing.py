"""Weights laid out as the CUDA kernels read them: one more recipe, and another graph input.

Knows `Op.cuda.packs` and no single op. A packed weight is named after the original and the op
(`layers.0.mlp.down_proj.weight:nvfp4_linear`): a tied head's weight may be needed in both layouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spark_engine.builder.graph.edit import variable
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.nodes import Ops, attrs_of, spec_of
from spark_engine.errors import GraphError
from spark_engine.kernel import Pack
from spark_engine.models.weights.recipes import Weight, transform
from spark_engine.op import DOMAIN, Attr, Op
from spark_engine.tensors import Array, TensorSpec


@dataclass(frozen=True)
class Packing:
    """One pack of one op as a function that compares equal to another of the same pack.

    `attrs`: those of the node that the pack reads: nodes that differ in others share the weight.
    """

    op: Op
    operand: str
    attrs: tuple[tuple[str, Attr], ...]

    @classmethod
    def of(cls, op: Op, operand: str, attrs: Mapping[str, Attr]) -> "Packing":
        """That of an operand of a node with these attributes."""
        return cls(op, operand, tuple((name, attrs[name]) for name in op.cuda.packs[operand].attrs))

    def __call__(self, array: Array) -> Array:
        return self.pack.apply(dict(self.attrs), array)

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """The packed spec, named."""
        packed = self.pack.infer(dict(self.attrs), spec)
        return replace(packed, name=f"{spec.name}{self.suffix}")

    @property
    def suffix(self) -> str:
        """What the packed weight's name has behind the original's."""
        return f":{self.pack.op or self.op.name}"

    @property
    def pack(self) -> Pack:
        return self.op.cuda.packs[self.operand]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packing) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self.suffix, self.operand, self.attrs


def pack(family: FamilyGraph, ops: Ops) -> None:
    """Gives each node of an op with packs its packed weights; removes weights without readers.

    Raises GraphError when a packed operand is no weight.
    """
    graph = family.graph
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    for node in graph.nodes:
        op = ops[node.op] if node.domain == DOMAIN else None
        attrs = attrs_of(node, op) if op is not None else {}
        names = op.names(attrs, len(node.inputs)) if op is not None else []
        for i, operand in enumerate(names):
            if op is None or operand not in op.cuda.packs:
                continue
            original = node.inputs[i]
            if original.name not in family.weights:
                raise GraphError(f"{node.name}: packed operand {original.name} is no weight")
            packing = Packing.of(op, operand, attrs)
            weight = family.weights[original.name]
            spec = packing.spec(spec_of(original))
            if spec.name not in inputs:
                inputs[spec.name] = variable(spec)
                graph.inputs.append(inputs[spec.name])
                family.weights[spec.name] = Weight(spec, transform(weight.recipe, spec, packing))
            node.inputs[i] = inputs[spec.name]
    unread = {t.name for t in graph.inputs if t.name in family.weights and not t.outputs}
    graph.inputs = [t for t in graph.inputs if t.name not in unread]
    for name in unread:
        del family.weights[name]
