"""A block drafter's folder: its network with the names of its tensors, opened next to a model.

The package's names are those of the file behind "dflash.". What a drafter shares with its target,
embedding and head, is the target's. Knows no graph.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from spark_engine.errors import CheckpointError
from spark_engine.interface import BLOCK_DRAFTER
from spark_engine.models.checkpoint.expected_tensors import MTP, Expected, misfits
from spark_engine.models.checkpoint.files import Checkpoint, open_checkpoint, read_json
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import (
    PLAIN,
    Linear,
    Row,
    Tensor,
    ValueKind,
    tensors_of,
)
from spark_engine.models.config.drafter_config import DrafterConfig, check_target, read_drafter
from spark_engine.models.graph.block_drafter import (
    BlockAttention,
    BlockConv,
    BlockDrafter,
    BlockLayer,
)
from spark_engine.models.graph.mlp import Swiglu
from spark_engine.models.synthetic import is_synthetic, open_synthetic
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import Array, TensorSpec

CONFIG = "config.json"


@dataclass(frozen=True)
class _Joined(Checkpoint):
    """The target's checkpoint with the drafter's tensors behind BLOCK_DRAFTER."""

    target: Checkpoint
    drafter: Checkpoint

    def read(self, name: str) -> Array:
        own = name.startswith(BLOCK_DRAFTER)
        return (self.drafter if own else self.target).read(name.removeprefix(BLOCK_DRAFTER))


def network(c: DrafterConfig) -> BlockDrafter:
    """The drafter's blocks."""
    name, taps = BLOCK_DRAFTER.removesuffix("."), len(c.taps)
    books = [
        Tensor(f"{name}.candidate_selector.{end}_codebook", (c.vocab, c.rank))
        for end in ("predecessor", "successor")
    ]
    return BlockDrafter(
        name,
        c,
        Linear(f"{name}.fc", c.hidden, taps * c.hidden),
        _norm(f"{name}.hidden_norm", c.hidden),
        tuple(_layer(c, f"{name}.layers.{i}") for i in range(c.layers)),
        _norm(f"{name}.norm", c.hidden),
        Tensor(f"{name}.candidate_selector.hidden_projection.weight", (c.rank, c.hidden)),
        *books,
    )


def _layer(c: DrafterConfig, name: str) -> BlockLayer:
    own, q, kv = f"{name}.self_attn", c.heads * c.head_dim, c.kv_heads * c.head_dim
    sizes = {"q": q, "k": kv, "v": kv}
    gate, up = (Linear(f"{name}.mlp.{n}_proj", c.intermediate, c.hidden) for n in ("gate", "up"))
    mixer = BlockAttention(
        own,
        config=c,
        **{n: Linear(f"{own}.{n}_proj", rows, c.hidden) for n, rows in sizes.items()},
        o=Linear(f"{own}.o_proj", c.hidden, q),
        q_norm=_norm(f"{own}.q_norm", c.head_dim),
        k_norm=_norm(f"{own}.k_norm", c.head_dim),
    )
    return BlockLayer(
        name,
        _norm(f"{name}.input_layernorm", c.hidden),
        mixer,
        _conv(c, f"{name}.attention_conv"),
        _norm(f"{name}.post_attention_layernorm", c.hidden),
        Swiglu(f"{name}.mlp", gate, up, Linear(f"{name}.mlp.down_proj", c.hidden, c.intermediate)),
        _conv(c, f"{name}.mlp_conv"),
    )


def _conv(c: DrafterConfig, name: str) -> BlockConv:
    rows = 4 * c.hidden // c.group
    projection = Tensor(f"{name}.kernel_projection.weight", (rows, c.hidden))
    return BlockConv(name, Tensor(f"{name}.base_kernel", (2, 2, c.hidden)), projection)


def _norm(module: str, size: int) -> Tensor:
    return Tensor(f"{module}.weight", (size,), ValueKind.NORM)


def with_drafter(model: Model, folder: Path) -> Model:
    """The model with the drafter in `folder`, next to its draft head if it has one. Each of several
    ranks has all of it.

    Raises CheckpointError for a folder that holds no drafter, or one of another model.
    """
    assert model.checkpoint is not None
    config = read_drafter(read_json(folder / CONFIG, required=True))
    name = read_json(model.checkpoint.path / CONFIG, required=False).get("_name_or_path")
    check_target(config, model.config, str(name or ""))
    rows = [*tensors_of(network(config))]
    expected = {e.name: e for e in map(_expected, rows)}
    if is_synthetic(folder):
        opened: Checkpoint = open_synthetic(folder, expected, expected.values())
    else:
        opened = open_checkpoint(folder)
    _check(expected, opened)
    own = {
        BLOCK_DRAFTER + t.name: replace(t, name=BLOCK_DRAFTER + t.name)
        for t in opened.tensors.values()
    }
    whole = MappingProxyType({**model.checkpoint.tensors, **own})
    joined = _Joined(
        model.checkpoint.path, whole, model.checkpoint.maps, model.checkpoint, opened,
        notes=(*model.checkpoint.notes, *opened.notes),
    )  # fmt: skip
    found = {n: TensorSpec(n, t.dtype, t.shape) for n, t in own.items()}
    drafts = {row.module: Scheme.PLAIN for row in rows if isinstance(row, Linear)}
    named = [replace(e, name=BLOCK_DRAFTER + e.name) for e in expected.values()]
    return replace(
        model,
        table=replace(model.table, drafts=MappingProxyType({**model.table.drafts, **drafts})),
        expected={**model.expected, **{e.name: e for e in named}},
        tensors=MappingProxyType({**model.tensors, **found}),
        checkpoint=joined,
        drafter=config,
    )


def _expected(row: Row) -> Expected:
    name = f"{row.module}.weight" if isinstance(row, Linear) else row.name
    shape = (row.rows, row.columns) if isinstance(row, Linear) else row.shape
    return Expected(name.removeprefix(BLOCK_DRAFTER), PLAIN, (shape,), row, part=MTP)


def _check(expected: dict[str, Expected], opened: Checkpoint) -> None:
    """Raises CheckpointError for a tensor that is missing, unknown, quantised or of another
    shape."""
    faults = misfits(expected, opened.tensors, MTP)
    faults += [f"{n} is no tensor of a drafter" for n in opened.tensors if n not in expected]
    if faults:
        more = f", and {len(faults) - 1} more faults" if len(faults) > 1 else ""
        raise CheckpointError(f"{faults[0]}{more}; give the folder as it was published")
