"""Events of a stream as they come in parts, passed on whole.

Knows where an event ends; knows neither what is in it nor who sends it.
"""

from __future__ import annotations

from spark_engine.runtime.replicas.upstream import Lost

END = b"\n\n"
MOST = 256 << 20  # bytes of one: an answer of 256K tokens with all that can be asked for of each


class Events:
    """Of one stream. Every byte is looked at once, however large an event is."""

    def __init__(self) -> None:
        self._left = bytearray()

    def take(self, part: bytes) -> bytes:
        """All whole events that were not passed on yet. Raises Lost for one that has no end."""
        seen = max(0, len(self._left) - len(END) + 1)
        self._left += part
        at = self._left.rfind(END, seen)
        if at < 0:
            if len(self._left) > MOST:
                raise Lost(f"an event of more than {MOST >> 20} MiB came")
            return b""
        whole = bytes(self._left[: at + len(END)])
        del self._left[: at + len(END)]
        return whole

    @property
    def left(self) -> bytes:
        """What came behind the last whole one."""
        return bytes(self._left)
