"""`DraftOptions`: the draft head's dtype, and the shortlist of ids that it may draft.

Knows neither checkpoint nor graph. The builder makes one of the user's options; `build_network`
reads it.
"""

from dataclasses import dataclass

DRAFT_DTYPES = ("checkpoint", "fp8", "nvfp4")


@dataclass(frozen=True)
class DraftOptions:
    """The draft head of a build.

    Attributes:
        dtype: "checkpoint" keeps its projections as stored; "fp8" and "nvfp4" quantise the
            unquantised ones (128x128 blocks with dynamic inputs; groups of 16, W4A16).
        shortlist: the ids that it drafts from, ascending; None: the whole vocabulary.
    """

    dtype: str = "checkpoint"
    shortlist: tuple[int, ...] | None = None
