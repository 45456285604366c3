"""What holds of an engine between two steps: each unit has its holders, and each count is right."""

from collections import Counter
from collections.abc import Iterable

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.policy.prefix_cache import PrefixCache
from spark_engine.runtime.engine.policy.shares import Shares
from spark_engine.runtime.engine.policy.waiting import Waiting
from spark_engine.runtime.engine.pool import Pool
from spark_engine.runtime.engine.request import Status
from spark_engine.runtime.engine.scheduler import Scheduler


def check_idle(engine: Engine) -> None:
    """Raises InternalError unless everything is free, or is kept by the prefix cache alone."""
    scheduler, pages = engine.scheduler, engine.scheduler.pages
    check_scheduler(scheduler)
    free = {
        "requests": not engine._live,
        "launched steps": not engine._loop.in_flight,
        "slots": scheduler.slots.free == scheduler.slots.size,
        "pages": pages.free + pages.spare == pages.size,
        "snapshots": scheduler.swap_used == 0,
        "queue": not (scheduler.waiting or scheduler.running),
    }
    left = [name for name, ok in free.items() if not ok]
    if left:
        raise InternalError(f"the idle engine still holds {', '.join(left)}")


def check_scheduler(scheduler: Scheduler, loading: Iterable[int] = ()) -> None:
    """Raises InternalError unless every slot, page, row and swapped byte has its holders;
    `loading`: pages that are filled from a disk."""
    running, fence, prefix = scheduler.running, scheduler._fence, scheduler.prefix
    check_pool(scheduler.slots, [*(s.slot for s in running), *(f[1] for f in fence)])
    held = [page for s in running for page in s.pages] + prefix.copied + [*loading]
    held += [page for f in fence for page in f[2]]
    check_pool(scheduler.pages, held, kept_pages(prefix.cache))
    check_cache(prefix.cache)
    swapped = sum(s.swap_bytes for s in scheduler.waiting)
    if swapped != scheduler.swap_used:
        raise InternalError(f"snapshots hold {swapped} bytes, accounted {scheduler.swap_used}")
    check_waiting(scheduler.waiting)


def check_engine(engine: Engine) -> None:
    """`check_scheduler`, of an engine that may be reading from a disk."""
    check_scheduler(engine.scheduler, engine._disk.reader.held if engine._disk else ())


def check_waiting(waiting: Waiting) -> None:
    """Raises InternalError unless the counts are right and each request is in one place."""
    fresh = sum(seq.last_step < 0 for seq in waiting)
    swapped = sum(seq.status is Status.SWAPPED for seq in waiting)
    if (fresh, swapped) != (waiting.fresh, waiting.swapped):
        counted = f"{waiting.fresh} new and {waiting.swapped} swapped"
        raise InternalError(f"{fresh} new and {swapped} swapped wait, counted {counted}")
    lined = sum(map(len, waiting._lines.values()))
    placed = lined + len(waiting.first) + len(waiting._unready)
    if placed != len(waiting) or not holds(waiting.shares):
        raise InternalError(
            f"{len(waiting)} wait, {lined} of them in line, {len(waiting.first)} before that and "
            f"{len(waiting._unready)} for a grammar; {len(waiting.shares)} owners"
        )


def holds(shares: Shares) -> bool:
    """Whether only owners with requests or ahead are kept, and the count is right."""
    owners = shares._owners.values()
    sharing = sum(o.waiting > 0 or o.ahead for o in owners)
    return shares._sharing == sharing and all(o.live or o.ahead for o in owners)


def kept_pages(cache: PrefixCache) -> list[int]:
    suffixes = [s.page for s in cache._states if s.suffix_tokens]
    return [*(node.page for node in cache._nodes), *suffixes]


def check_cache(cache: PrefixCache) -> None:
    """Raises InternalError unless trie, rows and bytes are consistent."""
    for node in cache._nodes:
        up = node.parent
        if up is None or not (node.alive and up.alive and up.children.get(node.name) is node):
            raise InternalError(f"the node that ends at {node.end} is on no path")
    roots = cache._roots.values()
    if any(root.bare or not root.alive for root in roots):
        raise InternalError("the root of a salt is kept and is bare")
    found = {s for node in (*roots, *cache._nodes) for s in node.states}
    if found != cache._states or not all(s.alive for s in cache._states):
        raise InternalError("a cached state is at no node")
    check_pool(cache._rows, [s.row for s in (*cache._states, *cache._leaving)])
    if cache.used_bytes > cache.budget:
        raise InternalError(f"the cache holds {cache.used_bytes} bytes of {cache.budget}")


def check_pool(pool: Pool, held: Iterable[int], kept: Iterable[int] = ()) -> None:
    """Raises InternalError unless every unit is free, or used and kept as often as given."""
    users, keeps = Counter(held), Counter(kept)
    free = Counter(pool._free)
    for unit in {*users, *keeps} - set(range(pool.size)):
        raise InternalError(f"{pool.name} {unit} is held, and there are {pool.size}")
    for unit in range(pool.size):
        found = users[unit], keeps[unit]
        if found != (pool._users[unit], pool._keeps[unit]) or free[unit] != (found == (0, 0)):
            if users[unit] > pool._users[unit] or keeps[unit] > pool._keeps[unit]:
                raise InternalError(f"{pool.name} {unit} is held twice, or held and free")
            raise InternalError(f"{pool.name} {unit} is neither free nor held: a leak")
    spare = sum(n > 0 and not users[unit] for unit, n in keeps.items())
    if (pool.kept, pool.spare) != (len(keeps), spare):
        raise InternalError(f"{pool.name}: {len(keeps)} kept, {pool.kept} accounted")
