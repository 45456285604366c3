"""An op without declared results, for tests of other things."""

from collections.abc import Callable
from dataclasses import dataclass

from spark_engine.op import Attrs, Op
from spark_engine.tensors import TensorSpec

Specs = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class InferringOp(Op):
    """`results_of`: (attrs, input specs) -> output specs."""

    results_of: Callable[[Attrs, Specs], Specs] = lambda attrs, specs: specs

    def infer(self, attrs: Attrs, specs: Specs) -> Specs:
        return self.results_of(attrs, specs)
