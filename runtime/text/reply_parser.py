"""Takes a chat answer apart while it streams: reasoning, content, tool calls.

One machine over the text, right however the stream is cut: a whole answer is a stream of one
piece. Marks (`reply_formats`) that the tokenizer knows as tokens count only where that token was
generated, so that an answer may speak of them. Its states:

    THOUGHT   up to `</think>`, or to a call: some models call without closing the thought
    CONTENT   the answer; a call may begin without its mark, by `<function=` alone
    CALLS     `reply_calls` reads; what is no call is content, as it was written
    DONE      behind the one call that was wanted: what follows is dropped
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spark_engine.runtime.text.reply_calls import CallReader
from spark_engine.runtime.text.reply_formats import FUNCTION, Formats
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.reply_text import ReplyText
from spark_engine.runtime.text.tool_schema import parameter_types


class State(enum.Enum):
    """Where in the answer the machine is."""

    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALLS = enum.auto()
    DONE = enum.auto()


class ReplyParser:
    """One answer. `thinking`: the prompt ended inside an open thought; `fresh`: the answer begins
    a turn, and is no further piece of one.

    Calls are looked for where `tools` are given; with `parallel` false the answer ends behind the
    first. `tokens`: marks that are tokens, and count where those were generated. Newlines around
    the reasoning, and between it, the content and a call, belong to the form and are dropped.
    """

    def __init__(
        self,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        formats: Formats | None = None,
        tokens: Collection[str] = (),
        fresh: bool = True,
        parallel: bool = True,
    ) -> None:
        formats = formats or Formats()
        self._parallel = parallel
        self._thoughts, self._form = formats.thoughts, formats.calls if tools else None
        self._state = State.THOUGHT if thinking and self._thoughts else State.CONTENT
        self._opening = fresh and self._thoughts is not None  # a thought may begin
        self._leading = fresh and thinking  # newlines at the start of this part are dropped
        self._gap = ""  # newlines before a call, which content behind it begins with
        self._in = ReplyText(tokens)
        self._deltas: list[Delta] = []
        self._calls: CallReader | None = None
        self._closing: tuple[str, ...] = ()  # ends of what had ended already: dropped with tools
        self._marks: tuple[str, ...] = ()  # in content
        if self._form is not None:
            self._closing = () if self._thoughts is None else (self._thoughts.end,)
            if self._form.end in tokens:
                self._closing = (*self._closing, self._form.end)
            begins = (self._form.start, FUNCTION) if self._form.xml else (self._form.start,)
            self._marks = (*self._closing, *begins)
            types = parameter_types(tools)
            hand_on = self._deltas.append
            self._calls = CallReader(self._in, self._form, types, hand_on, not parallel)
        self._step: Mapping[State, Callable[[bool], bool]] = {
            State.THOUGHT: self._thought,
            State.CONTENT: self._content,
            State.CALLS: self._call,
            State.DONE: self._drop,
        }

    @property
    def calls(self) -> int:
        """Calls so far whose name is known."""
        return self._calls.count if self._calls is not None else 0

    def has_ended(self) -> bool:
        """Nothing that follows is part of the answer: it need not be generated."""
        return self._state is State.DONE

    def push(self, text: str, marks: Iterable[int] = ()) -> list[Delta]:
        """The deltas that this further text makes certain.

        `marks`: places in the whole answer's text where a token that is a mark begins, which may
        lie ahead of the text.
        """
        self._in.push(text, marks)
        return self._run(last=False)

    def flush(self) -> list[Delta]:
        """What was held back, at the end of the stream."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[Delta]:
        self._deltas.clear()
        while self._step[self._state](last):
            pass
        return list(self._deltas)

    def _say(self, kind: Kind, text: str) -> None:
        if self._leading:
            text = text.lstrip("\n")
        if text:
            self._leading = False
            if kind is Kind.CONTENT:
                text, self._gap = self._gap + text, ""
            if self._deltas and self._deltas[-1].kind is kind:
                text = self._deltas.pop().text + text
            self._deltas.append(Delta(kind, text))

    def _enter(self, state: State) -> bool:
        self._state = state
        return True

    def _thought(self, last: bool) -> bool:
        assert self._thoughts is not None
        start, end = self._thoughts.start, self._thoughts.end
        marks = (start, end, *((self._form.start,) if self._form else ()))
        hit = self._in.find(marks)
        if hit is None:
            text = self._in.take(self._in.certain(marks, last))
            self._say(Kind.REASONING, text.rstrip("\n") if last else text)
            return False
        at, mark = hit
        text = self._in.take(at)
        self._say(Kind.REASONING, text if mark == start else text.rstrip("\n"))
        self._opening = False
        if mark == start:
            self._in.take(len(mark))
            return True
        self._leading, self._gap = True, ""
        if mark == end:
            self._in.take(len(mark))
            return self._enter(State.CONTENT)
        return self._begin_call(mark)

    def _content(self, last: bool) -> bool:
        if self._opening and not self._opened(last):
            return self._state is State.THOUGHT
        hit = self._in.find(self._marks)
        if hit is None:
            self._say(Kind.CONTENT, self._in.take(self._in.certain(self._marks, last)))
            return False
        at, mark = hit
        text = self._in.take(at)
        if mark in self._closing:
            self._say(Kind.CONTENT, text)
            self._in.take(len(mark))
            return True
        said = text.rstrip("\n")
        self._say(Kind.CONTENT, said)
        self._gap = "" if self._leading else text[len(said) :]
        self._leading = True
        return self._begin_call(mark)

    def _opened(self, last: bool) -> bool:
        """Drops the mark of a thought at the very start; False while one may still come, and when
        one came."""
        assert self._thoughts is not None
        marks = (self._thoughts.start,)
        if (hit := self._in.begins(marks)) is not None:
            self._in.take(hit[0] + len(hit[1]))
            self._opening, self._leading = False, True
            self._state = State.THOUGHT
            return False
        if not last and self._in.may_begin(marks):
            return False
        self._opening = False
        return True

    def _begin_call(self, mark: str) -> bool:
        assert self._calls is not None
        self._calls.begin(mark)
        return self._enter(State.CALLS)

    def _call(self, last: bool) -> bool:
        calls = self._calls
        assert calls is not None
        more = calls.step(last)
        if calls.closed and not self._parallel:
            return self._enter(State.DONE)
        if calls.inside:
            return more
        if calls.rest:
            self._leading = False
            self._say(Kind.CONTENT, calls.rest)
        return self._enter(State.CONTENT)

    def _drop(self, last: bool) -> bool:
        self._in.take(len(self._in.text))
        return False
