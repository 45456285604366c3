"""Complete events of a stream that arrives in parts.

Knows the end of an event; knows neither its contents nor its sender.
"""

from __future__ import annotations

from spark_engine.runtime.replicas.upstream import Lost

END = b"\n\n"
MOST = 256 << 20  # bytes of one: an answer of 256K tokens with all options


class Events:
    """The events of one stream. Each byte is searched once, also in a large event."""

    def __init__(self) -> None:
        self._left = bytearray()

    def take(self, part: bytes) -> bytes:
        """All complete events that were not returned yet. Raises Lost for an event that is too
        long.
        """
        seen = max(0, len(self._left) - len(END) + 1)
        self._left += part
        at = self._left.rfind(END, seen)
        if at < 0:
            if len(self._left) > MOST:
                raise Lost(f"an event has more than {MOST >> 20} MiB")
            return b""
        whole = bytes(self._left[: at + len(END)])
        del self._left[: at + len(END)]
        return whole

    @property
    def left(self) -> bytes:
        """Bytes after the last complete event."""
        return bytes(self._left)
