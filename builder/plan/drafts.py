"""Resolves the options for drafts: their number per round, the head's dtype, its shortlist of ids,
and the fewest ids of a match from which text is drafted.

Knows the options and what a checkpoint has; knows no tensor and no graph.
"""

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from spark_engine.errors import OptionError
from spark_engine.interface import MOST_DRAFTS, MOST_MATCH
from spark_engine.kernel import Target
from spark_engine.models.draft_options import DRAFT_DTYPES, DraftOptions

DEFAULT = 3  # drafts of a round: with most heads, the fourth is wrong more often than right
LOAD = 4  # logits that a GPU's kernel reads at once
LEFT_OUT = (
    "the draft head is left out: a CPU takes longer for a round of drafts than for its tokens one "
    f"by one; --drafts {DEFAULT} builds with it"
)
LISTED = (
    "drafts are made of {:,} of the {:,} ids: fewer rows take less time to read; fewer are right "
    "in text that the list covers less (docs/operate/drafts.md): --draft-vocab full drafts all"
)
DTYPES = ("auto", *DRAFT_DTYPES)
# A number of first ids, or the ids themselves; "full": all; "list": those that are shipped; "auto":
# these where they pay.
VOCABS = ("full", "auto", "list")
Vocab = int | tuple[int, ...] | str


@dataclass(frozen=True)
class HeadFacts:
    """A checkpoint's draft head."""

    kv_token_width: int  # values of K and V that it stores for one token
    row_bytes: int = 0  # of one id's row of the model's output matrix, as stored
    nvfp4: bool = False  # whether the MLPs of the model's layers, without the head's, are NVFP4
    eos: tuple[int, ...] = ()  # ids that end a text
    # The shipped list of ids, where it is of this vocabulary and the head's rows can be taken one
    # by one; else empty.
    listed: tuple[int, ...] = ()
    # Tokens of a block drafter's block, which is with the head or in its place; 0: there is none.
    block: int = 0


@dataclass(frozen=True)
class DraftRequest:
    """The user's options; None and "auto" are to be decided."""

    drafts: int | None = None
    dtype: str = "auto"
    vocab: Vocab = "auto"
    suffix: int = 0


@dataclass(frozen=True)
class DraftPlan:
    """Drafts of a round, 0 for none; the head's options, None without a head; notes for the
    report. Text is drafted with or without a head, where that was asked for."""

    drafts: int
    head: DraftOptions | None = None
    notes: tuple[str, ...] = ()


