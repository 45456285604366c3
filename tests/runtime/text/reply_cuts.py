"""Model replies as tokens, and their results over every division into rounds.

All subsets of a reply's token borders are covered without trying each: after the first i tokens the
parser is in one of few states, mostly in one, for any rounds; from each state a round of every
length is tried. Two states are equal if all mutable attributes are; lists of text count as the
text.
"""

import enum
import io
import pickle
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_engine.runtime.engine.request import Event, FinishReason, SamplingParams
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta
from spark_engine.runtime.text.reply_text import Lexeme, Mark
from spark_engine.runtime.text.text_stream import Piece, TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.runtime.text.tool_schema import Parameter

SPELL = "‖"  # inside a mark: it is written in ordinary tokens
END = 1  # used as the end id, which has no text
# Attributes that do not change, or duplicate another.
FIXED = {"_step", "_types", "_form", "_kinds", "_pattern", "_tokens", "_emit", "_closing", "_most"}
FIXED |= {"_marks_of_calls", "_may_follow", "_tools", "_parallel", "_queue", "_xml"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT = {"type": "string"}
MAYBE = {"anyOf": [TEXT, {"type": "null"}]}
TOOLS = [tool("f", a=TEXT, b=MAYBE, c={"type": "array"}, d={"type": "integer"}), tool("free")]


@dataclass(frozen=True)
class Reply:
    """One reply. `text` has SPELL inside marks that are not tokens; `ends`: by an end id."""

    text: str
    thinking: bool = False
    form: str = "qwen3_coder"
    stop: tuple[str, ...] = ()
    ends: bool = True
    parallel: bool = True

    def events(self, tokenizer: Tokenizer) -> list[Event]:
        ids = [i for part in self.text.split(SPELL) for i in tokenizer.encode(part)]
        made = [Event(0, i) for i in ids]
        if self.ends:
            return [*made, Event(0, END, finish=FinishReason.STOP)]
        return [*made[:-1], made[-1]._replace(finish=FinishReason.LENGTH)]


@dataclass
class Reader:
    parser: ReplyParser
    parts: list[tuple[str, str, str]] = field(default_factory=list)  # kind, name, text
    end: tuple[Any, ...] | None = None

    def push(self, text: str, marks: Sequence[int], last: Piece) -> None:
        """Adds a round's text, and its last piece."""
        self._add(self.parser.push(text, marks))
        if last.finish is not None:
            self._add(self.parser.flush(last.is_cut))
            self.end = last.finish.value, last.stop, self.parser.calls, self.parser.is_cut

    def _add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            kind, name, text = delta.kind.value, delta.name, delta.text
            if self.parts and self.parts[-1][0] == kind and not name:
                kind, name, said = self.parts.pop()
                text = said + text
            self.parts.append((kind, name, text))

    @property
    def result(self) -> object:
        """A client's result: reasoning, content and calls in order, the finish reason, and whether
        the last call is complete."""
        return tuple(self.parts), self.end


def _parser(reply: Reply, tokenizer: Tokenizer) -> ReplyParser:
    formats, marks = Formats(tools=reply.form), list(tokenizer.marks.values())
    return ReplyParser(reply.thinking, TOOLS, formats, marks, True, reply.parallel)


def _stream(reply: Reply, tokenizer: Tokenizer) -> TextStream:
    stream = TextStream(tokenizer, SamplingParams(stop=reply.stop), (END,))
    stream.stop_behind(lambda: _parser(reply, tokenizer))
    return stream


def read(reply: Reply, tokenizer: Tokenizer, cuts: Collection[int]) -> object:
    """The result of rounds that end after these numbers of tokens."""
    stream, reader = _stream(reply, tokenizer), Reader(_parser(reply, tokenizer))
    events = reply.events(tokenizer)
    edges = [0, *sorted(cuts), len(events)]
    for start, end in zip(edges, edges[1:], strict=False):
        if start < end and reader.end is None:
            piece = stream.push(events[start:end])
            reader.push(piece.text, piece.marks, piece)
    return reader.result


def results(reply: Reply, tokenizer: Tokenizer) -> set[object]:
    stream, pieces = _stream(reply, tokenizer), list[Piece]()
    for event in reply.events(tokenizer):
        pieces.append(stream.push([event]))
        if pieces[-1].finish is not None:
            break
    states: list[dict[object, bytes]] = [{} for _ in range(len(pieces) + 1)]
    copies = _Copies()
    states[0][None] = copies.save(Reader(_parser(reply, tokenizer)))
    found = set[object]()
    for begin, known in enumerate(states[:-1]):
        for state in known.values():
            text, marks = "", list[int]()
            for end in range(begin + 1, len(states)):
                text += pieces[end - 1].text
                marks += pieces[end - 1].marks
                reader = copies.load(state)
                reader.push(text, marks, pieces[end - 1])
                if end == len(pieces):
                    found.add(reader.result)
                    continue
                key = tuple(reader.parts), _signature(reader.parser)
                if key not in states[end]:
                    states[end][key] = copies.save(reader)
    return found


class _Copies:
    """Copies of a reader that share immutable parts."""

    def __init__(self) -> None:
        self._shared: list[object] = []
        self._places: dict[int, int] = {}

    def save(self, reader: Reader) -> bytes:
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        pickler.persistent_id = self._place  # type: ignore[method-assign]
        pickler.dump(reader)
        return file.getvalue()

    def load(self, data: bytes) -> Reader:
        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = self._shared.__getitem__  # type: ignore[method-assign]
        found: Reader = unpickler.load()
        return found

    def _place(self, value: object) -> int | None:
        if not isinstance(value, enum.Enum | re.Pattern | Parameter):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self._shared)
            self._shared.append(value)
        return self._places[id(value)]


