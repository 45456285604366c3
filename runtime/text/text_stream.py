"""Converts the engine's events of one choice to text: detokenising, end ids, stop strings.

Stop strings count in the answer and not in the thought before it; a `Thought` separates the two.
Knows no HTTP and no chat format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from spark_engine.runtime.engine.request import Event, FinishReason, SamplingParams
from spark_engine.runtime.text.stops import StopMatcher
from spark_engine.runtime.text.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Piece:
    """Text and tokens of one round's events. `text` may lag behind `tokens`."""

    text: str
    tokens: tuple[Event, ...] = ()  # the events with a token
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    marks: tuple[int, ...] = ()  # positions in the whole text of these tokens' marks

    @property
    def is_cut(self) -> bool:
        """True if a limit, a stop string or the server ended the answer, and not the model."""
        return self.stop is not None or self.finish is not FinishReason.STOP


class Thought(Protocol):
    """Reads streamed text up to the end of the thought: a `ReplyParser`."""

    answer_at: int | None

    @property
    def thought_until(self) -> int:
        """Position in the text up to which all is certainly thought."""
        ...

    def push(self, text: str, marks: Iterable[int] = ()) -> object:
        """Adds text."""
        ...

    def flush(self) -> object:
        """Ends the text."""
        ...


class TextStream:
    """The text of one choice; always empty without a tokenizer.

    `eos`: the model's end ids. The id that ended the answer is counted and reported, but is not
    part of the text unless `keep_stop`; nor is a stop string. Stop strings count from `min_tokens`
    on. The first `forced` tokens belong to the prompt, for scoring: they are stored separately.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        eos: tuple[int, ...],
        skip_special: bool = True,
        keep_stop: bool = False,
        forced: int = 0,
    ) -> None:
        self._marks = tokenizer.marks if tokenizer else {}
        self._places: list[int] = []
        self._length = 0  # of the text so far, including text held back
        self._detokenizer = Detokenizer(tokenizer, skip_special) if tokenizer else None
        self._stop_ids: Collection[int] = params.stop_ids(eos)
        self._stops = StopMatcher(params.stop)
        self._thought: Thought | None = None
        self._behind = ""  # held back: it may belong to the answer or the thought
        self._passed = 0  # characters before it
        self._keep_stop = keep_stop
        self._forced = forced
        self.scored: list[Event] = []  # the forced tokens
        self._min_tokens = params.min_tokens
        self.tokens = 0
        self.drafted = self.accepted = 0  # verified drafts, and accepted ones
        self.cached = 0  # cached tokens of the prompt
        self.finish: FinishReason | None = None

    def stop_behind(self, thought: Callable[[], Thought]) -> None:
        """Makes stop strings count from the reported start of the answer. Call it before the first
        push.
        """
        self._thought = thought() if self._stops.stops and self._detokenizer else None

    def push(self, events: Iterable[Event]) -> Piece:
        """Adds a round's events; drops text after a stop string.

        If the piece has a `stop`, the caller must end the request in the engine.
        """
        text, tokens = "", []
        for event in events:
            self.cached = max(self.cached, event.cached)
            if len(self.scored) < self._forced and event.token is not None:
                self._set_aside(event)
                continue
            text += self._take(event)
            if event.token is not None:
                tokens.append(event)
            if self.finish is not None:
                break
        places, self._places = tuple(self._places), []
        return Piece(text, tuple(tokens), self.finish, self._stops.matched, places)

    def _set_aside(self, event: Event) -> None:
        self.scored.append(event)
        self.finish = event.finish

    def _take(self, event: Event) -> str:
        self.tokens += event.token is not None
        self.drafted = max(self.drafted, event.drafted)
        self.accepted = max(self.accepted, event.accepted)
        text = self._text(event)
        self.finish = event.finish
        if self._stops.matched is not None:
            self.finish = FinishReason.STOP
            text += self._stops.matched if self._keep_stop else ""
        elif event.finish is not None:
            text += self._stops.flush()
        return text

    def _text(self, event: Event) -> str:
        if self._detokenizer is None:
            return ""
        ended = event.finish is FinishReason.STOP and event.token in self._stop_ids
        ended = ended and not self._keep_stop
        text = "" if event.token is None or ended else self._detokenizer.push([event.token])
        self._length += len(text)
        places = []
        if text and event.token is not None and (mark := self._marks.get(event.token)):
            places.append(self._length - len(mark))
        self._places += places
        last = event.finish is not None
        if last:
            text += self._detokenizer.flush()
        return self._stopped(text) if self._thought is None else self._split(text, places, last)

    def _stopped(self, text: str) -> str:
        """The part of an answer that certainly contains no stop string."""
        return text if self.tokens < self._min_tokens else self._stops.push(text)

    def _split(self, text: str, places: list[int], last: bool) -> str:
        """The same for text that starts with a thought, which passes unchanged."""
        thought = self._thought
        assert thought is not None
        thought.push(text, places)
        if last:
            thought.flush()
        text = self._behind + text
        begin = thought.answer_at
        end = thought.thought_until if begin is None else begin
        end = len(text) if last and begin is None else end - self._passed
        self._passed, self._behind = self._passed + end, text[end:]
        if begin is None:
            return text[:end]
        answer, self._thought, self._behind = self._behind, None, ""
        return text[:end] + self._stopped(answer)
