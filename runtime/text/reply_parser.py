"""Parses a streamed chat answer: reasoning, content, tool calls.

One state machine over marks and text (`reply_text`). It reads each once, in order, and passes on
only text that later text cannot change. The result therefore does not depend on how the stream is
divided. States:

    THOUGHT   up to `</think>`, or to a call: some models call without closing the thought
    CONTENT   the answer; a call may start without its mark, at `<function=`
    CALLS     `reply_calls` reads; text that is not a call returns to the previous state
    DONE      after the last wanted call: the rest is dropped

An answer that ends inside its thought is a thought alone; no content is added.
"""

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spark_engine.runtime.text.reply_calls import CallReader
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parts import Delta, Deltas, Kind
from spark_engine.runtime.text.reply_text import Lexeme, Lexer, Mark
from spark_engine.runtime.text.tool_schema import Types, parameter_types

_OPENING = 64  # characters of white space before the mark of a thought


class ParserState(enum.Enum):
    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()
    DONE = enum.auto()


class ReplyParser:
    """Parser of one answer. `thinking`: the prompt ended inside an open thought; `fresh`: the
    answer starts a turn, and does not continue one.

    It looks for calls if `tools`, or the `types` of their parameters, are given; with `parallel`
    false the answer ends after the first call. `tokens`: marks that are tokens, and count only
    where those were generated. Newlines around the reasoning, and between it, the content and a
    call, belong to the format and are dropped.

    Attributes:
        answer_at: position in the whole text of the answer's start, after the thought and its
            newlines; None until it is known.
    """

    def __init__(
        self,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        formats: Formats | None = None,
        tokens: Collection[str] = (),
        fresh: bool = True,
        parallel: bool = True,
        types: Types | None = None,
    ) -> None:
        formats = formats or Formats()
        types = parameter_types(tools) if types is None else types
        thoughts, form = formats.thoughts, formats.calls if types else None
        self._parallel = parallel
        self._state = ParserState.THOUGHT if thinking and thoughts else ParserState.CONTENT
        content = self._state is ParserState.CONTENT
        self._opening = fresh and content and thoughts is not None  # a thought may start
        self._space = ""  # white space before it
        self._leading = fresh and thinking  # newlines at the start of this part are dropped
        self._newlines = 0  # held back: a call or the thought's end may follow
        self._gap = 0  # newlines before a call, which start the content after it
        self._spelled = 0  # call marks that are text in the content: so are their ends
        self._lexer = Lexer(thoughts, form, tokens)
        self._queue, self._deltas = deque[Lexeme](), Deltas()
        self._outside, self._count = self._state, 0  # of calls: the outer state, known calls
        self._closing: tuple[Mark, ...] = ()  # unmatched end marks: dropped if there are tools
        self._calls: CallReader | None = None
        self.answer_at: int | None = 0 if content and not self._opening else None
        if form is not None:
            self._closing = (Mark.END_THINK, Mark.END_CALL)[: 1 + (form.end in tokens)]
            self._marks_of_calls = form.start, form.end
            hand_on = self._deltas.add
            self._calls = CallReader(self._queue, form, types, hand_on, not parallel)
        self._step: Mapping[ParserState, Callable[[Lexeme], None]] = {
            ParserState.THOUGHT: self._thought,
            ParserState.CONTENT: self._content,
            ParserState.CALLS: self._call,
            ParserState.DONE: self._drop,
        }

    @property
    def calls(self) -> int:
        """Number of calls with a known name."""
        return self._calls.count if self._calls is not None else 0

    @property
    def is_cut(self) -> bool:
        """True if the last call is incomplete: a client must not run it."""
        return self._calls is not None and self._calls.count > self._calls.closed

    @property
    def thought_until(self) -> int:
        """Position in the whole text up to which all is reasoning, while `answer_at` is None."""
        if self._state is ParserState.CALLS and self._calls is not None:
            return self._calls.started
        return self._lexer.at - len(self._space)

    def has_ended(self) -> bool:
        """True if any following text is dropped, so that it need not be generated."""
        return self._state is ParserState.DONE

    def push(self, text: str, marks: Iterable[int] = ()) -> list[Delta]:
        """The deltas that this text makes certain.

        `marks`: positions in the whole answer's text of tokens that are marks, which may be ahead
        of the text.
        """
        self._lexer.push(text, marks)
        self._read(last=False)
        return self._deltas.take()

    def flush(self, cut: bool = False) -> list[Delta]:
        """Text held back, at the end of the stream. `cut`: the answer did not end by itself, so a
        call that it ends in is incomplete."""
        self._read(last=True)
        while self._state is ParserState.CALLS and self._calls is not None and self._calls.end(cut):
            self._after_call()
            self._drain()
        if self._state is ParserState.CONTENT:
            if self._opening:
                self._begin_content()
            if self._newlines:
                self._deltas.add(Delta(Kind.CONTENT, "\n" * self._newlines))
                self._newlines = 0
        return self._deltas.take()

    def _read(self, last: bool) -> None:
        for lexeme in self._lexer.lexemes(last):
            self._queue.append(lexeme)
            self._drain()

    def _drain(self) -> None:
        while self._queue:
            self._step[self._state](self._queue.popleft())

    def _say(self, kind: Kind, text: str) -> None:
        if self._leading:
            text = text.lstrip("\n")
        if not text:
            return
        self._leading = False
        plain = text.rstrip("\n") if kind is Kind.REASONING or self._calls else text
        if plain:
            self._deltas.add(Delta(kind, "\n" * (self._gap + self._newlines) + plain))
            self._gap = self._newlines = 0
        self._newlines += len(text) - len(plain)

    def _drop(self, lexeme: Lexeme) -> None:
        """Drops text after the end."""

    def _thought(self, lexeme: Lexeme) -> None:
        if lexeme.kind is Mark.CALL:
            self._begin_call(lexeme)
        elif lexeme.kind is Mark.END_THINK:
            self._state, self._leading, self._newlines = ParserState.CONTENT, True, 0
        elif lexeme.kind is not Mark.THINK:
            self._say(Kind.REASONING, lexeme.text)

    def _content(self, lexeme: Lexeme) -> None:
        kind = lexeme.kind
        if self._opening and not self._opened(lexeme):
            return
        if kind in self._closing and not (kind is Mark.END_CALL and self._spelled):
            return
        if self.answer_at is None:
            text = lexeme.text.lstrip("\n")
            self.answer_at = lexeme.at + len(lexeme.text) - len(text) if text else None
        if kind is Mark.CALL or kind is Mark.FUNCTION:
            self._begin_call(lexeme)
            return
        self._spelled -= kind is Mark.END_CALL and self._spelled > 0
        self._say(Kind.CONTENT, lexeme.text)

    def _opened(self, lexeme: Lexeme) -> bool:
        """At the start: whether this is content. White space may be undecided."""
        if lexeme.is_blank and len(self._space) + len(lexeme.text) <= _OPENING:
            self._space += lexeme.text
            return False
        if lexeme.kind is Mark.THINK:
            self._opening, self._space, self._leading = False, "", True
            self._state = ParserState.THOUGHT
            return False
        self._begin_content()
        return True

    def _begin_content(self) -> None:
        space, self._space = self._space, ""
        self._opening, self.answer_at = False, 0
        self._say(Kind.CONTENT, space)

    def _begin_call(self, lexeme: Lexeme) -> None:
        assert self._calls is not None
        self._outside, self._state = self._state, ParserState.CALLS
        self._calls.begin(lexeme)
        self._after_call()

    def _call(self, lexeme: Lexeme) -> None:
        assert self._calls is not None
        self._calls.take(lexeme)
        self._after_call()

    def _after_call(self) -> None:
        calls = self._calls
        assert calls is not None
        if calls.count > self._count:
            self._count = calls.count
            self._note_call(calls.started)
        if calls.closed and not self._parallel:
            self._queue.clear()
            self._state = ParserState.DONE
        elif not calls.inside:
            self._state = self._outside
            if calls.rest:
                started, ended = self._marks_of_calls
                self._spelled += started in calls.rest and ended not in calls.rest
                self._leading = False
                thought = self._state is ParserState.THOUGHT
                self._say(Kind.REASONING if thought else Kind.CONTENT, calls.rest)

    def _note_call(self, at: int) -> None:
        """Records a recognised call: ends the previous part, except newlines that content continues
        with."""
        if self._outside is ParserState.CONTENT and not self._leading:
            self._gap = self._newlines
        self._outside, self._leading, self._newlines = ParserState.CONTENT, True, 0
        self.answer_at = at if self.answer_at is None else self.answer_at
