"""The text of an answer that is not taken apart yet, and the marks in it.

Marks that the tokenizer knows as tokens count only where that token was generated, so that an
answer may speak of them. Knows places in text; knows no forms and no states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from spark_engine.runtime.text.stops import partial_match


class ReplyText:
    """What came and was not taken. `tokens`: marks that are tokens."""

    def __init__(self, tokens: Collection[str] = ()) -> None:
        self.text = ""
        self._at = 0  # the text's place in the answer
        self._tokens, self._places = frozenset(tokens), set[int]()  # and where they begin

    def push(self, text: str, places: Iterable[int]) -> None:
        """Adds text. `places` in the whole answer, where a token that is a mark begins, may lie
        ahead of the text."""
        self._places.update(places)
        self.text += text

    def take(self, size: int) -> str:
        """The first characters, which are no longer here then."""
        taken, self.text = self.text[:size], self.text[size:]
        self._at += size
        return taken

    def find(self, marks: Sequence[str]) -> tuple[int, str] | None:
        """(place, mark) of the first mark in the text, the longest of those at one place."""
        found = []
        for mark in marks:
            at = self.text.find(mark)
            while at >= 0 and not self._counts(mark, at):
                at = self.text.find(mark, at + 1)
            if at >= 0:
                found.append((at, -len(mark), mark))
        if not found:
            return None
        at, _, mark = min(found)
        return at, mark

    def find_token(self, mark: str) -> int:
        """Where a mark was generated as a token; -1: nowhere yet, or it is none."""
        hit = self.find((mark,)) if mark in self._tokens else None
        return -1 if hit is None else hit[0]

    def begins(self, marks: Sequence[str]) -> tuple[int, str] | None:
        """(place, mark) of the first of these marks that comes next but for white space."""
        start = self.text.lstrip()
        gap = len(self.text) - len(start)
        for mark in marks:
            if start.startswith(mark) and self._counts(mark, gap):
                return gap, mark
        return None

    def may_begin(self, marks: Sequence[str]) -> bool:
        """Whether further text may make the beginning one of these marks."""
        start = self.text.lstrip()
        return any(mark.startswith(start) for mark in marks)

    def certain(self, marks: Sequence[str], last: bool) -> int:
        """How much of the text is sure to hold no mark, nor newlines before one; all of it when no
        more comes (`last`)."""
        if last:
            return len(self.text)
        cut = len(self.text) - partial_match(self.text, marks)
        return len(self.text[:cut].rstrip("\n")) if marks else cut

    def _counts(self, mark: str, at: int) -> bool:
        return mark not in self._tokens or self._at + at in self._places
