"""Which cases to compile where no GPU can run them: every form of a kernel, not every size.

Knows the macros of a launch and which of them only say how long a loop is. Two instantiations that
differ in sizes alone are one form; every value of every other macro is met with every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.plugins.cuda_node import Planned

SIZES = frozenset(
    "H K N VOCAB WIDTH SLOTS HIDDEN EXPERTS HEADS KV_HEADS HK HV SHARED EPS COLUMNS ROWS_ALL "
    "PAGE OFFSET THREADS".split()
)
Form = tuple[str, ...]


def forms(work: Planned) -> set[Form]:
    """(tactic, kernel), and (kernel, macro, value) of each macro that is no size; all of them with
    the states that the node updates, so that a mode with one more is met with every value too."""
    states = tuple(r.updates for r in work.op.made(work.case.attrs) if r.updates)
    found: set[Form] = set()
    for launch in work.plan.launches:
        found.add((*states, work.tactic.name, launch.symbol))
        found |= {(*states, launch.symbol, n, v) for n, v in launch.defines if n not in SIZES}
    return found


def covering(works: Sequence[Planned]) -> list[Planned]:
    """A few of `works` that have all their forms: each time the one that adds most."""
    known = [(work, forms(work)) for work in works]
    left = set().union(*(found for _, found in known))
    chosen = []
    while left:
        work, found = max(known, key=lambda pair: len(pair[1] & left))
        chosen.append(work)
        left -= found
    return chosen
