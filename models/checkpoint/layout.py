"""How a file spells the names of tensors, and which of two forms its experts have.

Inside the package names have no prefix (`layers.0.mlp.gate_proj`, `embed_tokens`, `lm_head`);
files put `model.language_model.` or `model.` before all but the head's. Knows no dtype and no
quantisation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.tensor_list import Kind, Row, of_kind

HEAD = "lm_head"
PREFIXES = ("model.language_model.", "model.")
SPELLINGS = (*PREFIXES, "language_model.model.", "language_model.")


@dataclass(frozen=True)
class Layout:
    """What two files of one network may differ in."""

    prefix: str
    fused_experts: bool

    def file_name(self, name: str) -> str:
        """The name in the file of a module or tensor of ours."""
        return name if name.startswith(HEAD) else self.prefix + name

    @classmethod
    def usual(cls, nested: bool, quantised: bool) -> Layout:
        """The layout of published files: quantised ones store every expert by itself."""
        return cls(PREFIXES[0 if nested else 1], not quantised)

    @classmethod
    def detect(cls, names: Iterable[str], rows: Collection[Row]) -> Layout:
        """Reads the layout off the names in the files of a network that lists `rows`.

        Raises CheckpointError when no token embedding is found under a known prefix.
        """
        known = set(names)
        (embedding,) = of_kind(rows, Kind.EMBEDDING)
        for prefix in PREFIXES:
            if prefix + embedding.name in known:
                stacked = of_kind(rows, Kind.STACKED_EXPERTS)
                return cls(prefix, any(prefix + t.name in known for t in stacked))
        raise CheckpointError(
            f"no {embedding.name} under {' or '.join(PREFIXES)}: the files hold no text model, "
            "or name its tensors otherwise; give a checkpoint as transformers saves it"
        )


def spellings(module: str) -> tuple[str, ...]:
    """Every way a quantisation config may write one of our module names."""
    if module == HEAD:
        return (HEAD, f"language_model.{HEAD}", f"model.{HEAD}")
    return tuple(prefix + module for prefix in SPELLINGS)
