"""A checkpoint's names of tensors, which of them are slices, and whether its experts are stacked.

Inside the package names have no prefix (`layers.0.mlp.gate_proj`, `embed_tokens`, `lm_head`);
files put `model.language_model.` or `model.` before all but the head's; some have
`language_model.` before the head too. Knows no dtype and no quantisation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from spark_engine.errors import CheckpointError
from spark_engine.hints import INSTEAD
from spark_engine.interface import BLOCK_DRAFTER
from spark_engine.models.checkpoint.tensor_list import (
    Linear,
    Row,
    Slice,
    ValueKind,
    linears,
    of_kind,
)

HEAD = "lm_head"
DRAFT = "mtp."  # prefix of the package's names of the draft head's tensors
PREFIXES = ("model.language_model.", "model.")
SPELLINGS = (*PREFIXES, "language_model.model.", "language_model.")
DRAFT_PREFIXES = ("", *PREFIXES, "language_model.")  # before DRAFT
VISUAL = "visual."  # prefix of the package's names of the vision tower's tensors
VISUAL_PREFIXES = ("model.", "")  # before VISUAL
_SCALES = ("weight_scale", "weight_scale_inv", "qweight")  # one is there if it is quantised
_ABOVE = "language_model."  # before HEAD in files that have no `model.` outside it


@dataclass(frozen=True)
class Layout:
    """The differences between files of one network.

    The draft head has a separate prefix, and its experts may be stored in another form than the
    network's. `slices`: the projections that are rows of a stored matrix, by module.
    """

    prefix: str
    fused_experts: bool
    draft_prefix: str = ""
    fused_draft_experts: bool = True
    slices: Mapping[str, Slice] = field(default_factory=dict)
    visual_prefix: str = VISUAL_PREFIXES[0]
    head_prefix: str = ""

    def fused(self, experts: str) -> bool:
        """True if the experts of this group are stacked."""
        drafts = experts.startswith(DRAFT)
        return self.fused_draft_experts if drafts else self.fused_experts

    def file_name(self, name: str) -> str:
        """The name in the file of a module or tensor; of a slice that of the stored matrix."""
        module, _, suffix = name.rpartition(".")
        if module in self.slices:
            name = f"{self.slices[module].module}.{suffix}"
        if name.startswith(DRAFT):
            return self.draft_prefix + name
        if name.startswith(BLOCK_DRAFTER):
            return name
        if name.startswith(VISUAL):
            return self.visual_prefix + name
        return (self.head_prefix if name.startswith(HEAD) else self.prefix) + name

    def as_stored(self, rows: Iterable[Row], tensors: Collection[str]) -> tuple[Row, ...]:
        """The rows; a matrix that exporters leave plain (a router) is a projection where the files
        have scales of it."""
        made = []
        for row in rows:
            if not isinstance(row, Linear) and row.kind in (ValueKind.ROUTER, ValueKind.GATE):
                if any(f"{self.file_name(row.module)}.{end}" in tensors for end in _SCALES):
                    row = Linear(row.module, row.shape[0], row.columns)
            made.append(row)
        return tuple(made)

    @classmethod
    def usual(
        cls, nested: bool, stacked: bool, stacked_drafts: bool, rows: Iterable[Row]
    ) -> Layout:
        """The layout of published files. `stacked`, `stacked_drafts`: experts of network and draft
        head; `rows`: their tensors."""
        return cls(PREFIXES[0 if nested else 1], stacked, "", stacked_drafts, _slices(rows))

    @classmethod
    def detect(
        cls, names: Iterable[str], rows: Collection[Row], drafts: Collection[Row] = ()
    ) -> Layout:
        """Finds the layout from the names in the files; `rows` is the network's list of tensors,
        `drafts` the draft head's.

        Raises CheckpointError when no token embedding is found under a known prefix.
        """
        known = set(names)
        begins = (p for p in DRAFT_PREFIXES if any(name.startswith(p + DRAFT) for name in known))
        before = next(begins, None)
        stacked = before is None or _any_stacked(known, before, drafts)
        bare = any(name.startswith(VISUAL) for name in known)
        (embedding,) = of_kind(rows, ValueKind.EMBEDDING)
        for prefix in SPELLINGS:
            if prefix + embedding.name in known:
                fused = _any_stacked(known, prefix, rows)
                slices = _slices((*rows, *drafts))
                visual = VISUAL_PREFIXES[bare]
                above = any(name.startswith(_ABOVE + HEAD) for name in known)
                head = _ABOVE if above else ""
                return cls(prefix, fused, before or "", stacked, slices, visual, head)
        if stored := min((n for n in known if f"{embedding.module}." in n), default=""):
            raise CheckpointError(f"a quantised embedding is not read ({stored}); {INSTEAD}")
        raise CheckpointError(
            f"no {embedding.name} under {' or '.join(SPELLINGS)}: the files hold no text model, "
            "or name its tensors otherwise; give a checkpoint as transformers saves it"
        )


def spellings(module: str) -> tuple[str, ...]:
    """All spellings of a module's name in quantisation configs."""
    if module == HEAD:
        return (HEAD, f"language_model.{HEAD}", f"model.{HEAD}")
    bare = (module,) if module.startswith(DRAFT) else ()
    return (*bare, *(prefix + module for prefix in SPELLINGS))


def _slices(rows: Iterable[Row]) -> Mapping[str, Slice]:
    return {linear.module: linear.slice for linear in linears(rows) if linear.slice is not None}


def _any_stacked(known: Collection[str], prefix: str, rows: Iterable[Row]) -> bool:
    return any(prefix + t.name in known for t in of_kind(rows, ValueKind.STACKED_EXPERTS))
