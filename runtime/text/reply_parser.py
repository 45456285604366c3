"""Takes a chat answer apart while it streams: reasoning, content, tool calls.

One machine over the text, right however the stream is cut: a whole answer is a stream of one
piece. Marks (`reply_formats`) that the tokenizer knows as tokens count only where that token was
generated, so that an answer may speak of them. Its states:

    THOUGHT   up to `</think>`, or to a call: some models call without closing the thought
    CONTENT   the answer; a call may begin without its mark, by `<function=` alone
    CALL      inside a call, before, between and behind functions
    NAME      the name of a function
    BODY      between parameters
    KEY       the name of a parameter
    VALUE     a parameter; strings are passed on as they come, others when they are whole
    JSON      a call written as an object, passed on when it is whole

A call that is malformed before its name is known stays in the content as it was written. One that
is cut off later keeps the arguments that came, without the closing brace: nobody runs half of it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    FUNCTION,
    PARAMETER,
    REASONING,
    TOOLS,
)
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.reply_values import sure_of_value, value_end
from spark_engine.runtime.text.stops import partial_match
from spark_engine.runtime.text.tool_schema import Types, parameter_types, value_of


class State(enum.Enum):
    """Where in the answer the machine is."""

    THOUGHT = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()
    NAME = enum.auto()
    BODY = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    JSON = enum.auto()


class ReplyParser:
    """One answer. `thinking`: the prompt ended inside an open thought.

    `reasoning` and `calls` name rows of `reply_formats`; calls are looked for where `tools` are
    given. `tokens`: marks that are tokens, and count where those were generated. Newlines around
    the reasoning, and between it, the content and a call, belong to the form and are dropped.
    """

    def __init__(
        self,
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning: str = "qwen3",
        calls: str = "qwen3_coder",
        tokens: Collection[str] = (),
    ) -> None:
        self.calls = 0
        self._types: Types = parameter_types(tools)
        self._thoughts = REASONING[reasoning]
        self._form = TOOLS[calls] if tools else None
        self._state = State.THOUGHT if thinking and self._thoughts else State.CONTENT
        self._opening = self._thoughts is not None  # only white space came: a thought may begin
        self._leading = thinking  # newlines at the start of this part are dropped
        self._text, self._at = "", 0  # what is not taken yet, and its place in the answer
        self._tokens, self._places = frozenset(tokens), set[int]()  # and where they begin
        self._deltas: list[Delta] = []
        self._raw = ""  # of a call whose name is not known yet
        self._name, self._key = "", ""
        self._types_of_call: Mapping[str, frozenset[str]] = {}
        self._open = self._first = False  # arguments are being written; none was yet
        self._string = False  # the value is passed on as it comes
        self._step: Mapping[State, Callable[[bool], bool]] = {
            State.THOUGHT: self._thought,
            State.CONTENT: self._content,
            State.CALL: self._call,
            State.NAME: self._read_name,
            State.BODY: self._body,
            State.KEY: self._read_key,
            State.VALUE: self._value,
            State.JSON: self._object,
        }

    def push(self, text: str, marks: Iterable[int] = ()) -> list[Delta]:
        """The deltas that this further text makes certain.

        `marks`: places in the whole answer's text where a token that is a mark begins, which may
        lie ahead of the text.
        """
        self._places.update(marks)
        self._text += text
        return self._run(last=False)

    def flush(self) -> list[Delta]:
        """What was held back, at the end of the stream."""
        return self._run(last=True)

    def _run(self, last: bool) -> list[Delta]:
        self._deltas = []
        while self._step[self._state](last):
            pass
        made, self._deltas = self._deltas, []
        return made

    # Text and marks.

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        self._at += size
        return taken

    def _find(self, marks: Sequence[str], behind: int = 0) -> tuple[int, str] | None:
        """(place, mark) of the first mark in the text, the longest of those at one place."""
        found = []
        for mark in marks:
            at = self._text.find(mark, behind)
            while at >= 0 and not self._counts(mark, at):
                at = self._text.find(mark, at + 1)
            if at >= 0:
                found.append((at, -len(mark), mark))
        if not found:
            return None
        at, _, mark = min(found)
        return at, mark

    def _counts(self, mark: str, at: int) -> bool:
        return mark not in self._tokens or self._at + at in self._places

    def _certain(self, marks: Sequence[str], last: bool) -> int:
        """How much of the text is sure to hold no mark, nor newlines before one."""
        if last:
            return len(self._text)
        cut = len(self._text) - partial_match(self._text, marks)
        return len(self._text[:cut].rstrip("\n")) if marks else cut

    def _say(self, kind: Kind, text: str) -> None:
        if self._leading:
            text = text.lstrip("\n")
        if text:
            self._leading = False
            if self._deltas and kind is not Kind.CALL and self._deltas[-1].kind is kind:
                text = self._deltas.pop().text + text
            self._deltas.append(Delta(kind, text))

    def _enter(self, state: State) -> bool:
        self._state = state
        return True

    # Thoughts and content.

    def _thought(self, last: bool) -> bool:
        assert self._thoughts is not None
        start, end = self._thoughts.start, self._thoughts.end
        marks = (start, end, *((self._form.start,) if self._form else ()))
        hit = self._find(marks)
        if hit is None:
            text = self._take(self._certain(marks, last))
            self._say(Kind.REASONING, text.rstrip("\n") if last else text)
            return False
        at, mark = hit
        text = self._take(at)
        self._say(Kind.REASONING, text if mark == start else text.rstrip("\n"))
        self._opening = False
        if mark == start:
            self._take(len(mark))
            return True
        self._leading = True
        if mark == end:
            self._take(len(mark))
            return self._enter(State.CONTENT)
        return self._begin_call(mark)

    def _content(self, last: bool) -> bool:
        if self._opening and not self._opened(last):
            return self._state is State.THOUGHT
        marks: tuple[str, ...] = ()
        if self._form is not None:
            marks = (self._form.start, *((FUNCTION,) if self._form.xml else ()))
            if self._thoughts is not None:
                marks = (*marks, self._thoughts.end)
        hit = self._find(marks)
        if hit is None:
            self._say(Kind.CONTENT, self._take(self._certain(marks, last)))
            return False
        at, mark = hit
        text = self._take(at)
        if self._thoughts is not None and mark == self._thoughts.end:
            self._say(Kind.CONTENT, text)
            self._take(len(mark))  # a thought that had ended already
            return True
        self._say(Kind.CONTENT, text.rstrip("\n"))
        self._leading = True
        return self._begin_call(mark)

    def _opened(self, last: bool) -> bool:
        """Drops the mark of a thought at the very start; False while one may still come, and when
        one came."""
        assert self._thoughts is not None
        start, mark = self._text.lstrip(), self._thoughts.start
        gap = len(self._text) - len(start)
        if start.startswith(mark) and self._counts(mark, gap):
            self._take(gap + len(mark))
            self._opening, self._leading = False, True
            self._state = State.THOUGHT
            return False
        if not last and mark.startswith(start):
            return False
        self._opening = False
        return True

    # Calls.

    def _begin_call(self, mark: str) -> bool:
        """At the mark of a call, or at `<function=`, which needs none."""
        self._raw = ""
        if self._form is not None and mark == self._form.start:
            self._raw = self._take(len(mark))
        return self._enter(State.CALL)

    def _give_up(self, rest: str = "") -> bool:
        """What was taken for a call is content."""
        leading, self._leading = self._leading, False
        self._say(Kind.CONTENT, self._raw + rest)
        self._leading, self._raw = leading and not (self._raw or rest), ""
        return self._enter(State.CONTENT)

    def _call(self, last: bool) -> bool:
        """Before, between and behind functions."""
        assert self._form is not None
        text = self._text.lstrip()
        gap = len(self._text) - len(text)
        ends = (self._form.end, self._form.start, FUNCTION)
        for mark in ends:
            if text.startswith(mark) and self._counts(mark, gap):
                return self._at_mark(mark, gap)
        if text.startswith("{"):
            self._raw += self._take(gap)
            return self._enter(State.JSON)
        if not last and any(mark.startswith(text) for mark in ends):
            return False
        if last and not text and not self._raw:
            self._take(len(self._text))
            return False
        if not self._raw:  # behind a function whose call was passed on: content goes on
            return self._enter(State.CONTENT)
        if last:
            self._give_up(self._take(len(self._text)))
            return False
        hit = self._find((self._form.end,))
        if hit is None:
            return False
        return self._give_up(self._take(hit[0] + len(hit[1])))

    def _at_mark(self, mark: str, gap: int) -> bool:
        assert self._form is not None
        taken = self._take(gap + len(mark))
        if mark == FUNCTION:
            self._raw += taken
            return self._enter(State.NAME)
        if mark == self._form.start:
            self._raw += taken
            return True
        if self._raw:  # a call without a function
            return self._give_up(taken)
        self._leading = True
        return self._enter(State.CONTENT)

    def _read_name(self, last: bool) -> bool:
        """The name ends with `>`; one that was left open ends with what comes next."""
        assert self._form is not None
        marks = (END_FUNCTION, self._form.end, self._form.start, FUNCTION, PARAMETER)
        hit = self._find((">", "\n", *marks))
        if hit is None:
            if last:
                self._give_up(self._take(len(self._text)))
            return False
        at, mark = hit
        name = self._text[:at].strip()
        if not name:
            return self._give_up(self._take(at))
        self._take(at + (mark in (">", "\n")))
        self._raw = ""
        self.calls += 1
        self._name, self._open, self._first = name, True, True
        self._types_of_call = self._types.get(name, {})
        self._deltas.append(Delta(Kind.CALL, "{", name))
        return self._enter(State.BODY)

    def _body(self, last: bool) -> bool:
        assert self._form is not None
        text = self._text.lstrip()
        gap = len(self._text) - len(text)
        marks = (PARAMETER, END_FUNCTION, FUNCTION, self._form.end, self._form.start)
        for mark in marks:
            if text.startswith(mark) and self._counts(mark, gap):
                if mark == PARAMETER:
                    self._take(gap + len(mark))
                    return self._enter(State.KEY)
                self._take(gap + (len(mark) if mark == END_FUNCTION else 0))
                self._deltas.append(Delta(Kind.CALL, "}"))
                self._open = False
                return self._enter(State.CALL)
        if last:
            self._take(len(self._text))
            return False
        if any(mark.startswith(text) for mark in marks):
            return False
        hit = self._find(marks)  # what stands between parameters is no part of them
        self._take(hit[0] if hit else self._certain(marks, last))
        return hit is not None

    def _read_key(self, last: bool) -> bool:
        hit = self._find((">", "\n"))
        if hit is None:
            if last:
                self._take(len(self._text))
            return False
        self._key = self._take(hit[0]).strip()
        self._take(1)
        types = self._types_of_call.get(self._key, frozenset())
        self._string = not types or types == {"string"} or types == {"string", "null"}
        comma = "" if self._first else ", "
        opened = json.dumps(self._key, ensure_ascii=False)
        self._deltas.append(Delta(Kind.CALL, f"{comma}{opened}: " + '"' * self._string))
        self._first = False
        self._leading = hit[1] == ">"  # one newline behind the mark is its own
        return self._enter(State.VALUE)

    def _call_end(self) -> int:
        """Where the call's end was generated as a token; -1: nowhere yet, or it is none."""
        assert self._form is not None
        hit = self._find((self._form.end,)) if self._form.end in self._tokens else None
        return -1 if hit is None else hit[0]

    def _value(self, last: bool) -> bool:
        assert self._form is not None
        if self._leading and self._text:
            self._leading = False
            if self._text[0] == "\n":
                self._take(1)
        end = value_end(self._text, self._form.end, self._call_end(), last)
        if end is None:
            if not last and self._string:
                self._string_delta(self._take(sure_of_value(self._text, self._form.end)))
            elif last:
                self._string_delta(self._take(len(self._text)) if self._string else "")
            return False
        at, size = end
        text = self._take(at)
        text = text[:-1] if text.endswith("\n") else text
        self._take(size)
        if self._string:
            self._string_delta(text)
            self._deltas.append(Delta(Kind.CALL, '"'))
        else:
            types = self._types_of_call[self._key]
            made = json.dumps(value_of(text, types), ensure_ascii=False)
            self._deltas.append(Delta(Kind.CALL, made))
        self._leading = False
        return self._enter(State.BODY)

    def _string_delta(self, text: str) -> None:
        if text:
            self._deltas.append(Delta(Kind.CALL, json.dumps(text, ensure_ascii=False)[1:-1]))

    def _object(self, last: bool) -> bool:
        assert self._form is not None
        hit = self._find((self._form.end,))
        if hit is None and not last:
            return False
        at, mark = hit or (len(self._text), "")
        text = self._take(at)
        try:
            made = json.loads(text)
            name, given = made["name"], made.get("arguments", made.get("parameters", {}))
            given = json.loads(given) if isinstance(given, str) else given
            if not isinstance(name, str) or not isinstance(given, dict):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            self._give_up(text + self._take(len(mark)))
            return hit is not None
        self._take(len(mark))
        self._raw = ""
        self.calls += 1
        arguments = json.dumps(given, ensure_ascii=False)
        self._deltas.append(Delta(Kind.CALL, arguments, name))
        self._leading = True
        return self._enter(State.CONTENT) and hit is not None
