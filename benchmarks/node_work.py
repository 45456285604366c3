"""What one node of a graph moves and computes in one launch of its bucket.

Bytes that no cache can keep (weights, states, pages: each once), bytes that the node before made
or the node behind reads (they stay in the L2 cache where they fit), and operations by the numbers
that are multiplied. Knows the ops' operands; knows no kernel, no card and no measurement.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.byte_floors import ring_bytes
from spark_engine.builder.native.tactics import Work
from spark_engine.builder.native.timing_inputs import launch_of, operands
from spark_engine.operand import Role
from spark_engine.tensors import TensorSpec

L2_SHARE = 0.5  # of the cache that one tensor may take and still be there for the next node
MMA_TOKENS = 8  # tokens that one matrix instruction takes: fewer cost as much
CHUNK = 64  # tokens of a chunk of the delta rule in prefill
FORMATS = {"fp8": "e4m3", "fp8_channel": "e4m3", "fp8_block": "e4m3", "nvfp4_a4": "nvfp4"}
LINEAR = {"fp8_linear": "e4m3", "fp8_block_linear": "e4m3", "nvfp4_linear_a4": "nvfp4"}
LINEAR["nvfp4_linear_a8"] = "e4m3"
LINEAR |= dict.fromkeys(("linear", "linear_bias", "nvfp4_linear", "int4_linear"), "bf16")
GATHERS = ("embed", "mtp_input")  # of a table they read one row a token
TOUCHES = ("mark_tokens", "accept_drafts", "round_rows", "shift_ids", "draft_token")


@dataclass(frozen=True)
class Amounts:
    """One node's amounts."""

    cold: float  # bytes that come from or go to DRAM, whatever the cache
    warm: tuple[float, ...] = ()  # bytes of each activation that it reads or writes
    ops: float = 0.0  # multiplications and additions
    kind: str = ""  # what is multiplied: "bf16", "e4m3", "nvfp4"; "" where no tensor core is used

    def dram(self, l2_bytes: float) -> float:
        """Bytes of DRAM traffic with an L2 cache of that size."""
        return self.cold + sum(n for n in self.warm if n > L2_SHARE * l2_bytes)

    @property
    def moved(self) -> float:
        """Bytes that multiprocessors read and write."""
        return self.cold + sum(self.warm)


def amounts(work: Work) -> Amounts:
    """Of a node of fixed shapes; rows have `work.context` tokens behind them in decode, and a
    prefill is one sequence from its beginning."""
    if work.name in LINEAR:
        return _linear(work)
    return _RULES.get(work.name, _plain)(work)


def _plain(work: Work) -> Amounts:
    """Weights once, activations in and out, states not at all."""
    warm = tuple(float(s.nbytes) for s in (*_activations(work), *_fresh(work)))
    return Amounts(_weights(work), warm)


def _linear(work: Work) -> Amounts:
    x, w, kind = work.ins[0], _named(work)["w"], LINEAR[work.name]
    k = x.dims[-1] * (2 if kind == "nvfp4" else 1)  # two codes a byte
    ops = 2.0 * _padded(x.dims[0]) * w.dims[0] * k
    plain = _plain(work)
    return Amounts(plain.cold, plain.warm, ops, kind)


def _router(work: Work) -> Amounts:
    """A product with the router's rows and the shared expert's gate."""
    x, plain = work.ins[0], _plain(work)
    rows = sum(s.dims[0] for s in _constants(work))
    return Amounts(plain.cold, plain.warm, 2.0 * x.dims[0] * rows * x.dims[-1], "bf16")


def _gather(work: Work) -> Amounts:
    """A row of the table for each token."""
    named = _named(work)
    table, tokens = named["weight"], work.outs[0].dims[0]
    kept = sum(s.nbytes for s in _constants(work)) - table.nbytes
    plain = _plain(work)
    return Amounts(kept + tokens * table.nbytes / table.dims[0], plain.warm)


