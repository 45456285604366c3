"""Opens a checkpoint: config, quantisation table and tensors, checked against each other.

`open_model` reads a folder; `describe` needs only the JSON files, and its weights have no values.
Knows the order of the steps, and no graph.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spark_engine.errors import CheckpointError, OptionError
from spark_engine.models.checkpoint.draft_tensors import draft_tensors
from spark_engine.models.checkpoint.expected_tensors import (
    ASIDE,
    MTP,
    TEXT,
    VISION,
    Expected,
    check_tensors,
    expected_tensors,
    misfits,
    usual,
)
from spark_engine.models.checkpoint.files import (
    CONFIGS,
    Checkpoint,
    open_checkpoint,
    read_configs,
    read_index,
    read_json,
)
from spark_engine.models.checkpoint.foreign_formats import named
from spark_engine.models.checkpoint.idle_tensors import idle_note
from spark_engine.models.checkpoint.layout import DRAFT, HEAD, Layout
from spark_engine.models.checkpoint.quant_schemes import Declared, Scheme
from spark_engine.models.checkpoint.quant_table import QuantTable, declarations, quant_table
from spark_engine.models.checkpoint.tensor_list import PLAIN, Row, ValueKind, of_kind
from spark_engine.models.checkpoint.weight_files import weight_files
from spark_engine.models.config.json_values import Json, malformed_json
from spark_engine.models.config.model_config import ModelConfig
from spark_engine.models.config.rope import rescaled
from spark_engine.models.config.vision import PREPROCESSOR, PROCESSOR, vision_info
from spark_engine.models.families.registry import family_of, read_config
from spark_engine.models.synthetic import is_synthetic, open_synthetic
from spark_engine.models.weights.shards import Shards, local_config
from spark_engine.models.weights.stored_model import Model
from spark_engine.tensors import DType, TensorSpec
from spark_engine.vision import VisionInfo

_ROWS = 4096  # rows of a matrix compared at a time


def open_model(path: Path | str, rope_scaling: Json | None = None) -> Model:
    """Opens a checkpoint folder and checks headers and configs. `rope_scaling` replaces the file's.

    Raises CheckpointError before any weight is read: see `open_checkpoint`, `read_config`,
    `quant_table` and `check_tensors`.
    """
    folder = Path(path)
    given = read_description(folder, None, rope_scaling)
    config, family = given.config, family_of(given.config)
    if is_synthetic(folder):
        exported = exporter_layout(config, given.declared)
        checkpoint: Checkpoint = open_synthetic(folder, exported.expected, exported.stored)
    else:
        checkpoint = open_checkpoint(folder, given.optional)
    heads = family.ignored_prefixes.get(MTP, ())
    if config.mtp_layers is None and any(name.startswith(heads) for name in checkpoint.tensors):
        config = replace(config, mtp_layers=1)
    rows, (drafts, note) = family.tensors(config), family.draft_tensors(config)
    layout = Layout.detect(checkpoint.tensors, rows, drafts)
    rows, drafts = (layout.as_stored(part, checkpoint.tensors) for part in (rows, drafts))
    declared = quant_table(rows, given.declared, layout.fused)
    table = declared.spelled(layout, checkpoint.tensors, rows)
    expected = expected_tensors(rows, config.dtype, table, layout)
    _check_declared(given, declared, checkpoint)
    ignored = check_tensors(expected, checkpoint.tensors, family.ignored_prefixes)
    _check_tied(rows, layout, checkpoint)
    if not note:
        table, head, note = draft_tensors(drafts, config.dtype, checkpoint.tensors, layout, table)
        expected = {**expected, **head}
    format = named(table.dialect) if table.quantised else config.dtype.value
    of_head = [n for n in checkpoint.tensors if n.startswith(layout.draft_prefix + DRAFT)]
    by_index = any(d.by_index for d in given.declared)
    names = {**checkpoint.tensors, **(expected if by_index else {})}
    of_text = [n for n in names if not n.startswith(given.optional)]
    notes = idle_note(checkpoint, of_text, expected, format)
    try:
        notes += idle_note(checkpoint, () if note else of_head, expected, format)
    except CheckpointError as error:
        note = f"the checkpoint's draft head is not read: {error}"
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *notes))
    found = {n: TensorSpec(n, t.dtype, t.shape) for n, t in checkpoint.tensors.items()}
    tensors = MappingProxyType(found)
    vision, unseen = _vision(config, given.json, expected, checkpoint)
    return Model(
        config, table, layout, rows, expected, tensors, ignored, note, checkpoint,
        given.generation, vision_note=unseen, vision=vision,
    )  # fmt: skip


def _vision(
    config: ModelConfig, json: Json, expected: Mapping[str, Expected], checkpoint: Checkpoint
) -> tuple[VisionInfo | None, str]:
    """How the checkpoint's images are read, and ""; or None, and why there is no tower. `json`:
    config.json."""
    tower = family_of(config).tower(config)
    if isinstance(tower, str):
        return None, tower
    names = [e.name for e in usual(expected, VISION)]
    if not any(name in checkpoint.tensors for name in names):
        return None, "the checkpoint's files hold no tensor of the vision tower"
    missing = [f"{name} is missing" for name in names if name not in checkpoint.tensors]
    if faults := [*misfits(expected, checkpoint.tensors, VISION), *missing]:
        more = f", and {len(faults) - 1} more faults" if len(faults) > 1 else ""
        return None, f"the checkpoint's vision tower is not read: {faults[0]}{more}"
    try:
        files = (checkpoint.path / file for file in (PREPROCESSOR, PROCESSOR))
        info = vision_info(json, *(read_json(file, required=False) for file in files))
        assert info is not None  # as there is a tower
        return replace(info, side=isqrt(tower.positions.shape[0])), ""
    except CheckpointError as error:
        return None, f"the checkpoint's images are not read: {error}"


def with_ranks(model: Model, ranks: int, tile: int, across: bool = False) -> Model:
    """One rank's share of the model; `tile` columns of NVFP4 are never cut. `across`: the ranks are
    on several hosts.

    Raises OptionError where heads, columns, blocks or the vocabulary do not divide.
    """
    if ranks == 1:
        return model
    local = local_config(model.config, ranks)
    family = family_of(model.config)
    rows = (*model.rows, *family.draft_tensors(model.config)[0])
    shards = Shards.of(model.config, rows, ranks, tile)
    if not shards.splits:
        raise OptionError(f"--tp {ranks}: networks of {family.name} are not split by ranks")
    shards.check(model.table)
    return replace(model, config=local, shards=replace(shards, across=across))


@dataclass(frozen=True)
class Description:
    """What the JSON files of a folder say: the model, and its quantisation file by file. `json` is
    config.json."""

    json: Json
    config: ModelConfig
    generation: Mapping[str, Any]
    declared: tuple[Declared, ...]

    @property
    def optional(self) -> tuple[str, ...]:
        """How the names of tensors begin that no text needs."""
        return (*ASIDE, *chain(*family_of(self.config).ignored_prefixes.values()))


def read_description(
    folder: Path, files: Collection[str] | None = None, rope_scaling: Json | None = None
) -> Description:
    """The description of a folder that may lack its weights. `files`: those that it will hold.

    Raises CheckpointError as `open_model` does for faults of the JSON files, so before weights are
    fetched or read, and where one of `files` is missing.
    """
    config, generation, hf_quant, *others = read_configs(folder)
    with malformed_json(CONFIGS[0]):
        given = rescaled(config, rope_scaling) if rope_scaling else config
    model = read_config(given, generation)
    declared = declarations(config, hf_quant, dict(zip(CONFIGS[3:], others, strict=True)))
    found = Description(config, model, generation, declared)
    if files is not None:
        weight_files(folder, files, read_index(folder), found.optional)
    return found


def describe(config_json: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None) -> Model:
    """The model that the JSON files describe, in the layout of exporters.

    Raises CheckpointError as `open_model` does for faults of the JSON files.
    """
    config = read_config(config_json)
    exported = exporter_layout(config, declarations(config_json, hf_quant or {}))
    parts = [e.part for e in usual(exported.expected)]
    ignored = {part: parts.count(part) for part in family_of(config).ignored_prefixes}
    specs = (TensorSpec(e.name, e.dtypes[0], e.shapes[0]) for e in exported.stored)
    found = MappingProxyType({spec.name: spec for spec in specs})
    return Model(
        config, exported.table, exported.layout, exported.rows, exported.expected, found, ignored,
        exported.draft_note, None, {},
    )  # fmt: skip


def _check_declared(given: Description, table: QuantTable, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where a key that is set, or missing, does not fit any tensor."""
    optional = given.optional
    text = [t for name, t in checkpoint.tensors.items() if not name.startswith(optional)]
    dtypes = {t.dtype for t in text}
    words = any(t.name.endswith((".qweight", ".weight_packed")) for t in text)
    packed = sorted(dtypes & {DType.F8E4M3, DType.U8, *[DType.I32] * words})
    schemes = sorted({s.value for s in table.modules.values()} - {Scheme.PLAIN.value})
    if schemes and not packed:
        raise CheckpointError(
            f"{' and '.join(schemes)} is declared, but all weights are plain: if they were "
            f"dequantised, remove {' and '.join(d.where for d in given.declared)}; else take the "
            "weights of that export"
        )
    if packed and not schemes:
        files = " and ".join(d.where for d in given.declared)
        what = f"{files}: no entry fits" if files else "config.json has no quantization_config for"
        raise CheckpointError(
            f"{', '.join(packed)} weights are quantised, but {what} them: take config.json, and "
            "hf_quant_config.json, from their export"
        )
    head = {t.dtype for t in text if f"{HEAD}." in t.name}
    if given.config.tied and not head <= {*PLAIN}:
        raise CheckpointError(
            f"{HEAD} has {', '.join(sorted(head - {*PLAIN}))} weights, though config.json says "
            "tie_word_embeddings: set it to false, as quantising a head unties it"
        )
    if not given.config.tied and not head:
        raise CheckpointError(
            f"{HEAD}.weight is missing, and config.json does not say tie_word_embeddings: set it "
            "to true if the head is the embedding, else download the weights again"
        )


