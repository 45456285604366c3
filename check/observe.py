"""What one launch has to show: the part of its outputs and states that has a defined value.

Knows docs/graph.md's rules on what is unspecified; knows no engine. A state is shown with
what another holds of it (a replay ring), so that engines with and without are alike. Everything is
returned as float32 or int32 arrays, in the order in which a network computes it, so that the first
entry that differs names the place where two engines part.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.manifest import StateInfo
from spark_engine.operand import Completes
from spark_engine.plugins.registry import OPS
from spark_engine.tensors import Array

Buffers = Mapping[str, NDArray[Any]]

LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
_STATES = {o.name: o for op in OPS for o in op.states()}
_PARTS = (*_STATES, "mixed", "out")
_RESTS = {o.completes.state: (o.name, o.completes) for o in _STATES.values() if o.completes}
_LAST = ("logits_all", "logits", "ok", "next_tokens", "logprobs", "top_logprobs", "last_tokens")
EMITTED = ("next_tokens", "logprobs")  # defined where the row emits
_PER_TOKEN = ("logits_all", "mixed", "out")
_LEFT_OUT = ("top_ids",)  # equal logits may stand in either order; top_logprobs tells


def layer_of(name: str) -> int | None:
    """`layers.3.out` -> 3, and None for what belongs to no layer."""
    found = LAYER.match(name)
    return int(found.group(1)) if found else None


def observe(
    buffers: Buffers, outputs: Iterable[str], states: Iterable[StateInfo]
) -> dict[str, Array]:
    """The defined part of every output and state after a launch, and which live rows emitted.

    What is empty is left out.

    Args:
        buffers: step inputs, tables, states and outputs of the launch.
        outputs: names of the outputs.
        states: of the engine; slot states give [live slots, …], page states [tokens, …].
    """
    live = np.flatnonzero(buffers["counts"] > 0)
    emitted = np.flatnonzero(buffers["emit"][live] == 1)
    seen: dict[str, NDArray[Any]] = {"emitted": emitted}
    for name in outputs:
        if name not in _LEFT_OUT:
            seen[name] = buffers[name][_mask(name, buffers)]
    for info in states:
        name = info.spec.name
        part = name.split(".")[-1]
        if part in _STATES and _STATES[part].completes:
            continue
        pick = _page_tokens if info.unit == "page" else _slot_rows
        seen[name] = pick(name, buffers)
        rest, completes = _RESTS.get(part, ("", None))
        kept = buffers.get(name.removesuffix(part) + rest)
        if completes is not None and kept is not None:
            seen[name] = _whole(seen[name], kept, completes, buffers)
    return {name: _plain(seen[name]) for name in sorted(seen, key=place) if seen[name].size}


def place(name: str) -> tuple[int, int, str]:
    """Sort key: `token_counts`, then layer by layer, then the logits and what they give."""
    found = LAYER.match(name)
    if found:
        part = found.group(2)
        return int(found.group(1)), _PARTS.index(part) if part in _PARTS else 99, part
    if name in _LAST:
        return 1 << 30, _LAST.index(name), name
    return -1, 0, name


def _mask(name: str, buffers: Buffers) -> NDArray[np.bool_]:
    counts, emit = buffers["counts"], buffers["emit"]
    if name.split(".")[-1] in _PER_TOKEN:
        tile = len(buffers["token_ids"]) // len(counts)
        return np.asarray(np.arange(tile) < counts[:, None]).reshape(-1)
    live = np.asarray(counts > 0)
    return live & np.asarray(emit == 1) if name in EMITTED else live


def _slot_rows(name: str, buffers: Buffers) -> NDArray[Any]:
    state = buffers[name]
    if name == "last_tokens":
        return state[buffers["slots"][_mask("next_tokens", buffers)]]
    return state[_live_slots(buffers)]


def _whole(
    states: NDArray[Any], rests: NDArray[Any], completes: Completes, buffers: Buffers
) -> NDArray[Any]:
    """The live slots' states with what another holds of them: what an engine that keeps nothing
    apart has there. In the states' dtype."""
    found = states.copy()
    ends = buffers["starts"] + buffers["counts"]
    drafts = buffers["drafts"].shape[1] if "drafts" in buffers else 0
    for i, slot in enumerate(_live_slots(buffers)):
        end = int(ends[buffers["slots"] == slot].max())
        found[i] = completes.whole(states[i].astype(np.float64), rests[slot], end, drafts)
    return found


def _live_slots(buffers: Buffers) -> NDArray[np.int64]:
    """Each live slot once, in the order of the rows."""
    live = buffers["slots"][buffers["counts"] > 0]
    return np.asarray(list(dict.fromkeys(live.tolist())), np.int64)


def _page_tokens(name: str, buffers: Buffers) -> NDArray[Any]:
    """[tokens, kv_heads, D]: every position of every live sequence so far."""
    pages, table = buffers[name], buffers["page_table"]
    ends = buffers["starts"] + buffers["counts"]
    found = []
    for slot in _live_slots(buffers):
        length = int(ends[buffers["slots"] == slot].max())
        held = table[slot, : -(-length // pages.shape[2])]
        tokens = np.moveaxis(pages[held], 2, 1).reshape(-1, pages.shape[1], pages.shape[3])
        found.append(tokens[:length])
    return np.concatenate(found) if found else pages[:0, :, 0]


def _plain(array: NDArray[Any]) -> Array:
    if array.dtype == np.uint8:  # e4m3 codes of KV pages
        array = array.view(ml_dtypes.float8_e4m3fn)
    if array.dtype.kind in "iu":
        return np.asarray(array, np.int32)
    return np.asarray(array, np.float32)
