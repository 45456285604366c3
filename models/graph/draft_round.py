"""Graphs of an engine with drafts: a round of decode or verification, and prefill.

A round samples at each of its tokens, accepts each draft that equals the sample before it until the
first that differs, updates the head's keys and values for the accepted tokens, and drafts the next
round's tokens: the head, and what followed the same tokens before (`limits.suffix`). Knows the
order of these (docs/graph.md) and no tensor's name.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.interface import drafts_by_block, drafts_of, id_state
from spark_engine.models.checkpoint.tensor_list import Linear
from spark_engine.models.graph.block_drafter import BlockDrafter
from spark_engine.models.graph.decoder import SAMPLED, Decoder, sampling_attrs, sampling_tables
from spark_engine.models.graph.draft_head import DraftHead
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.draft_weights import head_rows
from spark_engine.models.weights.recipes import constant
from spark_engine.tensors import DType

PAGES = ("k_pages", "v_pages")


@dataclass(frozen=True)
class DraftRound:
    """The network with its draft head and its block drafter, if it has them. `shortlist`: the ids
    that these may draft; None: all ids."""

    network: Decoder
    head: DraftHead | None
    drafter: BlockDrafter | None
    shortlist: tuple[int, ...] | None

    def write(self, w: Writer, debug: bool) -> None:
        """Writes decode, which neither verifies nor drafts, and `verify_k{k}`."""
        drafts = drafts_of(w.family)
        by_block = not self.head or drafts_by_block(drafts, w.limits.drafts)
        drafter = self.drafter if drafts and by_block else None
        head = self.head if drafts and not drafter else None
        step = [w[n] for n in ("slots", "starts", "counts")]
        known = [w[n] for n in ("token_ids", "last_tokens", "drafts", "positions")]
        names = ["ids", "row_starts", "certain"]
        ids, starts, certain = w.op("round_rows", [*known, *step], names, tile=w.tile)
        with w.over([w["slots"], starts, w["counts"]]):
            x = self.network.stream(w, ids, debug)
            hidden = self.network.normed(w, x, "hidden")
            logits = self.network.logits(w, hidden, "logits")
            if debug:
                w.output(hidden)
                w.output(self.network.all_logits(w, hidden, "logits_all"))
            sampled, accepted, draft_starts = _accept(w, ids, certain, logits)
        for tensor in (*sampled, *([accepted] if drafts else []), logits):
            w.output(tensor)
        state = w["drafts"]
        with w.over([w["slots"], starts, accepted]):
            if self.drafter:
                self.drafter.fill(w)
            if self.head:
                x, pages = self._fill(w, self.head, sampled[0], hidden, last=not head)
        if drafter:
            state = self._draft_block(w, drafter, ids, accepted, debug)
        elif head:
            x = w.one("last_rows", [x, accepted], "draft.last", tile=w.tile)
            state = self._draft(w, head, x, pages, [draft_starts, certain], debug)
        if w.limits.suffix:
            with w.over([w["slots"], starts, accepted]):
                w.output(_match(w, ids, state, drafts if drafter or head else 0))

    def write_prefill(self, w: Writer, debug: bool) -> None:
        """Writes prefill as without drafts, then the draft head over every token."""
        x = self.network.write(w, debug)
        if w.limits.suffix:
            _store_ids(w, w["token_ids"])
        if self.drafter:
            self.drafter.fill(w)
        if not self.head:
            return
        hidden = self.network.normed(w, x, "hidden")
        if debug:
            w.output(hidden)
        operands = [w[n] for n in ("token_ids", "next_ids", "next_tokens", "counts")]
        ids = w.one("shift_ids", operands, "shifted_ids", tile=w.tile)
        self._fill(w, self.head, ids, hidden, last=True)

    def _fill(
        self, w: Writer, head: DraftHead, ids: gs.Variable, hidden: gs.Variable, last: bool
    ) -> tuple[gs.Variable, list[gs.Variable]]:
        """(the head's input [tokens, H], its pages with the rows' keys and values)."""
        x = head.input(w, ids, hidden, self.network.embedded(w))
        pages = head.pages(w)
        return x, head.fill(w, x, pages, _updates(pages, last, ".filled"))

    def _draft(
        self,
        w: Writer,
        head: DraftHead,
        x: gs.Variable,
        pages: Sequence[gs.Variable],
        where: Sequence[gs.Variable],
        debug: bool,
    ) -> gs.Variable:
        """The state with the next round's drafts, made one after another. `where`: starts and
        counts of the rows."""
        (starts, counts), state = where, w["drafts"]
        embedding, drafts = self.network.embedded(w), drafts_of(w.family)
        states = [w[f"{head.name}.{name}"] for name in PAGES]
        for i in range(drafts):
            last = i == drafts - 1
            with w.over([w["slots"], starts, counts], tile=1, scope=f"draft.{i}."):
                y, pages = head.step(w, x, pages, _updates(states, last))
                logits = self._logits(w, y, whole=debug)  # a debug output has all ids
                if debug:
                    w.output(y)
                    w.output(logits)
                done = last and not w.limits.suffix
                token, starts, state = self._token(w, logits, state, i, done)
                if not last:
                    x = head.input(w, token, y, embedding)
        return state

    def _draft_block(
        self, w: Writer, drafter: BlockDrafter, ids: gs.Variable, accepted: gs.Variable, debug: bool
    ) -> gs.Variable:
        """The state with the next round's drafts, made in one pass."""

        def logits(z: gs.Variable) -> tuple[gs.Variable, list[gs.Variable]]:
            made = self._logits(w, z, whole=True)
            if debug:
                w.output(z)
                w.output(made)
            return made, [] if self.shortlist is None else [self._shortlist(w)]

        embedding = self.network.embedded(w)
        return drafter.draft(w, ids, accepted, embedding, logits, last=not w.limits.suffix)

    def _logits(self, w: Writer, y: gs.Variable, whole: bool) -> gs.Variable:
        """f32 [rows, V], or of the ids that may be drafted; or unless `whole`, of those that a rank
        has."""
        if self.shortlist is None:
            make = self.network.all_logits if whole else self.network.logits
            return make(w, y, "logits")
        head = self.network.head
        name = head.module if isinstance(head, Linear) else self.network.embedding.module
        rows = head_rows(w.model, name, self.shortlist)
        return w.multiply(y, f"{self._owner}.head", rows, DType.F32.value, "logits")

    def _token(
        self, w: Writer, logits: gs.Variable, state: gs.Variable, index: int, last: bool
    ) -> list[gs.Variable]:
        """(the token [rows], the position of the next one, the state that holds it)."""
        ids = [] if self.shortlist is None else [self._shortlist(w)]
        outputs = ["token", "next_starts", state_out("drafts") if last else "drafts"]
        attrs = {"index": index, "shortlist": len(ids), "vocab": w.config.vocab}
        ranks = w.model.shards.ranks
        if not ids and ranks * logits.shape[1] == w.config.vocab and ranks > 1:
            given = [logits, *w.rows, *w.first_id()]
            best = w.one("draft_best", given, "best.own", vocab=w.config.vocab)
            logits, attrs["pairs"] = w.gathered(best, "best"), ranks
        return w.op("draft_token", [logits, *ids, state, *w.rows], outputs, **attrs)

    def _shortlist(self, w: Writer) -> gs.Variable:
        ids = constant(self.shortlist or (), DType.I32)
        return w.weight(f"{self._owner}.shortlist", ids)

    @property
    def _owner(self) -> str:
        """The name under which head and drafter share the rows of the shortlist."""
        owner = self.head or self.drafter
        assert owner
        return owner.name


