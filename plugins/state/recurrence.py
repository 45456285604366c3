"""An op over a recurrence, made from its rule for one state: wraps reference, body and operands.

A rule says what a token does to a state S [Hv,Dv,Dk]: its result o, and its update (δ, k, g), by
which S ← e^g S + δ kᵀ. Here is what the op adds: a launch's rows, and where and how their states
are stored, in `gdn_state` alone or behind a replay ring, `gdn_ring`. Knows no rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from spark_engine.interface import MOST_DRAFTS
from spark_engine.named import Named, Rules
from spark_engine.op import Attrs
from spark_engine.operand import Completes, Operand, Result, Role, TimedLaunch, When
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import (
    Rows,
    over,
    read_rows,
    read_tiles,
    state_rows,
    store_tiles,
)
from spark_engine.plugins.state import replay_ring_nodes as nodes
from spark_engine.plugins.state.replay_ring import (
    Ring,
    Update,
    Wide,
    heads_of,
    narrowed,
    ring_of,
    slot_of,
    whole_state,
)
from spark_engine.tensors import Array, DType


@cache  # a build asks for it a thousand times
def _decays() -> Array:
    drawn = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    drawn = np.asarray(-np.abs(drawn) * np.float32(0.1))
    drawn.setflags(write=False)
    return drawn


def _live(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Decays' logarithms and `base` are among it: neither grows, all is live."""
    return _decays()


STATE = Operand("gdn_state", Role.STATE, "f32/bf16/f16[S+1,Hv,Dv,Dk]")
RING = Operand(
    "gdn_ring",
    Role.STATE,
    "f32[S+1,L,W]",
    When("ring"),
    completes=Completes("gdn_state", whole_state),
    fill=_live,
)
RESULTS = (
    Result("state_out", STATE.spec, updates=STATE.name),
    Result("ring_out", RING.spec, RING.when, updates=RING.name),
)


def _ring(node: Named) -> Ring:
    found = ring_of(node.attrs)
    assert found is not None  # asked for by the ring's operand
    return found


DIMS: Rules = {"L": lambda node: _ring(node).rows, "W": lambda node: _ring(node).width}


def check(node: Named) -> str | None:
    """Why a row has too many tokens. Raises GraphError for a ring that no op takes."""
    ring_of(node.attrs)
    tile, most = node.number("tile"), 1 + node.number("drafts")
    if most < tile <= 1 + MOST_DRAFTS:
        return f"a tile of {tile} tokens; a round has up to {most}"
    return None


# ---- Reference: float64 --------------------------------------------------------------------------

# (token of the launch, S before it, which becomes S after it) -> (o [Hv,Dv], the update)
Rule = Callable[[int, Wide], tuple[Wide, Update]]


def evaluate(
    rule: Rule, attrs: Attrs, tokens: int, operands: Sequence[Array]
) -> tuple[Wide, list[Array]]:
    """(o [tokens,Hv,Dv], the states after the launch); `operands`: the states, slots, starts,
    counts, [sources, saves]."""
    states = [array.copy() for array in operands[: 2 if attrs["ring"] else 1]]
    rows = operands[len(states) :]
    h = heads_of(attrs)
    o = np.zeros((tokens, h.values, h.value_dim))
    (_steps if h.tile <= 1 + MOST_DRAFTS else _tiles)(rule, attrs, o, states, rows)
    return o, states


def _steps(rule: Rule, attrs: Attrs, o: Wide, states: list[Array], rows: Sequence[Array]) -> None:
    h, ring = heads_of(attrs), ring_of(attrs)
    drafts = ring.drafts if ring else 0
    for row, (slot, start, count) in enumerate(zip(*map(np.ndarray.tolist, rows), strict=True)):
        if slot < 0 or (count == 0 and (start > 0 or drafts)):
            continue
        held = slot_of(ring, h, states, slot, start)
        certain = held.state
        for j in range(count):
            at, position = row * h.tile + j, start + j
            o[at], update = rule(at, held.before(position))
            held.append(position, update)
            if j == 0:  # the later ones may be rejected
                certain = held.state.copy()
        if drafts:
            held.end_round(start)
        states[0][slot] = certain
        if ring:
            states[1][slot] = held.records