def _check_tied(rows: Iterable[Row], layout: Layout, checkpoint: Checkpoint) -> None:
    """A stored copy of a tied head must equal the embedding byte for byte."""
    (embedding,) = of_kind(rows, ValueKind.EMBEDDING)
    head = next(of_kind(rows, ValueKind.TIED_HEAD), None)
    if head is None or layout.file_name(head.name) not in checkpoint.tensors:
        return
    name = layout.file_name(head.name)
    a, b = checkpoint.read(name), checkpoint.read(layout.file_name(embedding.name))
    same = a.dtype == b.dtype and all(
        a[i : i + _ROWS].tobytes() == b[i : i + _ROWS].tobytes() for i in range(0, len(a), _ROWS)
    )
    if not same:
        file = checkpoint.tensors[name].file
        raise CheckpointError(
            f"{file}: tensor {name} differs from {embedding.name}, though config.json says "
            "tie_word_embeddings; set it to false if the head is its own"
        )


@dataclass(frozen=True)
class ExporterLayout:
    """The tensors of a configuration as exporters write them."""

    rows: tuple[Row, ...]  # the tensors of the text network and of the vision tower
    table: QuantTable
    layout: Layout
    expected: Mapping[str, Expected]  # all tensors, those of the draft head included
    draft_note: str  # why there is no draft head, or ""

    @property
    def stored(self) -> list[Expected]:
        """The tensors that an exporter writes and a graph may read."""
        return usual(self.expected, TEXT, MTP, VISION)


def exporter_layout(config: ModelConfig, declared: tuple[Declared, ...]) -> ExporterLayout:
    """The layout for these JSON files. Raises CheckpointError if they contradict each other."""
    family = family_of(config)
    rows, (drafts, note) = family.tensors(config), family.draft_tensors(config)
    table = quant_table(rows, declared)
    head = quant_table(drafts, declared)
    # quantised experts are stored one by one
    stacked, of_head = (family.stacks_experts and not t.quantised for t in (table, head))
    layout = Layout.usual(config.nested, stacked, of_head, (*rows, *drafts))
    table = table.drafting(head)
    expected = {
        **expected_tensors(rows, config.dtype, table, layout),
        **expected_tensors(drafts, config.dtype, table, layout, MTP),
    }
    return ExporterLayout(rows, table, layout, expected, note)
