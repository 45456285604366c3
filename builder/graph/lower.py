"""The checkpoint's network as a graph of one family, and the facts that options depend on.

Knows how to ask `models`; attaches no op's body (`executors/ort.py` does, per bucket).
"""

from collections.abc import Iterable

from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.plan.drafts import HeadFacts
from spark_engine.builder.plan.options import RTX, BuildPlan, ModelFacts
from spark_engine.errors import OptionError
from spark_engine.interface import PREFILL
from spark_engine.models.build_network import build_network
from spark_engine.models.checkpoint.expected_tensors import VISION
from spark_engine.models.checkpoint.files import StoredTensor
from spark_engine.models.checkpoint.layout import HEAD
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import Linear, ValueKind, of_kind
from spark_engine.models.config.model_config import FULL, LINEAR
from spark_engine.models.draft_options import DraftOptions
from spark_engine.models.draft_vocabulary import listed
from spark_engine.models.weights.borrowed_scales import borrowed_note
from spark_engine.models.weights.operands import takes_fp8
from spark_engine.models.weights.recipes import rounded
from spark_engine.models.weights.stored_model import Model
from spark_engine.plugins.state.replay_ring import ring_width
from spark_engine.tensors import DType

MLP_ACTIVATIONS = ("auto", "bf16", "fp8")
NAMED = 3  # rounded matrices that a note lists


def lower(model: Model, plan: BuildPlan, family: str) -> FamilyGraph:
    """The unfused graph of `family`. Raises what `build_network` raises."""
    draft = plan.draft or DraftOptions()
    fp8 = fp8_mlps(plan) and family == PREFILL
    network = build_network(model, family, plan.limits, plan.precision, plan.debug, draft, fp8)
    network.graph.toposort()
    return FamilyGraph(family, network.graph, dict(network.weights), network.states)


def fp8_mlps(plan: BuildPlan) -> bool:
    """Whether the dense NVFP4 MLPs of prefill multiply in FP8. By default on a GPU, but not where
    prefill has to give decode's bits (`--invariant`)."""
    native = plan.gpu is not None and plan.target != RTX
    default = native and not plan.invariant
    return plan.mlp_activations == "fp8" or (plan.mlp_activations == "auto" and default)


def check_mlps(model: Model, plan: BuildPlan) -> None:
    """Raises OptionError for unknown --mlp-activations, and for fp8 where no MLP takes it."""
    if plan.mlp_activations not in MLP_ACTIVATIONS:
        known = " or ".join(MLP_ACTIVATIONS)
        raise OptionError(f"--mlp-activations {plan.mlp_activations} is not known: give {known}")
    fp8 = plan.mlp_activations == "fp8"
    if fp8 and plan.target == RTX:
        raise OptionError(f"--mlp-activations fp8: --target {RTX} has no such op; leave it out")
    if fp8 and not any(takes_fp8(model, module) for module in model.table.modules):
        raise OptionError(
            "--mlp-activations fp8: the checkpoint has no dense MLP in NVFP4 with inputs as they "
            "are (W4A16) and columns in multiples of 128; leave it out"
        )


def rounding_notes(families: Iterable[FamilyGraph]) -> tuple[str, ...]:
    """A note if matrices of the checkpoint are rounded to bf16."""
    weights = [w.recipe for graph in families for w in graph.weights.values()]
    sources = {r.source: r for recipe in weights for r in rounded(recipe)}
    if not sources:
        return ()
    kinds = "/".join(sorted({r.dtype.value for r in sources.values()}))
    named = ", ".join(sorted(sources)[:NAMED]) + (", …" if len(sources) > NAMED else "")
    return (
        f"{len(sources)} {kinds} matrices are rounded to bf16, which the target multiplies, each "
        f"number by 1/512 of itself at most; none was out of bf16's range: {named}",
    )


