"""Converts the engine's events of one choice to text: detokenising, end ids, stop strings.

Stop strings count in the answer and not in the thought before it; a `ReplyParser` separates the
two. Knows no HTTP and no chat format.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from spark_engine.runtime.engine.draft_counts import BySource
from spark_engine.runtime.engine.request import Event, FinishReason, SamplingParams
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.tokenizer import Detokenizer, Tokenizer


def partial_match(text: str, patterns: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a pattern."""
    longest = max((len(p) for p in patterns), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(p) > size and p.startswith(tail) for p in patterns):
            return size
    return 0


def first_match(text: str, patterns: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the pattern that is completed first, or None.

    Of several completed by the same character the longest counts. Comparing ends instead of starts
    makes the result independent of how the stream is divided.
    """
    found = [(at + len(p), at) for p in patterns if (at := text.find(p)) >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


class StopMatcher:
    """Passes a stream through up to the first stop string, which it removes.

    Holds back every suffix that may become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The certain part of the stream; empty after a stop string."""
        if self.matched is not None:
            return ""
        text = self._pending + text
        hit = first_match(text, self.stops)
        if hit is not None:
            self.matched = text[hit[0] : hit[1]]
            self._pending = ""
            return text[: hit[0]]
        cut = len(text) - partial_match(text, self.stops)
        self._pending = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Text held back, at the end of the stream."""
        text, self._pending = self._pending, ""
        return text


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


class TextStream:
    """The text of one choice; always empty without a tokenizer.

    `eos`: the model's end ids. The id that ended the answer is counted and reported, but is not
    part of the text unless `keep_stop`; nor is a stop string. Stop strings count from `min_tokens`
    on. The first `forced` tokens belong to the prompt, for scoring: they go to `on_scored` only.
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
        self._thought: ReplyParser | None = None
        self._behind = ""  # held back: it may belong to the answer or the thought
        self._passed = 0  # characters before it
        self._keep_stop = keep_stop
        self._forced = forced  # those to come
        self.on_scored: Callable[[Event], object] = lambda event: None
        self._min_tokens = params.min_tokens
        self.tokens = 0
        self.drafted = self.accepted = 0  # verified drafts, and accepted ones
        self.by_source: BySource | None = None  # both by source and position, where asked for
        self.cached = 0  # cached tokens of the prompt
        self.finish: FinishReason | None = None

    def stop_behind(self, thought: Callable[[], ReplyParser]) -> None:
        """Makes stop strings count from the reported start of the answer. Call it before the first
        push."""
        self._thought = thought() if self._stops.stops and self._detokenizer else None

    def push(self, events: Iterable[Event]) -> Piece:
        """Adds a round's events; drops text after a stop string.

        If the piece has a `stop`, the caller must end the request in the engine.
        """
        text, tokens = "", []
        for event in events:
            self.cached = max(self.cached, event.cached)
            if self._forced and event.token is not None:
                self._forced, self.finish = self._forced - 1, event.finish
                self.on_scored(event)
                continue
            text += self._take(event)
            if event.token is not None:
                tokens.append(event)
            if self.finish is not None:
                break
        places, self._places = tuple(self._places), []
        return Piece(text, tuple(tokens), self.finish, self._stops.matched, places)

    def _take(self, event: Event) -> str:
        self.tokens += event.token is not None
        self.drafted = max(self.drafted, event.drafted)
        self.accepted = max(self.accepted, event.accepted)
        self.by_source = event.by_source or self.by_source
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
