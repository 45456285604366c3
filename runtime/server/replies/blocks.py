"""An answer as a sequence of blocks: thoughts, text, calls. Two APIs have such answers.

Knows the parts of an answer; knows no JSON. A block ends where a part of another kind, or another
call, starts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from spark_engine.runtime.engine.request import Event
from spark_engine.runtime.server.api.answers import new_id
from spark_engine.runtime.text.reply_formats import REASONING
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.text_stream import Piece

BEGINNINGS = {row.start for row in REASONING.values() if row}  # marks that do not end a thought
PREFIXES = {Kind.REASONING: "rs", Kind.CONTENT: "msg", Kind.CALL: "fc"}


@dataclass
class ReplyBlock:
    """One block as it grows. `name` is a call's; its `text` is the JSON of its arguments."""

    kind: Kind
    index: int
    ident: str
    name: str = ""
    text: str = ""
    call: str = ""  # a call's id, which its result refers to


class BlockChange(NamedTuple):
    """A change of a block: `text` was added, or (None) it was opened or closed. `last`: the block
    is the answer's last one."""

    block: ReplyBlock
    text: str | None = None
    closed: bool = False
    last: bool = False


class Blocks:
    """The blocks of one choice. `marks` are the tokenizer's, by id; `thinking`: it starts with
    a thought."""

    def __init__(self, parser: ReplyParser, thinking: bool, marks: Mapping[int, str]) -> None:
        self.all: list[ReplyBlock] = []
        self.thought_tokens = 0
        self.calls = 0
        self._parser = parser
        self._thinking = thinking
        self._marks = marks
        self._open: ReplyBlock | None = None

    @property
    def is_cut(self) -> bool:
        """The last block is a call that is not complete."""
        return self._parser.is_cut

    def push(self, piece: Piece) -> list[BlockChange]:
        """The changes of one round; at the end of the answer also its last block's end."""
        self._count(piece.tokens)
        deltas = self._parser.push(piece.text, piece.marks)
        if piece.finish is not None:
            deltas += self._parser.flush(piece.is_cut)
        steps = [step for delta in deltas for step in self._take(delta)]
        return steps if piece.finish is None else steps + self._close(last=True)

    def _take(self, delta: Delta) -> list[BlockChange]:
        steps: list[BlockChange] = []
        begins = self._open is None or self._open.kind is not delta.kind or bool(delta.name)
        if begins:
            steps += self._close()
            self._open = self._new(delta)
            steps.append(BlockChange(self._open))
        assert self._open is not None
        if delta.text:
            self._open.text += delta.text
            steps.append(BlockChange(self._open, delta.text))
        return steps

    def _new(self, delta: Delta) -> ReplyBlock:
        block = ReplyBlock(delta.kind, len(self.all), new_id(PREFIXES[delta.kind], "_"), delta.name)
        if delta.kind is Kind.CALL:
            self.calls += 1
            block.call = new_id("call", "_")
        self.all.append(block)
        return block

    def _close(self, last: bool = False) -> list[BlockChange]:
        block, self._open = self._open, None
        return [] if block is None else [BlockChange(block, closed=True, last=last)]

    def _count(self, events: Iterable[Event]) -> None:
        """Counts tokens of the thought, including the mark of its end."""
        for event in events:
            if not self._thinking or event.token is None:
                return
            self.thought_tokens += 1
            mark = self._marks.get(event.token)
            self._thinking = mark is None or mark in BEGINNINGS
