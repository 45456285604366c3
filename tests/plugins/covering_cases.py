"""Which cases to compile where no GPU can run them: every form of a kernel, not every size.

Knows the macros of a launch and which of them only say how long a loop is. Two instantiations that
differ in sizes alone are one form; every value of every other macro is met with every kernel. Of a
macro that counts, as tokens of a round, two and more are one value, and ops that launch the same
kernel share what is compiled of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.plugins.cuda_node import Planned

SIZES = frozenset(
    "H K N VOCAB WIDTH SLOTS HIDDEN EXPERTS HEADS KV_HEADS HK HV SHARED EPS COLUMNS ROWS_ALL "
    "PAGE OFFSET THREADS".split()
)
# Lengths and counts, of which `make kernels` compiles every value, and every op's (`every`).
LENGTHS = frozenset("CHUNK MOST_CHUNKS SPLITS INNER K1 HALF DS".split())
NAMED = frozenset("CHUNK SPLITS".split())  # lengths that tactics' names have
COUNTS = frozenset("RING DRAFTS TOKENS TILE".split())
Form = tuple[str, ...]


def tactic_of(work: Planned, every: bool = False) -> str:
    """The tactic's name, without the lengths in it: chunks_128_8 and chunks_256_8 are chunks_8."""
    lengths = {v for launch in work.plan.launches for n, v in launch.defines if n in NAMED}
    parts = work.tactic.name.split("_")
    return "_".join(parts if every else (p for p in parts if p not in lengths))


def forms(work: Planned, every: bool = False) -> set[Form]:
    """(op, kernel), (tactic, kernel), and (kernel, macro, value) of each macro that is no size; all
    of them with the states that the node updates, so that a mode with one more is met with every
    value too. `every`: all lengths, and each op for itself."""
    states = tuple(r.updates for r in work.op.made(work.case.attrs) if r.updates)
    found: set[Form] = set()
    for launch in work.plan.launches:
        kernel = launch.source or work.tactic.source, launch.symbol
        where = (*states, *kernel, work.op.name if every else "")
        found |= {(*states, *kernel, work.op.name), (*where, tactic_of(work, every))}
        for name, value in launch.defines:
            if name in SIZES or (not every and name in LENGTHS):
                continue
            several = not every and name in COUNTS and value not in ("0", "1")
            found.add((*where, name, "several" if several else value))
    return found


def covering(works: Sequence[Planned], every: bool = False) -> list[Planned]:
    """A few of `works` that have all their forms: each time the one that adds most."""
    known = [(work, forms(work, every)) for work in works]
    left = set().union(*(found for _, found in known))
    chosen = []
    while left:
        work, found = max(known, key=lambda pair: len(pair[1] & left))
        chosen.append(work)
        left -= found
    return chosen
