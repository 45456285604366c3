"""The names every engine shares: step inputs, tables, common states, outputs (docs/graph.md).

Knows no model: per-layer states are added by `models`, and the runtime reads them from the
manifest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from spark_engine.tensors import DType, TensorSpec
from spark_engine.typed import typed
from spark_engine.vision import IMAGE_ROWS, PATCH_VALUES, ROW_PATCHES, TAPS, VISION

DECODE, PREFILL = "decode", "prefill"
VERIFY = "verify_k"  # and the number of drafts: verify_k3 has up to four tokens a row
PREFILL_TILE = 64
ROPE_ROWS = 3  # positions of a token: in time, height and width
MOST_DRAFTS = 7  # of a round; verification reads up to eight tokens a row
HEAD_DRAFTS = 3  # of a round: more are a block drafter's, where there is one
# How names of nodes, weights and states begin: a draft head's, those of a block drafter, and of
# what makes drafts ("draft.0." the first).
DRAFT_HEAD, BLOCK_DRAFTER, DRAFT_STEP = "mtp.", "dflash.", "draft."
HEADS = (DRAFT_HEAD, BLOCK_DRAFTER)
# What makes drafts, by the names of counts: a head, the text where it matches, a block drafter.
SOURCES = MTP, COPIED, BLOCKS = "mtp", "text", "dflash"
ID_PAGES = "id_pages"  # the state that holds the ids of a sequence's tokens
MOST_MATCH = 16  # ids of a repetition that are compared; a longer one counts as so long
STATE_OUT = ".out"
SAMPLING_F = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "", "")
SAMPLING_I = ("top_k", "seed_low", "seed_high", "masked")
MASK_BITS = 32  # ids of a word of `allow`


# what no engine reaches: a runtime makes lists and buffers as long as its limits
MOST = {
    "max_seqs": 1 << 16,
    "max_context": 1 << 26,
    "pages": 1 << 24,
    "vocab": 1 << 22,
    "page_size": 1 << 16,
    "bias_slots": 1 << 16,
    "top_logprobs": 1 << 12,
    "gdn_ring": 1 << 16,
    "drafts": 1 << 8,
    "snapshots": 1 << 24,
    "image_rows": 1 << 20,
    "suffix": MOST_MATCH,
}
_NEEDED = ("max_seqs", "max_context", "pages", "vocab", "page_size")
_OPTIONAL = ("gdn_ring", "drafts", "snapshots", "image_rows", "suffix")


@dataclass(frozen=True)
class Limits:
    """Sizes fixed at build time. All counts; `page_size` and `max_context` in tokens.

    `gdn_ring`: tokens that every recurrent state may lag behind; 0, there is no replay ring.
    `drafts`: most draft tokens of a round, up to MOST_DRAFTS; 0, the engine drafts nothing.
    `snapshots`: rows of the states by sequence beyond a slot's, for the prefix cache; a device's
    runtime adds as many as its memory holds.
    `image_rows`: rows that the tower's results take, those of the largest image at least; 0, the
    engine reads no images.
    `suffix`: fewest ids that end a sequence and were in it before, for what followed them there to
    be drafted; 0, the draft head alone drafts.
    """

    max_seqs: int
    max_context: int
    pages: int
    vocab: int
    page_size: int = 64
    bias_slots: int = 512
    top_logprobs: int = 20
    gdn_ring: int = 0
    drafts: int = 0
    snapshots: int = 0
    image_rows: int = 0
    suffix: int = 0

    @property
    def pages_per_seq(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def mask_words(self) -> int:
        """Words of a row of `allow`: a bit for each id."""
        return -(-self.vocab // MASK_BITS)

    @property
    def sequence_rows(self) -> int:
        """Rows of a state by sequence: of slots, of snapshots, and the scratch one."""
        return self.max_seqs + self.snapshots + 1

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "pages_per_seq": self.pages_per_seq, "tile": PREFILL_TILE}

    @classmethod
    def from_json(cls, row: dict[str, int]) -> Limits:
        """The inverse of `to_json`. Raises KeyError when a limit is missing, TypeError or
        ValueError when it is no count or out of range; what an engine does not speak of, ring,
        drafts, snapshots, images or suffix, it has not."""
        known = {**dict.fromkeys(_OPTIONAL, 0), **row}
        found = {k: typed(int, known[k], k) for k in cls.__dataclass_fields__}
        for name, value in found.items():
            least = int(name in _NEEDED)
            if not least <= value <= MOST[name]:
                raise ValueError(f"{name} is {value}; it must be {least} to {MOST[name]}")
        return cls(**found)


@dataclass(frozen=True)
class Precision:
    """Element types of what is not a weight. `kv` may be F8E4M3 (pages then hold U8 codes)."""

    activation: DType
    kv: DType
    state: DType

    @property
    def kv_storage(self) -> DType:
        return DType.U8 if self.kv is DType.F8E4M3 else self.kv


def verify_family(drafts: int) -> str:
    """The family that verifies `drafts` draft tokens a row: `verify_k{drafts}`."""
    return f"{VERIFY}{drafts}"


def drafts_by_block(k: int, most: int) -> bool:
    """Whether a round of k drafts, of `most` at most, makes the next ones by the block drafter, in
    an engine that also has a draft head: a block costs as much for few drafts as for many."""
    return k > HEAD_DRAFTS or k == most


def drafts_of(family: str) -> int:
    """Draft tokens of a row: k of `verify_k{k}`, else 0."""
    return int(family.removeprefix(VERIFY)) if family.startswith(VERIFY) else 0


def tile_of(family: str) -> int:
    """Tokens of a full row: 1 of decode, 64 of prefill, k + 1 of `verify_k{k}`; of the tower the
    patches of a row, 4."""
    tiles = {PREFILL: PREFILL_TILE, VISION: ROW_PATCHES}
    return tiles.get(family, 1 + drafts_of(family))


def families(drafts: int, images: int = 0) -> tuple[str, ...]:
    """Every family of an engine with up to `drafts` drafts a round, and if it has `images` rows of
    them, the tower's."""
    tower = (VISION,) if images else ()
    return (DECODE, PREFILL, *(verify_family(k) for k in range(1, drafts + 1)), *tower)