def _store_ids(w: Writer, ids: gs.Variable) -> gs.Variable:
    """The state of ids with those of the rows' tokens."""
    pages = w.state(id_state(w.limits), "page")
    operands, name = [ids, pages, w["page_table"], *w.rows], state_out(pages.name)
    return w.one("store_ids", operands, name, tile=w.tile, vocab=w.config.vocab)


def _match(w: Writer, ids: gs.Variable, drafts: gs.Variable, held: int) -> gs.Variable:
    """The ids that match of each row; updates its drafts, of which the head made `held`."""
    pages, last = _store_ids(w, ids), w[state_out("last_tokens")]
    operands, attrs = [pages, w["page_table"], last, drafts, *w.rows], {"held": held}
    names = ["matched", state_out("drafts")]
    return w.op("match_drafts", operands, names, least=w.limits.suffix, **attrs)[0]


def _updates(states: Sequence[gs.Variable], last: bool, suffix: str = "") -> list[str]:
    """Renames the last update of each state to the state's own output name."""
    return [state_out(s.name) if last else s.name + suffix for s in states]


def _accept(
    w: Writer, ids: gs.Variable, certain: gs.Variable, logits: gs.Variable
) -> tuple[list[gs.Variable], gs.Variable, gs.Variable]:
    """(the sample at each token, the accepted tokens of each row, the row where drafting
    starts)."""
    slots, starts, counts = w.rows
    marked = [w["token_counts"], ids, w["last_tokens"], slots, starts, certain, w["prompt_lens"]]
    token_counts = w.one("mark_tokens", marked, "token_counts.marked", tile=w.tile)
    attrs = {**sampling_attrs(w), "drafts": 1, "tile": w.tile}
    operands = [logits, token_counts, *sampling_tables(w), *w.rows, ids, *w.first_id()]
    sampled = w.op("sample", operands, SAMPLED, **attrs)
    states = [token_counts, w["last_tokens"], w["positions"]]
    updates = [state_out(name) for name in ("token_counts", "last_tokens", "positions")]
    accepted, draft_starts, *_ = w.op(
        "accept_drafts",
        [sampled[0], ids, *states, *w.rows],
        ["accepted", "draft_starts", *updates],
        tile=w.tile,
    )
    return sampled, accepted, draft_starts
