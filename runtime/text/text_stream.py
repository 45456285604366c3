"""From the engine's events to text: detokenising, end ids, stop strings, one stream at a time.

Stop strings count in the answer and not in the thought before it, which a `Thought` separates.
Knows one choice of one request. Knows no HTTP and no chat form.
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
    """What the events of one round add. `text` may lag behind `tokens`."""

    text: str
    tokens: tuple[Event, ...] = ()  # the events that brought a token
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that ended it
    marks: tuple[int, ...] = ()  # places in the whole text where these tokens' marks begin

    @property
    def is_cut(self) -> bool:
        """The answer was ended by a limit, a stop string or the server, and not by the model."""
        return self.stop is not None or self.finish is not FinishReason.STOP


class Thought(Protocol):
    """Reads a stream of text up to where the thought ends: a `ReplyParser`."""

    answer_at: int | None

    @property
    def thought_until(self) -> int:
        """Place in the text up to which all is sure to be thought."""
        ...

    def push(self, text: str, marks: Iterable[int] = ()) -> object:
        """More text."""
        ...

    def flush(self) -> object:
        """No more comes."""
        ...


class TextStream:
    """The text of one choice. Without a tokenizer it is always empty.

    `eos` are the model's end ids. The id that ended the answer is counted and reported, but is
    not part of the text unless `keep_stop`; nor is a stop string. Those count from `min_tokens` on.
    The first `forced` tokens are the prompt's own, which was to be scored: they are kept aside.
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
        self._length = 0  # of the text so far, what is held back included
        self._detokenizer = Detokenizer(tokenizer, skip_special) if tokenizer else None
        self._stop_ids: Collection[int] = params.stop_ids(eos)
        self._stops = StopMatcher(params.stop)
        self._thought: Thought | None = None
        self._behind = ""  # text that may be of the answer or not: it is held back
        self._passed = 0  # characters before it
        self._keep_stop = keep_stop
        self._forced = forced
        self.scored: list[Event] = []  # the forced tokens
        self._min_tokens = params.min_tokens
        self.tokens = 0
        self.drafted = self.accepted = 0  # drafts that were verified, and those kept
        self.cached = 0  # tokens of the prompt that were not computed
        self.finish: FinishReason | None = None

    def stop_behind(self, thought: Callable[[], Thought]) -> None:
        """Stop strings count from where this says that the answer begins. Before the first push."""
        self._thought = thought() if self._stops.stops and self._detokenizer else None

    def push(self, events: Iterable[Event]) -> Piece:
        """Takes the events of a round; what follows a stop string is dropped.

        When the piece has a `stop`, the engine is to be told.
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
        """As much of an answer as is certain to hold no stop string."""
        return text if self.tokens < self._min_tokens else self._stops.push(text)

    def _split(self, text: str, places: list[int], last: bool) -> str:
        """The same of text that begins with a thought, which passes as it is."""
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
