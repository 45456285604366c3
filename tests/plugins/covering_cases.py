"""Which cases to compile where no GPU can run them: forms of a kernel, not sizes.

`make kernels` compiles every value of every macro that is no size (`every`), for each op.
`make test` compiles each kernel once for every tactic and for every op with every set of states it
updates.
"""

from collections.abc import Sequence

from tests.plugins.cuda_node import Planned

SIZES = frozenset(
    "H K N VOCAB WIDTH SLOTS HIDDEN EXPERTS HEADS KV_HEADS HK HV SHARED EPS COLUMNS ROWS_ALL "
    "PAGE OFFSET THREADS".split()
)
Form = tuple[str, ...]


def tactic_of(work: Planned, every: bool = False) -> str:
    """The tactic, or what tactics share that differ in sizes alone."""
    return work.tactic.name if every else work.tactic.form


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
