"""Where the turns of a chat begin in a prompt's token ids: what a prefix cache should remember.

Knows Qwen's mark of a turn. Knows no template and no cache: a prompt that was rendered elsewhere
and sent as text or as ids has the same marks.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_engine.runtime.text.tokenizer import Tokenizer

TURN, SYSTEM = "<|im_start|>", "system"
_ROLE = 8  # tokens that surely hold the name of a role


class Turns:
    """Finds the marks of prompts, for one tokenizer or for none."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._turn = tokenizer.id_of(TURN) if tokenizer is not None else None

    def marks(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Positions, ascending: the first turn behind what the system says (and the tools that
        stand there), which other chats share; and the last turn, before which the next request of
        the same chat is the same. Empty where there is no turn behind the start.
        """
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
