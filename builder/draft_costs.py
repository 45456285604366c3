"""The fixed cost of drafting: bytes, and the time of a round.

Knows the manifest and the names of the draft head's tensors; decides nothing.
"""

from collections.abc import Iterable

from spark_engine.builder.report import size, timed
from spark_engine.interface import DECODE, HEADS, ID_PAGES, VERIFY
from spark_engine.manifest import Manifest, StateInfo
from spark_engine.tensors import TensorSpec

OWN = ("positions", "drafts")  # states of engines with drafts only


def draft_costs(manifest: Manifest, weights: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Sentences for the report; none for an engine without drafts."""
    if not manifest.limits.drafts:
        return ()
    head = sum(spec.nbytes for spec in weights if spec.name.startswith(HEADS))
    kv = sum(s.spec.nbytes for s in manifest.states if _own(s) and s.unit == "page")
    states = sum(_more(s, manifest) for s in manifest.states if s.unit != "page")
    taken = (
        f"drafts take {size(head)} of weights (the head's own, and ids that it may draft), "
        f"{size(kv)} of KV pages and {size(states)} of states"
    )
    return taken, *_rounds(manifest)


def _rounds(manifest: Manifest) -> Iterable[str]:
    """Compares the longest round with a decode step, for the fewest and the most rows."""
    steps = {b.rows: b.cost_us for b in manifest.buckets if b.family == DECODE}
    longest = {
        b.rows: b
        for b in sorted(manifest.buckets, key=lambda b: b.tile)
        if b.family.startswith(VERIFY) and steps.get(b.rows)
    }
    how = "" if timed(manifest) else " (predicted)"
    for rows in sorted({min(longest), max(longest)} if longest else ()):
        bucket, step = longest[rows], steps[rows]
        more = bucket.cost_us / step
        yield (
            f"{bucket.family} of {rows} rows takes {bucket.cost_us:.0f} us, decode {step:.0f}{how}"
            f": drafts pay there from {more:.2f} tokens of a row each round on"
        )


def _own(state: StateInfo) -> bool:
    return state.spec.name.startswith(HEADS) or state.spec.name == ID_PAGES


def _more(state: StateInfo, manifest: Manifest) -> int:
    """Bytes of a state per slot that drafts add: ring records beyond the ring's length, and a
    column of the convolution's window for each token of a round."""
    name, nbytes, limits = state.spec.name, state.spec.nbytes, manifest.limits
    if name in OWN or _own(state):
        return nbytes
    rows = state.spec.dims[1] if len(state.spec.dims) > 1 else 1
    if name.endswith(".gdn_ring"):
        return nbytes // rows * (rows - limits.gdn_ring)
    return nbytes // rows * (limits.drafts + 1) if name.endswith(".conv_state") else 0
