"""One rank's share of a model: a local configuration, and parts of the stored tensors.

The tensor list defines how ranks share a tensor (`Split`). This module makes recipes of it: rank
0's when the graph is written, and those of the others by `of_rank`, so that all ranks share one
graph. Shapes are equal on every rank. Every rank has the scales of whole tensors; blocks of FP8 and
groups of NVFP4 are never cut. Knows no graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from spark_engine.errors import GraphError, OptionError
from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable
from spark_engine.models.checkpoint.tensor_list import Linear, Row, Split
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.weights.recipes import Recipe, constant, part
from spark_engine.plugins.formats.numpy_codecs import FP8_BLOCK, NVFP4_BLOCK
from spark_engine.plugins.formats.weight_packing import INT4_GROUP
from spark_engine.tensors import Array, DType

MOST_RANKS = 8
TILE = 64  # columns and rows of a matrix that kernels read together
FP4 = (Scheme.NVFP4, Scheme.NVFP4_A4)


@dataclass(frozen=True)
class Cut:
    """A rank's share of an axis, as a function that compares equal to another of the same share."""

    axis: int  # of the array
    parts: tuple[tuple[int, int], ...]  # (units, entries of a unit) along it, as in `Split`
    ranks: int
    rank: int = 0

    def __call__(self, array: Array) -> Array:
        """The share; a view if it is contiguous."""
        before = (slice(None),) * self.axis
        pieces = [array[(*before, slice(*ends))] for ends in self.ends]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, self.axis)

    @property
    def ends(self) -> list[tuple[int, int]]:
        """(first, last + 1) entry of each part."""
        found, start = [], 0
        for units, size in self.parts:
            mine = share(units, self.ranks)
            first = self.rank * units // self.ranks
            found.append((start + first * size, start + (first + mine) * size))
            start += units * size
        return found

    @property
    def length(self) -> int:
        """Entries of the share."""
        return sum(end - first for first, end in self.ends)


@dataclass(frozen=True)
class Shards:
    """How a model's tensors are shared by `ranks`.

    Attributes:
        rows: the tensors, sizes those of the whole model.
        splits: how tensors are shared, by tensor name and module.
        tile: columns of NVFP4 that are never cut.
        shares: units of each rank and of the whole model, by what is counted.
        across: the ranks are on several hosts, so their GPUs do not read each other's memory.
    """

    ranks: int = 1
    rows: tuple[Row, ...] = ()
    splits: Mapping[str, Split] = field(default_factory=dict)
    tile: int = NVFP4_BLOCK
    shares: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    across: bool = False

    @property
    def samplers(self) -> int:
        """Ranks that sample together, each from the logits of its ids; they read each other's
        memory. On several hosts each rank has all logits and samples alone, so this is 1."""
        return 1 if self.across else self.ranks

    @classmethod
    def of(cls, config: ModelConfig, rows: tuple[Row, ...], ranks: int, tile: int) -> Shards:
        """The shards of a network's list of tensors."""
        named = ((r.module if isinstance(r, Linear) else r.name, r.split) for r in rows)
        splits = {name: s for name, s in named if s is not None}
        return cls(ranks, rows, splits, tile, shares(config, ranks))

    def check(self, table: QuantTable) -> None:
        """Raises OptionError where a share would end inside an FP8 block or an NVFP4 tile."""
        for row in self.rows:
            if isinstance(row, Linear) and row.split is not None and self.ranks > 1:
                _check_blocks(row, row.split, table[row.table_key], self)

    def cut(self, name: str, x: Recipe) -> Recipe:
        """Rank 0's share of `x`, the stored tensor or module `name`, or some of its scales. An axis
        that is missing or has one entry is not cut."""
        split = self.splits.get(name, self.splits.get(name.rpartition(".")[0]))
        if self.ranks == 1 or split is None or len(x.shape) <= split.axis:
            return x
        entries = x.shape[split.axis]
        if entries == 1 and split.length > 1:
            return x
        function = Cut(split.axis, _scaled(name, split, entries), self.ranks)
        shape = list(x.shape)
        shape[split.axis] = function.length
        return part(x, tuple(shape), function)

    def share_of(self, name: str) -> float:
        """The share of a stored tensor's bytes that one rank has."""
        split = self.splits.get(name, self.splits.get(name.rpartition(".")[0]))
        if split is None:
            return 1.0
        return Cut(split.axis, split.parts, self.ranks).length / split.length


