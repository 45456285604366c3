"""What a draft head drafts, in float64, from the published definition: see oracle.py.

Row t of the head takes (hidden_t, token t+1) and is at position t, where hidden_t is what the
network's head reads. Its output behind `mtp.norm` gives the logits of token t+2, and is the hidden
of the next row, with the token just drafted. So the drafts depend on the sequence alone, whatever
rounds it came from. The variants are the known mistakes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.oracles.oracle import F64, _Net


@dataclass
class Drafts:
    """Of one sequence: `tokens` [k] drafted behind it, and their logits [k, V], the network's own
    logits [T-1, V] and the head's keys and values [T-1, kv_heads, D]. `margin` as in `Result`."""

    tokens: list[int]
    logits: F64
    target: F64
    keys: F64
    values: F64
    margin: float

    @property
    def gap(self) -> float:
        """The least distance between the two largest logits of a draft."""
        top = np.sort(self.logits, axis=1)
        return float((top[:, -1] - top[:, -2]).min(initial=np.inf))


def draft(
    checkpoint: Path,
    ids: Sequence[int],
    count: int,
    shortlist: Sequence[int] | None = None,
    before_norm: bool = False,
    empty: int = 0,
) -> Drafts:
    """`count` drafts behind `ids`, of which the last was sampled and not yet read.

    `before_norm`: hidden is taken before the final norm. `empty`: of so many first positions the
    head has no keys and values.
    """
    net = _Net(checkpoint)
    target = net.forward(np.asarray(ids[:-1]))
    hidden = list(target.layers[-1] if before_norm else target.hidden)
    tokens, logits = list(ids[1:]), []
    allowed = np.arange(net.c["vocab_size"]) if shortlist is None else np.asarray(shortlist)
    embedding = net.files.get(f"{net.files.prefix}embed_tokens.weight")
    for _ in range(count):
        y, keys, values = _rows(net, embedding[tokens], np.stack(hidden), empty)
        logits.append(net.head(y[-1:])[0, allowed])
        tokens.append(int(allowed[np.argmax(logits[-1])]))
        hidden.append(y[-1])
    drafted, known = tokens[len(ids) - 1 :], len(ids) - 1
    return Drafts(
        drafted, np.array(logits), target.logits, keys[:known], values[:known], net.rounder.margin
    )


def _rows(net: _Net, embedded: F64, hidden: F64, empty: int) -> tuple[F64, F64, F64]:
    """(outputs behind the head's norm, keys, values) of rows [T, H] from position 0 on."""
    end = "mtp.pre_fc_norm_hidden.weight"
    head = next(n for n in net.files.tensors if n.endswith(end)).removesuffix(end) + "mtp"
    layer = f"{head}.layers.0"
    e, h = (
        net.norm(embedded, f"{head}.pre_fc_norm_embedding"),
        net.norm(hidden, f"{head}.pre_fc_norm_hidden"),
    )
    x = net.linear(np.concatenate([e, h], axis=1), f"{head}.fc")
    h = net.norm(x, f"{layer}.input_layernorm")
    mixed, keys, values = net.attend(h, f"{layer}.self_attn", empty)
    x = x + mixed
    x = x + net.mlp(net.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
    return net.norm(x, f"{head}.norm"), keys, values


def continuation(checkpoint: Path, ids: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens that the network itself chooses, the likeliest each time."""
    found = list(ids)
    for _ in range(count):
        found.append(int(np.argmax(_Net(checkpoint).forward(np.asarray(found)).logits[-1])))
    return found[len(ids) :]


def near(ours: NDArray[np.generic], truth: F64, tolerance: float) -> bool:
    """Whether all differences are within `tolerance` of the truth's range."""
    wide = np.asarray(ours, np.float64)
    return bool(np.abs(wide - truth).max() <= tolerance * max(np.ptp(truth), 1e-30))