def _signature(value: Any) -> object:
    """A key of all mutable attributes of a state."""
    if value is None or isinstance(value, str | int | frozenset | enum.Enum):
        return value
    if isinstance(value, list | deque | tuple):
        if value and isinstance(value[0], Lexeme):
            return tuple(_joined(value))
        if value and isinstance(value[0], str):
            return "".join(value)
        return tuple(map(_signature, value))
    if isinstance(value, set):
        return frozenset(value)
    attributes: Mapping[str, Any] = getattr(value, "__dict__", {})
    return tuple(_signature(v) for name, v in attributes.items() if name not in FIXED)


def _joined(lexemes: Sequence[Lexeme]) -> Iterator[tuple[Mark, str]]:
    kind, text = lexemes[0].kind, ""
    for lexeme in lexemes:
        if lexeme.kind is not kind or kind is not Mark.TEXT:
            yield kind, text
            kind, text = lexeme.kind, ""
        text += lexeme.text
    yield kind, text


HEAD = "<tool_call>\n<function=f>\n<parameter=a>\n"
TAIL = "\n</parameter>\n</function>\n</tool_call>"
NEXT = "\n<tool_call>\n<function=free>\n</function>\n</tool_call>"
VALUES = (  # of a parameter
    *("Oslo", "", "\n\nx\n", "null", "é猫🙂👩‍👧 नि", "a </tool_call> b", "</tool_call>"),
    "a </think> b",
    *("<think>x</think>", "a</parameter> b", "</function>\n</tool_call>\nb", "a\n<parameter=z>\nb"),
    *("a <tool‖_call> b", "</tool_‖call>\nb", "a <tool_call> b", "</parameter1>\nb", "1 < 2 </x>"),
    "a\n<tool_call><function=g><parameter=a>b</parameter></function></tool_call>\nc",
)
ENDS = (  # of a call
    *(TAIL, "</parameter></function></tool_call>", "\n</parameter/>\n</function>\n</tool_call>"),
    *("\n</parameter>\n</tool_call>", "\n</function>\n</tool_call>", "\n</tool_call>", ""),
    *("</tool_call>\n\nDone.", "\n<parameter=b>\nnull" + TAIL, "\n</parameter>", "\n</function>"),
    *("\n</parameter1>\n<parameter=d>\n3" + TAIL, "</tool_call>" + NEXT),
    *(TAIL + "\nDone.\n", TAIL + NEXT, "\n</parameter>\n<parameter=a>\nb" + TAIL),
)
OBJECT = '<tool_call>\n{"name": "f", "arguments": {"a": "'
STRINGS = (
    *("Oslo", "a </tool_call> b", "</think>", 'a \\"</tool_call>\\" b', "a\nb", "é🙂", "{", "\\\\"),
)
ENDS_OF_OBJECT = (
    *('"}}\n</tool_call>', '"}}', '",}}\n</tool_call>\nDone.', "}}\n</tool_call>", ""),
    '"}\n</tool_call>',
    *('"}}\n</tool_call>\n' + OBJECT + 'b"}}\n</tool_call>', "\n</tool_call>\n" + OBJECT + 'b"}}'),
)
OTHERS = (
    Reply("hm\n\nso\n</think>\n\n12 + 30 = 42.\n", True, stop=("\n\n",)),
    Reply("hm Tens: 4\n</think>\n\nTens: 5", True, stop=("Tens:",)),
    Reply("<think>\nTens: 4\n</think>\n\nHm. Tens: 5", stop=("Tens:", "\n\n")),
    Reply("the mark </thi‖nk> ends it\n</think>\nYes </think> no", True),
    Reply("say <tool_call> to call\n\nhm\n</think>\nDone.", True, stop=("\n\n",)),
    Reply("I look\n" + HEAD + "a\n\nb" + TAIL, True, stop=("\n\n",)),
    Reply("I look\n" + HEAD + "b" + TAIL, True),
    Reply("I look\n" + HEAD + "b", True, ends=False),
    Reply("hm\n\nhm", True, stop=("\n\n",), ends=False),
    Reply("Let me see.\n\n" + HEAD + "a </tool_call> b" + TAIL, parallel=False),
    Reply(HEAD + "a" + TAIL + "\n" + HEAD + "b" + TAIL, parallel=False),
    Reply(HEAD + "one\n\ntwo" + TAIL, stop=("\n\n",)),
    Reply(HEAD + "a </tool_call> b. c" + TAIL, stop=(".",)),
    Reply(HEAD + "a" + TAIL + "\n\nDone.", stop=("Done",)),
    Reply("See <tool_call>\nwords\n</tool_call> there.\n\n" + HEAD + "b" + TAIL),
    Reply("Call:\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n\nDone."),
    Reply("Write <function=NAME> and\n<parameter=KEY>.\n</parameter>"),
    Reply(
        '<tool_call>\n<function=f>\n{"a": "</function> </tool_call>"}\n</function>\n</tool_call>'
    ),
    Reply('<tool_call>\n<function=f>\n{"a": "b\n</function>\n</tool_call>'),
    Reply("<tool_call>\n<function=f>\nwords {\n<parameter=a>\nb" + TAIL),
    Reply("<tool_call>\n<function=free>\n<parameter=any>\nb\n<parameter=more>\nc" + TAIL),
    Reply("\n \n<think>\nhm\n</think>\nDone."),
    Reply("I look </tool_call> </think> there\n\n\n"),
    Reply(OBJECT + 'one two"}}\n</tool_call>', form="hermes", stop=("two",)),
    Reply("hm <tool_call> {x} </think>\n\n" + OBJECT + 'b"}}\n</tool_call>', True, form="hermes"),
    Reply("a <tool_call> b </tool_call> c", form="hermes"),
    Reply(HEAD + "b" + TAIL, form="none"),
    Reply("Four.\n\n"),
    Reply("hm </think> Four.\n\n</think>\n\nSo.", True),
    Reply("hm\n</think>\n\n<tool_call>\n<function=free>\n</function>\n</tool_call>", True),
    Reply("<tool_call>\n<function=f>\n<parameter=d>\n3\n</parameter>\n<parameter=c>\n[1,\n2,]\n</"),
    Reply("<tool_call>\n<function=f>\n<parameter=c>\n[1,\n2,]\n</Parameter>\n</function>"),
    Reply("hm\n</think>\n\nOne. Two. Three.", True, stop=("Two", "One. T")),
)


def replies() -> list[Reply]:
    found = []
    for i, value in enumerate(VALUES):  # each value with three ends, and each end with some values
        head = HEAD.replace("\n", "") if i % 2 else HEAD
        ends = (ENDS[(i + k) % len(ENDS)] for k in (0, 5, 10))
        found += [Reply(head + value + end, ends=bool((i + k) % 5)) for k, end in enumerate(ends)]
    for i, value in enumerate(STRINGS):
        for k in range(2):
            text = OBJECT + value + ENDS_OF_OBJECT[(i + k) % len(ENDS_OF_OBJECT)]
            found.append(Reply(text, form="hermes", ends=k != 1))
    return [*found, *OTHERS]
