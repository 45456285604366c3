"""Finds the end of a parameter's value in a streamed XML call.

A value is any text and may contain the format's own marks. "Followed by" ignores white space. These
rules hold over the whole answer, so the result does not depend on how the stream is divided:

1. `</parameter>` ends the value if it is followed by `<parameter=`, `</function>`, the call's
   end, `<function=`, a new call, or the end of the answer. Otherwise it is text.
2. A misspelled `</parameter>` (`</parameter/>`, `</parameter1>`, `</Parameter>`, …) ends it if it
   is followed by `</function>`, the call's end, or a `<parameter=NAME>` as in rule 3.
3. `<parameter=NAME>` at the start of a line ends an open value if NAME is a parameter of this tool
   without a value so far. A tool with a schema that names no parameter accepts any new name; one
   with a schema that names some accepts only those, whatever it says of additional ones.
4. The call's end ends an open value; so does `</function>` followed by the call's end, a new call
   or the end of the answer. Both do so only if no later text belongs to the value: if an end by
   rules 1 to 3 comes later and no new call comes before, they are text, and so is the call's end
   if the other comes later. The text after them is therefore held back until one of these, or
   the end of the answer, arrives.
5. If the value contains the beginning of a whole call (`<function=NAME>`, then `<parameter=` or
   `</function>`), the next `</parameter>` with `</function>` is the end of that call, and text,
   unless no end of the value follows up to the end of the answer.

A new call is the call's mark followed by `<function=`, or `<function=` with the name of a tool. A
mark that is a token counts only where that token was generated. `structured/raw_values.py` writes
values that end by rule 1. Knows no types and no JSON.
"""

import enum
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import islice

from spark_engine.runtime.text.reply_text import Lexeme, Mark

_MARKS = frozenset(Mark) - {Mark.TEXT, Mark.THINK, Mark.END_THINK, Mark.STRAY}
_ENDS = {Mark.END_PARAMETER, Mark.END_FUNCTION, Mark.END_CALL}


class _Verdict(enum.Enum):
    WAIT = "for what follows"
    TEXT = "it is text"
    END = "of the value"
    NEW_CALL = "the value ended before"
    # The end, unless another comes later; a stronger candidate replaces a weaker one.
    END_OF_CALL = 1
    END_OF_FUNCTION = 2
    END_OF_INNER_CALL = 3


class OpenValue:
    """One value. `certain`: the certain text, for the caller to remove. `leads`: a newline at its
    start belongs to the format; `may_follow`: whether a parameter of this name may follow; `tools`:
    names of functions."""

    def __init__(
        self, leads: bool, may_follow: Callable[[str], bool], tools: Collection[str]
    ) -> None:
        self.certain: list[str] = []
        self._leads, self._may_follow, self._tools = leads, may_follow, tools
        self._newline = False  # held back: the last newline belongs to the format
        self._blank = True  # of the line so far
        self._window: deque[Lexeme] = deque()  # lexemes from an undecided mark on
        self._held: list[Lexeme] = []  # lexemes from a candidate for the end on
        self._strength = 0  # of that candidate
        self._inner = 0  # calls that started in the value

    def take(self, lexeme: Lexeme) -> Sequence[Lexeme] | None:
        """None; or, once the value has ended, the following lexemes."""
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
        """The same at the end of the answer. A `cut` answer without the call's end, or that ends in
        text after a candidate, still ends inside the value."""
        if (rest := self._decide(last=True)) is not None:
            return rest
        kinds = {lexeme.kind for lexeme in self._held if not lexeme.is_blank}
        if kinds and not (cut and not {Mark.END_CALL} <= kinds <= _ENDS):
            return self._end_at_held()
        for lexeme in self._release():
            self._say(lexeme.text)
        if self._newline:
            self.certain.append("\n")
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
        if not follow or follow[0].kind not in (Mark.CALL, Mark.FUNCTION):
            return _Verdict.TEXT
        if follow[0].kind is Mark.FUNCTION:
            return _Verdict.NEW_CALL if follow[0].name in self._tools else _Verdict.TEXT
        if len(follow) == 1:
            return _Verdict.TEXT if last else _Verdict.WAIT
        return _Verdict.NEW_CALL if follow[1].kind is Mark.FUNCTION else _Verdict.TEXT

    def _hold(self, strength: int) -> None:
        """Starts a candidate; a weaker earlier one becomes text."""
        if strength > self._strength or strength == 3:
            for lexeme in self._release():
                self._say(lexeme.text)
            self._strength = strength

    def _add(self, lexeme: Lexeme, held: bool = False) -> None:
        """Adds text, or (`held`) a candidate mark."""
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
            self.certain.append(text)