def decide(
    requested: DraftRequest, head: HeadFacts | str, ids: int, gpu: Target | None
) -> DraftPlan:
    """Resolves the options for a model of `ids` ids and this head, or the reason why it has none.
    Raises OptionError for impossible values."""
    drafts, dtype, suffix = requested.drafts, requested.dtype, requested.suffix
    block = 0 if isinstance(head, str) else head.block
    possible = min(MOST_DRAFTS, block - 1) if block else MOST_DRAFTS
    if not 0 <= suffix <= MOST_MATCH:
        raise OptionError(f"--draft-suffix {suffix} is not possible; choose 0 to {MOST_MATCH}")
    if dtype not in DTYPES:
        raise OptionError(f"--draft-dtype {dtype} is not known; choose from {', '.join(DTYPES)}")
    if drafts is not None and not 0 <= drafts <= possible:
        raise OptionError(f"--drafts {drafts} is not possible; choose auto or 0 to {possible}")
    if drafts and isinstance(head, str) and not suffix:
        raise OptionError(
            f"--drafts {drafts}: {head}; build with --drafts 0, with --draft-suffix, or from a "
            "checkpoint that kept its draft head"
        )
    if drafts == 0 or isinstance(head, str):
        given = [("--draft-dtype", dtype != "auto"), ("--draft-vocab", requested.vocab != "auto")]
        given += [("--draft-suffix", suffix > 0), ("--drafter", block > 0)] if drafts == 0 else []
        if asked := [name for name, is_given in given if is_given]:
            why = "--drafts is 0" if drafts == 0 else head
            raise OptionError(f"{asked[0]}: {why}, so nothing drafts; leave it out")
    most = DEFAULT if drafts is None else drafts
    if (suffix or block) and drafts is None:
        most = possible  # what followed a match is right for long, or not at all
    if drafts == 0:
        return DraftPlan(0)
    if isinstance(head, str):
        how = "the text alone drafts" if suffix else "built without drafts"
        return DraftPlan(most if suffix else 0, notes=(f"{head}: {how}",))
    if (
        drafts is None
        and not gpu
        and not block
        and dtype == "auto"
        and requested.vocab == "auto"
        and not suffix
    ):
        return DraftPlan(0, notes=(LEFT_OUT,))
    if dtype == "auto":
        dtype = "nvfp4" if head.nvfp4 and gpu else "checkpoint"
    vocab, notes = requested.vocab, tuple[str, ...]()
    if vocab == "list" and not head.listed:
        raise OptionError(
            "--draft-vocab list: the shipped list is of Qwen3.5's vocabulary, for output matrices "
            "other than FP8 blocks; choose full, auto, a number of ids or a file of them"
        )
    if vocab == "list" or vocab == "auto" and head.listed and gpu is not None and gpu.slow:
        vocab = tuple({*head.listed, *(i for i in head.eos if i < ids)})
        notes = (LISTED,)
    shortlist = _ids(vocab, head, ids, LOAD if gpu else 1)
    notes = tuple(note.format(len(shortlist or range(ids)), ids) for note in notes)
    return DraftPlan(most, DraftOptions(dtype, shortlist), notes)


def parse_drafts(text: str) -> int | None:
    """`auto`, or a number. Raises OptionError for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise OptionError(f"--drafts {text} is not possible; choose auto or 0 to {MOST_DRAFTS}")
    return int(text)


def parse_vocab(text: str) -> Vocab:
    """`full`, `auto`, `list`, a number of ids, or the ids in the file of that name: a JSON list, or
    one id a line.

    Raises OptionError for a file that is missing, or holds anything else.
    """
    if text in VOCABS:
        return text
    if text.isdecimal():
        return int(text)
    try:
        found = _listed(Path(text).read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "the file is no text"
        raise OptionError(
            f"--draft-vocab {text} is not {', '.join(VOCABS)}, a number of ids or a file of them "
            f"({why})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"--draft-vocab {text}: {error}; write one id a line, or a JSON list of ids"
        ) from error
    return tuple(found)


def _listed(text: str) -> list[int]:
    rows = json.loads(text) if text.lstrip().startswith("[") else text.split("\n")
    found = []
    for row in rows:
        if isinstance(row, str) and not row.strip():
            continue
        if isinstance(row, str) and row.strip().isdecimal():
            row = int(row)
        if type(row) is not int or row < 0:
            raise ValueError(f"{row!r} is no token id")
        found.append(row)
    return found


def _ids(vocab: Vocab, head: HeadFacts, ids: int, times: int) -> tuple[int, ...] | None:
    """The shortlist, ascending, with the first of the other ids up to a multiple of `times`; None
    for every id."""
    if isinstance(vocab, str):
        return None
    if isinstance(vocab, int):
        if vocab < 1:
            raise OptionError(f"--draft-vocab {vocab}: give 1 or more, full or auto")
        found = {*range(min(vocab, ids)), *(i for i in head.eos if i < ids)}
    else:
        found = {*vocab}
        if strange := sorted(i for i in found if i >= ids):
            raise OptionError(f"--draft-vocab: {strange[0]} is no id of the model, which has {ids}")
        if not found:
            raise OptionError("--draft-vocab: the file holds no id")
    others = (i for i in range(ids) if i not in found)
    found |= {*islice(others, -len(found) % times)}
    return tuple(sorted(found)) if len(found) < ids else None
