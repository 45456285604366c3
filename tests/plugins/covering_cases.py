"""Which cases to compile where no GPU can run them: forms of a kernel, not sizes.

`make kernels` compiles every value of every macro that is no size (`every`), for each op.
`make test` compiles each kernel once for every tactic and for every op with every set of states it
updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.plugins.cuda_node import Planned

SIZES = frozenset(
    "H K N VOCAB WIDTH SLOTS HIDDEN EXPERTS HEADS KV_HEADS HK HV SHARED EPS COLUMNS ROWS_ALL "
    "PAGE OFFSET THREADS".split()
)
NAMED = frozenset("CHUNK SPLITS".split())  # lengths that tactics' names have
Form = tuple[str, ...]


def tactic_of(work: Planned, every: bool = False) -> str:
    """The tactic's name, without the lengths in it: chunks_128_8 and chunks_256_8 are chunks_8."""
    lengths = {v for launch in work.plan.launches for n, v in launch.defines if n in NAMED}
    parts = work.tactic.name.split("_")
    return "_".join(parts if every else (p for p in parts if p not in lengths))


def forms(work: Planned, every: bool = False) -> set[Form]:
    """(tactic, kernel) and (states, kernel, op); with `every` also each value of each macro that is
    no size, for each op and with the states that the node updates."""
    states = tuple(r.updates for r in work.op.made(work.case.attrs) if r.updates)
    found: set[Form] = set()
    for launch in work.plan.launches:
        kernel = launch.source or work.tactic.source, launch.symbol
        where = (*states, *kernel, work.op.name) if every else kernel
        found |= {(*where, tactic_of(work, every)), (*states, *kernel, work.op.name)}
        if every:
            found |= {(*where, name, v) for name, v in launch.defines if name not in SIZES}
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
