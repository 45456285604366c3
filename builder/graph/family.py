"""`FamilyGraph`, the object that every stage of a build works on: a family's graph, weights,
states.

Knows no stage. Rules and packing change the graph and the weights together, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_engine.models.weights.recipes import Weight
from spark_engine.tensors import TensorSpec

if TYPE_CHECKING:  # reading a graph needs no ONNX library
    import onnx_graphsurgeon as gs


@dataclass(frozen=True)
class FamilyGraph:
    """A network of one family, from lowering to emission.

    `weights` are recipes by input name; `states` are (spec, unit) with unit "slot", "page" or
    "sequence".
    """

    family: str
    graph: gs.Graph
    weights: dict[str, Weight]
    states: tuple[tuple[TensorSpec, str], ...]

    @property
    def state_names(self) -> tuple[str, ...]:
        """In their order."""
        return tuple(spec.name for spec, _ in self.states)
