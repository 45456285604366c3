"""The observable result of a launch: the part of its outputs and states with defined values.

Knows docs/graph.md's rules on what is unspecified; knows no engine. A state is shown with its
replay ring folded in, so that engines with and without rings compare. Returns float32 or int32
arrays in the order of the network, so that the first entry that differs names the place where two
engines diverge.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import HEADS
from spark_engine.manifest import StateInfo
from spark_engine.operand import Completes
from spark_engine.plugins.registry import OPS
from spark_engine.tensors import Array

Buffers = Mapping[str, NDArray[Any]]
Paired = Mapping[int, NDArray[np.int32]]

HEAD, PAIRED = "mtp.", "mtp.tokens"  # the draft head's states, and the tokens that filled them
LAYER = re.compile(r"^layers\.(\d+)\.(.+)$")
_STATES = {o.name: o for op in OPS for o in op.states()}
_PARTS = (*_STATES, "mixed", "out")
_RESTS = {o.completes.state: (o.name, o.completes) for o in _STATES.values() if o.completes}
_SHOWN_BY_OTHERS = {name for state, (name, _) in _RESTS.items() if name != state}
_LAST = ("logits_all", "logits", "ok", "next_tokens", "logprobs", "top_logprobs", "last_tokens")
EMITTED = ("next_tokens", "logprobs")  # defined where the row emits
LAST = "last_accepted"  # per row of a round: the token that `last_tokens` was sampled after
_LEFT_OUT = ("top_ids",)  # equal logits may be in either order; top_logprobs is compared
_GUESSED = "draft."  # outputs of a debug build for tokens that are not accepted yet


def layer_of(name: str) -> int | None:
    """`layers.3.out` -> 3; None for a name without a layer."""
    found = LAYER.match(name)
    return int(found.group(1)) if found else None


def defined_values(
    buffers: Buffers,
    outputs: Iterable[str],
    states: Iterable[StateInfo],
    paired: Paired | None = None,
) -> dict[str, Array]:
    """The defined part of every output and state after a launch, and which live rows emitted.

    Leaves out empty arrays.

    Args:
        buffers: step inputs, tables, states and outputs of the launch.
        outputs: names of the outputs.
        states: of the engine; slot states give [live slots, …], page states [tokens, …].
        paired: by slot, the token of the draft head's keys at each position.
    """
    live = np.flatnonzero(buffers["counts"] > 0)
    seen: dict[str, NDArray[Any]] = {"emitted": np.flatnonzero(emits(buffers)[live] == 1)}
    if "accepted" in buffers:
        counts, accepted = buffers["counts"][live], buffers["accepted"][live]
        seen["emitted"] = np.arange(counts.sum())
        seen[LAST] = np.cumsum(counts) - counts + accepted - 1
    for name in outputs:
        if name not in _LEFT_OUT and not name.startswith(_GUESSED):
            seen[name] = buffers[name][_mask(name, buffers)]
    for info in states:
        name = info.spec.name
        part = name.split(".")[-1]
        if part in _SHOWN_BY_OTHERS or info.unit == "image":
            continue
        if name.startswith(HEAD) and paired is not None:
            seen[PAIRED] = _paired(paired, buffers)
        pick = _page_tokens if info.unit == "page" else _slot_rows
        seen[name] = pick(name, buffers)
        rest, completes = _RESTS.get(part, ("", None))
        kept = buffers.get(name.removesuffix(part) + rest)
        if completes is not None and kept is not None:
            seen[name] = _whole(seen[name], kept, completes, buffers)
    return {name: _plain(seen[name]) for name in sorted(seen, key=place) if seen[name].size}


def place(name: str) -> tuple[int, int, str]:
    """Sort key: `token_counts`, then layer by layer, then the logits and their results."""
    found = LAYER.match(name)
    if found:
        part = found.group(2)
        return int(found.group(1)), _PARTS.index(part) if part in _PARTS else 99, part
    if name in _LAST:
        return 1 << 30, _LAST.index(name), name
    return -1, 0, name


def emits(buffers: Buffers) -> NDArray[Any]:
    """1 for each row that samples; all rows without such an input."""
    every = np.ones(len(buffers["counts"]), np.int32)
    return np.asarray(buffers.get("emit", every))


def ends(buffers: Buffers) -> NDArray[Any]:
    """Tokens of each row's sequence after the launch."""
    kept: NDArray[Any] = buffers.get("accepted", buffers["counts"])
    return np.asarray(buffers["starts"] + kept)


def _mask(name: str, buffers: Buffers) -> NDArray[np.bool_]:
    counts, tokens = buffers["counts"], len(buffers["token_ids"])
    if len(buffers[name]) == tokens > len(counts):
        tile = tokens // len(counts)
        return np.asarray(np.arange(tile) < counts[:, None]).reshape(-1)
    live = np.asarray(counts > 0)
    return live & np.asarray(emits(buffers) == 1) if name in EMITTED else live


def _slot_rows(name: str, buffers: Buffers) -> NDArray[Any]:
    state = buffers[name]
    if name != "last_tokens":
        return state[_live_slots(buffers)]
    samples = np.asarray((buffers["counts"] > 0) & (emits(buffers) == 1))
    return np.asarray(state[buffers["slots"][samples]])


def _whole(
    states: NDArray[Any], rests: NDArray[Any], completes: Completes, buffers: Buffers
) -> NDArray[Any]:
    """The live slots' states with their rings folded in, as in an engine without rings. In the
    states' dtype."""
    drafts = buffers["drafts"].shape[1] if "drafts" in buffers else 0
    after, found = ends(buffers), []
    for i, slot in enumerate(_live_slots(buffers)):
        end = int(after[buffers["slots"] == slot].max())
        found.append(completes.whole(states[i].astype(np.float64), rests[slot], end, drafts))
    return np.stack(found).astype(states.dtype) if found else states


def _paired(paired: Paired, buffers: Buffers) -> NDArray[Any]:
    """For the positions of `_page_tokens`, in its order."""
    after = ends(buffers)
    lengths = [(s, int(after[buffers["slots"] == s].max())) for s in _live_slots(buffers)]
    found = [paired[int(slot)][:length] for slot, length in lengths]
    return np.concatenate(found) if found else np.zeros(0, np.int32)


def _live_slots(buffers: Buffers) -> NDArray[np.int64]:
    """Each live slot once, in the order of the rows."""
    live = buffers["slots"][buffers["counts"] > 0]
    return np.asarray(list(dict.fromkeys(live.tolist())), np.int64)


def _page_tokens(name: str, buffers: Buffers) -> NDArray[Any]:
    """[tokens, kv_heads, D]: every position of every live sequence so far."""
    pages, table = buffers[name], buffers["page_table"]
    after = ends(buffers) if name.startswith(HEADS) else buffers["starts"] + buffers["counts"]
    found = []
    for slot in _live_slots(buffers):
        length = int(after[buffers["slots"] == slot].max())
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
