"""`build_network`: a model as an unfused ONNX graph, weight recipes and states.

Knows the order: inputs, the nodes of the model's own network, outputs. Needs configs and the
tensor table only; no weight is read but quantised inputs' scales, where the files are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine import interface
from spark_engine.errors import OptionError
from spark_engine.interface import Limits, Precision
from spark_engine.models.families.registry import family_of
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.recipes import Weight
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import TensorSpec


@dataclass(frozen=True)
class Network:
    """One family's graph.

    Attributes:
        graph: opset 23 and domain `spark`; inputs are steps, tables, states and weights.
        weights: the recipe of each weight input, by name.
        states: (spec, unit) of each state; axis 0 counts units ("slot" or "page") and scratch.
    """

    graph: gs.Graph
    weights: Mapping[str, Weight]
    states: tuple[tuple[TensorSpec, str], ...]


def build_network(
    model: Model, family: str, limits: Limits, precision: Precision, debug: bool = False
) -> Network:
    """The graph of `family` ("decode" or "prefill").

    `debug` adds the outputs `layers.{i}.out` and `logits_all` f32 [tokens, V]. Raises
    OptionError when limits and model contradict each other, CheckpointError when experts are
    stored in a way that no op reads.
    """
    if limits.vocab != model.config.vocab:
        raise OptionError(
            f"the limits say a vocabulary of {limits.vocab}, the checkpoint {model.config.vocab}"
        )
    if family not in interface.families(limits.drafts):
        raise OptionError(
            f"family is {family!r}; expected one of {', '.join(interface.families(limits.drafts))}"
        )
    w = Writer(model, family, limits, precision)
    for spec in (*interface.steps(family, limits.drafts), *interface.tables(limits)):
        w.input(spec)
    for spec in interface.common_states(limits):
        w.state(spec, "slot")
    family_of(model.config).network(model.config).write(w, debug)
    for spec, _ in w.states:
        w.output(w[state_out(spec.name)])
    return Network(w.graph, w.weights, tuple(w.states))
