"""Stop strings in a stream of text. Knows no tokens and no engine."""

from collections.abc import Sequence


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
