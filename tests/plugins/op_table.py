"""The table of ops in docs/graph.md, written from what the ops declare.

.venv/bin/python -m tests.plugins.op_table      writes it again
"""

from collections.abc import Iterable
from itertools import groupby

from spark_engine.op import Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins import registry
from tests.plugins.cases.seeded import seeded
from tests.repository import ROOT

PAGE = ROOT / "docs" / "graph.md"
BEGIN, END = "<!-- ops: written by tests/plugins/op_table.py -->\n", "<!-- /ops -->\n"
HEAD = "| op | operands → results | attributes | fusion of |\n|---|---|---|---|\n"
ENGINES = (Role.STEP, Role.TABLE, Role.STATE)  # the engine's tables give their types


def table() -> str:
    """Heading and rows."""
    first: dict[tuple[Operand, ...], str] = {}
    return HEAD + "".join(row(op, first) for op in registry.OPS)


def row(op: Op, first: dict[tuple[Operand, ...], str]) -> str:
    """One op's line. `first`: operands that an attribute chooses, and the first op with them."""
    given = []
    for attr, group in groupby(op.operands, lambda o: o.when.attr if o.when else ""):
        members = tuple(group)
        several = len({o.when for o in members}) > 1
        owner = first.setdefault(members, op.name) if several else op.name
        given += list(_grouped(members)) if owner == op.name else [f"{attr}'s as `{owner}`"]
    cells = (
        f"`{op.name}`{' Q' if op.quantises else ''}",
        f"{', '.join(given)} → {', '.join(_grouped(op.results))}",
        ", ".join(op.attrs),
        _fused(op),
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _grouped(members: Iterable[Operand | Result]) -> Iterable[str]:
    """Neighbours with the same condition share a pair of brackets."""
    for when, group in groupby(members, lambda m: m.when):
        text = ", ".join(f"[{_text(m)}]" if _optional(m) else _text(m) for m in group)
        yield f"[{text} if {when}]" if when else text


def _optional(member: Operand | Result) -> bool:
    return isinstance(member, Operand) and member.optional


def _text(member: Operand | Result) -> str:
    note = f" ({member.note})" if member.note else ""
    if isinstance(member, Operand):
        return f"{member.name}{'' if member.role in ENGINES else ' ' + member.spec}{note}"
    if member.name.endswith("*"):
        return member.spec
    return f"{member.updates}'" if member.updates else f"{member.name} {member.spec}{note}"


def _fused(op: Op) -> str:
    chains = (op.fuses(case.attrs) for case in seeded(op)) if op.fuses else ()
    parts = dict.fromkeys(part.op for chain in chains for part in chain.parts)
    quantisers = {o.name for o in registry.OPS if o.quantises}
    return ", ".join(dict.fromkeys("quantisers" if p in quantisers else p for p in parts))


def written(page: str) -> str:
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
