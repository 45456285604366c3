"""`build_network`: a model as an unfused ONNX graph, weight recipes and states.

Knows the order: inputs, the nodes of the model's own network, outputs. Needs configs and the tensor
table only; of the weights only scales of quantised inputs are read, if the files are present.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine import interface
from spark_engine.errors import OptionError
from spark_engine.interface import Limits, Precision
from spark_engine.manifest import IMAGE
from spark_engine.models.config.model_config import LINEAR
from spark_engine.models.draft_options import DRAFT_DTYPES, DraftOptions
from spark_engine.models.drafter import network as block_drafter
from spark_engine.models.families.registry import family_of
from spark_engine.models.graph.draft_round import DraftRound
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.draft_weights import with_draft_dtype
from spark_engine.models.weights.recipes import Weight
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import TensorSpec
from spark_engine.vision import IMAGE_ROWS, VISION

ROUND_STATES = ("positions", "drafts")  # prefill neither reads nor updates them


@dataclass(frozen=True)
class Network:
    """One family's graph."""

    graph: gs.Graph  # opset 23 and domain `spark`; inputs are steps, tables, states and weights
    weights: Mapping[str, Weight]  # the recipe of each weight input, by name
    # (spec, unit) of each state that it reads or updates; axis 0 counts units ("slot", "page",
    # "sequence" or "image") and scratch. A state without output `.out` is only read.
    states: tuple[tuple[TensorSpec, str], ...]


def build_network(
    model: Model,
    family: str,
    limits: Limits,
    precision: Precision,
    debug: bool = False,
    draft: DraftOptions = DraftOptions(),  # noqa: B008 - frozen
    fp8_mlps: bool = False,
) -> Network:
    """The graph of `family`; `limits.drafts` decides whether the draft head is in it, if the model
    has one.

    `fp8_mlps`: inputs of dense NVFP4 MLPs are FP8. `debug` adds the outputs that docs/graph.md
    lists for debug builds. Raises OptionError when limits, draft options and model contradict each
    other, CheckpointError when experts are stored in a form that no op reads.
    """
    if limits.vocab != model.config.vocab:
        raise OptionError(
            f"the limits say a vocabulary of {limits.vocab}, the checkpoint {model.config.vocab}"
        )
    if family not in (known := interface.families(limits.drafts, limits.image_rows)):
        raise OptionError(f"family is {family!r}; expected one of {', '.join(known)}")
    if family == VISION:
        return _tower(model, limits, precision)
    if limits.drafts:
        _check_drafts(model, limits, draft)
    model = with_draft_dtype(model, draft.dtype)
    model.shards.check(model.table)
    w = Writer(model, family, limits, precision, fp8_mlps)
    for spec in (*interface.steps(family, limits.drafts), *interface.tables(limits)):
        w.input(spec)
    for spec in interface.common_states(limits):
        if family != interface.PREFILL or spec.name not in ROUND_STATES:
            w.state(spec, "slot")
    if family == interface.PREFILL and limits.image_rows:
        rows = interface.image_state(limits, model.config.hidden, precision.activation)
        w.state(rows, IMAGE)
    _write(model, w, debug, draft)
    for spec, _ in w.states:
        if w.has(state_out(spec.name)):
            w.output(w[state_out(spec.name)])
    return Network(w.graph, w.weights, tuple(w.states))


def _tower(model: Model, limits: Limits, precision: Precision) -> Network:
    """The vision tower's graph: it has no tables, and no outputs but its state."""
    tower = family_of(model.config).tower(model.config)
    if isinstance(tower, str) or model.vision is None:
        raise OptionError(f"{limits.image_rows} rows of images are asked for: {model.vision_note}")
    w = Writer(model, VISION, limits, precision)
    for spec in interface.steps(VISION):
        w.input(spec)
    tower.write(w, model.vision)
    w.output(w[state_out(IMAGE_ROWS)])
    return Network(w.graph, w.weights, tuple(w.states))


def _write(model: Model, w: Writer, debug: bool, draft: DraftOptions) -> None:
    """Writes all nodes, and all outputs except the states'."""
    family = family_of(model.config)
    network = family.network(model.config)
    if not w.limits.drafts:
        network.write(w, debug)
        return
    head = family.draft_head(model.config) if model.has_head else None
    assert not isinstance(head, str)
    drafter = None if model.drafter is None else block_drafter(model.drafter)
    round_ = DraftRound(network, head, drafter, draft.shortlist)
    if w.family == interface.PREFILL:
        round_.write_prefill(w, debug)
    else:
        round_.write(w, debug)


def _check_drafts(model: Model, limits: Limits, draft: DraftOptions) -> None:
    if not (model.has_drafts or limits.suffix):
        raise OptionError(f"{limits.drafts} drafts are asked for, but {model.draft_note}")
    if not limits.gdn_ring and LINEAR in model.config.layers:
        raise OptionError("drafts need a replay ring: a round that is rejected leaves no state")
    if draft.dtype not in DRAFT_DTYPES:
        raise OptionError(f"draft dtype {draft.dtype!r}: choose from {', '.join(DRAFT_DTYPES)}")
    ids = draft.shortlist
    if ids is not None and not (ids and 0 <= min(ids) and max(ids) < model.config.vocab):
        raise OptionError(
            f"the draft shortlist needs ids from 0 to {model.config.vocab - 1}, one at least"
        )
    if ids is not None and list(ids) != sorted(set(ids)):
        raise OptionError("the ids of the draft shortlist must ascend, each of them once")