def steps(family: str = DECODE, drafts: int = 0) -> tuple[TensorSpec, ...]:
    """Inputs of a family written for every step, in an engine with up to `drafts` drafts.

    `rope_offsets` are added to positions before they turn queries and keys: in prefill ROPE_ROWS of
    each token (time, height, width), else one of each row.

    Of prefill, `sources` and `saves` are rows of the states by sequence: what a sequence's first
    tile begins from, and where the state behind a tile is written as well, or -1. The tower's
    `tokens` are patches of one image, `live` of them; its rows of `image_rows` begin at `first`.
    """
    if family == VISION:
        return (
            TensorSpec("patches", DType.U8, ("tokens", PATCH_VALUES)),
            TensorSpec("taps", DType.I32, ("tokens", TAPS)),
            TensorSpec("tap_weights", DType.F32, ("tokens", TAPS)),
            TensorSpec("coords", DType.I32, ("tokens", 2)),
            TensorSpec("live", DType.I32, (1,)),
            TensorSpec("first", DType.I32, (1,)),
        )
    rows = ["slots", "starts", "counts"]
    if not drafts or family == PREFILL:
        rows.append("emit")
    if drafts and family == PREFILL:
        rows.append("next_ids")
    if family == PREFILL:
        rows += ["sources", "saves"]
    turns = ROPE_ROWS * PREFILL_TILE if family == PREFILL else 1
    return (
        TensorSpec("token_ids", DType.I32, ("tokens",)),
        *(TensorSpec(name, DType.I32, ("rows",)) for name in rows),
        TensorSpec("rope_offsets", DType.I32, ("rows", turns)),
    )


def tables(limits: Limits) -> tuple[TensorSpec, ...]:
    """Slot-indexed inputs that change on admission, eviction or a new page only, but for the ids
    that a sequence's next token may have: those are written for every one, where not all may be."""
    slots = limits.max_seqs + 1
    return (
        TensorSpec("page_table", DType.I32, (slots, limits.pages_per_seq)),
        TensorSpec("prompt_lens", DType.I32, (slots,)),
        TensorSpec("sampling_f", DType.F32, (slots, len(SAMPLING_F))),
        TensorSpec("sampling_i", DType.I32, (slots, len(SAMPLING_I))),
        TensorSpec("bias_ids", DType.I32, (slots, limits.bias_slots)),
        TensorSpec("bias_values", DType.F32, (slots, limits.bias_slots)),
        TensorSpec("bias_until", DType.I32, (slots, limits.bias_slots)),
        TensorSpec("allow", DType.U32, (slots, limits.mask_words)),
    )


def common_states(limits: Limits) -> tuple[TensorSpec, ...]:
    """Slot-indexed states of every model; with drafts, each sequence's position and its next
    round's drafts. None of them is part of a snapshot."""
    slots = limits.max_seqs + 1
    states = [
        TensorSpec("last_tokens", DType.I32, (slots,)),
        TensorSpec("token_counts", DType.I32, (slots, limits.vocab)),
    ]
    if limits.drafts:
        states.append(TensorSpec("positions", DType.I32, (slots,)))
        states.append(TensorSpec("drafts", DType.I32, (slots, limits.drafts)))
    return tuple(states)


def image_state(limits: Limits, hidden: int, activation: DType) -> TensorSpec:
    """The tower's results, rows of the residual stream, and a scratch row; unit "image"."""
    return TensorSpec(IMAGE_ROWS, activation, (limits.image_rows + 1, hidden))


def id_state(limits: Limits) -> TensorSpec:
    """The ids of each sequence's tokens, -1 for those of images, in pages as a cache of one head
    of one value has them; unit "page"."""
    return TensorSpec(ID_PAGES, DType.I32, (limits.pages + 1, 1, limits.page_size, 1))


def outputs(limits: Limits, family: str = DECODE, ranks: int = 1) -> tuple[TensorSpec, ...]:
    """What every engine of a family writes besides its states: of each row, or in a round of drafts
    of each token, and in `verify_k{k}` how many of a row's were accepted; with `suffix` of each row
    how many ids matched, 0 if its next drafts are the head's. The logits are those of one rank's
    ids. The tower writes nothing but its state."""
    if family == VISION:
        return ()
    round_ = limits.drafts and family != PREFILL
    top, unit = limits.top_logprobs, "tokens" if round_ else "rows"
    by_row = ["accepted"] * bool(drafts_of(family)) + ["matched"] * bool(round_ and limits.suffix)
    return (
        TensorSpec("next_tokens", DType.I32, (unit,)),
        TensorSpec("logprobs", DType.F32, (unit,)),
        TensorSpec("top_ids", DType.I32, (unit, top)),
        TensorSpec("top_logprobs", DType.F32, (unit, top)),
        TensorSpec("ok", DType.I32, (unit,)),
        *(TensorSpec(name, DType.I32, ("rows",)) for name in by_row),
        TensorSpec("logits", DType.F32, (unit, limits.vocab // ranks)),
    )
