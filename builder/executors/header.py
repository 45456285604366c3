"""The header of a bucket's `.engine` file, which is the same for every executor.

Knows the interface of docs/graph.md; knows no executor's payload.
"""

from spark_engine import interface
from spark_engine.builder.graph.family import FamilyGraph
from spark_engine.builder.graph.nodes import spec_of, state_aliases
from spark_engine.builder.plan.buckets import Size
from spark_engine.engine_file import EngineHeader
from spark_engine.interface import STATE_OUT


def header(graph: FamilyGraph, size: Size, executor: str, target: str) -> EngineHeader:
    """The inputs and outputs of the bucket, in the order of docs/graph.md, without weights."""
    found = {t.name: spec_of(t).bind(size.dims) for t in graph.graph.inputs}
    results = [spec_of(t).bind(size.dims) for t in graph.graph.outputs]
    states = [name for name in graph.state_names if name in found]
    updates = {name + STATE_OUT for name in states}
    updated = [name for name in states if any(s.name == name + STATE_OUT for s in results)]
    given = {*found} - {*states}
    return EngineHeader(
        executor=executor,
        target=target,
        family=size.family,
        rows=size.rows,
        tile=size.tile,
        inputs=tuple(found[n] for n in _input_order(given)),
        states=tuple(found[n] for n in states),
        outputs=tuple(s for s in results if s.name not in updates),
        aliases=state_aliases(updated),
    )


def _input_order(names: set[str]) -> list[str]:
    known = (s for f in interface.families(1, 1) for d in (0, 1) for s in interface.steps(f, d))
    steps = list(dict.fromkeys(s.name for s in known))
    tables = [s.name for s in interface.tables(interface.Limits(1, 1, 1, 1))]
    return [name for name in (*steps, *tables) if name in names]
