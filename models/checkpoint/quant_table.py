"""The quantisation table: what each projection of a checkpoint is stored as.

Built from the checkpoint's own declarations (`quant_declarations.py` reads their dialects);
`expected_tensors.py` then holds every tensor in the file against it. Never guessed from a flag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint import quant_declarations
from spark_engine.models.checkpoint.layout import DRAFT, Layout, spellings
from spark_engine.models.checkpoint.quant_schemes import SUFFIXES, Declared, Dialect, Scheme
from spark_engine.models.checkpoint.tensor_list import PLAIN, Row, Stored, linears
from spark_engine.models.config.json_values import Json, malformed_json

# Of config.json: the second of older compressed-tensors, the third of MLX.
_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True)
class QuantTable:
    """Scheme by module; experts of one layer share one, found at the name of their group."""

    modules: Mapping[str, Scheme]  # of the text network
    dialect: Dialect
    kv_fp8: bool  # the checkpoint asks for an e4m3 KV cache
    drafts: Mapping[str, Scheme] = field(default_factory=dict)  # of the draft head, in any scheme
    draft_dialect: Dialect = Dialect.MODELOPT  # the dialect of the head's tensors

    def __getitem__(self, module: str) -> Scheme:
        """The scheme of a module; plain if it is no projection."""
        return self.modules.get(module, self.drafts.get(module, Scheme.PLAIN))

    def dialect_of(self, module: str) -> Dialect:
        """The dialect of a module's tensors."""
        return self.draft_dialect if module.startswith(DRAFT) else self.dialect

    def spelled(
        self, layout: Layout, tensors: Mapping[str, Stored], rows: Iterable[Row]
    ) -> QuantTable:
        """The table as the files have their tensors, where declarations leave it open.

        Exporters of FP8_PB_WO name block scales differently. Many do not list what stays plain:
        stacked experts, which are no Linear, and modules outside a layer's usual ones.
        """
        inverse = SUFFIXES[Dialect.BLOCK].block_scale
        scales = (inverse, SUFFIXES[Dialect.MODELOPT].block_scale)
        found, dialect = dict.fromkeys(self.modules, Scheme.PLAIN), self.dialect
        for linear in linears(rows):
            key, module = linear.table_key, layout.file_name(linear.stored.module)
            weight = f"{module}.weight"
            if linear.group and layout.fused(linear.group):
                weight = layout.file_name(f"{linear.group}.gate_up_proj")
            plain = weight in tensors and tensors[weight].dtype in PLAIN
            if not plain or any(f"{module}.{scale}" in tensors for scale in scales):
                found[key] = self.modules[key]
            if found[key] is Scheme.FP8_BLOCK and f"{module}.{inverse}" in tensors:
                dialect = Dialect.BLOCK
        return replace(self, modules=MappingProxyType(found), dialect=dialect)

    def drafting(self, drafts: QuantTable) -> QuantTable:
        """The table with the draft head of `drafts`."""
        return replace(self, drafts=drafts.modules, draft_dialect=drafts.dialect)

    def quantising(self, scheme: Scheme) -> QuantTable:
        """The table with the head's plain projections in another scheme."""
        drafts = {m: scheme if s is Scheme.PLAIN else s for m, s in self.drafts.items()}
        return replace(self, drafts=MappingProxyType(drafts))

    @property
    def quantised(self) -> bool:
        """True if any module of the text network is quantised."""
        return any(s is not Scheme.PLAIN for s in self.modules.values())

    def summary(self) -> Mapping[str, int]:
        """Projections of the text network by scheme; the experts of a layer count as one."""
        return Counter(s.value for s in self.modules.values())


def quant_table(
    rows: Iterable[Row],
    from_files: tuple[Declared, ...],
    stacked: Callable[[str], bool] = lambda group: False,
) -> QuantTable:
    """The table of the projections in `rows`, from the `declarations` of a checkpoint. `stacked`:
    of which groups of experts the file has the group as one module.

    Raises CheckpointError when the two files contradict each other, or when the experts of one
    layer are not stored alike.
    """
    if not from_files:
        names = {linear.table_key: Scheme.PLAIN for linear in linears(rows)}
        return QuantTable(MappingProxyType(names), Dialect.MODELOPT, False)
    table: dict[str, Scheme] = {}
    by_expert = any(d.by_expert for d in from_files)
    for linear in linears(rows):
        if linear.group in table and not by_expert:
            continue
        of_group = bool(linear.group) and stacked(linear.group)
        scheme = _agreed(linear.group if of_group else linear.stored.module, from_files)
        if table.setdefault(linear.table_key, scheme) is not scheme:
            raise CheckpointError(
                f"{from_files[0].where}: {linear.module} is {scheme}, but other experts of its "
                f"layer are {table[linear.table_key]}; quantise all experts of a layer alike"
            )
    kv_fp8 = any(d.kv_fp8 for d in from_files)
    return QuantTable(MappingProxyType(table), from_files[0].dialect, kv_fp8)


def declarations(
    config_json: Json, hf_quant: Json, others: Mapping[str, Json] = MappingProxyType({})
) -> tuple[Declared, ...]:
    """The declarations of both files ({} where absent), hf_quant_config.json, the more specific,
    first; without them that of the first of the `others`, by name. Raises CheckpointError when a
    method is unsupported."""
    found = []
    with malformed_json("config.json: quantization_config"):
        outer = (config_json, config_json.get("text_config") or {})
        inside = [(f"config.json: {key}", row.get(key)) for key in _KEYS for row in outer]
        given = filter(lambda one: one[1], (*inside, *(() if hf_quant else others.items())))
        where, inner = next(given, ("", dict[str, Any]()))
        groups = inner.get("config_groups")
    if hf_quant:
        with malformed_json("hf_quant_config.json"):
            found.append(quant_declarations.modelopt(hf_quant, "hf_quant_config.json", groups))
    if inner:
        with malformed_json(where):
            found.append(quant_declarations.from_config(inner, where))
    return tuple(found)


def _agreed(module: str, from_files: tuple[Declared, ...]) -> Scheme:
    names = spellings(module)
    with malformed_json(from_files[-1].where):
        schemes = [d.scheme(names) for d in from_files]
    if len(set(schemes)) > 1:
        first, second = from_files
        raise CheckpointError(
            f"{module} is {schemes[0]} in {first.where} but {schemes[1]} in {second.where}"
            "; take both files from one export of the checkpoint"
        )
    return schemes[0]
