"""Takes a chat answer apart while it streams: reasoning, content, tool calls.

One machine over marks and text (`reply_text`). It reads each once, in order, and passes on what no
later text can change; so the cut of the stream changes nothing, and a whole answer is a stream of
one piece. Its states:

    THOUGHT   up to `</think>`, or to a call: some models call without closing the thought
    CONTENT   the answer; a call may begin without its mark, by `<function=` alone
    CALLS     `reply_calls` reads; what is no call is a part of what it was in, as it was written
    DONE      behind the one call that was wanted: what follows is dropped

An answer that ends inside its thought is a thought alone: nothing is made up for it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spark_engine.runtime.text.reply_calls import CallReader
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parts import Delta, Deltas, Kind
from spark_engine.runtime.text.reply_text import Lexeme, Lexer, Mark
from spark_engine.runtime.text.tool_schema import Types, parameter_types

_OPENING = 64  # characters of white space that may come before the mark of a thought


class State(enum.Enum):
    """Where in the answer the machine is."""

    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()
    DONE = enum.auto()


class ReplyParser:
    """One answer. `thinking`: the prompt ended inside an open thought; `fresh`: the answer begins
    a turn, and is no further piece of one.

    Calls are looked for where `tools` are given, or the `types` of their parameters; with
    `parallel` false the answer ends behind the first. `tokens`: marks that are tokens, and count
    where those were generated. Newlines around the reasoning, and between it, the content and a
    call, belong to the form and are dropped.

    Attributes:
        answer_at: place in the whole text where the answer begins, behind the thought and the
            newlines that follow it; None while that is not known.
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
        self._state = State.THOUGHT if thinking and thoughts else State.CONTENT
        content = self._state is State.CONTENT
        self._opening = fresh and content and thoughts is not None  # a thought may begin
        self._space = ""  # before it
        self._leading = fresh and thinking  # newlines at the start of this part are dropped
        self._newlines = 0  # held back: a call may follow, or the end of the thought
        self._gap = 0  # newlines before a call, which content behind it begins with
        self._spelled = 0  # marks of calls that content has as text: their ends are text too
        self._lexer = Lexer(thoughts, form, tokens)
        self._queue, self._deltas = deque[Lexeme](), Deltas()
        self._outside, self._count = self._state, 0  # of calls: the state around, those known
        self._closing: tuple[Mark, ...] = ()  # ends of what had ended already: dropped with tools
        self._calls: CallReader | None = None
        self.answer_at: int | None = 0 if content and not self._opening else None
        if form is not None:
            self._closing = (Mark.END_THINK, Mark.END_CALL)[: 1 + (form.end in tokens)]
            self._marks_of_calls = form.start, form.end
            hand_on = self._deltas.add
            self._calls = CallReader(self._queue, form, types, hand_on, not parallel)
        self._step: Mapping[State, Callable[[Lexeme], None]] = {
            State.THOUGHT: self._thought,
            State.CONTENT: self._content,
            State.CALLS: self._call,
            State.DONE: self._drop,
        }

    @property
    def calls(self) -> int:
        """Calls so far whose name is known."""
        return self._calls.count if self._calls is not None else 0

    @property
    def is_cut(self) -> bool:
        """The last call is not complete: nobody is to run it."""
        return self._calls is not None and self._calls.count > self._calls.closed

    @property
    def thought_until(self) -> int:
        """Place in the whole text up to which all is reasoning, while `answer_at` is None."""
        if self._state is State.CALLS and self._calls is not None:
            return self._calls.begun
        return self._lexer.at - len(self._space)

    def has_ended(self) -> bool:
        """Nothing that follows is part of the answer: it need not be generated."""
        return self._state is State.DONE

    def push(self, text: str, marks: Iterable[int] = ()) -> list[Delta]:
        """The deltas that this further text makes certain.

        `marks`: places in the whole answer's text where a token that is a mark begins, which may
        lie ahead of the text.
        """
        self._lexer.push(text, marks)
        self._read(last=False)
        return self._deltas.take()

    def flush(self, cut: bool = False) -> list[Delta]:
        """What was held back, at the end of the stream. `cut`: the answer did not end by itself,
        so that a call in which it ended is not complete."""
        self._read(last=True)
        while self._state is State.CALLS and self._calls is not None and self._calls.end(cut):
            self._after_call()
            self._drain()
        if self._state is State.CONTENT:
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
        """Behind the end."""

    def _thought(self, lexeme: Lexeme) -> None:
        if lexeme.kind is Mark.CALL:
            self._begin_call(lexeme)
        elif lexeme.kind is Mark.END_THINK:
            self._state, self._leading, self._newlines = State.CONTENT, True, 0
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
        """At the very start: whether this is content. White space may be neither."""
        if lexeme.is_blank and len(self._space) + len(lexeme.text) <= _OPENING:
            self._space += lexeme.text
            return False
        if lexeme.kind is Mark.THINK:
            self._opening, self._space, self._leading = False, "", True
            self._state = State.THOUGHT
            return False
        self._begin_content()
        return True

    def _begin_content(self) -> None:
        """No thought was opened."""
        space, self._space = self._space, ""
        self._opening, self.answer_at = False, 0
        self._say(Kind.CONTENT, space)

    def _begin_call(self, lexeme: Lexeme) -> None:
        assert self._calls is not None
        self._outside, self._state = self._state, State.CALLS
        self._calls.begin(lexeme)
        self._after_call()

    def _call(self, lexeme: Lexeme) -> None:
        assert self._calls is not None
        self._calls.take(lexeme)
        self._after_call()

    def _after_call(self) -> None:
        """Where the reader of calls is now."""
        calls = self._calls
        assert calls is not None
        if calls.count > self._count:
            self._count = calls.count
            self._note_call(calls.begun)
        if calls.closed and not self._parallel:
            self._queue.clear()
            self._state = State.DONE
        elif not calls.inside:
            self._state = self._outside
            if calls.rest:
                begun, ended = self._marks_of_calls
                self._spelled += begun in calls.rest and ended not in calls.rest
                self._leading = False
                thought = self._state is State.THOUGHT
                self._say(Kind.REASONING if thought else Kind.CONTENT, calls.rest)

    def _note_call(self, at: int) -> None:
        """A call is one: what it was in has ended, but for newlines that content goes on with."""
        if self._outside is State.CONTENT and not self._leading:
            self._gap = self._newlines
        self._outside, self._leading, self._newlines = State.CONTENT, True, 0
        self.answer_at = at if self.answer_at is None else self.answer_at
