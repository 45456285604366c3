"""What an engine shares among requests: slots, pages, snapshots. Numbers only."""

from dataclasses import dataclass

from spark_engine.interface import COPIED, SOURCES


@dataclass(frozen=True)
class EngineSizes:
    """Buckets ascend, in rows; `tile` and `page_size` in tokens.

    `swap_bytes`: budget of swap copies; `max_waiting`: most requests not yet admitted for the first
    time. `verify`: the buckets of rounds of 1, 2, … drafts; `fixed`: each round has as many drafts
    as possible. `snapshots`: rows of `snapshot_bytes` for the prefix cache; `cache_bytes`: its
    budget, 0 for none. `image_rows`: of the pool of images, 0 for none. `makers`: what makes the
    drafts of rounds of 0, 1, 2, … drafts, of `interface.SOURCES`; where that is the text, there
    is neither a draft head nor a block drafter. `suffix`: texts are drafted from, too.
    """

    slots: int
    pages: int
    page_size: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    tile: int
    slot_bytes: int
    page_bytes: int
    swap_bytes: int
    max_waiting: int
    verify: tuple[tuple[int, ...], ...] = ()
    snapshots: int = 0
    snapshot_bytes: int = 0
    cache_bytes: int = 0
    invariant: bool = False
    fixed: bool = False
    image_rows: int = 0
    makers: tuple[str, ...] = ()
    suffix: bool = False

    @property
    def headless(self) -> bool:
        return COPIED in self.makers

    @property
    def sources(self) -> tuple[str, ...]:
        """What may make drafts."""
        own = {*self.makers, *([COPIED] if self.suffix else [])}
        return tuple(source for source in SOURCES if source in own)
