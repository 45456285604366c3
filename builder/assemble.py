"""Assembles the manifest from what the stages of a build produced.

Knows which stage gives which key; decides nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

from spark_engine import interface, manifest
from spark_engine.builder.fingerprint import producer
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.lower import fp8_mlps
from spark_engine.builder.graph.rewrite import Rewritten
from spark_engine.builder.plan.options import BuildPlan
from spark_engine.errors import GraphError
from spark_engine.interface import DECODE
from spark_engine.models.checkpoint.expected_tensors import MTP
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.weights.operands import takes_fp8
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.formats.nvfp4 import W4A8
from spark_engine.tensors import TensorSpec
from spark_engine.vision import VISION
from spark_engine.weights_file import WeightLayout


def weight_specs(families: Sequence[FamilyGraph]) -> list[TensorSpec]:
    """The distinct weights of all families, sorted by name.

    Raises GraphError when two families make different weights of one name.
    """
    found = dict(families[0].weights)
    for family in families[1:]:
        for name, weight in family.weights.items():
            if found.setdefault(name, weight) != weight:
                raise GraphError(f"weight {name} differs between families")
    return [found[name].spec for name in sorted(found)]


def make_manifest(
    name: str,
    model: Model,
    plan: BuildPlan,
    graphs: Mapping[str, FamilyGraph],
    rewritten: Mapping[str, Rewritten],
    buckets: Sequence[manifest.Bucket],
    layout: WeightLayout,
    fingerprint: manifest.Fingerprint,
    executor: str,
    tactics: Sequence[manifest.Json],
) -> manifest.Manifest:
    """The manifest without `files`, which are known only after all of them are written."""
    families = (graphs[name].states for name in (DECODE, VISION) if name in graphs)
    states = tuple(manifest.StateInfo(spec, unit) for spec, unit in chain(*families))
    tables, built = interface.tables(plan.limits), {MTP: plan.draft, VISION: plan.vision}
    return manifest.Manifest(
        name=name,
        producer=producer(plan.target),
        target=plan.target,
        card=plan.gpu.card.name if plan.gpu else "",
        executor=executor,
        model=_model_info(model),
        limits=plan.limits,
        dtypes=plan.precision,
        states=states,
        tables=tables,
        buckets=tuple(buckets),
        memory=manifest.Memory.of(layout.total, states, tables, buckets),
        quantisation=quantisation(model, plan.draft, fp8_mlps(plan)),
        fusions={family: done.counts for family, done in rewritten.items()},
        refusals=_refusals(rewritten),
        tactics=tuple(tactics),
        ignored={part: n for part, n in model.ignored.items() if not built.get(part)},
        generation=dict(model.generation),
        eos_token_ids=model.config.eos_token_ids,
        fingerprint=fingerprint,
        files={},
        rope=str(model.config.rope),
        invariant=plan.invariant,
        ranks=plan.ranks,
        shares=model.shards.shares,
        vision=plan.vision,
    )


def quantisation(
    model: Model, draft: DraftOptions | None = None, fp8_mlps: bool = False
) -> tuple[manifest.Quantised, ...]:
    """How each projection is stored and multiplied, with the draft head's, and how many checkpoint
    tensors it has."""
    rows = []
    owned = model.tensors_by_module()
    schemes = {**model.table.modules, **(model.table.drafts if draft else {})}
    for module, scheme in schemes.items():
        stored = scheme.value if scheme is not Scheme.PLAIN else model.config.dtype.value
        stored = W4A8.name if fp8_mlps and takes_fp8(model, module) else stored
        rows.append(manifest.Quantised(module, stored, owned[module]))
    return tuple(rows)


def _model_info(model: Model) -> manifest.ModelInfo:
    config = model.config
    return manifest.ModelInfo(
        model_type=config.model_type,
        layers=len(config.layers),
        hidden=config.hidden,
        vocab=config.vocab,
        parameters=model.parameters,
    )


def _refusals(rewritten: Mapping[str, Rewritten]) -> tuple[manifest.Refusal, ...]:
    found = (r for done in rewritten.values() for r in done.refusals)
    return tuple(dict.fromkeys(found))