def _touch(work: Work) -> Amounts:
    """A few bytes of a table's rows; what it is given may be large."""
    return Amounts(0.0, tuple(float(s.nbytes) for s in _activations(work)))


def _experts(work: Work) -> Amounts:
    """Experts that tokens are expected to hit under uniform routing, the shared one always."""
    named = _named(work)
    tokens, chosen = named["ids"].dims
    held, two_inner = named["w13"].dims[0], named["w13"].dims[1]
    hidden = named["w2"].dims[1]
    shared = held - routed_of(held)
    routed, top = held - shared, chosen - shared
    hit = routed * (1 - (1 - top / routed) ** tokens)
    experts = [s for n, s in named.items() if n.startswith(("w13", "w2"))]
    cold = sum(s.nbytes for s in experts) * (hit + shared) / held
    cold += sum(s.nbytes for s in _constants(work)) - sum(s.nbytes for s in experts)
    pairs = max(tokens * top, MMA_TOKENS * hit) + shared * _padded(tokens)
    ops = 2.0 * pairs * hidden * two_inner * 1.5  # gate and up, then down of half the width
    kind = FORMATS.get(str(work.attrs.get("format", "")), "bf16")
    inner = 2.0 * tokens * chosen * two_inner / 2  # bf16 between the two products
    plain = _plain(work)
    return Amounts(cold, (*plain.warm, inner), ops, kind)


def routed_of(held: int) -> int:
    """Experts that a router chooses from, of those stored together: one more is the shared."""
    return held - held % 2


def _gdn_decode(work: Work) -> Amounts:
    """States read, and written once in so many tokens; records; convolutions read and written."""
    named, attrs = _named(work), {k: v for k, v in work.attrs.items() if not isinstance(v, str)}
    rows = named["slots"].dims[0]
    ring = int(attrs.get("ring", 0))
    sizes = [int(attrs[n]) for n in ("key_heads", "value_heads", "key_dim", "value_dim")]
    moved = _of_slot(named["gdn_state"]) * (1 + 1 / max(ring, 1))
    moved += 2 * _of_slot(named["conv_state"])
    moved += ring_bytes(ring, *sizes) if ring else 0
    ops = 6.0 * rows * int(attrs.get("tile", 1)) * sizes[1] * sizes[2] * sizes[3]
    plain = _plain(work)
    return Amounts(_weights(work) + rows * moved, plain.warm, ops)


def _delta_chunk(work: Work) -> Amounts:
    """The chunked form, with its convolution or without: of a token and value head two products
    with keys, the solve over values and keys, three products with the state."""
    named = _named(work)
    tokens = work.ins[0].dims[0]
    heads, key, value = (int(work.attrs[n]) for n in ("value_heads", "key_dim", "value_dim"))
    each = 2.0 * (2 * CHUNK * key + CHUNK * (key + value) + 3 * key * value + CHUNK * value)
    states = [s for n, s in named.items() if n in ("gdn_state", "conv_state")]
    state = 2.0 * sum(map(_of_slot, states)) * _sequences(work)
    plain = _plain(work)
    return Amounts(_weights(work) + state, plain.warm, tokens * heads * each, "bf16")


def _conv(work: Work) -> Amounts:
    plain = _plain(work)
    return Amounts(plain.cold + 2.0 * _of_slot(_named(work)["conv_state"]), plain.warm)


def _attention_decode(work: Work) -> Amounts:
    """Keys and values of everything before each row's tokens, or of a window, and its own."""
    named, tile = _named(work), int(work.attrs.get("tile", 1))
    rows, heads = named["slots"].dims[0], int(work.attrs["heads"])
    seen = min(work.context, int(work.attrs.get("window", work.context))) + tile
    ops = 4.0 * rows * tile * heads * int(work.attrs["head_dim"]) * seen
    plain = _plain(work)
    return Amounts(_weights(work) + rows * seen * _of_token(work), plain.warm, ops, "bf16")


