"""Whether a GPU runs the vision tower, and what the tower takes.

Knows how to lower the tower's graph and to ask its ops' tactics; decides nothing.
"""

from collections.abc import Iterable

from spark_engine.builder.graph.lower import lower
from spark_engine.builder.graph.nodes import attrs_of, spec_of
from spark_engine.builder.graph.packing import pack
from spark_engine.builder.plan.options import BuildPlan
from spark_engine.manifest import IMAGE, Manifest, bytes_of
from spark_engine.models.checkpoint.layout import VISUAL
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import TensorSpec
from spark_engine.vision import VISION

MIB = 1 << 20


def refusal(model: Model, plan: BuildPlan) -> str:
    """Why the plan's GPU does not run a node of the tower; "" if it runs all of them."""
    assert plan.gpu is not None
    graph = lower(model, plan, VISION)
    pack(graph, REGISTRY)
    for size in plan.buckets.vision:
        for node in graph.graph.nodes:
            op, specs = REGISTRY[node.op], tuple(spec_of(t).bind(size.dims) for t in node.inputs)
            asked = (t.refuse(attrs_of(node, op), specs, plan.gpu) for t in op.cuda.tactics)
            reasons = [*asked] or ["it has none for any GPU"]
            if None not in reasons:
                return f"no kernel of {plan.gpu.name} computes {op.name}: {reasons[0]}"
    return ""


def tower_note(manifest: Manifest, weights: Iterable[TensorSpec]) -> tuple[str, ...]:
    """What the tower of an engine takes; nothing without one."""
    buckets = [b for b in manifest.buckets if b.family == VISION]
    if manifest.vision is None:
        return ()
    stored = sum(spec.nbytes for spec in weights if spec.name.startswith(VISUAL))
    work = max(b.arena_bytes + b.zeroed_bytes for b in buckets)
    rows = bytes_of(manifest.states, IMAGE) * (manifest.limits.image_rows + 1)
    return (
        f"images of up to {manifest.vision.most_pixels} pixels are read: the vision tower has "
        f"{stored / MIB:.1f} MiB of weights, its largest bucket {work / MIB:.1f} MiB of workspace, "
        f"its results {rows / MIB:.1f} MiB; --no-vision builds without it",
    )