def share(units: int, ranks: int) -> int:
    """Units of one rank; one if there are fewer units than ranks."""
    return max(1, units // ranks)


def of_rank(recipe: Recipe, rank: int) -> Recipe:
    """The same recipe for another rank."""
    function = recipe.function
    if isinstance(function, Cut):
        function = replace(function, rank=rank)
    args = tuple(of_rank(arg, rank) for arg in recipe.args)
    if function is recipe.function and all(a is b for a, b in zip(args, recipe.args, strict=True)):
        return recipe
    return replace(recipe, args=args, function=function)


def by_rank(values: list[int]) -> Recipe:
    """i32 [1]: the number of each rank."""
    parts = ((len(values), 1),)
    return part(constant(values, DType.I32), (1,), Cut(0, parts, len(values)))


def local_config(config: ModelConfig, ranks: int) -> ModelConfig:
    """The sizes of one rank's network; the vocabulary stays whole.

    Raises OptionError where heads or columns do not divide.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise OptionError(f"--tp {ranks}: give 1 to {MOST_RANKS} ranks")
    uneven = _uneven(config, ranks)
    if uneven:
        legal = [n for n in range(1, MOST_RANKS + 1) if not _uneven(config, n)]
        raise OptionError(
            f"--tp {ranks}: {uneven}; choose from {', '.join(map(str, legal))}: all ranks have "
            "equal parts, and no head is cut"
        )
    moe = config.moe
    if moe is not None:
        inner, wide = moe.intermediate // ranks, moe.shared_intermediate // ranks
        moe = replace(moe, intermediate=inner, shared_intermediate=wide)
    return replace(
        config,
        heads=config.heads // ranks,
        kv_heads=share(config.kv_heads, ranks),
        key_heads=config.key_heads // ranks,
        value_heads=config.value_heads // ranks,
        intermediate=None if config.intermediate is None else config.intermediate // ranks,
        moe=moe,
    )


def shares(config: ModelConfig, ranks: int) -> dict[str, tuple[int, int]]:
    """Units of each rank and of the whole model, by what is counted; `config` is the whole
    model's."""
    if ranks == 1:
        return {}
    sizes = {"KV heads": config.kv_heads, **_sizes(config)}
    return {what: (share(size, ranks), size) for what, size in sizes.items()}


def _sizes(config: ModelConfig) -> dict[str, int]:
    """The counts that ranks divide evenly."""
    moe = config.moe
    sizes = {"attention heads": config.heads, "ids of the vocabulary": config.vocab}
    sizes |= {"key heads": config.key_heads, "value heads": config.value_heads}
    if moe is not None:
        inner = {"expert": moe.intermediate, "shared expert": moe.shared_intermediate}
        sizes |= {f"columns of each {what}": size for what, size in inner.items()}
    if config.intermediate is not None:
        sizes["columns of the MLP"] = config.intermediate
    return sizes


def _uneven(config: ModelConfig, ranks: int) -> str:
    """The part of the model that does not divide by that many ranks; "" if all of it does."""
    kv = config.kv_heads
    for what, size in _sizes(config).items():
        if size % ranks:
            return f"the model's {size} {what} do not divide by {ranks}"
    if kv % ranks and ranks % kv:
        return f"the model's {kv} KV heads neither divide by {ranks} nor are shared evenly by it"
    return ""


def _check_blocks(row: Linear, split: Split, scheme: Scheme, shards: Shards) -> None:
    columns = split.axis == 1
    block = INT4_GROUP if scheme.group else NVFP4_BLOCK if scheme in FP4 else 0
    whole = max(block, shards.tile) if block and columns else 1
    if scheme is Scheme.FP8_BLOCK and (columns or split.length > FP8_BLOCK):
        whole = FP8_BLOCK  # rows within one block share its scale wherever they are cut
    for first, end in Cut(split.axis, split.parts, shards.ranks).ends:
        if end - first < split.length and (first % whole or (end - first) % whole):
            raise OptionError(
                f"--tp {shards.ranks}: {row.module} ({scheme}) would be cut into {end - first} "
                f"{'columns' if columns else 'rows'}, and {whole} are stored together; choose "
                "fewer ranks"
            )


def _scaled(name: str, split: Split, entries: int) -> tuple[tuple[int, int], ...]:
    """The parts of an axis with `entries` entries, each of several elements of the split: packed
    codes, or scales of blocks. Shares that cut an entry are refused earlier."""
    parts = []
    for units, size in split.parts:
        whole, rest = divmod(units * size * entries, split.length)
        if rest:
            raise GraphError(f"{name}: {entries} entries do not divide as {split.parts}")
        parts.append((units, whole // units) if whole % units == 0 else (whole, 1))
    return tuple(parts)