def _tiles(rule: Rule, attrs: Attrs, o: Wide, states: list[Array], rows: Sequence[Array]) -> None:
    h, ring = heads_of(attrs), ring_of(attrs)
    slots, starts, counts, *prefill = rows
    sources, saves = state_rows(slots, starts, prefill)
    wide: dict[int, Wide] = {}  # states of this launch, rounded once
    for row, (slot, start, count) in enumerate(zip(*map(np.ndarray.tolist, rows[:3]), strict=True)):
        if slot < 0:
            continue
        if slot not in wide or start == 0:
            wide[slot] = slot_of(ring, h, states, int(sources[row]), start).before(start)
        for at in range(row * h.tile, row * h.tile + count):
            o[at], _ = rule(at, wide[slot])
        for entry in (slot, int(saves[row])):
            if entry >= 0:
                states[0][entry] = narrowed(wide[slot], states[0].dtype)
                if ring:
                    ring.settle(states[1][entry], start + count)


# ---- Body: ONNX ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Names of what one token of every row makes, all f32."""

    state: str  # [rows,Hv,Dv,Dk], after the token
    delta: str  # [rows,Hv,Dv]
    k: str  # [rows,Hv,Dk]
    g: str  # [rows,Hv,1], 0 where there is no token
    o: str  # [rows,Hv·Dv], an activation


# (rows, a token of each by operand, the old state f32 [rows,Hv,Dv,Dk], the name of o)
StepRule = Callable[[Rows, tuple[str, ...], str, str], Step]
# (tiles, the old state of each f32 [rows,Hv,Dv,Dk]) -> the new one, stored as `gdn_state` is
TileRule = Callable[[Rows, str], str]


def step_body(
    f: Text, node: Named, rule: StepRule, tokens: tuple[str, ...], outs: Sequence[str]
) -> None:
    """One token of every row, or a round; `tokens`: operands with a row a token. Written to `o` and
    `outs` (the state, [the ring])."""
    ring, rows = ring_of(node.attrs), read_rows(f, "slots", "starts", "counts")
    if ring is None:
        new = rule(rows, tokens, _plain(f, rows), "o").state
        _store(f, rows.slots, nodes.narrowed(f, new, node["gdn_state"].dtype), outs[0])
    else:
        _round(f, node, rule, tokens, ring, rows, outs)


def _round(
    f: Text,
    node: Named,
    rule: StepRule,
    tokens: tuple[str, ...],
    ring: Ring,
    rows: Rows,
    outs: Sequence[str],
) -> None:
    """Token after token of every row, each a step of one; see `replay_ring.StoredState`."""
    h, dtype = ring.heads, node["gdn_state"].dtype
    held = nodes.opened(f, ring, rows, dtype)
    made, certain = [], ""
    first = f("Mul", f.indices("slots"), h.tile) if h.tile > 1 else ""  # token of every row
    for j in range(h.tile):
        left = f("Max", f("Sub", rows.counts, j), 0)
        known = f("Min", f("Max", f("Sub", rows.counts, 1), 0), j)  # after the last: the last
        position = f("Add", rows.starts, known)
        there = f("Greater", left, 0)
        own = f("Add", first, j) if h.tile > 1 else ""
        given = tuple(f("Gather", name, own) if own else name for name in tokens)
        state = nodes.before(f, held, position)
        step = rule(replace(rows, counts=left), given, state, f.fresh())
        held = nodes.append(f, held, position, there, (step.delta, step.k, step.g))
        held = nodes.fold(f, held, position, there, step.state)
        certain = certain or held.state
        made.append(f("Unsqueeze", step.o, [1]))
    f("Reshape", f("Concat", *made, axis=1), [-1, h.values * h.value_dim], out="o")
    has = f("Greater", rows.counts, 0)
    if ring.drafts:
        certain = f("Where", over(f, has, [1, 2, 3]), certain, held.stored)
    _store(f, rows.slots, nodes.narrowed(f, certain, dtype), outs[0])
    nodes.end_round(f, held, rows, has, outs[1])


def _plain(f: Text, rows: Rows) -> str:
    """f32 [rows, Hv, Dv, Dk]: zero for a fresh row, whatever its slot holds."""
    state = f.cast(f("Gather", "gdn_state", rows.sources), DType.F32)
    return f("Where", over(f, rows.fresh, [1, 2, 3]), 0.0, state)


def _store(f: Text, slots: str, new: str, out: str) -> None:
    f("ScatterND", "gdn_state", over(f, slots, [1]), new, out=out)


def tile_body(f: Text, node: Named, rule: TileRule) -> None:
    """A prefill's tiles: written to `o`, `state_out` and `ring_out`."""
    ring, rows = ring_of(node.attrs), read_tiles(f)
    if ring is None:
        old = _plain(f, rows)
    else:
        held = nodes.opened(f, ring, rows, node["gdn_state"].dtype)
        old = nodes.before(f, held, rows.starts)
    store_tiles(f, rows, "gdn_state", rule(rows, old), "state_out")
    if ring is not None:
        nodes.settle(f, held, rows, "ring_out")
