"""Parses the tool calls of a streamed answer, in either format (`reply_formats`). States:

    OPENED  after the mark of a call
    BODY    between parameters
    VALUE   a parameter (`reply_values`); strings are passed on as they arrive, others at their end
    OBJECT  all arguments of a function as one object, instead of parameters
    JSON    calls as objects, passed on when complete
    BEHIND  after a function

Text that turns out to be no call before its name is known is returned unchanged; without the marks
of a call the name must be that of a tool. A call that is cut off later keeps the arguments so far,
without the closing brace, so that no client runs it. Of a parameter that occurs twice the first
value counts, as it may have been passed on already.
"""

import enum
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spark_engine.runtime.text.reply_formats import CallFormat
from spark_engine.runtime.text.reply_objects import OpenObject, calls_in, object_in
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.reply_text import Lexeme, Mark
from spark_engine.runtime.text.reply_values import OpenValue
from spark_engine.runtime.text.tool_schema import Parameter, Types, to_json

_CLOSING = (Mark.END_CALL, Mark.END_FUNCTION, Mark.END_PARAMETER, Mark.STRAY)
_OF_OBJECT = (Mark.END_FUNCTION, Mark.END_CALL, Mark.CALL, Mark.FUNCTION)
_OF_JSON = (Mark.END_CALL, Mark.CALL, Mark.END_THINK)
_ANY = Parameter()


class CallState(enum.Enum):
    OPENED = enum.auto()
    BODY = enum.auto()
    VALUE = enum.auto()
    OBJECT = enum.auto()
    JSON = enum.auto()
    BEHIND = enum.auto()