def scale_notes(model: Model, families: Iterable[FamilyGraph]) -> tuple[str, ...]:
    """A note if input scales of experts are replaced."""
    assert model.checkpoint is not None
    weights = (w.recipe for graph in families for w in graph.weights.values())
    return borrowed_note(weights, model.checkpoint)


def facts_of(model: Model) -> ModelFacts:
    config = model.config
    linear = config.layers.count(LINEAR)
    values = config.value_heads * config.value_dim
    channels = linear * config.conv_channels
    kv_width = 2 * config.kv_heads * config.head_dim
    assert model.checkpoint is not None
    of_tower = {e.name for e in model.expected.values() if e.part == VISION}
    tensors = model.checkpoint.tensors
    rest = [name for name in tensors if name not in of_tower]
    return ModelFacts(
        max_context=config.max_position,
        vocab=config.vocab,
        kv_token_width=config.layers.count(FULL) * kv_width,
        kv_dtype=DType.F8E4M3 if model.table.kv_fp8 else None,
        state_dtype=config.state_dtype,
        weight_bytes=_bytes_of(model, rest),
        wide_bytes=_bytes_of(model, [n for n in rest if _wide(tensors[n])]),
        state_width=linear * values * config.key_dim,
        conv_width=(config.conv_kernel - 1) * channels,
        record_width=linear * ring_width(**config.delta_heads) if linear else 0,
        conv_channels=channels,
        head=_head_facts(model, kv_width) if model.has_drafts else None,
        no_head=model.draft_note,
        vision=model.vision_note or model.vision or "",
        vision_bytes=_bytes_of(model, of_tower & tensors.keys()),
        hidden=config.hidden,
        experts=config.moe is not None,
    )


def _bytes_of(model: Model, names: Iterable[str]) -> int:
    """Bytes that one rank has of these tensors of the file."""
    assert model.checkpoint is not None
    tensors, expected = model.checkpoint.tensors, model.expected
    rows = ((n, expected[n].row if n in expected else None) for n in names)
    own = ((n, r.module if isinstance(r, Linear) else r.name if r else "") for n, r in rows)
    return int(sum(model.shards.share_of(row) * tensors[n].nbytes for n, row in own))


def _head_facts(model: Model, kv_width: int) -> HeadFacts:
    assert model.checkpoint is not None
    vocab, eos = model.config.vocab, model.config.eos_token_ids
    by_row = model.table[_logits_matrix(model)] is not Scheme.FP8_BLOCK
    ids = listed(vocab, model.checkpoint.path) if by_row else ()
    own, block = kv_width if model.has_head else 0, 0
    if model.drafter is not None:
        own, block = own + model.drafter.kv_token_width, model.drafter.block
    return HeadFacts(own, _row_bytes(model), _has_nvfp4_mlps(model), eos, ids, block)


def _logits_matrix(model: Model) -> str:
    """The module of the matrix that makes logits: the head, or the tied embedding."""
    (embedding,) = of_kind(model.rows, ValueKind.EMBEDDING)
    return embedding.module if model.config.tied else HEAD


def _row_bytes(model: Model) -> int:
    """Bytes of one id's row in the matrix that makes logits."""
    assert model.checkpoint is not None
    matrix = _logits_matrix(model)
    stored = (e.name for e in model.expected.values() if e.row.module == matrix)
    found = (model.checkpoint.tensors[n] for n in stored if n in model.checkpoint.tensors)
    return sum(t.nbytes for t in found if t.shape) // model.config.vocab


def _has_nvfp4_mlps(model: Model) -> bool:
    """True if the MLPs of the network's layers, without the draft head's, are NVFP4."""
    fp4 = (Scheme.NVFP4, Scheme.NVFP4_A4)
    return any(".mlp." in module and s in fp4 for module, s in model.table.modules.items())


def _wide(tensor: StoredTensor) -> bool:
    return tensor.dtype is DType.F32 and len(tensor.shape) > 1
