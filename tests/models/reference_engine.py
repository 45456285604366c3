"""Runs a model's graphs node by node, each by its op's reference, with states kept between runs.

An engine without a builder: no rule, no executor. Every state begins as NaN or wild. Knows the
graph's grammar (docs/graph.md).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from spark_engine import interface
from spark_engine.builder.graph.nodes import attrs_of
from spark_engine.check.engines.prompts import default_tables
from spark_engine.interface import STATE_OUT, Limits, Precision, tile_of
from spark_engine.models.build_network import Network, build_network
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.weights.stored_model import Model
from spark_engine.op import DOMAIN
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType

Array = NDArray[Any]
F32 = Precision(DType.F32, DType.F32, DType.F32)


class ReferenceEngine:
    """Networks by family, their weights, and memory."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        draft: DraftOptions = DraftOptions(),  # noqa: B008 - frozen
        precision: Precision = F32,
    ) -> None:
        assert model.checkpoint is not None
        self.limits = limits
        self.networks: dict[str, Network] = {}
        self.weights: dict[str, Array] = {}
        for family in interface.families(limits.drafts):
            network = build_network(model, family, limits, precision, True, draft)
            network.graph.toposort()
            self.networks[family] = network
            for name, weight in network.weights.items():
                if name not in self.weights:
                    self.weights[name] = weight.evaluate(model.checkpoint)
        self.reset()

    def reset(self) -> None:
        """States and tables as before the first run."""
        self.states = {
            spec.name: _wild(spec.dims, spec.dtype) for spec, _ in self.networks["decode"].states
        }
        self.tables = {n: np.array(t) for n, t in default_tables(self.limits).items()}

    def run(self, family: str, steps: Mapping[str, Array]) -> dict[str, Array]:
        """Every tensor of a launch by name; states are updated."""
        rows = len(steps["slots"])
        for spec in interface.steps(family, self.limits.drafts):
            dims = {"rows": rows, "tokens": rows * tile_of(family)}
            assert steps[spec.name].shape == spec.bind(dims).shape, spec.name
        values = {**self.weights, **self.tables, **self.states, **steps}
        for node in self.networks[family].graph.nodes:
            made = _run(node, [values[t.name] for t in node.inputs])
            for tensor, value in zip(node.outputs, made, strict=True):
                assert value.dtype == tensor.dtype, (node.name, value.dtype)
                values[tensor.name] = value
        for tensor in self.networks[family].graph.outputs:
            if tensor.name.removesuffix(STATE_OUT) in self.states:
                self.states[tensor.name.removesuffix(STATE_OUT)] = values[tensor.name]
        return values


def _wild(shape: tuple[int, ...], dtype: DType) -> Array:
    value = np.empty(shape, dtype.numpy)
    value[...] = 0x7F if value.dtype.kind in "iu" else np.nan
    return value


def _run(node: gs.Node, inputs: list[Array]) -> list[Array]:
    if node.domain != DOMAIN:
        if node.op == "Add":
            return [np.asarray(inputs[0] + inputs[1])]
        assert node.op == "Concat" and node.attrs == {"axis": 1}
        return [np.concatenate(inputs, axis=1)]
    op = REGISTRY[node.op]
    return list(op.reference(attrs_of(node, op), tuple(inputs)))