class CallReader:
    """The calls of one answer, or the first (`single`). It puts lexemes that must be read again at
    the front of the `queue`, and adds deltas to `deltas`.

    Attributes:
        count: calls with a known name.
        closed: complete calls; only the last call can be incomplete.
        inside: the next text belongs to a call, or follows one.
        rest: after a failed call, its text.
        started: position of the mark of a call without a known name.
    """

    def __init__(
        self,
        queue: deque[Lexeme],
        form: CallFormat,
        types: Types,
        deltas: Callable[[Delta], None],
        single: bool = False,
    ) -> None:
        self.count = self.closed = self.started = 0
        self.inside = False
        self.rest = ""
        self._queue, self._form, self._types, self._emit = queue, form, types, deltas
        self._most = 1 if single else None  # calls allowed within one pair of marks
        self._state = CallState.OPENED
        self._raw: list[str] = []  # text of a call without a known name
        self._space: list[Lexeme] = []  # white space after a call: content, if content follows
        self._bare = False  # without the marks of a call
        self._name = ""
        self._given: set[str] = set()  # parameters of this call
        self._blank = True  # only white space in the body so far
        self._value: _Value | None = None
        self._object = OpenObject(())
        self._step: Mapping[CallState, Callable[[Lexeme], None]] = {
            CallState.OPENED: self._opened,
            CallState.BODY: self._body,
            CallState.VALUE: self._in_value,
            CallState.OBJECT: self._in_object,
            CallState.JSON: self._in_object,
            CallState.BEHIND: self._behind,
        }

    def begin(self, lexeme: Lexeme) -> None:
        """Starts at the mark of a call, or at `<function=NAME>` without one."""
        self.started, self.inside, self.rest = lexeme.at, True, ""
        self._bare = lexeme.kind is Mark.FUNCTION
        self._raw = [] if self._bare else [lexeme.text]
        self._state = CallState.OPENED
        if self._bare:
            self._opened(lexeme)

    def take(self, lexeme: Lexeme) -> None:
        self._step[self._state](lexeme)

    def end(self, cut: bool) -> bool:
        """Ends the answer; `cut`: it did not end by itself. True if the state changed; it may have
        put lexemes into the queue."""
        if self._state is CallState.OPENED:
            self._leave()
        elif self._state is CallState.VALUE:
            assert self._value is not None
            return self._after_value(self._value.open.end(cut), last=True)
        elif self._state in (CallState.OBJECT, CallState.JSON):
            return self._after_object(*self._object.end(cut))
        elif self._state is CallState.BEHIND:
            self.inside = False
        return self._state is not CallState.BODY

    def _again(self, lexemes: Iterable[Lexeme]) -> None:
        self._queue.extendleft(reversed([*lexemes]))

    def _leave(self, text: str = "") -> None:
        """Leaves a call that turned out to be text."""
        self.rest, self._raw, self.inside = "".join(self._raw) + text, [], False

    def _close(self, text: str = "}") -> None:
        """Ends the arguments with this text."""
        self._say(text)
        self.closed += 1
        self._state, self._space = CallState.BEHIND, []

    def _say(self, text: str) -> None:
        if text:
            self._emit(Delta(Kind.CALL, text))

    def _opened(self, lexeme: Lexeme) -> None:
        kind = lexeme.kind
        if kind is Mark.FUNCTION:
            self._at_function(lexeme)
        elif kind is Mark.CALL or lexeme.is_blank:
            self._raw.append(lexeme.text)
        elif kind is Mark.TEXT and lexeme.text.lstrip().startswith("{"):
            self._state, self._object = CallState.JSON, OpenObject(_OF_JSON)
            self._again([lexeme])
        elif kind is Mark.END_CALL:
            self._leave(lexeme.text)
        else:
            self._leave()
            self._again([lexeme])

    def _at_function(self, lexeme: Lexeme) -> None:
        name = lexeme.name
        if not name or (self._bare and name not in self._types):  # a mention of the format
            self._leave(lexeme.text)
            return
        self._begin_call(name, "{")
        self._state, self._blank, self._given = CallState.BODY, True, set()

    def _begin_call(self, name: str, arguments: str) -> None:
        self._raw, self._name = [], name
        self.count += 1
        self._emit(Delta(Kind.CALL, arguments, name))

    def _body(self, lexeme: Lexeme) -> None:
        kind = lexeme.kind
        if kind is Mark.PARAMETER:
            self._at_parameter(lexeme)
        elif kind is Mark.END_FUNCTION:
            self._close()
        elif kind in (Mark.FUNCTION, Mark.END_CALL, Mark.CALL):
            self._close()
            self._again([lexeme])
        elif kind is Mark.TEXT and self._blank and lexeme.text.lstrip().startswith("{"):
            self._state, self._object = CallState.OBJECT, OpenObject(_OF_OBJECT)
            self._again([lexeme])
        else:  # text between parameters is ignored
            self._blank = self._blank and lexeme.is_blank

    def _at_parameter(self, lexeme: Lexeme) -> None:
        key, known = lexeme.name, self._types.get(self._name, {})
        new = key not in self._given
        if new:
            comma = ", " if self._given else ""
            self._say(f"{comma}{_json(key)}: ")
        self._given.add(key)
        self._blank = False
        leads = lexeme.text.endswith(">")  # the newline after the mark belongs to the format
        value = OpenValue(leads, self._may_follow, self._types)
        self._value = _Value(value, known.get(key, _ANY), self._emit if new else _drop)
        self._state = CallState.VALUE

    def _may_follow(self, name: str) -> bool:
        known = self._types.get(self._name, {})
        return bool(name) and name not in self._given and (name in known or not known)

    def _in_value(self, lexeme: Lexeme) -> None:
        assert self._value is not None
        self._after_value(self._value.open.take(lexeme))

    def _after_value(self, behind: Iterable[Lexeme] | None, last: bool = False) -> bool:
        """True if the value has ended."""
        assert self._value is not None
        self._value.pass_on()
        if behind is None:
            if last:
                self._value.cut()
            return False
        self._value.close()
        self._state = CallState.BODY
        self._again(behind)
        return True

    def _in_object(self, lexeme: Lexeme) -> None:
        if (ended := self._object.take(lexeme)) is not None:
            self._after_object(*ended)

    def _after_object(self, text: str, behind: Iterable[Lexeme]) -> bool:
        """False if the object is not complete."""
        ends = [*behind]
        if self._state is CallState.JSON:
            self._after_json(text, ends)
        elif (made := object_in(text)) is not None:
            self._close(made[1:])
        else:  # passed on unchanged: the client must see that it is malformed
            given = text.lstrip()[1:]
            if not ends:
                self._say(given)
                return False
            self._close(given)
        self._again(ends)
        return True

    def _after_json(self, text: str, ends: list[Lexeme]) -> None:
        if (calls := calls_in(text)) is None:
            end = ends.pop(0).text if ends and ends[0].kind is Mark.END_CALL else ""
            self._leave(text + end)
            return
        for name, arguments in calls[: self._most]:
            self._begin_call(name, arguments)
            self.closed += 1
        self._state, self._space = CallState.BEHIND, []

    def _behind(self, lexeme: Lexeme) -> None:
        kind = lexeme.kind
        if lexeme.is_blank:
            self._space.append(lexeme)
            return
        if kind in _CLOSING:  # models write more closing marks than opening ones
            self._bare = self._bare or kind is Mark.END_CALL
            self._space = []
        elif kind is Mark.CALL or (
            kind is Mark.FUNCTION and not (self._bare and lexeme.name not in self._types)
        ):
            self._space = []
            if kind is Mark.CALL:
                self.begin(lexeme)
            else:
                self._opened(lexeme)
        else:
            self.inside = False
            self._again([*self._space, lexeme])


class _Value:
    """Converts a parameter's value to JSON. `emit` receives the pieces."""

    def __init__(
        self, value: OpenValue, parameter: Parameter, emit: Callable[[Delta], None]
    ) -> None:
        self.open = value
        self._parameter, self._emit = parameter, emit
        self._parts: list[str] = []  # of a value that may be other than a string
        self._size = 0  # in characters
        self._is_text = False
        self._decide()

    def pass_on(self) -> None:
        """Emits the certain part."""
        text = "".join(self.open.certain)
        self.open.certain.clear()
        if not text:
            return
        if self._is_text:
            self._say(_json(text)[1:-1])
            return
        self._parts.append(text)
        known, self._size = self._size > Parameter.SHORT, self._size + len(text)
        if not known:
            self._decide()

    def close(self) -> None:
        """Ends a complete value."""
        self._say('"' if self._is_text else to_json(self._parameter.value("".join(self._parts))))

    def cut(self) -> None:
        """Ends an incomplete value; of an object or a number nothing is emitted."""
        text = "".join(self._parts)
        if not self._is_text and self._parameter.may_be_text(text):
            self._say('"' + _json(text)[1:-1])

    def _decide(self) -> None:
        text = "".join(self._parts)
        if self._parameter.is_text(text):
            self._is_text, self._parts = True, []
            self._say('"' + _json(text)[1:-1])

    def _say(self, text: str) -> None:
        if text:
            self._emit(Delta(Kind.CALL, text))


def _drop(delta: Delta) -> None:
    """Ignores a repeated parameter."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
