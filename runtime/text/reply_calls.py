"""Reads the tool calls of an answer while it streams, in either form (`reply_formats`). Its states:

    CALL    inside a call's marks: before, between and behind functions
    NAME    the name of a function
    BODY    between parameters
    KEY     the name of a parameter
    VALUE   a parameter; strings are passed on as they come, others when they are whole
    OBJECT  all arguments of a function as one object, where parameters are expected
    JSON    calls written as objects, passed on when they are whole

What turns out to be no call before its name is known is given back as it was written; without the
marks of a call the name must be that of a tool. A call that is cut off later keeps the arguments
that came, without the closing brace: nobody runs half of it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    STRAY,
    CallFormat,
)
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.reply_text import ReplyText
from spark_engine.runtime.text.reply_values import possible_end, sure_of_value, value_end
from spark_engine.runtime.text.tool_schema import Types, to_json, value_of


class State(enum.Enum):
    """Where in a call."""

    CALL = enum.auto()
    NAME = enum.auto()
    BODY = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    OBJECT = enum.auto()
    JSON = enum.auto()


class CallReader:
    """The calls of one answer, or the first (`single`). It takes from `text` what is theirs and
    hands `deltas` on.

    Attributes:
        count: calls whose name is known.
        closed: calls that are complete.
        inside: the text goes on with a call, or behind one.
        rest: when it left the inside: what was taken and is no call.
    """

    def __init__(
        self,
        text: ReplyText,
        form: CallFormat,
        types: Types,
        deltas: Callable[[Delta], None],
        single: bool = False,
    ) -> None:
        self.count = self.closed = 0
        self.inside = False
        self.rest = ""
        self._in, self._form, self._types, self._emit = text, form, types, deltas
        self._most = 1 if single else None  # calls that one object's marks may hold
        self._state = State.CALL
        self._raw = ""  # of a call whose name is not known yet
        self._bare = False  # without the marks of a call
        self._name, self._key = "", ""
        self._first = False  # no argument was written yet
        self._leading = False  # a newline at the start of a value is the form's
        self._seen = 0  # place in the text before which no end is: it was looked for
        self._string = False  # the value is passed on as it comes
        self._step: Mapping[State, Callable[[bool], bool]] = {
            State.CALL: self._call,
            State.NAME: self._read_name,
            State.BODY: self._body,
            State.KEY: self._read_key,
            State.VALUE: self._value,
            State.OBJECT: self._arguments,
            State.JSON: self._objects,
        }

    def begin(self, mark: str) -> None:
        """At the mark of a call, or at `<function=`, which needs none."""
        self._bare = mark != self._form.start
        self._raw = "" if self._bare else self._in.take(len(mark))
        self._state, self.inside, self.rest = State.CALL, True, ""

    def step(self, last: bool) -> bool:
        """Takes what is certain; False when there is no more to do until more text comes."""
        return self._step[self._state](last)

    def _enter(self, state: State) -> bool:
        self._state = state
        return True

    def _leave(self, rest: str = "") -> bool:
        """`rest` was taken for a call, and is none."""
        self.rest, self._raw, self.inside = self._raw + rest, "", False
        return True

    def _close(self, text: str = "}") -> None:
        """The arguments end with this text."""
        self._emit(Delta(Kind.CALL, text))
        self.closed += 1
        self._state = State.CALL

    def _call(self, last: bool) -> bool:
        marks: tuple[str, ...] = (self._form.end, self._form.start)
        if self._raw or self._form.xml:
            marks = (*marks, FUNCTION)
        if not self._raw:  # behind a function: models close more than they opened
            marks = (*marks, *STRAY)
        if (hit := self._in.begins(marks)) is not None:
            return self._at_mark(*hit)
        text = self._in.text
        if self._raw and text.lstrip().startswith("{"):
            self._raw += self._in.take(len(text) - len(text.lstrip()))
            return self._enter(State.JSON)
        if not last and self._in.may_begin(marks):
            return False
        if not self._raw:
            if last and not text.strip():
                self._in.take(len(text))
                return False
            return self._leave()  # content goes on
        if last:
            return self._leave(self._in.take(len(text)))
        end = self._in.find((self._form.end,))
        return end is not None and self._leave(self._in.take(end[0] + len(end[1])))

    def _at_mark(self, gap: int, mark: str) -> bool:
        taken = self._in.take(gap + len(mark))
        if mark in (FUNCTION, self._form.start):
            self._raw += taken
            self._bare = self._bare and mark == FUNCTION
            return self._enter(State.NAME if mark == FUNCTION else State.CALL)
        if self._raw:  # a call without a function
            return self._leave(taken)
        return True

    def _read_name(self, last: bool) -> bool:
        """The name ends with `>`; one that was left open ends with what comes next."""
        marks = (END_FUNCTION, self._form.end, self._form.start, FUNCTION, PARAMETER)
        hit = self._in.find((">", "\n", *marks))
        if hit is None:
            return last and self._leave(self._in.take(len(self._in.text)))
        at, mark = hit
        name = self._in.text[:at].strip()
        if not name or (self._bare and name not in self._types):  # an answer speaks of the form
            return self._leave(self._in.take(at))
        self._in.take(at + (mark in (">", "\n")))
        self._begin_call(name, "{")
        return self._enter(State.BODY)

    def _begin_call(self, name: str, arguments: str) -> None:
        self._raw, self._name, self._first = "", name, True
        self.count += 1
        self._emit(Delta(Kind.CALL, arguments, name))

    def _body(self, last: bool) -> bool:
        marks = (PARAMETER, END_FUNCTION, FUNCTION, self._form.end, self._form.start)
        if (hit := self._in.begins(marks)) is not None:
            gap, mark = hit
            if mark == PARAMETER:
                self._in.take(gap + len(mark))
                return self._enter(State.KEY)
            self._in.take(gap + (len(mark) if mark == END_FUNCTION else 0))
            self._close()
            return True
        text = self._in.text
        if self._first and text.lstrip().startswith("{"):
            self._seen = 0
            return self._enter(State.OBJECT)
        if last:
            self._in.take(len(text))
            return False
        if self._in.may_begin(marks):
            return False
        found = self._in.find(marks)  # what stands between parameters is no part of them
        self._in.take(found[0] if found else self._in.certain(marks, last))
        return found is not None

    def _read_key(self, last: bool) -> bool:
        hit = self._in.find((">", "\n"))
        if hit is None:
            if last:
                self._in.take(len(self._in.text))
            return False
        self._key = self._in.take(hit[0]).strip()
        self._in.take(1)
        types = self._types_of(self._key)
        self._string = not types or types == {"string"} or types == {"string", "null"}
        comma = "" if self._first else ", "
        self._emit(Delta(Kind.CALL, f"{comma}{_json(self._key)}: " + '"' * self._string))
        self._first = False
        self._leading = hit[1] == ">"  # one newline behind the mark is its own
        self._seen = 0
        return self._enter(State.VALUE)

    def _types_of(self, key: str) -> frozenset[str]:
        return self._types.get(self._name, {}).get(key, frozenset())

    def _value(self, last: bool) -> bool:
        if self._leading and self._in.text:
            self._leading = False
            if self._in.text[0] == "\n":
                self._in.take(1)
        text, mark = self._in.text, self._form.end
        place = possible_end(text, mark, self._seen)
        end = value_end(text, mark, self._in.find_token(mark), last, place)
        if end is None:
            self._seen = place if place >= 0 else max(0, len(text) - len(END_PARAMETER))
            if self._string:
                size = len(text) if last else sure_of_value(text, mark)
                self._say(self._in.take(size))
                self._seen = max(0, self._seen - size)
            elif last:
                self._in.take(len(text))
            return False
        at, size = end
        text = self._in.take(at)
        text = text[:-1] if text.endswith("\n") else text
        self._in.take(size)
        if self._string:
            self._say(text)
            self._emit(Delta(Kind.CALL, '"'))
        else:
            self._emit(Delta(Kind.CALL, to_json(value_of(text, self._types_of(self._key)))))
        return self._enter(State.BODY)

    def _say(self, text: str) -> None:
        """A further piece of a string."""
        if text:
            self._emit(Delta(Kind.CALL, _json(text)[1:-1]))

    def _arguments(self, last: bool) -> bool:
        """An object up to the function's end, which a string in it may name; one that is malformed
        is passed on as it is, for who reads it must see that it is."""
        text = self._in.text
        end = self._in.find((self._form.end,))
        most = end[0] if end else len(text)
        for at in _places(text, END_FUNCTION, self._seen, most):
            self._seen = at + 1
            if (made := _object(text[:at])) is not None:
                self._in.take(at + len(END_FUNCTION))
                self._close(made[1:])
                return True
        if end is None and not last:
            return False
        if end is not None and (made := _object(text[:most])) is not None:
            self._in.take(most)
            self._close(made[1:])
            return True
        given = self._in.take(most).strip().removesuffix(END_FUNCTION)
        if given[1:]:
            self._emit(Delta(Kind.CALL, given[1:]))
        return self._enter(State.CALL) and end is not None

    def _objects(self, last: bool) -> bool:
        hit = self._in.find((self._form.end,))
        if hit is None and not last:
            return False
        at, mark = hit or (len(self._in.text), "")
        text = self._in.take(at)
        calls = _calls_in(text)
        self._in.take(len(mark))
        if calls is None:
            return self._leave(text + mark)
        for name, arguments in calls[: self._most]:
            self._begin_call(name, arguments)
            self.closed += 1
        return self._enter(State.CALL) and hit is not None


def _calls_in(text: str) -> list[tuple[str, str]] | None:
    """(name, arguments as JSON) of objects one behind the other; None where one is no call."""
    found, at = [], 0
    text = text.strip()
    try:
        while at < len(text):
            made, at = json.JSONDecoder().raw_decode(text, at)
            name, given = made["name"], made.get("arguments", made.get("parameters", {}))
            given = json.loads(given) if isinstance(given, str) else given
            if not isinstance(name, str) or not isinstance(given, dict):
                return None
            name.encode()
            found.append((name, to_json(given)))
            at += len(text[at:]) - len(text[at:].lstrip())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return found


def _object(text: str) -> str | None:
    """An object as JSON; None where the text is none."""
    try:
        made = json.loads(text)
        return to_json(made) if isinstance(made, dict) else None
    except (ValueError, RecursionError):
        return None


def _places(text: str, mark: str, start: int, before: int) -> Iterator[int]:
    at = start - 1
    while (at := text.find(mark, at + 1, before)) >= 0:
        yield at


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
