"""Where a parameter's value ends in a call that is written as XML, while it streams.

A value is any text and may hold the form's own words. "Followed by" looks past white space. These
rules decide, over the whole answer, so that the cut of the stream changes nothing:

1. `</parameter>` ends the value where it is followed by `<parameter=`, `</function>`, the call's
   end, `<function=`, a new call, or the end of the answer. Elsewhere it is text.
2. Nearly `</parameter>` (`</parameter/>`, `</parameter1>`, `</Parameter>`, …) ends it where it is
   followed by `</function>`, the call's end, or a `<parameter=NAME>` as in rule 3.
3. `<parameter=NAME>` at the beginning of a line ends a value that was left open, where NAME is a
   parameter of this tool that was not given yet. A tool whose schema names no parameter takes any
   name that was not given; one whose schema names some takes those alone, whatever it says of
   additional ones.
4. The call's end ends a value that was left open; so does `</function>` followed by the call's end,
   a new call or the end of the answer. Both do so only where nothing that follows belongs to the
   value: where an end by the rules 1 to 3 comes later and no new call comes before, they are text,
   and so is the call's end where the other comes later. So what comes behind is held back until
   one of these, or the end of the answer, is there.
5. Where the value holds the beginning of a whole call (`<function=NAME>`, then `<parameter=` or
   `</function>`), the next `</parameter>` with `</function>` is the end of that call, and text,
   unless nothing that ends the value follows up to the end of the answer.

A new call is the call's mark followed by `<function=`, or `<function=` with the name of a tool. A
mark that is a token is one only where that token was generated. `structured/raw_values.py` writes
values that end by rule 1. Knows no types and no JSON.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from spark_engine.runtime.text.reply_text import Lexeme, Mark

_MARKS = frozenset(Mark) - {Mark.TEXT, Mark.THINK, Mark.END_THINK, Mark.STRAY}
_ENDS = {Mark.END_PARAMETER, Mark.END_FUNCTION, Mark.END_CALL}


class _Verdict(enum.Enum):
    """On the first mark of those that are not decided."""

    WAIT = "for what follows"
    TEXT = "it is text"
    END = "of the value"
    NEW_CALL = "the value ended before"
    # The end, unless one comes later; a stronger one takes the place of a weaker.
    END_OF_CALL = 1
    END_OF_FUNCTION = 2
    END_OF_INNER_CALL = 3


class OpenValue:
    """One value. `said` is what is certain of it, for the caller to take. `leads`: a newline at its
    start is the form's; `may_follow`: whether a name is that of a parameter which may follow;
    `tools`: names of functions."""

    def __init__(
        self, leads: bool, may_follow: Callable[[str], bool], tools: Collection[str]
    ) -> None:
        self.said: list[str] = []
        self._leads, self._may_follow, self._tools = leads, may_follow, tools
        self._newline = False  # held back: the last one is the form's
        self._blank = True  # the line so far
        self._window: deque[Lexeme] = deque()  # from a mark on that is not decided
        self._held: list[Lexeme] = []  # from a mark on that is the end unless one comes later
        self._strength = 0  # of that mark
        self._inner = 0  # calls that began in the value

    def take(self, lexeme: Lexeme) -> Sequence[Lexeme] | None:
        """None, or, when the value has ended, what follows it."""
        if self._leads:
            self._leads = False
            if lexeme.kind is Mark.TEXT and lexeme.text[0] == "\n":
                lexeme = lexeme._replace(text=lexeme.text[1:], at=lexeme.at + 1)
                if not lexeme.text:
                    return None
        if not self._window and lexeme.kind not in _MARKS:
            self._add(lexeme)
            return None
        self._window.append(lexeme)
        return None if lexeme.is_blank else self._decide(last=False)

    def end(self, cut: bool) -> Sequence[Lexeme] | None:
        """The same when no more comes. An answer that was `cut` off without the call's end, or in
        text behind what may have been the end, is taken to be inside the value still."""
        if (rest := self._decide(last=True)) is not None:
            return rest
        kinds = {lexeme.kind for lexeme in self._held if not lexeme.is_blank}
        if kinds and not (cut and not {Mark.END_CALL} <= kinds <= _ENDS):
            return self._end_at_held()
        for lexeme in self._release():
            self._say(lexeme.text)
        if self._newline:
            self.said.append("\n")
        return None

    def _decide(self, last: bool) -> Sequence[Lexeme] | None:
        while self._window:
            first = self._window[0]
            if first.kind not in _MARKS:
                verdict = _Verdict.TEXT
            else:
                rest = islice(self._window, 1, None)
                verdict = self._judge(first, [lex for lex in rest if not lex.is_blank], last)
            if verdict is _Verdict.WAIT:
                return None
            if verdict is _Verdict.NEW_CALL:
                return self._end_at_held()
            if verdict is _Verdict.END:
                for lexeme in self._release():
                    self._say(lexeme.text)
                return list(self._window)[first.kind is not Mark.PARAMETER :]
            self._window.popleft()
            if isinstance(verdict.value, int):
                self._hold(verdict.value)
            self._add(first, verdict is not _Verdict.TEXT)
        return None

    def _judge(self, first: Lexeme, follow: Sequence[Lexeme], last: bool) -> _Verdict:
        kind = first.kind
        if kind is Mark.PARAMETER:
            ends = self._blank and self._may_follow(first.name)
            return _Verdict.END if ends else _Verdict.TEXT
        if kind is Mark.END_CALL:
            return _Verdict.END_OF_CALL
        if not follow and not last:
            return _Verdict.WAIT
        after = follow[0].kind if follow else None
        if kind is Mark.END_PARAMETER:
            return self._judge_end(after, follow, last)
        if kind is Mark.NEAR_END:
            ends = after in (Mark.END_FUNCTION, Mark.END_CALL)
            ends = ends or (after is Mark.PARAMETER and self._may_follow(follow[0].name))
            return _Verdict.END if ends else _Verdict.TEXT
        if kind is Mark.END_FUNCTION:
            if after in (None, Mark.END_CALL):
                return _Verdict.END_OF_FUNCTION
            verdict = self._new_call(follow, last)
            return _Verdict.END_OF_FUNCTION if verdict is _Verdict.NEW_CALL else verdict
        verdict = self._new_call([first, *follow], last)
        if verdict is _Verdict.NEW_CALL and 0 < self._strength < 3:
            return verdict
        if kind is Mark.FUNCTION:
            self._inner += after in (Mark.PARAMETER, Mark.END_FUNCTION)
        return verdict if verdict is _Verdict.WAIT else _Verdict.TEXT

    def _judge_end(self, after: Mark | None, follow: Sequence[Lexeme], last: bool) -> _Verdict:
        """Of `</parameter>`."""
        if after in (None, Mark.PARAMETER, Mark.FUNCTION, Mark.END_CALL):
            return _Verdict.END
        if after is Mark.CALL:
            verdict = self._new_call(follow, last)
            return _Verdict.END if verdict is _Verdict.NEW_CALL else verdict
        if after is not Mark.END_FUNCTION:
            return _Verdict.TEXT
        if not self._inner:
            return _Verdict.END
        behind = [lexeme for lexeme in follow[1:] if lexeme.kind is not Mark.END_CALL]
        if not behind:
            return _Verdict.END if last else _Verdict.WAIT
        self._inner -= 1
        return _Verdict.END_OF_INNER_CALL

    def _new_call(self, follow: Sequence[Lexeme], last: bool) -> _Verdict:
        """Whether these marks begin one."""
        if not follow or follow[0].kind not in (Mark.CALL, Mark.FUNCTION):
            return _Verdict.TEXT
        if follow[0].kind is Mark.FUNCTION:
            return _Verdict.NEW_CALL if follow[0].name in self._tools else _Verdict.TEXT
        if len(follow) == 1:
            return _Verdict.TEXT if last else _Verdict.WAIT
        return _Verdict.NEW_CALL if follow[1].kind is Mark.FUNCTION else _Verdict.TEXT

    def _hold(self, strength: int) -> None:
        """From here on; what is held already is text if this is stronger."""
        if strength > self._strength or strength == 3:
            for lexeme in self._release():
                self._say(lexeme.text)
            self._strength = strength

    def _add(self, lexeme: Lexeme, held: bool = False) -> None:
        """Text, or (`held`) a mark that may be the end."""
        lines = lexeme.text.rpartition("\n")
        self._blank = (self._blank or bool(lines[1])) and not lines[2].strip(" \t")
        if held or self._held:
            self._held.append(lexeme)
        else:
            self._say(lexeme.text)

    def _release(self) -> Sequence[Lexeme]:
        held, self._held, self._strength = self._held, [], 0
        return held

    def _end_at_held(self) -> Sequence[Lexeme]:
        rest = [*self._release(), *self._window]
        return rest[rest[0].kind is Mark.END_PARAMETER :]

    def _say(self, text: str) -> None:
        text = "\n" * self._newline + text
        self._newline = text.endswith("\n")
        if text := text.removesuffix("\n"):
            self.said.append(text)