def _draft_path(work: Work) -> Amounts:
    """Of each draft's token: a row for what is before it, and one for each candidate."""
    named, plain = _named(work), _plain(work)
    drafts = named["slots"].dims[0] * (int(work.attrs["tile"]) - 1)
    book = named["successor"]
    row = book.nbytes / book.dims[0]
    return Amounts(drafts * (1 + named["ids"].dims[1]) * row, plain.warm)


def _paged_attention(work: Work) -> Amounts:
    """One sequence from its beginning: keys and values written, and read back once."""
    tokens, heads = work.ins[0].dims[0], int(work.attrs["heads"])
    each = tokens / _sequences(work)
    ops = 2.0 * tokens * heads * int(work.attrs["head_dim"]) * (each + 1)
    plain = _plain(work)
    return Amounts(_weights(work) + 2 * tokens * _of_token(work), plain.warm, ops, "bf16")


def _vision_attention(work: Work) -> Amounts:
    (tokens, width), plain = work.outs[0].dims, _plain(work)
    return Amounts(plain.cold, plain.warm, 4.0 * tokens * tokens * width, "bf16")


def _append(work: Work) -> Amounts:
    plain = _plain(work)
    return Amounts(plain.cold + work.ins[0].dims[0] * _of_token(work), plain.warm)


_RULES: dict[str, Callable[[Work], Amounts]] = {
    **dict.fromkeys(GATHERS, _gather),
    **dict.fromkeys(TOUCHES, _touch),
    "sample": lambda work: Amounts(0.0, (float(_named(work)["logits"].nbytes),)),
    "moe_router": _router,
    "grouped_moe": _experts,
    "moe_norm_quant": _experts,
    "gdn_decode": _gdn_decode,
    "gated_delta_chunk": _delta_chunk,
    "gdn_prefill": _delta_chunk,
    "causal_conv": _conv,
    **dict.fromkeys(("attention_decode", "block_attention"), _attention_decode),
    "draft_path": _draft_path,
    "paged_attention": _paged_attention,
    "append_kv": _append,
    "vision_attention": _vision_attention,
}


def _named(work: Work) -> dict[str, TensorSpec]:
    return {o.name: s for o, s in zip(operands(work), work.ins, strict=True)}


def _constants(work: Work) -> list[TensorSpec]:
    """Weights and scales, the same in every launch."""
    pairs = zip(operands(work), work.ins, strict=True)
    return [s for i, (o, s) in enumerate(pairs) if i in work.cold and o.constant]


def _weights(work: Work) -> float:
    return float(sum(s.nbytes for s in _constants(work)))


def _activations(work: Work) -> list[TensorSpec]:
    pairs = zip(operands(work), work.ins, strict=True)
    kept = (Role.STATE, Role.TABLE, Role.STEP)
    return [s for i, (o, s) in enumerate(pairs) if i not in work.cold and o.role not in kept]


def _fresh(work: Work) -> list[TensorSpec]:
    aliases = work.op.aliases(work.attrs) if work.op is not None else {}
    return [s for i, s in enumerate(work.outs) if i not in aliases]


def _of_slot(spec: TensorSpec) -> float:
    """Bytes of one sequence's state."""
    return spec.nbytes / spec.dims[0]


def _of_token(work: Work) -> float:
    """Bytes of one token's keys and values."""
    pages = [s for o, s in zip(operands(work), work.ins, strict=True) if o.unit == "page"]
    return sum(s.nbytes / (s.dims[0] * s.dims[2]) for s in pages)


def _sequences(work: Work) -> int:
    """Sequences of a prefill: one, of as many tokens as the launch has."""
    return math.ceil(launch_of(work).rows / launch_of(work).per_sequence)


def _padded(tokens: int) -> int:
    return -(-tokens // MMA_TOKENS) * MMA_TOKENS
