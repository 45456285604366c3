"""Positions of a chat's turns in a prompt's token ids, at which a prefix cache stores states.

Knows Qwen's mark of a turn. Knows no template and no cache: a prompt that a client rendered and
sends as text or ids has the same marks.
"""

from collections.abc import Sequence

from spark_engine.runtime.text.tokenizer import Tokenizer

TURN, SYSTEM = "<|im_start|>", "system"
_ROLE = 8  # tokens that contain the name of a role


class Turns:
    """Finds turns in prompts, for one tokenizer or none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._turn = tokenizer.id_of(TURN) if tokenizer is not None else None

    def marks(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ascending positions: the first turn after the system message and tools, which other chats
        share; and the last turn, up to which the next request of the same chat is equal. Empty if
        no turn follows the start."""
        if self._turn is None or self._turn not in ids:
            return ()
        last = len(ids) - 1 - ids[::-1].index(self._turn)
        first = ids.index(self._turn)
        if first < last and self._is_system(ids[first + 1 : first + 1 + _ROLE]):
            first = ids.index(self._turn, first + 1)
        return tuple(sorted({first, last} - {0}))

    def _is_system(self, ids: Sequence[int]) -> bool:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids).startswith(SYSTEM)
